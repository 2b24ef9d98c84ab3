"""A sweep: which runs it trains, its outcome, its record, its budgets, and what stops it."""

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cope_sweep.config import Plan, RunSpec
from cope_sweep.errors import ClusterError
from cope_sweep.signals import STOP, TERMINATION, stopping_on_signals
from cope_sweep.store import Budget, Event, Lease, RunRecord, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep import leases as leases_module
from cope_sweep.sweep import sweep as sweep_module
from cope_sweep.sweep.driver import Driver
from cope_sweep.sweep.executor import Callbacks, Workload
from cope_sweep.sweep.leases import Leases
from cope_sweep.sweep.sweep import Sweep, SweepOutcome
from tests.helpers.errors import raises
from tests.helpers.finished_runs import plan_of
from tests.helpers.processes import TIMEOUT_S, until
from tests.helpers.sweep_runs import Recorded, other_sweep

METRICS = {"in_dist/token_error": 12.5, "dense/loss": 0.5}


def enter(leases: Leases, run: RunSpec, status: str) -> None:
    """Have a sweep end a run with a status, as an executor does."""
    lease = leases.acquire(run)
    assert isinstance(lease, Lease)
    Recorded(leases.store, run, lease.attempt).end(status, METRICS)
    leases.end(run.run_id)


class Scripted:
    """An executor that enters a given status for each run, instead of training it."""

    def __init__(self, store: Store, statuses: Sequence[str], error: Exception | None = None) -> None:
        self.store, self.statuses, self.error = store, statuses, error
        self.work: Workload
        self.note = ""

    @property
    def runs(self) -> list[RunSpec]:
        return list(self.work.runs)

    def __call__(self, work: Workload) -> None:
        self.work = work
        if self.note:
            work.callbacks.on_note(self.note)
        for run, status in zip(work.runs, self.statuses, strict=True):
            if status == "pending":
                continue
            enter(work.leases, run, status)
            work.callbacks.on_event(Event(run_id=run.run_id, status=status))
        if self.error:
            raise self.error


class Waiting(Scripted):
    """An executor that trains nothing until it is stopped."""

    def __call__(self, work: Workload) -> None:
        assert work.stop.wait(TIMEOUT_S)


def start(plan: Plan, store: Store, executor: Scripted, **options: Any) -> SweepOutcome:
    return Sweep(plan, store, executor, executor_name="local", **options).run()


def test_a_sweep_trains_unfinished_runs_and_records_itself(store: Store) -> None:
    plan = plan_of()
    with other_sweep(store) as other:
        enter(other, plan.runs[0], "finished")
        enter(other, plan.runs[1], "failed")
    executor = Scripted(store, ["finished"] * 5)
    events: list[Event] = []
    outcome = start(plan, store, executor, file_text="title: x", callbacks=Callbacks(on_event=events.append))
    assert executor.runs == list(plan.runs[1:])
    assert len(events) == 5
    assert (outcome.trained, outcome.reused, outcome.failed, outcome.interrupted) == (5, 1, 0, 0)
    record = store.sweep(outcome.sweep_id)
    assert (record.status, record.file_text, record.reused) == ("finished", "title: x", [plan.runs[0].run_id])
    assert record.ended_ms >= record.started_ms
    assert [run.run_id for run in record.runs] == [run.run_id for row in plan.rows for run in row.runs]
    (summary,) = store.index.sweeps()
    assert (summary.sweep_id, summary.status) == (outcome.sweep_id, "finished")


def test_runs_that_another_sweep_finished_meanwhile_count_as_reused(store: Store) -> None:
    plan = plan_of()

    class Overtaken(Scripted):
        def __call__(self, work: Workload) -> None:
            with other_sweep(store) as other:
                enter(other, work.runs[0], "finished")
            super().__call__(replace(work, runs=work.runs[1:]))

    outcome = start(plan, store, Overtaken(store, ["finished"] * 5))
    assert (outcome.trained, outcome.reused, outcome.exit_code) == (5, 1, 0)


@pytest.mark.parametrize(
    ("statuses", "status", "code"),
    [
        (["finished"] * 5 + ["failed"], "failed", 1),
        (["finished"] * 4 + ["failed", "interrupted"], "interrupted", 130),
        (["finished"] * 5 + ["pending"], "interrupted", 130),
        (["finished"] * 5 + ["stopped"], "finished", 0),
    ],
)
def test_the_record_says_how_a_sweep_ended(store: Store, statuses: list[str], status: str, code: int) -> None:
    plan = plan_of()
    outcome = start(plan, store, Scripted(store, statuses))
    assert outcome.exit_code == code
    counts = (outcome.trained, outcome.failed, outcome.interrupted, outcome.not_started, outcome.stopped)
    assert counts == tuple(map(statuses.count, ("finished", "failed", "interrupted", "pending", "stopped")))
    assert store.sweep(outcome.sweep_id).status == status


def test_failed_runs_are_kept_on_request(store: Store) -> None:
    plan = plan_of()
    with other_sweep(store) as other:
        for run in plan.runs[1:]:
            enter(other, run, "finished")
        enter(other, plan.runs[0], "failed")
    outcome = start(plan, store, Scripted(store, []), leave_out={"failed"})
    assert (outcome.sweep_id, outcome.reused, outcome.failed, outcome.exit_code) == (None, 5, 1, 1)
    assert store.index.sweeps() == []
    more = plan_of(seeds=[0, 1, 2])
    outcome = start(more, store, Scripted(store, ["finished"] * 3), leave_out={"failed"})
    assert (outcome.trained, outcome.failed, outcome.exit_code) == (3, 1, 1), "the same as where nothing was to train"
    assert start(plan, store, Scripted(store, ["finished"])).exit_code == 0


@pytest.mark.parametrize("scheduled", [True, False])
def test_stopped_runs_are_trained_again_only_without_the_schedule(store: Store, scheduled: bool) -> None:
    plan = plan_of(schedule="asha" if scheduled else "none")
    with other_sweep(store) as other:
        enter(other, plan.runs[0], "stopped")
    executor = Scripted(store, ["finished"] * (5 if scheduled else 6))
    start(plan, store, executor)
    assert (plan.runs[0] in executor.runs) is not scheduled
    assert executor.work.schedule == plan.schedule


def ended_before(store: Store, status: str) -> Plan:
    """A plan whose first run has ended with a status in another sweep; the others are finished."""
    plan = plan_of()
    with other_sweep(store) as other:
        for run in plan.runs:
            enter(other, run, "finished" if run is not plan.runs[0] else status)
    return plan


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_is_tried_again_and_does_not_start_is_not_started(store: Store, status: str) -> None:
    """Ctrl-C while runs that failed before wait in Tune's queue, which are leased."""
    plan = ended_before(store, status)
    events: list[Event] = []

    class Interrupted(Scripted):
        def __call__(self, work: Workload) -> None:
            driver = Driver(work)
            run = driver.take()
            assert run is not None
            work.stop.set()
            driver.give_up(run)
            driver.flush_events()
            assert driver.failed == set()

    for _ in range(2):
        outcome = start(plan, store, Interrupted(store, []), callbacks=Callbacks(on_event=events.append))
        counts = (outcome.not_started, outcome.failed, outcome.stopped, outcome.interrupted)
        assert (counts, outcome.exit_code, events) == ((1, 0, 0, 0), 130, [])
        assert store.sweep(outcome.sweep_id).status == "interrupted"
        assert store.index.statuses()[plan.runs[0].run_id] == status
    outcome = start(plan, store, Scripted(store, ["failed"]))
    assert (outcome.failed, outcome.exit_code) == (1, 1)


@pytest.mark.parametrize("keep_recorded", [True, False])
def test_a_run_that_is_tried_again_and_whose_process_dies_before_its_attempt_begins_has_failed(
    store: Store, keep_recorded: bool
) -> None:
    plan = ended_before(store, "failed")
    events: list[Event] = []

    class Died(Scripted):
        def __call__(self, work: Workload) -> None:
            driver = Driver(work)
            run = driver.take()
            assert run is not None
            driver.fail(run, "its process died", "killed by signal 9", keep_recorded=keep_recorded)
            driver.flush_events()

    for attempt in (2, 3):
        outcome = start(plan, store, Died(store, []), callbacks=Callbacks(on_event=events.append))
        assert (outcome.failed, outcome.not_started, outcome.exit_code) == (1, 0, 1)
        record = store.index.records([plan.runs[0].run_id])[plan.runs[0].run_id]
        assert (record.attempt, record.sweep_id) == (attempt, outcome.sweep_id)
        assert record.message == events[-1].message == "its process died"


def test_a_damaged_run_is_trained_again(store: Store) -> None:
    plan = plan_of()
    with other_sweep(store) as other:
        for run in plan.runs:
            enter(other, run, "finished")
        other.acquire(plan.runs[0])
        (store.run(plan.runs[0].run_id).path / "result.json").write_text("{")
        store.index.delete([plan.runs[0].run_id])
        other.acquire(plan.runs[0])
        other.end(plan.runs[0].run_id)
    executor = Scripted(store, ["finished"])
    assert start(plan, store, executor).reused == 5
    assert executor.runs == [plan.runs[0]]


@pytest.mark.parametrize("left_out", [True, False])
def test_the_note_of_lost_files_says_who_trains_them_again(store: Store, left_out: bool) -> None:
    plan = plan_of()
    start(plan, store, Scripted(store, ["finished"] * 6))
    (store.run(plan.runs[0].run_id).path / "result.json").unlink()
    leave_out = {"pending", "interrupted", "stopped"} if left_out else set()
    notes: list[str] = []
    outcome = start(
        plan, store, Scripted(store, ["finished"]), leave_out=leave_out, callbacks=Callbacks(on_note=notes.append)
    )
    assert (outcome.trained, ["`cope-sweep run`" in note for note in notes]) == (not left_out, [left_out])


def test_a_run_whose_sweep_was_killed_after_its_worker_finished_is_not_trained_again(store: Store) -> None:
    plan = plan_of()
    for run in plan.runs:
        row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"))
        store.index.acquire(row, "killed", -1.0)
        Recorded(store, run).end("finished", METRICS)
    assert start(plan, store, Scripted(store, [])).reused == 6


def test_an_error_of_the_executor_is_raised_after_the_sweep_was_recorded(store: Store) -> None:
    plan = plan_of()
    executor = Scripted(store, ["finished"] * 5 + ["pending"], ClusterError("the cluster broke"))
    with raises("no_cluster"):
        start(plan, store, executor)
    (summary,) = store.index.sweeps()
    record = store.sweep(summary.sweep_id)
    assert (summary.status, record.status) == ("interrupted", "interrupted")


def test_an_index_that_is_away_at_the_end_does_not_hide_why_the_sweep_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "INDEX_TIMEOUT_S", 0.0)

    class Away(Scripted):
        def __call__(self, work: Workload) -> None:
            def fail(*_: object, **__: object) -> None:
                raise IndexUnavailable("the index does not answer")

            monkeypatch.setattr(type(store.index), "records", fail)
            raise ClusterError("the cluster broke")

    with raises("no_cluster"):
        start(plan_of(), store, Away(store, []))


def test_notes_are_passed_on_and_recorded(store: Store) -> None:
    executor = Scripted(store, ["finished"] * 6)
    executor.note = "node 10.0.0.1 is left out: no GPU"
    notes: list[str] = []
    outcome = start(plan_of(), store, executor, callbacks=Callbacks(on_note=notes.append))
    assert notes == list(outcome.notes) == store.sweep(outcome.sweep_id).notes == [executor.note]


def test_no_more_runs_than_the_budget_are_started(store: Store) -> None:
    executor = Scripted(store, ["finished"] * 2)
    outcome = start(plan_of(), store, executor, budget=Budget(max_runs=2, max_failures=3))
    assert (outcome.trained, outcome.not_started, outcome.exit_code) == (2, 4, 130)
    assert outcome.stop_reasons == ("the budget of 2 runs is used up",)
    assert store.sweep(outcome.sweep_id).notes == ["stopped: the budget of 2 runs is used up"]
    assert executor.work.max_failed_runs == 3
    executor.statuses = ["finished"] * 4
    outcome = start(plan_of(), store, executor, budget=Budget(max_runs=4, max_failures=1))
    assert (outcome.exit_code, outcome.notes) == (0, ())


def test_runs_that_an_earlier_sweep_failed_and_this_one_has_not_tried_are_not_started(store: Store) -> None:
    plan = plan_of()
    start(plan, store, Scripted(store, ["failed"] * 3 + ["finished"] * 3))
    # The first failed run is tried again and fails again: no more are started.
    outcome = start(plan, store, Scripted(store, ["failed", "pending", "pending"]), budget=Budget(max_failures=1))
    assert (outcome.failed, outcome.not_started, outcome.interrupted, outcome.exit_code) == (1, 2, 0, 130)
    assert outcome.stop_reasons == ("the budget of 1 failed run is used up",)
    assert store.sweep(outcome.sweep_id).status == "interrupted"
    outcome = start(plan, store, Scripted(store, ["failed"] * 3), budget=Budget(max_failures=3))
    assert (outcome.failed, outcome.not_started, outcome.exit_code, outcome.notes) == (3, 0, 1, ())


def test_an_interrupted_sweep_does_not_blame_its_budget(store: Store) -> None:
    class Interrupted(Scripted):
        def __call__(self, work: Workload) -> None:
            work.stop.set()

    outcome = start(plan_of(), store, Interrupted(store, []), budget=Budget(max_runs=2, max_failures=1))
    assert (outcome.left, outcome.notes) == (6, ())
    with pytest.raises(ClusterError):
        start(plan_of(), store, Scripted(store, ["pending"] * 2, ClusterError("gone")), budget=Budget(max_runs=2))
    assert all(store.sweep(each.sweep_id).notes == [] for each in store.index.sweeps())


def test_a_time_budget_stops_the_sweep(store: Store) -> None:
    outcome = start(plan_of(), store, Waiting(store, []), budget=Budget(time_budget_s=0.2))
    assert 0.2 <= outcome.seconds < TIMEOUT_S
    assert (outcome.not_started, outcome.exit_code) == (6, 130)
    assert outcome.notes == ("stopped: the time budget of 0.2 s is used up",)
    assert outcome.stop_reasons == ("the time budget of 0.2 s is used up",)


def test_a_stop_can_be_requested_from_another_machine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "RENEWAL_S", 0.05)

    def request() -> None:
        until(store.index.sweeps)
        store.index.request_stop(store.index.sweeps()[0].sweep_id)

    thread = threading.Thread(target=request)
    thread.start()
    outcome = start(plan_of(), store, Waiting(store, []))
    thread.join()
    assert outcome.notes == ("stopped: a stop was requested",)
    assert list(store.names("sweeps")) == [f"{outcome.sweep_id}.json"]


@pytest.mark.parametrize("signum", STOP)
def test_a_signal_asks_the_sweep_to_stop(signum: int) -> None:
    stop = threading.Event()
    before = {each: signal.getsignal(each) for each in STOP}
    try:
        with stopping_on_signals(stop):
            os.kill(os.getpid(), signum)
            assert stop.is_set()
            for repeated in TERMINATION:
                os.kill(os.getpid(), repeated)  # a second one changes nothing
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        # The process only has to end now: another hang-up, or Slurm's signal, must not take its exit code.
        after = before | dict.fromkeys((signal.SIGHUP, signal.SIGUSR1), signal.SIG_IGN)
        assert {each: signal.getsignal(each) for each in STOP} == after
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_warning_is_shown_once_for_all_runs_and_events_of_a_row(store: Store) -> None:
    class Warned(Scripted):
        def __call__(self, work: Workload) -> None:
            for run in work.runs:
                for step in (1, 2):
                    event = Event(run_id=run.run_id, status="running", step=step, warnings=("cope: does nothing",))
                    work.callbacks.on_event(event)
            super().__call__(work)

    notes: list[str] = []
    plan = plan_of()
    outcome = start(
        plan, store, Warned(store, ["finished"] * len(plan.runs)), callbacks=Callbacks(on_note=notes.append)
    )
    assert notes == [f"{row.name}: cope: does nothing" for row in plan.rows]
    assert len(plan.runs) > len(plan.rows)
    assert outcome.notes == ()
    (log,) = store.root.glob("logs/*/driver.log")
    assert all(log.read_text("utf-8").count(note) == 1 for note in notes)
