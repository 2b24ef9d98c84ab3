"""How runs are counted: in one place, for the command line, the service and its page."""

from cope_sweep.records import RunRecord
from cope_sweep.store import Event, Store
from tests.helpers.finished_runs import plan_of
from tests.helpers.sweeps import end_sweep, write_sweep


def test_a_leased_run_counts_as_running_when_it_has_a_worker(tmp_path):
    store, plan = Store(tmp_path / "store", create=True), plan_of()
    first, second, *rest = plan.runs
    mine = write_sweep(store, plan)
    for run in (first, second):
        store.index.acquire(RunRecord.of(run.run_id, "running", {}), mine.sweep_id, 20)
    store.index.renew(mine.sweep_id, 20, [Event(run_id=first.run_id, status="running", step=1, worker_id="here:1")])
    counts = {"running": 1, "pending": 1 + len(rest)}
    progress = store.index.sweep_progress(mine.sweep_id, 1)
    assert store.index.status_counts([run.run_id for run in plan.runs]) == counts
    assert store.index.sweep_counts([mine.sweep_id]) == {mine.sweep_id: counts}
    assert (progress.counts, progress.groups) == (counts, 1)
    assert [store.index.records([run.run_id])[run.run_id].progress()["status"] for run in (first, second)] == [
        "running", "pending",
    ]  # fmt: skip


def test_an_active_sweep_waits_for_runs_that_another_trains(tmp_path):
    store, plan = Store(tmp_path / "store", create=True), plan_of()
    first, *_ = plan.runs
    mine, other = write_sweep(store, plan), write_sweep(store, plan)
    store.index.acquire(RunRecord.of(first.run_id, "running", {}), mine.sweep_id, 20)
    store.index.renew(mine.sweep_id, 20, [Event(run_id=first.run_id, status="running", step=1, worker_id="here:1")])
    counts = store.index.sweep_counts([mine.sweep_id, other.sweep_id])
    assert [counts[sweep.sweep_id].get("running") for sweep in (mine, other)] == [1, None]
    assert store.index.sweep_progress(other.sweep_id, 1).groups == 0
    end_sweep(store, other)
    assert store.index.sweep_counts([other.sweep_id])[other.sweep_id]["running"] == 1
