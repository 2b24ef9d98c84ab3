"""What the index knows of what a tracker has received."""

from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.index.summaries import sweep_rows
from tests.store.index.rows import write_sweep

RUNS = [RunRecord.of(f"{number:016x}", "finished", {"seed": number}) for number in range(4)]


def test_the_backlog_of_a_tracker(index):
    mirrored, another = Mirrored(index, "mlflow"), Mirrored(index, "another")
    index.write(RUNS[:2])
    write_sweep(index, "2026-a", RUNS[:2])
    backlog = mirrored.backlog()
    assert list(backlog.runs) == [RUNS[0].run_id, RUNS[1].run_id]
    assert list(backlog.sweeps) == ["2026-a"]
    assert mirrored.count() == 3
    mirrored.mark({RUNS[0].run_id: (backlog.runs[RUNS[0].run_id], "tracked-1")})
    mirrored.mark({"2026-a": (backlog.sweeps["2026-a"], "tracked-2")})
    assert list(mirrored.backlog().runs) == [RUNS[1].run_id]
    assert (mirrored.count(), another.count()) == (1, 3)
    index.write(RUNS[:1])
    assert list(mirrored.backlog().runs) == [RUNS[1].run_id, RUNS[0].run_id]
    assert mirrored.tracked_ids([run.run_id for run in RUNS]) == {RUNS[0].run_id: "tracked-1"}
    assert mirrored.newest_tracked_id() == "tracked-2"
    mirrored.forget()
    assert mirrored.count() == 3
    assert mirrored.newest_tracked_id() is None


def test_runs_that_are_trained_are_no_backlog_until_their_lease_ends(index):
    mirrored = Mirrored(index, "mlflow")
    index.acquire(RUNS[0], new_owner("a"), 600.0)
    index.acquire(RUNS[1], new_owner("a"), 0.0)
    index.acquire(RUNS[2], "a@host/unknown:1:2", 600.0)  # of another machine: it may be alive
    assert mirrored.running() == [RUNS[0].run_id, RUNS[2].run_id]
    assert list(mirrored.backlog().runs) == [RUNS[1].run_id]
    assert mirrored.count() == 1


def test_sweeps_that_are_executed_are_no_backlog_until_their_process_ends(index):
    mirrored = Mirrored(index, "mlflow")
    dead = new_owner("b").rpartition(":")[0] + ":1"  # the same process id, started at another time
    write_sweep(index, "2026-a", RUNS, "running", owner=new_owner("a"))
    write_sweep(index, "2026-b", RUNS, "running", owner=dead)
    assert mirrored.running_sweeps() == ["2026-a"]
    assert list(mirrored.backlog().sweeps) == ["2026-b"]


def test_the_places_of_runs_and_the_rows_of_a_sweep(index):
    mirrored = Mirrored(index, "mlflow")
    write_sweep(index, "2026-a", RUNS)
    write_sweep(index, "2026-b", RUNS[:1])
    assert [place.sweep_id for place in mirrored.memberships([RUNS[0].run_id])[RUNS[0].run_id]] == ["2026-a", "2026-b"]
    assert set(sweep_rows(index, "2026-b")) == {RUNS[0].run_id}
