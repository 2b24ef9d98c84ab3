"""Leases in the index, and the thread that renews them. Who gets a lease is in `test_protocol.py`."""

import multiprocessing
import multiprocessing.pool
import os
import threading
import time

import pytest
from cope_sweep.store.index.owners import new_owner

from cope_sweep.store import Lease, LeaseHolder, Refusal, Store
from cope_sweep.store import leases as leases_module
from cope_sweep.store.event import Event
from cope_sweep.store.index import Index, IndexUnavailable, IndexUnusable, waiting
from tests.store.index.rows import row
from tests.store.waiting import until, until_prolonged
from tests.tiny import tiny_run

RUN = tiny_run()
A, B = "a@other/machine-1:1:1", "b@other/machine-2:1:1"


def test_renewing_prolongs_and_notes_progress(index):
    index.acquire(row(status="running"), A, 0.0)
    progress = [
        Event(RUN.run_id, "running", 4, metrics={"train/loss": 0.5}, worker_id="w"),
        Event("0" * 16, "running", 1),
    ]
    assert index.renew(A, 60, progress)[0] == {RUN.run_id}
    record = index.records([RUN.run_id])[RUN.run_id]
    assert (record.status, record.step, record.worker_id, record.metrics) == ("running", 4, "w", {"train/loss": 0.5})


def test_a_lease_that_expired_is_given_to_others_with_the_next_number(index):
    leases = [index.acquire(row(status="running"), owner, 0.0) for owner in (A, B, A)]
    assert leases == [Lease(RUN.run_id, number) for number in (1, 2, 3)]


@pytest.mark.parametrize("what", ["", "*"])
def test_a_sweep_that_has_to_stop_leases_no_run(index, what):
    index.request_stop("a", what)
    assert index.acquire(row(status="running"), A, 60) == Refusal("stopped")
    assert index.acquire(row(status="running"), B, 60) == Lease(RUN.run_id, 1)
    index.forget_stops("a")
    index.request_stop("a", RUN.run_id)  # only this one, which is known to whoever has it
    assert index.acquire(row(tiny_run(seed=1), "running"), A, 60) == Lease(tiny_run(seed=1).run_id, 1)


def test_requests_to_stop_come_with_a_renewal(index):
    assert index.renew(A, 60)[1] == {}
    index.request_stop("a", RUN.run_id, "stopped by ASHA")
    index.request_stop("another", reason="not this one")
    index.request_stop("a%", reason="no pattern")
    assert index.renew(A, 60)[1] == {RUN.run_id: "stopped by ASHA"}
    index.request_stop("a")
    index.request_stop("a")  # again
    assert index.renew(A, 60)[1] == {RUN.run_id: "stopped by ASHA", "": ""}
    index.forget_stops("a", RUN.run_id)
    assert index.renew(A, 60)[1] == {"": ""}
    assert index.stop_requested("a")
    index.forget_stops("a")
    assert index.renew(A, 60)[1] == {}
    assert not index.stop_requested("a")
    assert index.stop_requested("another")


def _die_with_a_lease(url):
    index = Index(url)
    index.acquire(row(status="running"), new_owner("dead"), 600)
    os._exit(0)


@pytest.mark.slow
def test_the_lease_of_a_dead_process_of_this_machine_ends_at_once(index):
    process = multiprocessing.get_context("spawn").Process(target=_die_with_a_lease, args=(index.url,))
    process.start()
    process.join()
    assert index.statuses() == {RUN.run_id: "interrupted"}
    assert index.acquire(row(status="running"), new_owner("alive"), 60) == Lease(RUN.run_id, 2)


def _take_all(url, name, all_started, results):
    index = Index(url)
    all_started.wait()
    taken = []
    for seed in range(25):
        run = tiny_run(seed=seed)
        if isinstance(index.acquire(row(run, "running"), f"{name}@other/m:1:1", 60), Lease):
            index.end(row(run, "finished", metrics={"test/loss": 1.0}), f"{name}@other/m:1:1")
            taken.append(seed)
    results.put(taken)


@pytest.mark.slow
def test_four_writers_at_once(index_url):
    """Each run is taken by exactly one of four processes, and nobody sees `database is locked`."""
    context = multiprocessing.get_context("spawn")
    all_started, results = context.Barrier(4), context.Queue()
    writers = [context.Process(target=_take_all, args=(index_url, f"w{n}", all_started, results)) for n in range(4)]
    for writer in writers:
        writer.start()
    taken = [results.get(timeout=240) for _ in writers]
    for writer in writers:
        writer.join()
    assert sorted(seed for seeds in taken for seed in seeds) == list(range(25))
    assert [writer.exitcode for writer in writers] == [0] * 4


# -- the holder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, index_url):
    return Store(tmp_path / "store", index=index_url, create=True)


def test_a_sweep_holds_its_runs_until_it_closes(store):
    first, second = LeaseHolder(store, "first", ttl_s=3), LeaseHolder(store, "second", ttl_s=3)
    assert first.acquire(RUN) == Lease(RUN.run_id, 1)
    store.run(RUN.run_id).begin(RUN, "here", 1)
    first.progress(Event(RUN.run_id, "running", 3))
    until_prolonged(store.index, RUN.run_id, 3)
    assert isinstance(second.acquire(RUN), Refusal)
    assert store.index.records([RUN.run_id])[RUN.run_id].step == 3
    first.close()
    assert store.status(RUN.run_id) == "interrupted"
    assert second.acquire(RUN) == Lease(RUN.run_id, 2)
    second.close()


def test_the_end_of_a_run_is_what_its_folder_says(store):
    holder = LeaseHolder(store, "sweep")
    lease = holder.acquire(RUN)
    folder = store.run(RUN.run_id).begin(RUN, "here", lease.attempt)
    folder.finish({"test/loss": 1.5}, {"steps": 6})
    assert holder.end(RUN.run_id) == "finished"
    record = store.index.records([RUN.run_id])[RUN.run_id]
    assert (record.status, record.metrics, record.sweep_id) == ("finished", {"test/loss": 1.5}, "sweep")
    assert holder.acquire(RUN) == Refusal("finished")
    holder.close()


def test_a_run_that_was_never_begun_is_pending_again(store):
    holder = LeaseHolder(store, "sweep")
    holder.acquire(RUN)
    assert holder.end(RUN.run_id) == "pending"
    assert store.index.statuses() == {}
    holder.close()


def test_a_lost_lease_is_noticed(store):
    holder = LeaseHolder(store, "sweep", ttl_s=0.5)
    holder.acquire(RUN)
    store.index.end(row(status="interrupted"), holder.owner)
    until(lambda: holder.is_lost(RUN.run_id))
    holder.close()


@pytest.mark.slow
def test_postgresql_is_restarted(postgres, tmp_path):
    store = Store(tmp_path / "store", index=postgres.new_database(), create=True)
    holder = LeaseHolder(store, "sweep", ttl_s=1)
    holder.acquire(RUN)
    store.run(RUN.run_id).begin(RUN, "here", 1)
    postgres.stop()
    time.sleep(1.5)
    restart = multiprocessing.pool.ThreadPool(1).apply_async(lambda: (time.sleep(1), postgres.start()))
    assert holder.acquire(tiny_run(seed=1)) == Lease(tiny_run(seed=1).run_id, 1)  # waits for the server
    restart.get()
    until(lambda: store.status(RUN.run_id) == "running")  # the next renewal
    assert not holder.is_lost(RUN.run_id)
    holder.close()
    assert store.status(RUN.run_id) == "interrupted"


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [
        ("max_page_count = 1", "database or disk is full"),
        ("query_only = 1", "attempt to write a readonly database"),
    ],
)
def test_a_full_disk_and_a_read_only_one_are_errors_at_once(tmp_path, pragma, reason):
    store = Store(tmp_path / "store", create=True)
    with store.index.database.engine.connect() as connection:  # the pool gives this connection to the next caller
        connection.exec_driver_sql(f"PRAGMA {pragma}")
    waits = []
    leases = LeaseHolder(store, "sweep", on_wait=lambda: waits.append(1))
    with pytest.raises(IndexUnusable, match=f"index.db cannot be used: {reason}; .*--store"):
        for seed in range(1000):
            leases.acquire(tiny_run(seed=seed))
    assert waits == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"no database" * 100), "file is not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "malformed"),
        (lambda path: (path.unlink(), path.mkdir()), "unable to open database file"),
    ],
)
def test_a_damaged_database_is_no_reason_to_wait(tmp_path, damage, reason):
    path = tmp_path / "index.db"
    Index(f"sqlite:///{path}").database.close()
    damage(path)
    with pytest.raises(IndexUnusable, match=f"cannot be used: .*{reason}"):
        waiting(lambda: Index(f"sqlite:///{path}").statuses(), lambda waited_s: False)


def test_a_stopped_sweep_waits_for_a_database_for_a_limited_time(store, monkeypatch):
    monkeypatch.setattr(leases_module, "STOP_WAIT_S", 0.1)
    monkeypatch.setattr(leases_module, "WAIT_NOTE_S", 0.01)
    stop, told, calls = threading.Event(), [], []
    leases = LeaseHolder(store, "sweep", stop=stop, on_wait=lambda: told.append(len(calls)))

    def away():
        calls.append(1)
        if len(calls) == 3:
            stop.set()
        raise IndexUnavailable("the server is away")

    with pytest.raises(IndexUnavailable):
        leases.waiting(away)
    assert len(calls) > 3
    assert len(told) == 1
