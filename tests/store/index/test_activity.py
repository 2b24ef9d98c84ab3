"""What happens in a store, on SQLite and on PostgreSQL."""

from cope_sweep.records import Event
from cope_sweep.store.index import Activity, Lease
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import row, write_sweep

RUNS = [tiny_run(seed=seed) for seed in range(6)]


def test_an_empty_index_is_quiet(index):
    assert index.activity() == Activity({}, 0, None, {}, 0, 0)


def test_runs_sweeps_and_leases_are_counted(index):
    index.write([row(RUNS[0]), row(RUNS[1], "failed")])
    steps = sum(record.step for record in index.records([run.run_id for run in RUNS]).values())
    for run, left_s in zip(RUNS[2:4], (60.0, 20.0), strict=True):
        assert isinstance(index.acquire(row(run, "running"), f"owner-{left_s}", left_s), Lease)
    index.renew("owner-60.0", 60.0, [Event(run_id=RUNS[2].run_id, status="running", step=7, worker_id="w")])
    write_sweep(index, "running", RUNS, "running", ttl_s=60)
    write_sweep(index, "dead", RUNS[:2], "running", ttl_s=0)
    write_sweep(index, "waiting", RUNS[:1], "pending")
    write_sweep(index, "over", RUNS[:1])
    found = index.activity()
    assert found.runs == {"finished": 1, "failed": 1, "running": 1, "pending": 1}  # RUNS[3] has no worker
    assert found.steps == steps + 7
    assert 0 < found.shortest_lease_s <= 20
    assert found.sweeps == {"running": 1, "interrupted": 1, "pending": 1, "finished": 1}
    assert found.waiting == 3  # RUNS[3:] of the first sweep
    assert found.left_out == 0


def test_a_lease_that_expired_is_no_heartbeat(index):
    assert isinstance(index.acquire(row(RUNS[0], "running"), "owner", -1.0), Lease)
    found = index.activity()
    assert (found.runs, found.shortest_lease_s) == ({"interrupted": 1}, None)


def test_nodes_are_left_out_by_running_sweeps_only(index):
    write_sweep(index, "a", RUNS[:1], "running", ttl_s=60)
    write_sweep(index, "b", RUNS[1:2], "running", ttl_s=60)
    write_sweep(index, "dead", RUNS[2:3], "running", ttl_s=-1)
    for sweep_id, nodes in (("a", 1), ("a", 2), ("b", 1), ("dead", 5), ("none", 9)):
        index.note_left_out(sweep_id, nodes)
    found = index.activity()
    assert found.left_out == 3
    assert found.sweeps == {"running": 2, "interrupted": 1}
    assert found.waiting == 2
    write_sweep(index, "a", RUNS[:1])
    assert index.activity().left_out == 1
