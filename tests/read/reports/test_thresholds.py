"""Steps until a task is learned."""

import itertools
import math
import statistics

import pytest

from cope_sweep.read.reports import evidence
from cope_sweep.read.reports.thresholds import bootstrap_median
from cope_sweep.read.tables import read_results
from tests.helpers.finished_runs import begin, fail, plan_of
from tests.helpers.sweeps import end

ERROR = "in_dist/token_error"
CURVES = {0: {2: 50.0, 4: 3.0, 6: 0.5}, 1: {2: 4.0, 4: 60.0, 6: 1.0}, 2: {2: 70.0, 4: 60.0, 6: 50.0}}
"""Seed → step → error: learned at 4, at 2 (and lost again), and never."""


def finished(runs, store, curves):
    for run in runs:
        folder = begin(store, run)
        for step, error in curves[run.seed].items():
            folder.log({"step": step, ERROR: error})
        folder.finish({ERROR: curves[run.seed][6]}, {"steps": 6})
        end(store, folder)


def plan_with(**metric):
    return plan_of(
        grid={"model.position": {"CoPE": ["cope"]}},
        metrics=[{"name": ERROR, "label": "In-dist.", "unit": "%", **metric}],
        seeds=[0, 1, 2],
        published=[],
    )


def test_median_and_interval_by_hand(store):
    plan = plan_with(learned=5.0)
    finished(plan.runs, store, CURVES)
    found = evidence(read_results(plan, store))
    batch = plan.runs[0].train.batch
    assert [[cell.text for cell in line] for line in found.thresholds.rows] == [
        ["CoPE", "2/3", "4 [2, > 6]", f"{4 * batch} [{2 * batch}, > {6 * batch}]"]
    ]
    text = found.to_markdown({})
    assert "### Until the task is learned" in text
    assert "the first evaluation with In-dist. ≤ 5 %: the median over seeds" in text


def test_runs_that_have_not_finished_are_left_out(store):
    plan = plan_with(learned=5.0)
    finished(plan.runs[:2], store, CURVES)
    begin(store, plan.runs[2]).log({"step": 2, ERROR: 70.0})  # in training, or killed
    ((_, seeds, *_),) = evidence(read_results(plan, store)).thresholds.rows
    assert seeds.text == "2/2"


def test_a_run_that_failed_has_not_learned_the_task(store):
    plan = plan_with(learned=5.0)
    finished(plan.runs[:2], store, CURVES)
    fail(store, plan.runs[2])
    found = evidence(read_results(plan, store)).thresholds
    assert [[cell.text for cell in line[:3]] for line in found.rows] == [["CoPE", "2/3", "4 [2, > 6]"]]
    assert "never gets there, or whose run failed, counts as later" in found.note


def test_a_mean_of_test_sets_is_learned_where_it_reaches_the_limit(store):
    plan = plan_with(name="in_dist_and_dense/token_error", learned=5.0)
    for run in plan.runs:
        folder = begin(store, run)
        for step, error in CURVES[0].items():
            folder.log({"step": step, ERROR: error, "dense/token_error": error + 5.0})
        folder.finish({ERROR: 0.5, "dense/token_error": 5.5}, {"steps": 6})
        end(store, folder)
    ((_, seeds, steps, _),) = evidence(read_results(plan, store)).thresholds.rows
    assert (seeds.text, steps.text) == ("3/3", "6")


def test_no_table_where_no_seed_learns_or_nothing_is_to_be_learned(store):
    never, nothing = plan_with(learned=0.1), plan_with()
    finished(never.runs, store, CURVES)
    assert evidence(read_results(never, store)).thresholds is None
    assert evidence(read_results(nothing, store)).thresholds is None


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0, 9.0, 30.0], [3.0, 4.0, math.inf, math.inf], [7.0, 7.0]])
def test_the_interval_is_that_of_all_resamples(values):
    medians = sorted(map(statistics.median, itertools.product(values, repeat=len(values))))
    middle, low, high = bootstrap_median(values)
    assert middle == statistics.median(values)
    assert low == medians[math.ceil(0.025 * len(medians)) - 1]
    assert high == medians[math.ceil(0.975 * len(medians)) - 1]
