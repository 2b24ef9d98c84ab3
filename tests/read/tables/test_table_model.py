import math

import pytest

from cope_sweep.read.tables.render import markdown
from cope_sweep.read.tables.table_model import table_model
from cope_sweep.store import RunRecord
from tests.read.tables.ablations import CONTENT, plan_of


def model_of(plan, *values, **facts):
    """The table of `plan` with one finished run per value, in the order of rows and seeds; None: a failed run."""
    runs = [run for row in plan.rows for run in row.runs]
    records = {run.run_id: RunRecord(run.run_id) for run in runs}
    for run, value in zip(runs, values, strict=False):
        finished = RunRecord(
            run.run_id, "finished", metrics={"in_dist/token_error": value, "dense/loss": value}, facts=facts
        )
        records[run.run_id] = RunRecord(run.run_id, "failed", message="no") if value is None else finished
    return table_model(plan, records)


def best(model, metric):
    return [row.metrics[metric].best for row in model.rows]


def test_counts_and_progress():
    complete, partial, pending = model_of(plan_of(), 1.0, 2.0, None, 3.0).rows
    assert (complete.complete, complete.progress) == (True, "2/2")
    assert (partial.complete, partial.progress) == (False, "1/2: 1 failed")
    assert pending.progress == "0/2: 2 pending"
    assert partial.counts == {
        "finished": 1, "stopped": 0, "failed": 1, "damaged": 0, "running": 0, "interrupted": 0, "pending": 0,
    }  # fmt: skip


def test_stopped_runs_are_counted_and_never_averaged():
    plan = plan_of(seeds=[0, 1, 2])
    runs = [run for row in plan.rows for run in row.runs]
    values = {"in_dist/token_error": 1.0}
    records = {run.run_id: RunRecord(run.run_id, "finished", metrics=values, facts={"parameters": 5}) for run in runs}
    stopped = runs[1].run_id
    records[stopped] = RunRecord(stopped, "stopped", metrics={"in_dist/token_error": 100.0}, facts={"parameters": 7})
    model = table_model(plan, records)
    assert model.stopped == 1
    assert model.rows[0].metrics["in_dist/token_error"].summary.mean == 1.0
    assert model.rows[0].metrics["in_dist/token_error"].summary.n == 2
    assert (model.rows[0].progress, model.rows[0].complete) == ("2/3: 1 stopped", False)
    assert "1 run was stopped early and not averaged" in markdown(model)


def test_the_best_mean_is_the_lowest_or_the_highest():
    model = model_of(plan_of(), 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert best(model, "in_dist/token_error") == [True, False, False]
    assert best(model, "dense/loss") == [False, False, True]


def test_rows_with_missing_seeds_are_never_best():
    model = model_of(plan_of(), 5.0, 5.0, 1.0, None, 6.0, 6.0)
    assert best(model, "in_dist/token_error") == [True, False, False]
    assert best(model_of(plan_of(), 5.0, 5.0, 1.0), "in_dist/token_error") == [False, False, False]


def test_equal_means_are_all_best():
    assert best(model_of(plan_of(), 1.0, 3.0, 2.0, 2.0, 9.0, 9.0), "in_dist/token_error") == [True, True, False]


def test_parameters_are_those_of_the_first_finished_run():
    rows = model_of(plan_of(), None, 1.0, 2.0, parameters=77).rows
    assert [row.parameters for row in rows] == [77, 77, None]


def test_a_value_that_a_run_lacks_does_not_count():
    plan = plan_of(metrics=[{"name": "facts.tokens_per_s"}])
    cell = model_of(plan, 1.0, 2.0).rows[0].metrics["facts.tokens_per_s"]
    assert cell.summary.n == 0
    assert math.isnan(cell.summary.mean)
    assert model_of(plan, 1.0, 2.0, tokens_per_s=5).rows[0].metrics["facts.tokens_per_s"].summary.mean == 5.0


@pytest.mark.parametrize("key", ["search", "schedule"])
def test_a_choice_by_a_reported_metric_is_a_warning(key):
    chooser = {
        "search": {"kind": "optuna", "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}, "samples": 2},
        "schedule": {"kind": "asha", "grace": 2},
    }[key]
    base = CONTENT["base"] | {"train": {"steps": 60, "batch": 2}, "evaluate": {"every": 5}}
    grid = {} if key == "search" else CONTENT["grid"]

    def warnings(evaluate):
        plan = plan_of(base=base | {"evaluate": {"every": 5, **evaluate}}, grid=grid, seeds=[0], **{key: chooser})
        return table_model(plan, {run.run_id: RunRecord(run.run_id) for run in plan.runs}).warnings

    (warning,) = warnings({})
    assert warning.startswith(f"The {key} chose runs by in_dist/token_error, which this table reports")
    assert warnings({"validation": True}) == ()
