"""The data of learning curves, and what is drawn of it."""

import math

import pandas as pd
import pytest

from cope_sweep.read.figures.available import declared_figures, draw_declared
from cope_sweep.read.figures.kinds.curves import curve_frame
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.model import Column
from tests.helpers.errors import raises
from tests.helpers.figure_files import made, svg_texts
from tests.helpers.finished_runs import begin, fail, finish, plan_of, stop
from tests.helpers.sweeps import end

ERROR = Column(name="in_dist/token_error", label="In-dist.", unit="%")
SCORE = Column(name="score", label="score", goal="max")


def points(*lines):
    columns = ["row", "seed", "status", "step", "time_s", "metric", "value"]
    return pd.DataFrame(lines, columns=columns).astype({"value": "float64", "time_s": "float64"})


def test_means_and_intervals_by_hand():
    values = [("a", seed, "finished", 5, 10.0 * seed, ERROR.name, value) for seed, value in enumerate((4.0, 6.0, 8.0))]
    found = curve_frame(points(*values), ["a"], [ERROR], "interval").iloc[0]
    assert (found["row"], found["metric"], found["step"], found["n"]) == ("a", ERROR.name, 5, 3)
    assert found["value"] == 6.0
    assert found["time_s"] == 10.0
    # s = 2, t(0.975, 2) = 4.302653, s·t/√3 = 4.968276; this frame's interval is the one of `results.summarise`.
    assert found["low"] < 4.0 < 8.0 < found["high"]
    assert found["low"] >= 0
    ranged = curve_frame(points(*values), ["a"], [ERROR], "range").iloc[0]
    assert (ranged["low"], ranged["high"]) == (4.0, 8.0)


def test_an_unfinished_seed_has_its_own_lines_and_enters_no_mean():
    data = points(
        ("a", 0, "finished", 1, 0.0, ERROR.name, 40.0), ("a", 0, "finished", 2, 0.0, ERROR.name, 20.0),
        ("a", 1, "running", 1, 0.0, ERROR.name, 90.0),
        ("a", 2, "failed", 1, 0.0, ERROR.name, 80.0), ("a", 2, "failed", 2, 0.0, ERROR.name, math.nan),
    )  # fmt: skip
    found = curve_frame(data, ["a"], [ERROR], "interval")
    assert found["status"].tolist() == ["finished", "finished", "running", "failed", "failed"]
    assert found["value"].tolist()[:4] == [40.0, 20.0, 90.0, 80.0]
    assert found["seed"].tolist()[2:] == [1, 2, 2]
    assert found["seed"].isna().tolist()[:2] == [True, True]
    assert found["n"].tolist() == [1] * 5
    assert found["best"].tolist() == [False, True, False, False, False]


def test_a_nan_is_left_out_of_the_mean_and_counted():
    data = points(("a", 0, "finished", 1, 0.0, ERROR.name, math.nan), ("a", 1, "finished", 1, 0.0, ERROR.name, 30.0))
    found = curve_frame(data, ["a"], [ERROR], "range").iloc[0]
    assert (found["n"], found["value"]) == (1, 30.0)
    assert math.isnan(found["low"])


def test_the_best_step_is_the_first_one_and_follows_the_goal():
    lines = [(1, 9.0), (2, 3.0), (3, 5.0), (4, 3.0)]
    data = points(
        *(("a", 0, "finished", step, 0.0, name, value) for step, value in lines for name in (ERROR.name, "score"))
    )
    found = curve_frame(data, ["a"], [ERROR, SCORE], "range")
    assert found[found["best"]][["metric", "step"]].values.tolist() == [[ERROR.name, 2], ["score", 1]]


def test_rows_have_the_order_of_the_plan():
    data = points(*((row, 0, "finished", 1, 0.0, ERROR.name, 1.0) for row in ("b", "a")))
    assert curve_frame(data, ["a", "b"], [ERROR], "range")["row"].tolist() == ["a", "b"]


@pytest.fixture
def mixed(store):
    """A plan of three rows: finished and running, failed, stopped and damaged."""
    plan = plan_of()
    first, second, third = plan.rows
    finish(store, first.runs[0], {"in_dist/token_error": 5.0, "dense/loss": 0.5})
    end(store, begin(store, first.runs[1]))
    fail(store, second.runs[0])
    stop(store, third.runs[0])
    finish(store, third.runs[1], {"in_dist/token_error": 7.0})
    folder = store.run(third.runs[1].run_id)
    (folder.path / "curve.jsonl").unlink()
    (folder.path / "curve.jsonl").mkdir()
    return plan


def test_the_legend_counts_seeds_and_names_the_band(mixed, store):
    texts = svg_texts(made("curves", mixed, store).render("svg"))
    assert "CoPE, n = 1" in texts
    assert "a_b <c>, n = 0, 1 unfinished (dotted)" in texts
    assert "single seeds" in texts


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        (2, "mean; band: min–max over seeds"),
        (4, "mean; band: min–max over seeds"),
        (5, "mean; band: 95 % interval of the mean"),
    ],
)
def test_the_automatic_band(seeds, text, store):
    plan = plan_of(seeds=list(range(seeds)))
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 5.0 + run.seed})
    figure = made("curves", plan, store, metric=("in_dist/token_error",))
    assert text in svg_texts(figure.render("svg"))
    assert figure.frame["metric"].unique().tolist() == ["in_dist/token_error"]


def test_default_metrics_are_those_with_several_points(store):
    plan = plan_of()
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 5.0})
    assert made("curves", plan, store).frame["metric"].unique().tolist() == ["train/loss"]


def test_values_at_the_ends_of_shorter_and_longer_runs_are_no_curve(store):
    plan = plan_of(grid={"train.steps": [6, 9]}, seeds=[0])
    for run in plan.runs:
        folder = begin(store, run)
        for step in (1, run.train.steps):
            folder.log({"step": step, "train/loss": 2.0})
        folder.log({"step": run.train.steps, "in_dist/token_error": 5.0})
        folder.finish({"in_dist/token_error": 5.0}, {})
        end(store, folder)
    assert made("curves", plan, store).frame["metric"].unique().tolist() == ["train/loss"]


@pytest.mark.parametrize("best", [False, True])
def test_a_ring_marks_the_step_of_the_best_mean(store, best):
    error = "in_dist/token_error"
    plan = plan_of(seeds=[0], figures=[{"kind": "curves", "metrics": [error], "best": best}])
    for run in plan.runs:
        folder = begin(store, run)
        for step, value in ((1, 9.0), (2, 3.0), (3, 5.0)):
            folder.log({"step": step, error: value})
        folder.finish({error: 5.0, "dense/loss": 0.5}, {})
        end(store, folder)
    drawn = draw_declared(read_results(plan, store), declared_figures(plan)[0]).draw()
    rings = [line for line in drawn.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [ring.get_xydata().tolist() for ring in rings] == [[[2, 3.0]]] * len(plan.rows) * best
    assert ("ring: best mean" in drawn.legends[0].get_title().get_text()) is best


def test_time_axis_and_its_unit(store):
    plan = plan_of()
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 5.0})
    figure = made("curves", plan, store, x="time")
    assert "time since the run began (s)" in svg_texts(figure.render("svg"))
    with raises("unknown_key", key="epoch", allowed=["step", "time"]):
        made("curves", plan, store, x="epoch")
