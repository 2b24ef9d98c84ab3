"""How runs are counted: in one place, for the command line, the service and its page."""

from cope_sweep.api.ablations import GetCurves
from cope_sweep.api.runs import GetRun
from cope_sweep.read.queries import Queries
from cope_sweep.read.queries.curves import plan_curves
from cope_sweep.read.tables import read_results
from cope_sweep.records import RunRecord
from cope_sweep.store import Event, RunQuery, Store
from cope_sweep.store.index import Filter
from tests.helpers.finished_runs import plan_of, run_table
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


def test_every_answer_about_a_run_says_what_is_counted(tmp_path, monkeypatch):
    """A run that waits for a worker: it has just been leased, or its worker has died."""
    monkeypatch.chdir(tmp_path)
    store, plan = Store(tmp_path / "store", create=True), plan_of()
    first, second, *_ = plan.runs
    mine = write_sweep(store, plan)
    for run in (first, second):
        store.index.acquire(RunRecord.of(run.run_id, "running", {}), mine.sweep_id, 20)
    store.index.renew(mine.sweep_id, 20, [Event(run_id=first.run_id, status="running", step=1, worker_id="here:1")])
    expected = {first.run_id: "running", second.run_id: "pending"}
    page = store.index.page(RunQuery())
    assert {run.run_id: run.status for run in page.runs} == expected
    for status, run in (("running", first), ("pending", second)):
        assert store.index.matching(RunQuery((status,))) == [run.run_id]
        assert store.index.matching(RunQuery(filters=(Filter("status", "=", status),))) == [run.run_id]
        some = store.index.page(RunQuery((status,), run_ids=tuple(expected)))
        assert [each.run_id for each in some.runs] == [run.run_id]
        assert [each.status for each in some.runs] == [status]
    queries = Queries(store)
    assert {run_id: queries.ask(GetRun(run_id=run_id)).status for run_id in expected} == expected
    results = read_results(plan, store)
    assert {run_id: results.records[run_id].status for run_id in expected} == expected
    curves = plan_curves(plan, store, GetCurves(name=plan.name))
    series = [each for row in curves.rows for each in row.series]
    assert {each.run_id: each.status for each in series if each.run_id in expected} == expected
    exported = run_table(store)
    assert dict(zip(exported["run_id"].to_pylist(), exported["status"].to_pylist(), strict=True)) == expected
    assert store.status(second.run_id) == "running", "of its lease"
