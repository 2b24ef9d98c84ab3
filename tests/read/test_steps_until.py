"""A metric that counts the steps until another one is learned."""

import pytest

from cope_sweep.read.reports.runs import run_frame
from cope_sweep.read.tables import Table, read_results
from tests.helpers.errors import raises
from tests.helpers.finished_runs import begin, finish, plan_of
from tests.helpers.sweeps import end

STEPS = "steps_until/in_dist/token_error"
ERROR = {"name": "in_dist/token_error", "learned": 2.0}
PLAN = plan_of(metrics=[ERROR, {"name": STEPS, "label": "Steps"}], grid={"model.position": {"CoPE": ["cope"]}})


def finish_with(store, run, errors):
    """Finish a run that has logged these errors, one a step."""
    folder = begin(store, run)
    for step, error in enumerate(errors, start=1):
        folder.log({"step": step, "train/loss": 1.0, "in_dist/token_error": error})
    folder.finish({"in_dist/token_error": errors[-1]}, {"steps": len(errors)})
    end(store, folder)


def test_steps_until_a_metric_is_learned_are_read_from_the_curve(store):
    learns_and_forgets, never = PLAN.runs
    finish_with(store, learns_and_forgets, [9.0, 2.0, 5.0, 1.0])
    finish_with(store, never, [9.0, 2.5, 2.1])
    results = read_results(PLAN, store)
    (row,) = Table.of(results).model.rows
    assert dict(row.metrics[STEPS].values) == {0: 2, 1: never.train.steps}
    assert STEPS not in run_frame(PLAN, results.records, store), "it is computed again by whoever reads the file"


def test_runs_without_it_have_an_empty_cell(store):
    plan = plan_of(metrics=[ERROR], grid={"model.position": {"CoPE": ["cope"]}})
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    assert STEPS not in read_results(plan, store).records[plan.runs[0].run_id].metrics
    assert read_results(PLAN, store).records[plan.runs[1].run_id].metrics == {}


@pytest.mark.parametrize("metrics", [[{"name": STEPS}], [{"name": "in_dist/token_error"}, {"name": STEPS}]])
def test_a_column_has_to_say_when_it_is_learned(metrics):
    with raises("not_learned", metric="in_dist/token_error"):
        plan_of(metrics=metrics)


def test_it_counts_the_steps_of_a_metric_that_runs_report():
    with raises("unknown_metric", metric="steps_until/in_dist/other"):
        plan_of(metrics=[ERROR, {"name": "steps_until/in_dist/other"}])
