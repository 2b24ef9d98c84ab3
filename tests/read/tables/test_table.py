"""The table of the same runs does not depend on how they came into the store."""

import json
import math
import pathlib

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_sweep.read.tables import table
from cope_sweep.read.tables.layout import layout
from cope_sweep.store import Store
from cope_sweep.store.indexing import refresh_index
from tests.helpers.finished_runs import COUNTING, begin, fail, finish, plan_of, stop
from tests.helpers.sweeps import end


def test_the_frame_by_hand(partial):
    frame = partial.frame
    assert frame["row"].tolist() == ["CoPE", "a_b <c>", "None"]
    assert frame["finished"].tolist() == [2, 1, 0]
    assert frame["failed"].tolist() == [0, 1, 1]
    assert frame["pending"].tolist() == [0, 0, 1]
    assert frame["seeds"].tolist() == [2, 2, 2]
    cope = frame.iloc[0]
    assert cope["in_dist/token_error.mean"] == 12.0
    assert cope["in_dist/token_error.std"] == pytest.approx(math.sqrt(8))
    assert cope["in_dist/token_error.n"] == 2
    assert cope["in_dist/token_error.ci_low"] == pytest.approx(1.2142, abs=1e-4)  # test_stats.py computes it by hand
    assert (cope["in_dist/token_error.median"], cope["in_dist/token_error.high"]) == (12.0, 14.0)
    assert cope["in_dist/token_error.stuck"] == 0
    assert cope["in_dist/token_error.published"] == 4.7
    assert cope["in_dist/token_error.published_std"] == 0.5
    assert frame["in_dist/token_error.n"].tolist() == [2, 1, 0]
    assert frame["in_dist/token_error.std"].isna().tolist() == [False, True, True]
    assert frame["parameters"].tolist() == [1234, 1234, pd.NA]


def test_json_is_plain(partial):
    data = json.loads(json.dumps(partial.to_json(), allow_nan=False))
    assert data["ablation"] == "copying"
    assert data["axes"] == {"model.position": "position"}
    assert [metric["goal"] for metric in data["metrics"]] == ["min", "max"]
    cope, other, none = data["rows"]
    assert cope["labels"] == {"model.position": "CoPE"}
    error = cope["metrics"]["in_dist/token_error"]
    assert error["published"] == {"text": "4.70 ± 0.50", "value": 4.7, "std": 0.5, "seeds": None, "source": "Table 1"}
    assert (error["mean"], error["n"], error["best"]) == (12.0, 2, False)
    assert error["ci"] == [pytest.approx(1.2142, abs=1e-4), pytest.approx(60.2058, abs=1e-4)]
    assert (error["ci_method"], error["median"], error["range"]) == ("logit t", 12.0, [10.0, 14.0])
    ids = [run["run_id"] for run in cope["runs"]]
    assert error["values"] == [
        {"run_id": ids[0], "seed": 0, "value": 10.0, "text": "10.00", "stuck": False},
        {"run_id": ids[1], "seed": 1, "value": 14.0, "text": "14.00", "stuck": False},
    ]
    assert other["metrics"]["in_dist/token_error"] == {
        "text": "1.00", "mean": 1.0, "std": None, "n": 1, "ci": None, "ci_method": None, "median": 1.0, "range": [1.0, 1.0],
        "values": [{"run_id": other["runs"][0]["run_id"], "seed": 0, "value": 1.0, "text": "1.00", "stuck": False}],
        "published": None, "best": False, "mostly_stuck": False, "learned": None, "comparison": None,
    }  # fmt: skip
    assert none["counts"] == {
        "finished": 0, "stopped": 0, "failed": 1, "running": 0, "interrupted": 0, "pending": 1,
    }  # fmt: skip
    assert data["stopped"] == 0
    assert none["parameters"] is None
    assert [run["status"] for run in none["runs"]] == ["failed", "pending"]
    assert none["runs"][0]["message"] == "Diverged: the loss is nan"
    assert none["runs"][1]["message"] is None


def test_stopped_runs_and_those_with_lost_files_enter_no_mean(plan, store):
    cope, other, _ = plan.rows
    finish(store, cope.runs[0], {"in_dist/token_error": 10.0})
    stop(store, cope.runs[1])
    finish(store, other.runs[0], {"in_dist/token_error": 30.0})
    (store.run(other.runs[0].run_id).path / "result.json").write_text("{")
    end(store, store.run(other.runs[0].run_id))
    drawn = table(plan, store)
    rows = drawn.to_json()["rows"]
    assert [row["metrics"]["in_dist/token_error"]["mean"] for row in rows] == [10.0, None, None]
    assert [(row["counts"]["stopped"], row["counts"]["interrupted"]) for row in rows] == [(1, 0), (0, 1), (0, 0)]
    assert drawn.to_json()["stopped"] == 1
    assert rows[0]["runs"][1]["message"] == "stopped at step 3 by asha"
    assert "result.json" in rows[1]["runs"][0]["message"]
    for text in (drawn.to_markdown(), drawn.to_latex()):
        assert "1 run was stopped early" in text


def test_no_folder_is_read(store, monkeypatch):
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "None": []}}, seeds=list(range(500)))
    finish(store, plan.runs[0], {"in_dist/token_error": 10.0})
    monkeypatch.setattr(store, "run", lambda run_id: pytest.fail("a run folder was read"))
    whole = table(plan, store)
    assert whole.frame["pending"].tolist() == [499, 500]
    assert len(whole.to_json()["rows"][1]["runs"]) == len(whole.results.frame) / 2 == 500


def test_results_under_a_former_metric_name_are_shown(store):
    plan = plan_of(
        base=COUNTING, grid={"model.position": {"CoPE": ["cope"]}}, metrics=[{"name": "in_dist/commonest_error"}],
        published=[{"match": {"model.position": "CoPE"}, "values": {"in_dist/commonest_error": 78.0}}],
    )  # fmt: skip
    finish(store, plan.runs[0], {"in_dist/commonest_error": 70.0})
    finish(store, plan.runs[1], {"in_dist/majority_baseline_error": 80.0})
    row = table(plan, store).frame.iloc[0]
    assert row["in_dist/majority_baseline_error.mean"] == 75.0
    assert row["in_dist/majority_baseline_error.n"] == 2
    assert row["in_dist/majority_baseline_error.published"] == 78.0


def test_the_seeds_that_learned_the_task_are_counted(store):
    metrics = [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%", "learned": 1.0},
        {"name": "dense/loss", "goal": "max", "learned": 0.5},
    ]
    plan = plan_of(seeds=[0, 1, 2, 3, 4], metrics=metrics)
    for run, error in zip(plan.rows[0].runs, (0.0, 1.0, 1.01, 0.2, 60.0), strict=True):
        finish(store, run, {"in_dist/token_error": error, "dense/loss": error / 2})
    drawn = table(plan, store)
    assert [header.text for header in layout(drawn.model).headers][2:6] == [
        "In-dist. (%)", "In-dist. ≤ 1", "dense/loss", "dense/loss ≥ 0.5",
    ]  # fmt: skip
    texts = [cell.text for cell in layout(drawn.model).rows[0]]
    assert (texts[3], texts[5]) == ("3/5 (23–88 %)", "3/5 (23–88 %)")
    assert layout(drawn.model).rows[1][3].text == "–"
    found = drawn.to_json()["rows"][0]["metrics"]["in_dist/token_error"]["learned"]
    assert (found["k"], found["n"]) == (3, 5)
    assert found["interval"] == pytest.approx([0.2307, 0.8824], abs=1e-4)
    assert drawn.frame["in_dist/token_error.learned"].tolist()[0] == 3
    assert "3/5: 3 of 5 seeds reached In-dist. ≤ 1 %" in drawn.to_markdown()


PLAN = plan_of(
    published=[
        {
            "match": {"model.position": "CoPE"},
            "values": {"in_dist/token_error": 4.7},
            "std": {"in_dist/token_error": 0.5},
            "seeds": 3,
        }
    ]
)
RUNS = [run for row in PLAN.rows for run in row.runs]
VALUES = [{"in_dist/token_error": 10.0 * index / 3, "dense/loss": 1.0 / (index + 1)} for index in range(len(RUNS))]
LEFT_OUT = (RUNS[3].run_id, RUNS[4].run_id)
"""Runs that do not finish: one fails, one is stopped."""

history = st.lists(
    st.tuples(st.integers(0, len(RUNS) - 1), st.sampled_from(["fail", "stop", "begin", "finish"])), max_size=8
)


def write(store, events, order):
    """First the events, which the last attempts of all runs then replace, in this order."""
    for index, event in events:
        run = RUNS[index]
        if store.run(run.run_id).status == "finished":
            continue  # a finished run is never trained again
        if event == "fail":
            fail(store, run, "an earlier attempt")
        elif event == "stop":
            stop(store, run, "an earlier attempt")
        elif event == "begin":
            end(store, begin(store, run, "a worker that died"))
        elif run.run_id not in LEFT_OUT:
            finish(store, run, VALUES[index])
    for index in order:
        run = RUNS[index]
        if run.run_id == LEFT_OUT[0]:
            fail(store, run)
        elif run.run_id == LEFT_OUT[1]:
            stop(store, run)
        elif store.run(run.run_id).status != "finished":
            finish(store, run, VALUES[index])
        end(store, store.run(run.run_id))  # told twice


def rendered(store):
    """The table in three formats."""
    drawn = table(PLAN, store, compare="CoPE")
    return drawn.to_json(), drawn.to_csv(), drawn.to_markdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("expected"), create=True)
    write(store, [], range(len(RUNS)))
    return rendered(store)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=history, order=st.permutations(range(len(RUNS))))
def test_order_duplicates_failures_and_resumptions_give_the_same_table(tmp_path_factory, expected, events, order):
    root = tmp_path_factory.mktemp("store")
    store = Store(root, create=True)
    write(store, events, order)
    assert rendered(store) == expected
    store.index.delete(store.index.statuses())
    refresh_index(store.index, store.files)
    assert rendered(store) == expected, "from the folders alone"
    store.index.close()


GOLDEN = pathlib.Path(__file__).parent / "golden"


SEEDS_PLAN = plan_of(seeds=[0, 1, 2, 3, 4])
ERRORS = {
    "CoPE": [1.2, 2.1, 1.4, 97.0, 1.8],  # seed 3 is stuck
    "a_b <c>": [20.3, 22.4, 19.1, 21.7, 20.8],
    "None": [78.1, 81.2, 79.6, 80.3, 78.9],
}
LOSSES = {
    "CoPE": [0.21, 0.24, 0.19, 0.22, 0.2],
    "a_b <c>": [0.22, 0.23, 0.2, 0.21, 0.21],
    "None": [1.1, 1.3, 1, 1.2, 1],
}
"""Over five seeds: one row of each metric differs clearly from CoPE's, one does not."""


def partial_table(store, against):
    write(store, [], range(len(RUNS)))
    return table(PLAN, store, compare=against)


def five_seeds_table(store, against):
    for row in SEEDS_PLAN.rows:
        for run, error, loss in zip(row.runs, ERRORS[row.name], LOSSES[row.name], strict=True):
            finish(store, run, {"in_dist/token_error": error, "dense/loss": loss})
    return table(SEEDS_PLAN, store, compare=against)


@pytest.mark.parametrize(
    ("name", "make", "against"),
    [
        ("table.md", partial_table, None),
        ("table.tex", partial_table, None),
        ("compared.md", partial_table, "CoPE"),
        ("paper.md", partial_table, "paper"),
        ("five_seeds.md", five_seeds_table, "CoPE"),
        ("five_seeds.tex", five_seeds_table, None),
    ],
)
def test_golden_tables(tmp_path, name, make, against):
    """Made from recorded results; a change of these files is a change of what readers of tables see."""
    drawn = make(Store(tmp_path, create=True), against)
    text = {"md": drawn.to_markdown, "tex": drawn.to_latex}[name.partition(".")[2]]()
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
