"""A sweep: one execution of an ablation's plan, with a record in the store and a copy in MLflow."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from cope_sweep.config import Plan, Resources, Row, RunSpec, SpecError
from cope_sweep.errors import UserError, counted
from cope_sweep.redaction import redacted
from cope_sweep.signals import STOP, handling, stopping_on_signals
from cope_sweep.store import (
    ACTIVE,
    Budget,
    Event,
    RunRecord,
    Status,
    Store,
    StoreError,
    Submission,
    SweepRecord,
    SweepRun,
    new_sweep_id,
)
from cope_sweep.store.damage import note_lost
from cope_sweep.store.index import waiting
from cope_sweep.store.provenance import git_commit, processor, versions
from cope_sweep.sweep.driver import WAITS_FOR_INDEX
from cope_sweep.sweep.driver_log import DriverLog
from cope_sweep.sweep.executor import Callbacks, Executor, Workload
from cope_sweep.sweep.leases import LEASE_S, Leases
from cope_sweep.tracking.files import SweepFiles, no_files

if TYPE_CHECKING:
    from cope_sweep.sweep.search import Search
    from cope_sweep.tracking.background import BackgroundLogger

INDEX_TIMEOUT_S = 120.0
"""Time limit for the index to answer at the end of the sweep."""
STOP_PREFIX = "stopped: "
"""Start of each note that says why a sweep ended before its last run."""
STOP_REQUESTED = "a stop was requested"


@dataclass(frozen=True)
class SweepOutcome:
    """The end of a sweep."""

    sweep_id: str | None
    """None if there was nothing to train."""
    trained: int
    """Number of runs that this sweep finished."""
    reused: int
    """Number of runs that were finished before it started, or that another sweep finished while it ran."""
    failed: int
    """Number of runs that have failed, in this sweep or before; except runs that this sweep is to try again."""
    interrupted: int
    """Number of runs that have started and not ended."""
    seconds: float
    stopped: int = 0
    """Number of runs that the scheduler ended early."""
    not_started: int = 0
    notes: tuple[str, ...] = ()
    """Notes for the user: nodes that were left out, a budget that was used up."""
    tracking_errors: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """Number of runs that the next sweep of the same plan trains: those that were not started or have not ended."""
        return self.interrupted + self.not_started

    @property
    def summary(self) -> str:
        """The numbers of runs in one line."""
        numbers = {
            "trained": self.trained,
            "finished before": self.reused,
            "failed": self.failed,
            "stopped early": self.stopped,
            "interrupted": self.interrupted,
            "not started": self.not_started,
        }
        listed = ", ".join(f"{number} {name}" for name, number in numbers.items() if number or name == "trained")
        return f"ends after {self.seconds:.0f} s: {listed}"

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Why the sweep ended before its last run: a budget that was used up, a request. Ctrl-C leaves no note."""
        return tuple(note.removeprefix(STOP_PREFIX) for note in self.notes if note.startswith(STOP_PREFIX))

    @property
    def exit_code(self) -> int:
        """0: every run has ended as planned. 130: something is left, even if some runs failed. 1: some runs failed."""
        if self.left:
            return 130
        return 1 if self.failed else 0


@dataclass
class Sweep:
    """One execution of an ablation's plan. `run` trains what is left of it, and records that in the store and MLflow.

    Where the plan has a search, that continues: it suggests the rows again that have not ended, then new ones.
    """

    plan: Plan
    """The plan, with the rows that earlier sweeps have recorded where a search suggests them."""
    store: Store
    executor: Executor
    """Trains the runs."""
    _: KW_ONLY
    executor_name: Literal["ray", "local"]
    """For the record."""
    resources: Resources | None = None
    """What a run takes; None: as the ablation says."""
    file_text: str = ""
    """The text of the ablation file, for the record."""
    tracking_uri: str | None = None
    """The MLflow store; None for no copy in MLflow."""
    files: SweepFiles = no_files
    """Makes the files about the sweep that MLflow has, once it has ended."""
    leave_out: Collection[Status] = ()
    """Statuses of further runs that are not trained: `failed` keeps the failed runs of earlier sweeps."""
    budget: Budget = field(default_factory=Budget)
    """What the sweep may use."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    submission: Submission | None = None
    """What was submitted, if a job executes the sweep. Its record is in the store."""
    notes: Collection[str] = ()
    """What is known before it starts: shown, and kept for the record."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._notes: list[str] = []
        self._warned: set[str] = set()
        """Notes to the user, and why the sweep was stopped; for the record."""
        self._is_complete = False
        """Set if the executor returned on its own: leftover runs then mean that the budget was used up."""

    def run(self) -> SweepOutcome:
        """Train the runs of the plan that have not ended.

        Raises:
            UserError: The submission has ended before: it was stopped.
            ClusterError: And whatever else the executor raises, after the sweep was recorded as failed or interrupted.
        """
        self._prepare()
        self._check_submission()
        if not self._work.todo and self._work.search is None:
            return self._end_without_training()
        self._start()
        with stopping_on_signals(self._stop):  # until all is recorded: a closed terminal may send its signal twice
            try:
                self._train()
            finally:
                self._record()
        return self._outcome

    # -- before the training ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Find out what is left to train."""
        for note in self.notes:
            self._note(note)
        store = self.store
        store.end_expired()
        if lost := note_lost(store, [run.run_id for run in self.plan.runs]):
            number = "a finished run has" if len(lost) == 1 else f"{len(lost)} finished runs have"
            leaves_out = "interrupted" in self.leave_out
            remedy = "`cope-sweep run` trains what is lost" if leaves_out else "what is lost is trained again"
            self._note(f"{number} lost files, and {remedy}: {next(iter(lost.values()))}")
        skipped = {*self.plan.done_statuses, *self.leave_out}
        self._work = _Work.of(self.plan, store, skipped, self.executor_name, self.file_text, self.submission)
        self._work.start_search(store, self.budget.max_runs)

    def _check_submission(self) -> None:
        record = self.store.sweep(self.submission.sweep_id) if self.submission else None
        if record is not None and record.status not in ACTIVE:
            raise UserError(
                f"sweep {record.sweep_id} has ended ({record.status}: {'; '.join(record.notes)}); "
                f"`cope-sweep retry {record.sweep_id}` trains its runs",
                code="has_ended",
                sweep_id=record.sweep_id,
                status=record.status,
            )

    def _end_without_training(self) -> SweepOutcome:
        outcome = self._work.outcome(self.store, 0.0, [], Budget())
        if self.submission is None:
            return replace(outcome, sweep_id=None)
        self.store.write_sweep(final_record(self._work.record, outcome))
        return outcome

    def _start(self) -> None:
        """Record that the sweep starts, in the store, its log, and MLflow."""
        record, work = self._work.record, self._work
        self._started_s = time.monotonic()
        # With a lease from the start: if this process is killed before the first renewal, the sweep reads interrupted.
        self.store.write_sweep(record, ttl_s=LEASE_S)
        self._log = DriverLog(self.store, record.sweep_id, self.plan)
        self._log.write(f"sweep {record.sweep_id} starts on {platform.node()}: {shlex.join(record.command)}")
        numbers = f"{len(work.todo)} runs to train, {len(work.reused)} finished before"
        self._log.write("\n".join([numbers, *self._notes]))
        self._mlflow = self._start_mlflow(record)

    def _start_mlflow(self, record: SweepRecord) -> BackgroundLogger | None:
        """The thread that copies the sweep to MLflow; None without MLflow."""
        if self.tracking_uri is None:
            return None
        from cope_sweep.tracking.background import BackgroundLogger

        mlflow = BackgroundLogger(self.store, self.tracking_uri, record, self.callbacks.on_note, self.files)
        mlflow.start()
        return mlflow

    # -- the training ----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        sweep_id, search = self._work.record.sweep_id, self._work.search
        leases = Leases(
            self.store, sweep_id, stop=self._stop,
            on_stop_request=lambda: self._stop_because(STOP_REQUESTED),
            on_wait=lambda: self.callbacks.on_note(WAITS_FOR_INDEX),
        )  # fmt: skip
        with contextlib.closing(leases), _time_limit(self.budget.time_budget_s, self._stop_because):
            if self.store.index.stop_requested(sweep_id):  # before the job had started
                self._stop_because(STOP_REQUESTED)
                return
            self.executor(self._workload(leases))
            if search is not None and search.ended_early:
                self._show("the search ended early: every row that it can suggest was trained")
            self._is_complete = not self._stop.is_set()

    def _workload(self, leases: Leases) -> Workload:
        search = self._work.search
        return Workload(
            runs=[] if search else self._work.todo[: self.budget.max_runs],
            store=self.store,
            resources=self.resources or self.plan.ablation.content.resources,
            leases=leases,
            stop=self._stop,
            callbacks=Callbacks(on_event=self._report, on_note=self._show, on_row=self._add),
            plugins=self.plan.ablation.content.plugins,
            schedule=self.plan.schedule,
            max_failed_runs=self.budget.max_failures,
            search=search,
        )

    def _report(self, event: Event) -> None:
        self._log.report(event)
        for warning in event.warnings:
            self._warn(f"{self._log.row_of(event.run_id)}: {warning}")
        if self._mlflow is not None:
            self._mlflow.report(event)
        self.callbacks.on_event(event)

    def _warn(self, text: str) -> None:
        """Write a warning of a row's runs to the log and show it: once, though every event of every seed has it."""
        if text not in self._warned:
            self._warned.add(text)
            self._log.write(text)
            self.callbacks.on_note(redacted(text))

    def _note(self, text: str) -> None:
        """Show a note at once, and keep it for the record."""
        self._notes.append(redacted(text))
        self.callbacks.on_note(self._notes[-1])

    def _show(self, text: str) -> None:
        """Write a note to the log, show it at once, and keep it for the record."""
        self._log.write(text)
        self._note(text)

    def _add(self, row: Row) -> None:
        """Record a row that the search suggests."""
        self._work.add(row, self.store)
        self._log.add(row)
        self.callbacks.on_row(row)

    def _stop_because(self, reason: str) -> None:
        if not self._stop.is_set():
            self._notes.append(STOP_PREFIX + reason)
            self._log.write(f"stops, and runs in training write checkpoints: {reason}")
            self._stop.set()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record how the sweep ended, also with an error that is being handled: that one is raised in the end."""
        seconds = time.monotonic() - self._started_s
        if (error := sys.exception()) is not None:
            self._log.write("".join(traceback.format_exception(error)))
        budget = self.budget if self._is_complete else Budget()
        with _keep_original_error():
            self._outcome = _wait(lambda: self._work.outcome(self.store, seconds, self._notes, budget))
            _wait(lambda: self.store.write_sweep(final_record(self._work.record, self._outcome)))
            self._log.write(self._outcome.summary)
            if self._work.search is not None:
                self._work.search.close()
        self._log.close()
        # MLflow last: it reads the sweep's end from the store, and may take a minute that the user cuts short.
        if self._mlflow is None:
            return
        with handling(STOP, signal.default_int_handler):  # all else is saved: any of them ends the wait for MLflow
            errors = tuple(self._mlflow.finish(self.callbacks.on_sending))
        if error is None:
            self._outcome = replace(self._outcome, tracking_errors=errors)


_wait = partial(waiting, gives_up=lambda waited_s: waited_s > INDEX_TIMEOUT_S)


@contextlib.contextmanager
def _keep_original_error() -> Iterator[None]:
    """Let an error of the index in this block give way to the error that is handled around it, if there is one."""
    error = sys.exception()
    try:
        yield
    except StoreError:
        if error is None:
            raise


@contextlib.contextmanager
def _time_limit(time_budget_s: float | None, stop_because: Callable[[str], None]) -> Iterator[None]:
    """Stop the sweep when the time is used up."""
    if time_budget_s is None:
        yield
        return
    timer = threading.Timer(time_budget_s, stop_because, [f"the time budget of {time_budget_s:g} s is used up"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class _Work:
    """Work of a sweep: the runs that are left, and its record."""

    plan: Plan
    skipped: set[Status]
    """The statuses of runs that are not trained."""
    statuses: dict[str, Status]
    """Run id → status before the sweep, of the plan's runs that are in the store."""
    todo: list[RunSpec]
    """The runs to train; where a search suggests them, those that it has suggested."""
    reused: list[str]
    """The runs of the plan that were finished before."""
    record: SweepRecord
    ended_ms: dict[str, int | None]
    """Run id → when its last attempt ended, of those runs to train that had ended before: failed or stopped ones."""
    written: int
    """Number of runs in the record's file."""
    search: Search | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        store: Store,
        skipped: set[Status],
        executor_name: str,
        file_text: str,
        submission: Submission | None = None,
    ) -> Self:
        """Work that is left of a plan with its recorded rows."""
        statuses = store.index.statuses(run.run_id for run in plan.runs)
        todo = [run for run in plan.runs if statuses.get(run.run_id, "pending") not in skipped]
        reused = [run.run_id for run in plan.runs if statuses.get(run.run_id) == "finished"]
        _check_plugins(plan, store, reused)
        record = initial_record(plan, reused, executor_name, file_text, submission, skipped)
        ended = [run for run in todo if statuses.get(run.run_id) in ("failed", "stopped")]
        return cls(plan, skipped, statuses, todo, reused, record, _ends(store, ended), written=len(record.runs))

    def start_search(self, store: Store, max_runs: int | None) -> None:
        """Open the plan's search, if it has one and that has something to suggest.

        `retry` leaves out pending runs: it trains no rows that are new.
        """
        if self.plan.search is None or "pending" in self.skipped:
            return
        from cope_sweep.sweep.search import Search

        search = Search(self.plan, store, skipped=self.skipped, max_runs=max_runs)
        self.todo = []
        if search.is_exhausted:
            search.close()
        else:
            self.search = search
            self.ended_ms = _ends(store, [run for row in search.waiting for run in row.runs])

    def add(self, row: Row, store: Store) -> None:
        """Record a row that the search has suggested."""
        planned = {run.run_id for run in self.todo}
        self.todo += [run for run in self._unfinished(row) if run.run_id not in planned]
        recorded = {run.run_id for run in self.record.runs}
        members = [_member(row, run) for run in row.runs if run.run_id not in recorded]
        if not members:
            return
        statuses = store.index.statuses(member.run_id for member in members)
        reused = [run_id for run_id, status in statuses.items() if status == "finished"]
        changes = {"runs": [*self.record.runs, *members], "reused": [*self.record.reused, *reused]}
        record = self.record.model_copy(update=changes)
        # Before the index, which is made again from the files. Of more than 1,000 runs only now and then, for a file of
        # 10,000 is 2 MB; what is lost then if this process dies, the next sweep records: see `Search`.
        if len(record.runs) - self.written > len(record.runs) // 1000:
            store.write_record(record)
            self.written = len(record.runs)
        entries = [{**member.model_dump(), "reused": member.run_id in reused} for member in members]
        store.index.append_members(record.sweep_id, entries)
        self.plan, self.record = replace(self.plan, rows=(*self.plan.rows, row)), record

    def _unfinished(self, row: Row) -> list[RunSpec]:
        """The runs of a row without those that ended in an earlier sweep, which are not trained again."""
        return [run for run in row.runs if self.statuses.get(run.run_id) not in self.skipped]

    def outcome(self, store: Store, seconds: float, notes: list[str], budget: Budget) -> SweepOutcome:
        """The end of the sweep."""
        runs, missing = self.todo, 0
        if self.search is not None:
            runs = [*self.todo, *(run for row in self.search.waiting for run in self._unfinished(row))]
            missing = self.search.new_rows * len(self.plan.ablation.content.row_seeds)
        records = store.index.records((run.run_id for run in runs), values=False)
        finished = [record for record in records.values() if record.status == "finished"]
        trained = sum(record.sweep_id == self.record.sweep_id for record in finished)
        by_status = ["pending" if self._is_untried(record) else record.status for record in records.values()]
        failed, stopped = by_status.count("failed"), by_status.count("stopped")
        not_started = missing + len(runs) - len(records) + by_status.count("pending")
        outcome = SweepOutcome(
            sweep_id=self.record.sweep_id,
            trained=trained,
            reused=len(self.reused) + len(finished) - trained,
            failed=failed + self.kept("failed"),
            interrupted=missing + len(runs) - len(finished) - failed - stopped - not_started,
            seconds=seconds,
            stopped=stopped + self.kept("stopped"),
            not_started=not_started,
            notes=tuple(notes),
        )
        if outcome.left and not outcome.stop_reasons and (reason := self._used_up(budget, failed)):
            return replace(outcome, notes=(*notes, STOP_PREFIX + reason))
        return outcome

    def _is_untried(self, record: RunRecord) -> bool:
        """A run that had failed or was stopped before, and that was not tried again: it still has that status."""
        # Not by the number of its attempt, which also a lease increases whose run no process has started.
        has_ended_before = record.status in ("failed", "stopped") and record.run_id in self.ended_ms
        return has_ended_before and record.ended_ms == self.ended_ms[record.run_id]

    def kept(self, status: Status) -> int:
        """Number of runs of the plan that had ended with a status before the sweep and are not trained again."""
        return list(self.statuses.values()).count(status) if status in self.skipped else 0

    def _used_up(self, budget: Budget, failed: int) -> str | None:
        """Which budget is used up, if runs are left; None if it is for another reason."""
        if budget.max_failures is not None and failed >= budget.max_failures:
            return f"the budget of {counted(budget.max_failures, 'failed run')} is used up"
        if budget.max_runs is None:
            return None
        if len(self.todo) > budget.max_runs if self.search is None else self.search.is_spent:
            return f"the budget of {counted(budget.max_runs, 'run')} is used up"
        return None


def _ends(store: Store, runs: Sequence[RunSpec]) -> dict[str, int | None]:
    """Run id → when its last attempt ended, of the runs that failed or were stopped."""
    records = store.index.records((run.run_id for run in runs), values=False)
    return {run_id: record.ended_ms for run_id, record in records.items() if record.status in ("failed", "stopped")}


def _check_plugins(plan: Plan, store: Store, finished: Collection[str]) -> None:
    """Raises SpecError where a finished run was trained with another source of a plugin, so that no row mixes two."""
    runs = {run.run_id: run for run in plan.runs if run.plugins}
    for run_id, record in store.index.records(runs.keys() & set(finished)).items() if runs else ():
        recorded = dict(part.split(" ") for part in str(record.facts.get("plugins") or "").split(", ") if part)
        for kind, cls in runs[run_id].plugins.items():
            if recorded.get(kind, cls.source_digest()) not in (cls.source_digest(), *cls.SAME_SOURCES):
                raise SpecError(
                    f"run {run_id} of {plan.name} was trained before the code of {kind} changed (from {recorded[kind]} "
                    f"to {cls.source_digest()}). If the new code computes something else, increase VERSION of "
                    f"{cls.__name__}: its runs get new ids. If not, add {recorded[kind]!r} to its SAME_SOURCES",
                    code="changed_plugin",
                    run_id=run_id,
                    plugin=kind,
                    trained=recorded[kind],
                    here=cls.source_digest(),
                )


# -- the record of a sweep: at its submission, at its start and at its end ---------------------------------------------


def initial_record(
    plan: Plan,
    reused: Sequence[str],
    executor_name: str,
    file_text: str,
    submission: Submission | None = None,
    skipped: Collection[Status] = (),
) -> SweepRecord:
    """The record of a sweep at its start, or at its submission; `skipped` are the statuses that it does not train."""
    content = plan.ablation.content
    return SweepRecord(
        sweep_id=submission.sweep_id if submission else new_sweep_id(),
        ablation=plan.name,
        title=content.title,
        hypothesis=content.hypothesis,
        file_text=file_text,
        data=plan.ablation.data,
        executor=executor_name,
        command=submission.command if submission else [Path(sys.argv[0]).name, *sys.argv[1:]],
        scale=plan.ablation.scale,
        sets=list(plan.ablation.assignments),
        status="running",
        started_ms=int(time.time() * 1000),
        git_commit=(submission.git_commit if submission else None) or git_commit(),
        versions=versions(),
        machine={"host": platform.node(), "system": platform.platform(), "cpu": processor(), "cpus": os.cpu_count()},
        metrics=[metric.model_dump(mode="json") for metric in content.metrics],
        primary=content.primary_metric.name,
        runs=[_member(row, run) for row in plan.rows for run in row.runs],
        reused=list(reused),
        leave_out=sorted({*skipped} - {"finished"}),
    )


def _member(row: Row, run: RunSpec) -> SweepRun:
    """A run and its place in the ablation's table."""
    return SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)


def final_record(record: SweepRecord, outcome: SweepOutcome) -> SweepRecord:
    """The record with what is known at the end: status, time and notes."""
    status: Status = "finished"
    if outcome.exit_code == 130:
        status = "interrupted"
    elif outcome.failed:
        status = "failed"
    return ended_record(record, status, outcome.notes)


def ended_record(record: SweepRecord, status: Status, notes: Collection[str]) -> SweepRecord:
    """The record of a sweep that has ended now."""
    changes = {"status": status, "ended_ms": int(time.time() * 1000), "notes": [redacted(note) for note in notes]}
    return record.model_copy(update=changes)
