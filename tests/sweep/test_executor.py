"""What both executors do, the functions that they share, and what only the local one does."""

import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest

from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.ablation import Asha
from cope_sweep.errors import ClusterError
from cope_sweep.store import Event, Lease, RunRecord, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep import leases
from cope_sweep.sweep.local_executor import run_local
from tests.helpers.errors import raises
from tests.helpers.sweep_runs import LONG, ONE_GROUP, EventLog, Listener, Recorded, other_sweep, seeds, train_by
from tests.helpers.tiny import tiny_run

train_here = partial(train_by, run_local, sweep_id="another-sweep")
train_locally = partial(train_by, run_local)

RAY_IS_THOROUGH = pytest.mark.parametrize(
    "executor", ["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.thorough])], indirect=True
)


def test_every_run_is_trained_in_order_and_only_once(
    executor: Callable[..., None], store: Store, events: EventLog
) -> None:
    runs = seeds(4)
    train_here([runs[2]], store, ONE_GROUP, on_event=events, stop=events.stop)
    first = store.run(runs[2].run_id).path.joinpath("result.json").read_bytes()
    executor([*runs, runs[0]], store, ONE_GROUP, on_event=events, stop=events.stop)

    order = [2, 0, 1, 3]
    assert events.ends() == [(runs[index].run_id, "finished") for index in order]
    assert store.run(runs[2].run_id).path.joinpath("result.json").read_bytes() == first
    for run in runs:
        folder = store.run(run.run_id)
        assert store.status(run.run_id) == "finished"
        assert folder.curve()[-1]["step"] == run.train.steps
        assert events.of(run)[0].status == "running"
        assert events.of(run)[-1].metrics == folder.result["metrics"]
        assert ":" in events.of(run)[-1].worker_id
        assert folder.result["sweep_id"] == ("another-sweep" if run is runs[2] else "this-sweep")
    # One process trains all of them.
    assert len({events.of(run)[-1].worker_id for run in (runs[0], runs[1], runs[3])}) == 1


@pytest.mark.slow
def test_a_search_whose_index_is_away_waits_on_ray_for_its_first_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cope_sweep.sweep import ray_executor  # imports Ray

    class Away:
        metric, is_exhausted = "in_dist/loss", False

        def next_row(self) -> None:
            raise IndexUnavailable("no answer")

    def connect(*_: object, **__: object) -> None:
        raise ClusterError("it connects")

    monkeypatch.setattr(ray_executor, "connected", connect)
    with raises("no_cluster"):
        train_by(ray_executor.run_on_ray, [], store, ONE_GROUP, search=Away())


@RAY_IS_THOROUGH
def test_a_failing_run_fails_alone(executor: Callable[..., None], store: Store, events: EventLog) -> None:
    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [tiny_run(seed=1), bad, tiny_run(seed=2)]
    executor(runs, store, ONE_GROUP, on_event=events, stop=events.stop)

    assert [status for _, status in events.ends()] == ["finished", "failed", "finished"]
    assert "Diverged" in str(events.of(bad)[-1].message)
    state = store.run(bad.run_id).state
    assert "Diverged" in state["message"]
    assert "Traceback" in state["traceback"]
    # The next call tries a failed run again, with any executor.
    train_here([bad], store, ONE_GROUP, on_event=events, stop=events.stop)
    assert store.run(bad.run_id).state["attempt"] == 2


@RAY_IS_THOROUGH
def test_stop_interrupts_and_the_next_call_resumes(
    executor: Callable[..., None], store: Store, events: EventLog
) -> None:
    running, pending = seeds(2, **LONG)

    def stop_late(event: Event) -> None:
        if event.step >= 20:
            events.stop.set()

    executor([running, pending], store, ONE_GROUP, on_event=Listener(events, stop_late), stop=events.stop)
    assert events.ends() == [(running.run_id, "interrupted")]
    assert store.status(running.run_id) == "interrupted"
    assert store.run(running.run_id).resume.exists()
    assert store.status(pending.run_id) == "pending"
    assert not store.run(pending.run_id).path.exists()
    reached = events[-1].step

    again = EventLog()

    def stop_at_once(event: Event) -> None:
        if event.step:
            again.stop.set()

    train_here([running], store, ONE_GROUP, on_event=Listener(again, stop_at_once), stop=again.stop)
    assert next(event.step for event in again if event.step) >= reached


@RAY_IS_THOROUGH
def test_runs_of_another_sweep_are_left_to_it_until_it_gives_them_up(
    executor: Callable[..., None], store: Store, events: EventLog
) -> None:
    taken, given_up, free = seeds(3)
    with other_sweep(store) as other:
        for run in (taken, given_up):
            other.acquire(run)
        recorded = Recorded(store, taken)

        def release(event: Event) -> None:
            if event.run_id == free.run_id and event.status == "finished":
                # Later, so that the executor finds both runs taken.
                threading.Timer(1.5, end_both).start()

        def end_both() -> None:
            recorded.end("finished")
            other.end(taken.run_id)
            other.end(given_up.run_id)

        executor([taken, given_up, free], store, ONE_GROUP, on_event=Listener(events, release), stop=events.stop)
    assert events.ends()[0] == (free.run_id, "finished")
    assert sorted(events.ends()[1:]) == sorted([(taken.run_id, "finished"), (given_up.run_id, "finished")])
    assert events.of(taken)[-1].metrics == {"in_dist/loss": 0.5}
    assert events.of(taken)[-1].worker_id == "host:1"
    assert store.run(given_up.run_id).curve()[-1]["step"] == given_up.train.steps


@RAY_IS_THOROUGH
def test_after_too_many_failed_runs_no_more_are_started(
    executor: Callable[..., None], store: Store, events: EventLog
) -> None:
    bad, after = tiny_run(**{"train.lr": 1e20, "train.steps": 200}), tiny_run(seed=1)
    executor([bad, after], store, ONE_GROUP, on_event=events, stop=events.stop, max_failed_runs=1)
    assert events.ends() == [(bad.run_id, "failed")]
    assert store.status(after.run_id) == "pending"
    assert not store.run(after.run_id).path.exists()


@RAY_IS_THOROUGH
def test_an_error_of_the_event_handler_stops_the_sweep(
    executor: Callable[..., None], store: Store, events: EventLog
) -> None:
    runs: list[RunSpec] = seeds(2, **LONG)

    def break_down(event: Event) -> None:
        if event.step >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor(runs, store, ONE_GROUP, on_event=Listener(events, break_down), stop=events.stop)
    assert events.stop.is_set()
    assert store.status(runs[0].run_id) == "interrupted"
    assert store.run(runs[0].run_id).resume.exists()
    assert store.status(runs[1].run_id) == "pending"


def test_nothing_replaces_a_result(store: Store) -> None:
    (run,) = seeds(1)
    Recorded(store, run).end("finished")
    store.run(run.run_id).record_failure(run, 2, "killed", "killed", keep_recorded=False)
    assert store.run(run.run_id).status == "finished"
    assert store.run(run.run_id).state["status"] == "running"


@pytest.mark.parametrize("damaged", ["spec.json", "state.json"])
def test_a_failure_is_recorded_in_a_damaged_folder(store: Store, damaged: str) -> None:
    (run,) = seeds(1)
    (Recorded(store, run).folder.path / damaged).write_text("{")
    store.run(run.run_id).record_failure(run, 1, "killed", "killed by signal 9", keep_recorded=False)
    assert store.run(run.run_id).state["message"] == "killed"


def test_no_failure_replaces_what_a_newer_attempt_has_written(store: Store) -> None:
    (run,) = seeds(1)
    Recorded(store, run, 2)
    store.run(run.run_id).record_failure(run, 1, "killed", "killed", keep_recorded=False)
    assert store.run(run.run_id).state["status"] == "running"


# -- what only the local executor does -----------------------------------------------------------------------------------


def test_a_missing_device_is_an_error(store: Store, events: EventLog) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with raises("no_device", key="resources.device", value="cuda"):
        train_locally(seeds(1), store, Resources(device="cuda"), on_event=events, stop=events.stop)
    assert store.index.statuses() == {}


def test_an_error_after_the_sweep_was_stopped_is_raised_at_once(store: Store, events: EventLog) -> None:
    """A second Ctrl-C: the run was given its time to write a checkpoint after the first."""
    runs = seeds(1, **LONG)

    def stop_then_fail(event: object) -> None:
        if events.stop.is_set():
            signal.raise_signal(signal.SIGINT)
        if events[-1].step:
            events.stop.set()

    with pytest.raises(KeyboardInterrupt):
        train_locally(runs, store, ONE_GROUP, on_event=Listener(events, stop_then_fail), stop=events.stop)


def test_output_that_fails_after_the_sweep_was_stopped_costs_no_state(store: Store, events: EventLog) -> None:
    """The terminal was closed: the reader of a pipe is gone, too, and rich raises SystemExit for that."""
    (run,) = seeds(1, **LONG)

    def stop_then_fail(event: Event) -> None:
        if events.stop.is_set():
            raise SystemExit(1)
        if event.step >= 20:
            events.stop.set()
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        train_locally([run], store, ONE_GROUP, on_event=Listener(events, stop_then_fail), stop=events.stop)
    assert store.status(run.run_id) == "interrupted"
    assert store.run(run.run_id).resume.exists()


def test_a_lost_lease_ends_the_run_here(store: Store, events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was suspended until its lease expired, and another sweep took the run."""
    monkeypatch.setattr(leases, "RENEWAL_S", 0.1)
    (run,) = seeds(1, **LONG)
    taken: list[Lease] = []

    def take(event: Event) -> None:
        if event.step and not taken:
            store.index.renew("this-sweep", -1.0)
            answer = other.acquire(run)
            # This sweep's own renewal can come between the two lines: the next event tries again.
            if isinstance(answer, Lease):
                taken.append(answer)

    notes: list[str] = []

    def stop_waiting(note: str) -> None:
        """What follows the end of the run here: the sweep waits for the other one."""
        notes.append(note)
        events.stop.set()

    with other_sweep(store) as other:
        too_late = threading.Timer(60.0, events.stop.set)
        too_late.start()
        train_locally([run], store, ONE_GROUP, on_event=Listener(events, take), on_note=stop_waiting, stop=events.stop)
        too_late.cancel()
        assert taken
        assert [note.split(";")[0] for note in notes] == ["waiting for a run that is trained by the sweep other-sweep"]
        assert events.ends() == []
        assert store.status(run.run_id) == "running"


def test_waiting_for_another_sweep_is_said_with_the_time_that_is_left(store: Store, events: EventLog) -> None:
    """The process of the other sweep died: its lease ends, and the run is trained here."""
    (run,) = seeds(1)
    store.index.acquire(RunRecord.of(run.run_id, "running", run.model_dump(mode="json")), "dead-sweep", 3.0)
    notes: list[str] = []
    train_locally([run], store, ONE_GROUP, on_event=events, on_note=notes.append)
    (note,) = notes
    assert note.startswith("waiting for a run that is trained by the sweep dead-sweep; if its process has died,")
    assert "is free in" in note
    assert events.ends() == [(run.run_id, "finished")]


def test_a_schedule_has_no_effect_and_that_is_said(store: Store, events: EventLog) -> None:
    notes: list[str] = []
    rule = Asha(metric="in_dist/loss", goal="min", grace=3)
    train_locally(seeds(1), store, ONE_GROUP, on_event=events, stop=events.stop, schedule=rule, on_note=notes.append)
    assert [status for _, status in events.ends()] == ["finished"]
    assert notes == [
        "ASHA (in_dist/loss, grace 3 steps) does not apply: --local trains one run after another, to its end"
    ]
