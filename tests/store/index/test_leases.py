"""Leases of runs and of sweeps, and requests to stop and to submit, in the index."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from cope_sweep.store import Event, Lease, Renewal
from cope_sweep.store.index import Index, IndexUnavailable, waiting
from cope_sweep.store.index.database import CONNECTION_LIMITS
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import members, row, summary, write_sweep

RUN, OTHER = tiny_run(), tiny_run(seed=1)


def lease(index, sweep_id, ttl_s=60.0, run=RUN):
    return index.acquire(row(run, "running"), sweep_id, ttl_s)


def test_renewing_prolongs_and_notes_progress(index):
    lease(index, "a", 0.0)
    progress = [
        Event(
            run_id=RUN.run_id, status="running", step=4, metrics={"train/loss": 0.5}, worker_id="w", tokens_per_s=7.5
        ),
        Event(run_id="0" * 16, status="running", step=1),
    ]
    assert index.renew("a", 60, progress) == Renewal(frozenset({RUN.run_id}), stop_requested=False)
    record = index.records([RUN.run_id])[RUN.run_id]
    assert (record.status, record.step, record.worker_id, record.metrics) == ("running", 4, "w", {"train/loss": 0.5})
    assert record.tokens_per_s == 7.5


def test_one_sweep_at_a_time_trains_a_run(index):
    assert lease(index, "a") == Lease(RUN.run_id, 1)
    assert lease(index, "b") == "leased"
    ((run_id, (sweep_id, left_s)),) = index.leases([RUN.run_id, OTHER.run_id]).items()
    assert (run_id, sweep_id, 50 < left_s <= 60) == (RUN.run_id, "a", True)
    assert lease(index, "a") == Lease(RUN.run_id, 2)  # its driver died, and another one continues the sweep


def test_a_lease_that_expired_is_given_to_others_with_the_next_number(index):
    assert [lease(index, sweep_id, 0.0) for sweep_id in "aba"] == [Lease(RUN.run_id, number) for number in (1, 2, 3)]
    assert index.statuses() == {RUN.run_id: "interrupted"}
    assert (index.expired(), index.leases([RUN.run_id])) == ([RUN.run_id], {})


def test_a_lease_of_a_clock_that_was_ahead_is_not_believed(index):
    write_sweep(index, "a", [RUN], "running", ttl_s=86400)
    lease(index, "a", 86400.0)
    assert (index.statuses(), index.sweep("a").status) == ({RUN.run_id: "interrupted"}, "interrupted")
    assert (index.expired(), index.leases([RUN.run_id])) == ([RUN.run_id], {})
    assert lease(index, "b") == Lease(RUN.run_id, 2)
    assert index.renew("a", 60).held == frozenset()


def test_whoever_still_trains_corrects_a_lease_of_a_clock_that_was_ahead(index):
    lease(index, "a", 86400.0)
    assert index.renew("a", 60).held == {RUN.run_id}
    assert index.statuses() == {RUN.run_id: "running"}


def test_a_lease_that_was_taken_is_neither_renewed_nor_ended_by_its_former_sweep(index):
    lease(index, "a", 0.0)
    lease(index, "b")
    assert index.renew("a", 60).held == frozenset()
    assert not index.end(row(status="failed"), "a")
    index.release([RUN.run_id], "a")
    assert index.statuses() == {RUN.run_id: "running"}
    assert index.end(row(metrics={"m": 1.0}), "b")
    assert lease(index, "a") == "finished"


def test_a_run_that_was_not_begun_is_pending_again(index):
    lease(index, "a")
    lease(index, "b", run=OTHER)
    index.release([RUN.run_id, OTHER.run_id], "a")
    assert index.statuses() == {OTHER.run_id: "running"}


def test_only_leases_that_expired_are_ended(index):
    lease(index, "a")
    lease(index, "b", run=OTHER)
    assert index.end_expired({RUN.run_id: row(), OTHER.run_id: None}) == []
    for sweep_id in ("a", "b"):
        index.renew(sweep_id, 0.0)
    assert index.end_expired({RUN.run_id: row()}) == [RUN.run_id]
    assert index.records([RUN.run_id])[RUN.run_id].sweep_id == "a"
    assert index.end_expired({OTHER.run_id: None}) == [OTHER.run_id]
    assert index.statuses() == {RUN.run_id: "finished"}


def test_writing_what_files_say_keeps_runs_with_a_lease(index):
    lease(index, "a")
    index.write([row(status="interrupted"), row(OTHER)], since=index.revision())
    assert index.statuses() == {RUN.run_id: "running", OTHER.run_id: "finished"}


def test_what_files_said_earlier_changes_nothing_that_is_newer(index):
    write_sweep(index, "a", [RUN], "interrupted")
    index.write([row(OTHER, "failed")])
    since = index.revision()
    index.write([row()])
    write_sweep(index, "b", [RUN])
    index.write([row(status="interrupted"), row(OTHER, "stopped")], since=since)
    index.write_sweep(summary("a", "failed"), [], since=since)
    index.write_sweep(summary("b", "failed"), [], since=since)
    assert index.statuses() == {RUN.run_id: "finished", OTHER.run_id: "stopped"}
    assert {sweep.sweep_id: sweep.status for sweep in index.sweeps()} == {"a": "failed", "b": "finished"}
    index.delete([RUN.run_id, OTHER.run_id], since=since)
    assert index.statuses() == {RUN.run_id: "finished", OTHER.run_id: "stopped"}
    index.delete([RUN.run_id, OTHER.run_id], since=index.revision())
    assert index.statuses() == {}


def test_a_sweep_whose_driver_died_reads_as_interrupted(index):
    write_sweep(index, "a", [RUN], "running", ttl_s=60)
    write_sweep(index, "b", [RUN], "running")
    before = index.state()
    assert [each.status for each in index.sweeps()] == ["running", "interrupted"]
    assert index.activity().sweeps == {"running": 1, "interrupted": 1}
    index.renew("a", 0.0)
    assert index.state() != before
    assert index.sweep("a").status == index.sweep_progress("a", 3).status == "interrupted"
    assert index.sweeps({"running"}) == []
    assert [each.sweep_id for each in index.sweeps({"interrupted"})] == ["a", "b"]
    index.renew("a", 60)
    write_sweep(index, "a", [RUN], "running")  # its record has changed
    assert index.sweep("a").status == "running"
    write_sweep(index, "a", [RUN])
    index.renew("a", 60)
    assert index.sweep("a").status == "finished"


def test_a_request_to_stop_comes_with_a_renewal_and_ends_with_the_sweep(index):
    for sweep_id in ("a", "b"):
        write_sweep(index, sweep_id, [RUN], "running", ttl_s=60)
    write_sweep(index, "over", [RUN])
    for sweep_id in ("a", "a", "over", "none"):
        index.request_stop(sweep_id)
    assert [index.renew(each, 60).stop_requested for each in ("a", "b", "over")] == [True, False, False]
    assert [index.stop_requested(each) for each in ("a", "b", "over", "none")] == [True, False, False, False]
    write_sweep(index, "a", [RUN], "running")
    assert index.stop_requested("a")
    write_sweep(index, "a", [RUN], "interrupted")
    write_sweep(index, "a", [RUN], "pending")
    assert not index.stop_requested("a")


def test_rows_are_appended_to_a_sweep(index):
    write_sweep(index, "a", [RUN], "running", ttl_s=60)
    index.append_members("a", members([OTHER], first=1))
    assert list(index.sweep_rows("a")) == [RUN.run_id, OTHER.run_id]
    assert index.sweep("a").runs == 2
    assert index.recorded_rows("tiny") == [(RUN.run_id, {"n": "0"}), (OTHER.run_id, {"n": "1"})]
    assert [place.sweep_id for place in index.places([OTHER.run_id])[OTHER.run_id]] == ["a"]


def test_rows_that_the_record_of_a_killed_sweep_lacks_stay(index):
    write_sweep(index, "a", [RUN], "running", ttl_s=60)
    index.append_members("a", members([OTHER], first=1))
    write_sweep(index, "a", [RUN], "interrupted")
    assert [member["run_id"] for member in index.members("a")] == [RUN.run_id, OTHER.run_id]
    assert (index.sweep("a").runs, index.sweep("a").status) == (2, "interrupted")


def test_a_sweep_that_starts_says_which_runs_others_finished_since_its_submission(index):
    write_sweep(index, "a", [RUN, OTHER], "pending")
    index.write_sweep(
        summary("a", "running", runs=2, reused=1),
        [each | {"reused": True} for each in members([RUN])] + members([OTHER], first=1),
        ttl_s=60,
    )
    assert [member["reused"] for member in index.members("a")] == [True, False]


def test_of_several_processes_one_adds_a_sweep_and_the_others_find_it(index, index_url):
    run_ids = [RUN.run_id, OTHER.run_id]

    def add(number):
        own = Index(index_url)
        with own.adding_sweep() as write:
            if own.sweep("a") is None:
                write(summary("a", "pending", runs=1), members([(RUN, OTHER)[number % 2]]))
                return number
        return None

    with ThreadPoolExecutor(6) as pool:
        (first,) = {number for number in pool.map(add, range(6)) if number is not None}
    assert list(index.sweep_rows("a")) == [run_ids[first % 2]]


def test_a_sweep_whose_files_cannot_be_written_is_not_added(index):
    with pytest.raises(OSError, match="full"), index.adding_sweep() as write:
        write(summary("a", "pending", runs=1), members([RUN]))
        raise OSError("full")
    assert index.sweep("a") is None


def _take_all(url, sweep_id, all_started, results):
    index = Index(url)
    all_started.wait()
    taken = []
    for seed in range(25):
        run = tiny_run(seed=seed)
        if isinstance(index.acquire(row(run, "running"), sweep_id, 60), Lease):
            index.end(row(run, "finished", metrics={"test/loss": 1.0}), sweep_id)
            taken.append(seed)
    results.put(taken)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_several_writers_at_once(index_url, number):
    """Each run is taken by exactly one of the processes, and nobody sees `database is locked`."""
    context = multiprocessing.get_context("spawn")
    all_started, results = context.Barrier(number), context.Queue()
    writers = [
        context.Process(target=_take_all, args=(index_url, f"w{n}", all_started, results)) for n in range(number)
    ]
    for writer in writers:
        writer.start()
    taken = [results.get(timeout=240) for _ in writers]
    for writer in writers:
        writer.join()
    assert sorted(seed for seeds in taken for seed in seeds) == list(range(25))
    assert [writer.exitcode for writer in writers] == [0] * number


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [
        ("max_page_count = 1", "database or disk is full"),
        ("query_only = 1", "attempt to write a readonly database"),
    ],
)
def test_a_full_disk_and_a_read_only_one_are_errors_at_once(tmp_path, pragma, reason):
    index = Index(f"sqlite:///{tmp_path / 'index.db'}")
    with index.database.engine.connect() as connection:  # the pool gives this connection to the next caller
        connection.exec_driver_sql(f"PRAGMA {pragma}")

    def lease_many():
        for seed in range(1000):
            lease(index, "sweep", run=tiny_run(seed=seed))

    with raises("unusable_index", reason=reason):
        waiting(lease_many, lambda waited_s: False)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.write_bytes(b"no database" * 100), "damaged_index"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "damaged_index"),
        (lambda path: (path.unlink(), path.mkdir()), "unusable_index"),
    ],
)
def test_a_damaged_database_is_no_reason_to_wait(tmp_path, damage, code):
    path = tmp_path / "index.db"
    Index(f"sqlite:///{path}").database.close()
    damage(path)
    with raises(code, index=f"sqlite:///{path}"):
        waiting(lambda: Index(f"sqlite:///{path}").statuses(), lambda waited_s: False)


@pytest.mark.slow
def test_postgresql_is_restarted(postgres):
    index = Index(postgres.new_database())
    lease(index, "a", 1.0)
    postgres.stop()
    with ThreadPoolExecutor(1) as pool:
        restart = pool.submit(postgres.start)
        renewal = waiting(lambda: index.renew("a", 60), lambda waited_s: waited_s > 200)  # longer than the lease
        restart.result()
    assert renewal.held == {RUN.run_id}
    assert index.statuses() == {RUN.run_id: "running"}


@pytest.mark.slow
def test_leases_are_renewed_while_another_process_adds_a_sweep(postgres):
    """It may wait for an object store."""
    url = postgres.new_database()
    index, slow = Index(url), Index(url)
    lease(index, "a")
    with slow.adding_sweep() as write:
        assert index.renew("a", 60).held == {RUN.run_id}
        write(summary("b", "pending", runs=1), members([RUN]))
    assert list(index.sweep_rows("b")) == [RUN.run_id]


@pytest.mark.slow
def test_a_writer_that_has_vanished_is_not_waited_for(postgres):
    """As one whose machine has: its connection stays open, and asks nothing."""
    url = postgres.new_database()
    index, vanished = Index(url), Index(f"{url}&connect_timeout=3")
    with vanished.database.reading() as connection:
        limits = connection.connection.dbapi_connection.info.get_parameters()
    assert limits.items() >= (CONNECTION_LIMITS | {"connect_timeout": "3"}).items()
    ended = pytest.raises(IndexUnavailable, match="idle-in-transaction")
    with ended, vanished.database.writing(idle_s=1) as connection:
        lease(index, "a")  # waits for the lock
        connection.exec_driver_sql("SELECT 1")
