"""What both executors do, and the functions that they share."""

import threading

import pytest

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import Executor, ForeignRun, final_event, unfinished
from cope_sweep.sweep.local import run_local
from tests.sweep.runs import LONG, ONE_GROUP, EventLog, Listener, seeds
from tests.tiny import tiny_run


def test_every_run_is_trained_in_order_and_only_once(executor: Executor, store: Store, events: EventLog) -> None:
    runs = seeds(4)
    run_local([runs[2]], store, ONE_GROUP, on_event=events, stop=events.stop)
    first = store.run(runs[2].run_id).path.joinpath("result.json").read_bytes()
    executor([*runs, runs[0]], store, ONE_GROUP, on_event=events, stop=events.stop)

    order = [2, 0, 1, 3]
    assert events.ends() == [(runs[index].run_id, "finished") for index in order]
    assert store.run(runs[2].run_id).path.joinpath("result.json").read_bytes() == first
    for run in runs:
        folder = store.run(run.run_id)
        assert folder.status == "finished"
        assert folder.curve()[-1]["step"] == run.train.steps
        assert events.of(run)[0].status == "running"
        assert events.of(run)[-1].metrics == folder.result["metrics"]
        assert ":" in events.of(run)[-1].worker_id
    # One process trains all of them.
    assert len({event.worker_id for run in (runs[0], runs[1], runs[3]) for event in events.of(run)}) == 1


def test_a_failing_run_fails_alone(executor: Executor, store: Store, events: EventLog) -> None:
    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [tiny_run(seed=1), bad, tiny_run(seed=2)]
    executor(runs, store, ONE_GROUP, on_event=events, stop=events.stop)

    assert [status for _, status in events.ends()] == ["finished", "failed", "finished"]
    assert "Diverged" in str(events.of(bad)[-1].message)
    state = store.run(bad.run_id).state
    assert "Diverged" in state["message"]
    assert "Traceback" in state["traceback"]
    # The next call tries a failed run again, with any executor.
    run_local([bad], store, ONE_GROUP, on_event=events, stop=events.stop)
    assert store.run(bad.run_id).state["attempt"] == 2


def test_stop_interrupts_and_the_next_call_resumes(executor: Executor, store: Store, events: EventLog) -> None:
    running, pending = seeds(2, **LONG)

    def stop_late(event: Event) -> None:
        if event.step >= 20:
            events.stop.set()

    executor([running, pending], store, ONE_GROUP, on_event=Listener(events, stop_late), stop=events.stop)
    assert events.ends() == [(running.run_id, "interrupted")]
    assert store.run(running.run_id).status == "interrupted"
    assert store.run(running.run_id).resume.exists()
    assert store.run(pending.run_id).status == "pending"
    assert not store.run(pending.run_id).path.exists()
    reached = events[-1].step

    again = EventLog()

    def stop_at_once(event: Event) -> None:
        if event.step:
            again.stop.set()

    run_local([running], store, ONE_GROUP, on_event=Listener(again, stop_at_once), stop=again.stop)
    assert next(event.step for event in again if event.step) >= reached


def test_a_run_that_another_process_trains_is_waited_for(executor: Executor, store: Store, events: EventLog) -> None:
    taken, given_up, free = seeds(3)
    locks = [store.run(run.run_id).lock() for run in (taken, given_up)]
    for run, lock in zip((taken, given_up), locks, strict=True):
        assert lock.__enter__()
        store.run(run.run_id).begin(run, "another process")

    def release(event: Event) -> None:
        if event.run_id == free.run_id and event.status == "finished":
            # Later, so that the executor finds both runs locked.
            threading.Timer(1.5, end_both).start()

    def end_both() -> None:
        store.run(taken.run_id).finish({"in_dist/loss": 0.5}, {})
        for lock in locks:
            lock.__exit__(None, None, None)

    executor([taken, given_up, free], store, ONE_GROUP, on_event=Listener(events, release), stop=events.stop)
    assert events.ends()[0] == (free.run_id, "finished")
    assert sorted(events.ends()[1:]) == sorted([(taken.run_id, "finished"), (given_up.run_id, "finished")])
    assert events.of(taken)[-1].metrics == {"in_dist/loss": 0.5}
    assert events.of(taken)[-1].worker_id == "another process"
    assert store.run(given_up.run_id).curve()[-1]["step"] == given_up.train.steps


def test_no_runs(executor: Executor, store: Store, events: EventLog) -> None:
    executor([], store, ONE_GROUP, on_event=events, stop=events.stop)
    assert not events


def test_an_error_of_the_event_handler_stops_the_sweep(executor: Executor, store: Store, events: EventLog) -> None:
    runs: list[RunSpec] = seeds(2, **LONG)

    def break_down(event: Event) -> None:
        if event.step >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor(runs, store, ONE_GROUP, on_event=Listener(events, break_down), stop=events.stop)
    assert events.stop.is_set()
    assert store.run(runs[0].run_id).status == "interrupted"
    assert store.run(runs[0].run_id).resume.exists()
    assert store.run(runs[1].run_id).status == "pending"


def test_unfinished_runs_are_listed_once_and_in_order(store: Store) -> None:
    done, failed, new = seeds(3)
    for run in (done, failed):
        folder = store.run(run.run_id)
        with folder.lock():
            folder.begin(run, "here")
            folder.finish({}, {}) if run is done else folder.fail("no", "Traceback")
    assert unfinished([new, done, failed, new], store) == [new, failed]


@pytest.mark.parametrize(
    ("end", "expected"), [("finish", "ended"), ("fail", "ended"), ("release", "free"), ("interrupt", "free")]
)
def test_a_foreign_run_is_running_until_its_process_ends_it(store: Store, end: str, expected: str) -> None:
    (run,) = seeds(1)
    folder = store.run(run.run_id)
    foreign = ForeignRun(folder)
    with folder.lock():
        folder.begin(run, "another process")
        assert foreign.poll() == "running"
        match end:
            case "finish":
                folder.finish({}, {})
            case "fail":
                folder.fail("no", "Traceback")
            case "interrupt":
                folder.set_state("interrupted")
    assert foreign.poll() == expected


def test_an_old_failure_is_free_to_be_trained(store: Store) -> None:
    (run,) = seeds(1)
    folder = store.run(run.run_id)
    with folder.lock():
        folder.begin(run, "another process")
        folder.fail("no", "Traceback")
    assert ForeignRun(folder).poll() == "free"


def test_the_final_event_of_a_failed_run_has_its_message(store: Store) -> None:
    (run,) = seeds(1)
    folder = store.run(run.run_id)
    with folder.lock():
        folder.begin(run, "host:1")
        folder.log({"step": 3, "train/loss": 2.0})
        folder.fail("ValueError: no", "Traceback")
    assert final_event(run, folder) == Event(
        run.run_id, "failed", 3, run.train.steps, worker_id="host:1", message="ValueError: no"
    )


def test_the_final_event_of_a_finished_run_has_its_metrics(store: Store) -> None:
    (run,) = seeds(1)
    folder = store.run(run.run_id)
    with folder.lock():
        folder.begin(run, "host:1")
        folder.log({"step": 6, "train/loss": 2.0})
        folder.finish({"train/loss": 2.0}, {})
    assert final_event(run, folder) == Event(
        run.run_id, "finished", 6, run.train.steps, {"train/loss": 2.0}, worker_id="host:1"
    )
