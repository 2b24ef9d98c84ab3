"""Why runs of a sweep are not in training."""

import pytest

from cope_sweep.api.sweeps import GetSweep
from cope_sweep.config import expand, load_ablation
from cope_sweep.read.queries import Queries
from cope_sweep.records import RunRecord
from cope_sweep.store import Event, Store
from tests.helpers.finished_runs import fail, finish, plan_of
from tests.helpers.sweeps import end_sweep, stop, write_sweep


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


def lease(store, run, sweep, worker=None):
    """Lease a run, and have a worker train it."""
    store.index.acquire(RunRecord.of(run.run_id, "running", run.model_dump(mode="json")), sweep.sweep_id, 20)
    if worker:
        store.index.renew(sweep.sweep_id, 20, [Event(run_id=run.run_id, status="running", step=1, worker_id=worker)])


def members(store, sweep):
    """Run id → (status, reason)."""
    found = Queries(store).ask(GetSweep(sweep_id=sweep.sweep_id))
    counted = {}
    for run in found.members:
        counted[run.status] = counted.get(run.status, 0) + 1
    assert counted == found.counts
    return {run.run_id: (run.status, run.reason) for run in found.members}


def test_runs_that_wait_say_for_what(store):
    first, second, third, *rest = plan_of().runs
    mine, other = write_sweep(store, plan_of()), write_sweep(store, plan_of())
    assert members(store, mine)[first.run_id] == ("pending", "waits for the first worker to start")
    lease(store, first, mine, "here:1")
    lease(store, second, mine)
    lease(store, third, other, "here:2")
    found = members(store, mine)
    assert found[first.run_id] == ("running", None)
    assert found[second.run_id] == ("pending", "next: waits for a free worker (1 in training)")
    store.index.acquire(RunRecord.of(second.run_id, "running", {}), mine.sweep_id, 20)
    assert members(store, mine)[second.run_id][1] == "next: waits for a free worker (1 in training); attempt 2"
    assert found[third.run_id] == ("pending", f"waits for the sweep {other.sweep_id}, which trains it")
    assert {found[run.run_id] for run in rest} == {("pending", "waits for a free worker (1 in training)")}
    assert members(store, other)[second.run_id] == (
        "pending",
        f"waits for the sweep {mine.sweep_id}, which has leased it",
    )


def test_an_ended_sweep_waits_for_nothing_and_names_who_trains_its_runs(store):
    first, second, *_ = plan_of().runs
    mine = write_sweep(store, plan_of())
    later = write_sweep(store, plan_of())
    lease(store, first, later, "here:1")
    end_sweep(store, mine, "interrupted")
    found = members(store, mine)
    assert found[first.run_id] == ("running", f"the sweep {later.sweep_id} trains it")
    assert found[second.run_id] == ("pending", None)


def test_what_failed_or_was_interrupted_is_tried_again_unless_it_is_left_out(store):
    first, second, third, *rest = plan_of().runs
    fail(store, first, "Diverged")
    stop(store, second)
    finish(store, third, {})
    mine = write_sweep(store, plan_of())
    keeping = write_sweep(store, plan_of(), leave_out=["failed", "pending"])
    found, kept = members(store, mine), members(store, keeping)
    place = "waits for the first worker to start"
    assert found[first.run_id][0] == "failed"
    assert found[first.run_id][1].startswith(f"{place}; failed in the sweep")
    assert found[second.run_id] == ("interrupted", f"{place}; continues from step 1")
    assert found[third.run_id] == ("finished", None)
    assert kept[first.run_id][1] == "stays failed: the sweep leaves such runs out"
    assert {kept[run.run_id][1] for run in rest} == {"stays pending: the sweep leaves such runs out"}


def test_a_stopped_run_is_trained_on_unless_the_sweep_leaves_it_out(store):
    first, *_ = plan_of().runs
    stop(store, first, "stopped")
    mine, scheduled = write_sweep(store, plan_of()), write_sweep(store, plan_of(), leave_out=["stopped"])
    assert members(store, mine)[first.run_id] == (
        "stopped",
        "waits for the first worker to start; continues from step 1",
    )
    assert members(store, scheduled)[first.run_id] == ("stopped", None)


def test_a_sweep_that_stops_or_has_not_started_says_so(store):
    first, *_ = plan_of().runs
    submitted = write_sweep(store, plan_of(), status="pending")
    assert members(store, submitted)[first.run_id] == ("pending", "waits for the sweep to start")
    mine = write_sweep(store, plan_of())
    store.index.request_stop(mine.sweep_id)
    assert members(store, mine)[first.run_id] == ("pending", "is not started: the sweep was asked to stop")


def test_a_search_says_how_many_rows_it_has_still_to_choose(store, tmp_path):
    file = tmp_path / "searched.yaml"
    file.write_text("""\
title: Searched
hypothesis: A rate is found.
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 4, batch: 4}
  evaluate: {validation: true}
search: {kind: optuna, samples: 3, space: {train.lr: {log_uniform: [0.001, 0.1]}}}
seeds: [0]
metrics: [{name: in_dist/token_error}]
""")
    plan = expand(load_ablation(file))
    mine = write_sweep(store, plan, data=plan.ablation.data)
    ask = lambda: Queries(store).ask(GetSweep(sweep_id=mine.sweep_id)).to_suggest  # noqa: E731
    assert ask() == plan.open_samples > 0
    end_sweep(store, mine, "interrupted")
    assert ask() == plan.open_samples, "a retry chooses them"
    retry = write_sweep(store, plan, data=plan.ablation.data, leave_out=["pending"])
    assert Queries(store).ask(GetSweep(sweep_id=retry.sweep_id)).to_suggest == 0
