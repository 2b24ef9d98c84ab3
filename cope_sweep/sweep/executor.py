"""The interface of the executors, which train the runs of a plan; what both share; and the local one."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.ablation import EarlyStopping
from cope_sweep.errors import ClusterError
from cope_sweep.registry import load_plugins
from cope_sweep.store import Event, LeaseHolder, Refusal, RunFolder, Status, Store
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import Lease
from cope_sweep.store.reading import read_run

if TYPE_CHECKING:
    from cope_sweep.sweep.search import Suggestions
    from cope_sweep.train import Runtime, StopRequest

INTERRUPT_TIMEOUT_S = 15.0
"""Time that running runs have to write their checkpoints after they were asked to stop."""
FOREIGN_POLL_INTERVAL_S = 1.0
"""Time between two looks at the runs that other sweeps train."""
CONNECT_TIMEOUT_S = 30.0
"""Time limit for a cluster to accept a process or a request."""
PORT_TIMEOUT_S = 3.0
"""Time limit for a port to accept a connection."""
MAX_MESSAGE_CHARACTERS = 500
ENDED: tuple[Status, ...] = ("finished", "failed", "stopped")
"""The statuses of runs with which a sweep has no more to do. An interrupted or a damaged run goes on."""


T = TypeVar("T")


class ClusterLost(ClusterError):
    """The cluster is gone in the middle of a sweep. Nothing has failed: the same command continues on another one."""

    exit_code = 130


@dataclass(frozen=True)
class Workload:
    """The runs of a sweep for an executor, and how both talk to each other."""

    runs: Sequence[RunSpec]
    """The runs in order. Those that are finished are left out."""
    store: Store
    resources: Resources
    """Groups, workers and devices of the runs that have no `own_resources`."""
    sweep_id: str
    """The owner of the leases."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to interrupt the sweep: running runs write a checkpoint at their next step, pending runs stay untouched."""
    on_event: Callable[[Event], None] = lambda event: None
    """Called with every event, from the thread of the caller."""
    on_note: Callable[[str], None] = lambda text: None
    """Called, from that thread, with what the user should know: nodes that are left out."""
    plugins: Sequence[str] = ()
    """Modules that have to be imported before a run can be trained."""
    schedule: EarlyStopping | None = None
    """The rule that ends runs early, where several are trained at a time; every setting is filled in."""
    max_failed_runs: int | None = None
    """After this number of failed runs no more are started, and those in training end."""
    suggestions: Suggestions | None = None
    """Gives further runs, one after another, and learns their results."""
    own_resources: Mapping[str, Resources] = field(default_factory=dict)
    """Run id → resources, of the runs that do not use `resources`. There are more of them as runs are suggested."""

    def resources_of(self, run_id: str) -> Resources:
        """Resources of a run."""
        return self.own_resources.get(run_id, self.resources)

    def unfinished(self) -> list[RunSpec]:
        """The runs that are not finished, in order and without duplicates."""
        distinct = {run.run_id: run for run in self.runs}
        statuses = self.store.index.statuses(distinct)
        return [run for run_id, run in distinct.items() if statuses.get(run_id) != "finished"]

    def is_draining(self, failed: int) -> bool:
        """Whether no more runs are started after `failed` of them have failed."""
        return self.stop.is_set() or (self.max_failed_runs is not None and failed >= self.max_failed_runs)


Executor = Callable[[Workload], None]
"""Trains every run that is not finished, with `cope_sweep.train.train_run`.

Each run is leased in the index. One that another sweep trains is left to that sweep; the executor waits until it has
ended there, and trains the run itself if the other sweep gave it up. The call returns when every run has ended, or
after `stop` was set. A failing run does not stop the others. KeyboardInterrupt has the effect of `stop` and is raised
again at the end.

Raises:
    ClusterError: There is no cluster to train on, or nothing is left of it that can train.
    PluginError: A plugin cannot be imported.
    ValueError: `resources` ask for a device that is not available.
    Exception: Whatever `on_event` raises.
"""


def worker_id() -> str:
    """The id of this process, for people: `host:pid`."""
    return f"{platform.node()}:{os.getpid()}"


def final_event(run: RunSpec, store: Store) -> Event:
    """The last event of a run that has ended, made from its folder."""
    row = read_run(store.run(run.run_id))
    if row is None:
        return Event(run.run_id, "pending", steps=run.train.steps)
    return Event(
        run_id=run.run_id,
        status=row.status,
        step=row.step,
        steps=run.train.steps,
        metrics=dict(row.metrics),
        worker_id=row.worker_id or "",
        message=row.message,
    )


@dataclass(frozen=True)
class RunEnd:
    """The end of a run in a process."""

    event: Event
    """The run's last event."""
    elsewhere: bool = False
    """Whether another sweep, or a later process of this one, trains the run."""


def refused(run: RunSpec, store: Store, refusal: Refusal) -> RunEnd:
    """The end of a run that was not leased: another sweep has it or has finished it, or this one starts no more."""
    if refusal.reason == "finished":
        return RunEnd(final_event(run, store))
    return RunEnd(Event(run.run_id, "pending", steps=run.train.steps), elsewhere=refusal.reason == "leased")


def train_leased(
    run: RunSpec,
    store: Store,
    runtime: Runtime,
    leases: LeaseHolder,
    lease: Lease,
    *,
    on_event: Callable[[Event], None],
    should_stop: Callable[[], StopRequest | None],
) -> RunEnd:
    """Train a run whose lease this process holds, and end the lease.

    Args:
        run: The run.
        store: The store.
        runtime: How to train. Of several workers, the one of rank 0 calls this.
        leases: The leases of this process.
        lease: The run's.
        on_event: Called with the progress of the run, while it trains.
        should_stop: Asked after each step. A lease that was lost, and a stop of the sweep, are noticed without it.
    """
    from cope_sweep.train import train_run

    last: Event | None = None

    def pass_on(event: Event) -> None:
        nonlocal last
        last = event
        if event.status == "running":  # the last event is sent after the lease has ended
            leases.progress(event)
            on_event(event)

    def request() -> StopRequest | None:
        ends = leases.is_lost(run.run_id) or leases.stop_reason("") is not None
        return "interrupted" if ends else should_stop()

    outcome = train_run(run, store, runtime, attempt=lease.attempt, on_event=pass_on, should_stop=request)
    elsewhere = RunEnd(Event(run.run_id, "pending", steps=run.train.steps), elsewhere=True)
    if outcome == "fenced":
        leases.end(run.run_id)  # where the index has lost the number of attempts, it learns it from the folder
    if outcome == "fenced" or leases.is_lost(run.run_id):
        return elsewhere
    if outcome == "stopped":
        record_stop(run, store, leases.stop_reason(run.run_id) or "")
    leases.end(run.run_id)
    if leases.is_lost(run.run_id):
        return elsewhere
    complete = last is not None and last.status not in ("running", "stopped")
    return RunEnd(last if complete and last is not None else final_event(run, store))


def record_failure(run: RunSpec, store: Store, message: str, details: str, keep_recorded: bool) -> None:
    """Record the failure of a run in place of its worker. A result stays.

    Args:
        run: The run.
        store: The store.
        message: The reason, in one line.
        details: The whole reason.
        keep_recorded: Whether a failure that the worker itself recorded stays.
    """
    folder, state = _unfinished_folder(run, store)
    if folder is not None and not (keep_recorded and state.get("status") == "failed"):
        folder.fail(message[:MAX_MESSAGE_CHARACTERS], details)


def record_stop(run: RunSpec, store: Store, reason: str) -> None:
    """Record why the scheduler ended a run. A result or a failure stays."""
    folder, state = _unfinished_folder(run, store)
    if folder is not None and state.get("status") != "failed":
        folder.set_state("stopped", message=reason)


def _unfinished_folder(run: RunSpec, store: Store) -> tuple[RunFolder | None, dict[str, Any]]:
    """The folder of a run, to write its state, and that state; None if the run is finished."""
    folder = store.run(run.run_id)
    with contextlib.suppress(DamagedError):
        if folder.result is not None:
            return None, {}
    try:
        if folder.spec is not None and (state := folder.state):
            return replace(folder, attempt=int(state.get("attempt", 0))), state
    except DamagedError:
        pass
    return folder.begin(run, ""), {}


# -- the local executor ------------------------------------------------------------------------------------------------


def run_local(work: Workload) -> None:
    """The local executor, without Ray: one run after another, with one worker, in this process.

    No run is ended early by the schedule, which compares runs that are trained side by side.
    """
    load_plugins(work.plugins)
    todo = work.unfinished()
    if not todo and work.suggestions is None:
        return
    if work.schedule is not None:
        work.on_note(f"{work.schedule.rule} ends no run here: --local trains one run after another, each to its end")
    if any(work.resources_of(run.run_id).workers > 1 for run in todo):
        work.on_note("--local trains with one worker; runs that ask for several have the same results")
    _LocalSweep(work).execute(deque(todo))


class _LocalSweep:
    """One sweep in this process."""

    def __init__(self, work: Workload) -> None:
        self.work, self.store, self.suggestions = work, work.store, work.suggestions
        self.leases = LeaseHolder(
            work.store, work.sweep_id, stop=work.stop,
            on_wait=lambda: work.on_note("the index does not answer: waiting for it"),
        )  # fmt: skip
        self.failed = 0
        self.elsewhere: dict[str, RunSpec] = {}
        """Runs that other sweeps train."""
        self.error: BaseException | None = None
        """An error of `on_event`, which is raised again when the run in training has written its state."""

    def execute(self, runs: deque[RunSpec]) -> None:
        """Train the runs, then those that the search suggests."""
        try:
            while not self.work.is_draining(self.failed):
                run = runs.popleft() if runs else self.suggestions.next_run() if self.suggestions else None
                if run is not None:
                    self._train(run)
                elif self.elsewhere:
                    self.work.stop.wait(FOREIGN_POLL_INTERVAL_S)
                    self._follow_elsewhere()
                else:
                    break
        finally:
            self.leases.close()
        if self.error is not None:
            raise self.error
        if self.suggestions is not None:
            self.suggestions.publish()

    def _tell(self, event: Event) -> None:
        if self.error is not None:
            return
        was_stopping = self.work.stop.is_set()
        try:
            if self.suggestions is not None:
                self.suggestions.publish()
            self.work.on_event(event)
        except BaseException as error:
            if was_stopping and not isinstance(error, Exception):  # a second Ctrl-C: the run was given its time
                raise
            self.error = error
            self.work.stop.set()

    def _end(self, event: Event) -> None:
        """Pass on the last event of a run."""
        self.failed += event.status == "failed"
        if self.suggestions is not None:
            self.suggestions.end(event.run_id, event.status, event.metrics.get(self.suggestions.metric))
        self._tell(event)

    def _train(self, run: RunSpec) -> None:
        """Train a run, if no other sweep does."""
        from cope_sweep.train import Runtime

        lease = self.leases.acquire(run)
        if isinstance(lease, Refusal):
            end = refused(run, self.store, lease)
        else:
            runtime = Runtime.of(self.work.resources_of(run.run_id), worker_id=worker_id())
            end = train_leased(
                run, self.store, runtime, self.leases, lease,
                on_event=self._tell,
                should_stop=lambda: "interrupted" if self.work.stop.is_set() else None,
            )  # fmt: skip
        if end.elsewhere:
            self.elsewhere[run.run_id] = run
        elif end.event.status != "pending":
            self._end(end.event)

    def _follow_elsewhere(self) -> None:
        """Report the runs that other sweeps have ended; train those that they gave up."""
        statuses = self.leases.waiting(lambda: self.store.index.statuses(self.elsewhere))
        for run_id, run in list(self.elsewhere.items()):
            status = statuses.get(run_id, "pending")
            if status == "running" or self.work.is_draining(self.failed):
                continue
            del self.elsewhere[run_id]
            if status in ENDED:
                self._end(final_event(run, self.store))
            else:
                self._train(run)


# -- connections -------------------------------------------------------------------------------------------------------


def connection_error(host: str, port: int) -> OSError | None:
    """Why no TCP connection can be made, or None if it can."""
    try:
        socket.create_connection((host, port), timeout=PORT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread of its own. Signal handlers stay as they are.

    Raises:
        TimeoutError: `call` has not returned within `timeout_s`. The thread continues.
        BaseException: What `call` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="call-within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return results[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
