"""Aggregates over tasks, by hand and by all resamples."""

import itertools
import os
import statistics
import subprocess
import sys

import numpy as np
import pytest

from cope_sweep.read.reports.aggregates import aggregates, interquartile_mean, probability_of_improvement
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.model import table_model
from cope_sweep.read.tables.render import markdown
from cope_sweep.store import RunRecord, Store
from tests.helpers.finished_runs import fail, finish, plan_of


def test_the_interquartile_mean_by_hand_and_its_interval_by_all_resamples():
    scores = {"a": [0.0, 0.1], "b": [0.4, 1.0]}
    middle, low, high = interquartile_mean(scores)
    assert middle == pytest.approx((0.1 + 0.4) / 2)  # without the least and the greatest of four
    all_means = [
        statistics.fmean(sorted((*a, *b))[1:3])
        for a in itertools.product(scores["a"], repeat=2)
        for b in itertools.product(scores["b"], repeat=2)
    ]
    assert (low, high) == (pytest.approx(min(all_means)), pytest.approx(max(all_means)))  # each has a share of 1/16


def test_the_probability_of_improvement_by_hand():
    own, other = {"a": [0.0, 0.5], "b": [0.2, 0.2]}, {"a": [0.5, 1.0], "b": [0.1, 0.3]}
    middle, low, high = probability_of_improvement(own, other)
    assert middle == pytest.approx(((1 + 1 + 0.5 + 1) / 4 + 2 / 4) / 2)
    assert low <= middle <= high
    assert probability_of_improvement({"a": [0.0] * 3}, {"a": [0.0] * 3}) == (0.5, 0.5, 0.5)
    assert probability_of_improvement({"a": [0.0, 0.1]}, {"a": [0.2, 0.3]}) == (1.0, 1.0, 1.0)


def test_scores_are_shares_of_the_error_of_the_best_rule(tmp_path):
    store = Store(tmp_path, create=True)
    tasks = {"Copy": {"kind": "selective_copy", "tokens": 4, "blanks": 4}, "Flip": {"kind": "flip_flop", "pairs": 8}}
    plan = plan_of(
        base={"model": {"layers": 1, "dim": 8, "heads": 1}, "train": {"steps": 6, "batch": 2}},
        grid={"task": tasks, "model.position": {"CoPE": ["cope"], "None": [], "RoPE": ["rope"]}},
        metrics=[{"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"}],
        seeds=[0, 1, 2],
        published=[],
    )
    model = table_model(plan, read_results(plan, store).records)
    assert aggregates(model, "CoPE") is None, "no run is finished"
    for row in plan.rows:
        rules = row.runs[0].task.shortcut_errors("in_dist", 2048)
        share = {"CoPE": 0.5, "None": 1.0, "RoPE": 0.1}[row.labels["model.position"]]
        *runs, last = row.runs
        for run in runs:
            finish(store, run, {"in_dist/token_error": share * min(rules.values())})
        if row.name == "Flip · RoPE":
            fail(store, last)  # the others are the best ones
        else:
            finish(store, last, {"in_dist/token_error": share * min(rules.values())})
    drawn = aggregates(table_model(plan, read_results(plan, store).records), "CoPE")
    assert [[cell.text for cell in line] for line in drawn.rows] == [
        ["CoPE", "0.50 [0.50, 0.50]", "–"],
        ["None", "1.00 [1.00, 1.00]", "0.00 [0.00, 0.00]"],
    ]
    assert "With 3 seeds these intervals are too narrow" in drawn.note
    assert drawn.note.endswith("Left out, because runs failed or have no value: RoPE.")


@pytest.mark.thorough
def test_the_order_of_tasks_decides_what_is_drawn_and_not_how_python_hashes_them():
    rng = np.random.default_rng(1)
    own, other = ({f"task {n}": rng.random(4).tolist() for n in range(6)} for _ in range(2))
    found = probability_of_improvement(own, other)
    assert probability_of_improvement(own, dict(reversed(other.items()))) == found
    code = f"from cope_sweep.read.reports.aggregates import *; print(probability_of_improvement({own}, {other}))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(found)


def test_a_task_that_does_not_report_the_primary_metric_is_left_out(tmp_path):
    store = Store(tmp_path, create=True)
    tasks = {
        "Copy": {"kind": "selective_copy", "tokens": 4, "blanks": 4},
        "Flip": {"kind": "flip_flop", "pairs": 8},
        "Text": {"kind": "code", "tokens": 16},
    }
    plan = plan_of(
        base={"model": {"layers": 1, "dim": 8, "heads": 1}, "train": {"steps": 6, "batch": 2}},
        grid={"task": tasks, "model.position": {"CoPE": ["cope"], "None": []}},
        metrics=[{"name": "in_dist/token_error", "unit": "%"}, {"name": "test/perplexity"}],
        published=[],
    )
    for row in plan.rows:
        name = "test/perplexity" if row.labels["task"] == "Text" else "in_dist/token_error"
        for run in row.runs:
            finish(store, run, {name: 10.0 + run.seed})
    model = table_model(plan, read_results(plan, store).records)
    assert "Over 2 tasks" in aggregates(model, "CoPE").note
    of_flip = {run.run_id for row in plan.rows if row.labels["task"] == "Flip" for run in row.runs}
    kept = {run_id: record for run_id, record in read_results(plan, store).records.items() if run_id not in of_flip}
    pending = {run_id: RunRecord(run_id=run_id) for run_id in of_flip}
    assert aggregates(table_model(plan, kept | pending), "CoPE") is None, "a task that is to be trained counts"
    lines = [line for line in markdown(model).splitlines() if line.startswith("| Text")]
    assert lines
    assert all("10.50 ± 0.71" in line for line in lines)
