"""Metrics that depend on whether a run has learned its task: steps until it has, the share that has, the rest's errors."""

import math

import pytest

from cope_sweep.api.ablations import GetCurves
from cope_sweep.read.queries.curves import plan_curves
from cope_sweep.read.queries.plans import best_of_row
from cope_sweep.read.reports.files import run_frame
from cope_sweep.read.tables import Table, read_results
from cope_sweep.read.tables.best import rank_rows
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
    table = Table.of(results)
    (row,) = table.model.rows
    assert "Steps: a seed that never gets there counts with all its steps" in table.to_markdown()
    assert dict(row.metrics[STEPS].values) == {0: 2, 1: never.train.steps}
    assert STEPS not in run_frame(PLAN, results.records, store), "it is computed again by whoever reads the file"


def test_a_run_without_evaluations_has_no_steps_until_it_learned(store):
    """It is not one that never learned."""
    learns, unknown = PLAN.runs
    finish_with(store, learns, [9.0, 2.0, 1.0])
    folder = begin(store, unknown)
    folder.log({"step": 1, "train/loss": 1.0})
    folder.finish({"in_dist/token_error": 1.0}, {"steps": 1})
    end(store, folder)
    (row,) = Table.of(read_results(PLAN, store)).model.rows
    assert row.metrics[STEPS].values == {0: 2}
    assert row.metrics[STEPS].lost == (1,)


OTHER = "sparse/token_error"
SHARE, OF_LEARNED = "share_learned/in_dist/token_error", f"of_learned/{OTHER}"


def test_error_is_split_into_the_share_that_learned_and_the_error_of_those(store):
    seeds = list(range(6))
    columns = [ERROR, {"name": SHARE, "unit": "%", "goal": "max"}, {"name": OTHER}, {"name": OF_LEARNED}]
    plan = plan_of(metrics=columns, grid={"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}}, seeds=seeds)
    errors = {"CoPE": [0.0, 1.0, 2.0, 1.5, 0.5, 9.0], "RoPE": [2.5, 30.0, 30.0, 30.0, 30.0, 30.0]}
    for row in plan.rows:
        for run, error in zip(row.runs, errors[row.labels["model.position"]], strict=True):
            finish(store, run, {"in_dist/token_error": error, OTHER: 10.0 * error})
    results = read_results(plan, store)
    model = Table.of(results).model
    cope, rope = model.rows
    assert cope.metrics[SHARE].values == dict(enumerate([100, 100, 100, 100, 100, 0]))
    assert cope.metrics[OF_LEARNED].values == {0: 0.0, 1: 10.0, 2: 20.0, 3: 15.0, 4: 5.0}
    assert set(rope.metrics[SHARE].values.values()) == {0}
    assert not rope.metrics[OF_LEARNED].values
    assert cope.metrics[OF_LEARNED].summary.mean == 10.0
    text = Table.of(results).to_markdown()
    assert "(n=5)" in text
    assert "(n=…): only n seeds have learned the task" in text
    # Of all choices of 6 of the 12 runs, these put all five that learned in one row: Fisher's exact test.
    assert model.difference(cope.metrics[SHARE], rope.metrics[SHARE]).p == pytest.approx(
        2 * math.comb(7, 1) / math.comb(12, 6)
    )
    assert not {SHARE, OF_LEARNED} & set(run_frame(plan, results.records, store)), (
        "whoever reads the file computes them"
    )


def test_runs_without_it_have_an_empty_cell(store):
    plan = plan_of(metrics=[ERROR], grid={"model.position": {"CoPE": ["cope"]}})
    finish(store, plan.runs[0], {"in_dist/token_error": 1.0})
    assert STEPS not in read_results(plan, store).records[plan.runs[0].run_id].metrics
    assert read_results(PLAN, store).records[plan.runs[1].run_id].metrics == {}


@pytest.mark.parametrize("name", [STEPS, SHARE, "of_learned/in_dist/token_error"])
@pytest.mark.parametrize("others", [[], [{"name": "in_dist/token_error"}]])
def test_a_column_has_to_say_when_it_is_learned(name, others):
    with raises("not_learned", metric="in_dist/token_error"):
        plan_of(metrics=[*others, {"name": name}])


@pytest.mark.parametrize("prefix", ["steps_until", "share_learned", "of_learned"])
def test_it_is_of_a_metric_that_runs_report(prefix):
    with raises("unknown_metric", metric=f"{prefix}/in_dist/other"):
        plan_of(metrics=[ERROR, {"name": f"{prefix}/in_dist/other"}])


@pytest.mark.parametrize("primary", [SHARE, STEPS])
def test_what_depends_on_learning_is_ranked_and_drawn_by_the_metric_that_runs_report(store, primary):
    plan = plan_of(metrics=[{"name": primary, "goal": "max"}, ERROR], grid={"model.position": {"CoPE": ["cope"]}})
    worst, best = plan.runs
    finish(store, worst, {"in_dist/token_error": 9.0})
    finish(store, best, {"in_dist/token_error": 1.0})
    ranking = rank_rows(read_results(plan, store))
    assert (ranking.metric, ranking.goal) == ("in_dist/token_error", "min")
    assert best_of_row(plan, store, "CoPE") == best.run_id
    assert plan_curves(plan, store, GetCurves(name=plan.name)).metric == "in_dist/token_error"
