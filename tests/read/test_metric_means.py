"""A metric over several test sets as one number: `validation_and_test/perplexity`."""

import io
import math

import pandas as pd
import pytest

from cope_sweep.api.figures import GetFigure
from cope_sweep.config.run import RunSpec
from cope_sweep.frozen import metric_parts, metric_value
from cope_sweep.read.figures.available import draw_figure
from cope_sweep.read.figures.kinds.curves import with_means
from cope_sweep.read.reports.files import run_frame
from cope_sweep.read.tables import Table, read_results
from cope_sweep.read.tables.best import rank_rows
from cope_sweep.read.tables.table import sorted_by
from cope_sweep.records import RunRecord
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish, plan_of

BOTH = "in_dist_and_dense/token_error"
METRICS = [{"name": BOTH, "label": "Both", "unit": "%"}, {"name": "in_dist/token_error"}]


def test_the_parts_of_a_name_keep_variant_and_length() -> None:
    assert metric_parts("validation_and_test/perplexity") == ("validation/perplexity", "test/perplexity")
    assert metric_parts("capped/validation_and_test/perplexity@512") == (
        "capped/validation/perplexity@512", "capped/test/perplexity@512",
    )  # fmt: skip
    for single in ("test/perplexity", "facts.parameters", "train/loss", "_and_/loss", "loss_and_error"):
        assert metric_parts(single) == ()


def test_perplexities_have_the_mean_of_their_logarithms_and_others_the_plain_mean() -> None:
    metrics = {"validation/perplexity": 4.0, "test/perplexity": 9.0, "a/token_error": 1.0, "b/token_error": 2.0}
    assert metric_value(metrics, "validation_and_test/perplexity") == pytest.approx(6.0)
    assert metric_value(metrics, "a_and_b/token_error") == 1.5
    assert metric_value(metrics, "test/perplexity") == 9.0
    assert metric_value(metrics, "test_and_other/perplexity") is None
    assert metric_value({"x_and_y/loss": 7.0, "x/loss": 1.0, "y/loss": 2.0}, "x_and_y/loss") == 7.0, "was reported"
    huge = {"validation/perplexity": 1e300, "test/perplexity": math.inf}
    assert metric_value(huge, "validation_and_test/perplexity") == math.inf
    record = RunRecord(run_id="0", metrics=metrics)
    assert record.value("validation_and_test/perplexity") == pytest.approx(6.0)


def test_a_change_from_one_context_to_another() -> None:
    assert metric_parts("capped/test/perplexity@128..512") == (
        "capped/test/perplexity@128", "capped/test/perplexity@512",
    )  # fmt: skip
    metrics = {
        "validation/perplexity@2": 4.0, "validation/perplexity@8": 6.0, "test/perplexity@2": 9.0, "test/perplexity@8": 24.0,
        "in_dist/token_error@2": 1.5, "in_dist/token_error@8": 4.0, "zero/perplexity@2": 0.0, "zero/perplexity@8": 1.0,
    }  # fmt: skip
    assert metric_value(metrics, "validation/perplexity@2..8") == 1.5
    assert metric_value(metrics, "validation_and_test/perplexity@2..8") == pytest.approx(2.0)  # √(1.5 · 24/9)
    assert set(metric_parts("validation_and_test/perplexity@2..8")) == set(list(metrics)[:4])
    assert metric_value(metrics, "in_dist/token_error@2..8") == 2.5
    assert metric_value(metrics, "in_dist/token_error@8..2") == -2.5
    assert metric_value(metrics, "in_dist/token_error@2..16") is None
    assert metric_value(metrics, "zero/perplexity@2..8") is None
    with raises("unknown_metric"):
        plan_of(metrics=[{"name": "in_dist/token_error@1..2"}])


def test_it_is_a_column_like_others(store) -> None:
    plan = plan_of(metrics=METRICS, seeds=[0, 1])
    values = iter([1.0, 2.0, 9.0, 8.0, 5.0, 6.0])
    for row in plan.rows:
        for run in row.runs:
            value = next(values)
            finish(store, run, {"in_dist/token_error": value, "dense/token_error": value + 2})
    results = read_results(plan, store)
    table = Table.of(results, "CoPE")
    assert [row.metrics[BOTH].summary.mean for row in table.model.rows] == [2.5, 9.5, 6.5]
    assert table.model.primary.name == BOTH
    assert [row.row for row in sorted_by(table.model, "Both").rows] == ["CoPE", "None", "a_b <c>"]
    assert [row.metrics[BOTH].best for row in table.model.rows] == [True, False, False]
    csv = pd.read_csv(io.StringIO(table.to_csv()))
    assert list(csv[f"{BOTH}.mean"]) == [2.5, 9.5, 6.5]
    assert table.to_json()["rows"][0]["metrics"][BOTH]["mean"] == 2.5
    assert rank_rows(results, BOTH).groups[0].best().row.name == "CoPE"
    for kind in ("summary", "box", "curves"):
        drawn = draw_figure(results, GetFigure(name=plan.name, figure=kind, metric=[BOTH]))
        assert set(drawn.data.frame["metric"]) == {BOTH}, kind


def test_files_of_results_have_what_was_measured_alone(store) -> None:
    plan = plan_of(metrics=METRICS, seeds=[0])
    for row in plan.rows:
        finish(store, row.runs[0], {"in_dist/token_error": 1.0, "dense/token_error": 2.0})
    results = read_results(plan, store)
    assert BOTH in results.frame
    frame = run_frame(plan, results.records, store)
    assert BOTH not in frame
    assert "in_dist/token_error" in frame


def test_curves_have_it_at_the_steps_where_all_parts_were_logged() -> None:
    lines = [
        ("r", "CoPE", 0, step, metric, value, "finished", float(step))
        for step, metric, value in [(1, "a/loss", 2.0), (1, "b/loss", 4.0), (2, "a/loss", 1.0), (2, "train/loss", 9.0)]
    ]
    names = ["run_id", "row", "seed", "step", "metric", "value", "status", "time_s"]
    points = pd.DataFrame(lines, columns=names)
    found = with_means(points, ["train/loss", "a_and_b/loss", "a_and_c/loss"])
    means = found[found["metric"] == "a_and_b/loss"]
    assert means[["run_id", "row", "seed", "step", "value", "status"]].to_numpy().tolist() == [
        ["r", "CoPE", 0, 1, 3.0, "finished"]
    ]
    assert len(found) == len(points) + 1


def test_a_part_that_no_task_reports_is_an_error_and_so_is_a_choice_by_it_in_training() -> None:
    with raises("unknown_metric"):
        plan_of(metrics=[{"name": "in_dist_and_denser/token_error"}])
    base: RunSpec = plan_of().runs[0]
    assert "dense/token_error" in base.metrics
    with raises("unknown_metric", metric=BOTH):
        plan_of(metrics=METRICS, search={
            "kind": "optuna", "samples": 2, "metric": BOTH, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}},
        }, grid={}, seeds=[0])  # fmt: skip
