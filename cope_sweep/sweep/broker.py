"""The broker of a sweep: it leases runs to worker groups, and connects them with Tune's trials and the driver.

One asyncio object. A sweep runs it as a Ray actor, but it does not use Ray itself. Its callers are

    a trial            open → progress, progress, … → (interrupt)
    a worker group     register → lease → report, report, … → lease (which ends the last one) → … → None at the end
    a group's controller, when workers fail       group_failed
    the driver         poll_events, poll_events, … → (close)

Runs are leased in the order of the plan, at most a few runs ahead of the trials that have opened them. Before the first
trial has started, runs may be leased without one: the first runs are those for which Tune starts its first trials.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import FOREIGN_POLL_INTERVAL_S, ForeignRun, final_event

if TYPE_CHECKING:
    from cope_sweep.train import Outcome

TRIALS_START_TIMEOUT_S = 30.0
"""The processes of the first trials take 2 to 10 s to start."""
MAX_IDLE_FAILURES = 2
"""The sweep fails when the workers of a group fail this often in a row without having held a lease."""
MAX_MESSAGE_CHARACTERS = 500

State = Literal["pending", "leased", "foreign", "ended"]


@dataclass(frozen=True)
class Lease:
    """A run that a worker group has to train."""

    number: int
    """Counts the leases of the sweep from 1."""
    run: RunSpec


@dataclass(frozen=True)
class LeaseResult:
    """How a lease ended."""

    number: int
    outcome: Outcome
    event: Event | None
    """The run's last event; None if `train_run` sent none."""


@dataclass(frozen=True)
class EventBatch:
    """What the driver gets from one poll."""

    events: tuple[tuple[int, Event], ...]
    """Events with their numbers."""
    leased: int
    """Number of runs in training."""
    ended: bool
    """Whether every run has ended."""
    fatal: str | None
    """Why the sweep cannot continue."""


@dataclass
class _Run:
    spec: RunSpec
    turn: tuple[int, int]
    """The order of leasing: how often the run was deferred, then its index in the plan."""
    latest: Event
    state: State = "pending"
    deaths: int = 0
    """How often its worker died."""
    errors: int = 0
    """How often one of its ranks ended with an error."""
    stopped: bool = False
    """Its trial was stopped: it is not trained any further in this sweep."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Group:
    lease: Lease | None = None
    idle_failures: int = 0


class Broker:
    """The state of a running sweep. Everything that must outlive the sweep is in the store."""

    def __init__(self, root: str, runs: Sequence[RunSpec], *, max_failures: int, trials: int, ahead: int) -> None:
        """Create the broker of a sweep.

        Args:
            root: The store.
            runs: The runs to train, in order.
            max_failures: How often the worker of a run may die before the run fails.
            trials: How many trials run at the same time.
            ahead: How many runs may be leased before their trials have started.
        """
        self.store = Store(root)
        self.max_failures = max_failures
        self.trials = trials
        self.ahead = ahead
        self.runs = {
            run.run_id: _Run(run, (0, index), Event(run.run_id, "pending", steps=run.train.steps))
            for index, run in enumerate(runs)
        }
        self.remaining = len(self.runs)
        """Number of runs that have not ended."""
        self.queue = [(run.turn, run_id) for run_id, run in self.runs.items()]
        self.lease_limit = len(self.runs)
        """Only runs whose index in the plan is below this may be leased."""
        self.trial_processes: set[str] = set()
        self.all_trials_started = asyncio.Event()
        self.groups: dict[int, _Group] = {}
        self.lease_count = 0
        self.closed = False
        self.fatal: str | None = None
        self.events: list[tuple[int, Event]] = []
        """Events that the driver has not received yet."""
        self.event_count = 0
        self.events_available = asyncio.Event()
        self.changed = asyncio.Event()
        """Set, and replaced by a new event, whenever something happens that a group may be waiting for."""
        self.tasks: set[asyncio.Task[None]] = set()

    # -- worker groups ---------------------------------------------------------------------------------------------

    async def register(self, group: int, problem: str | None) -> None:
        """Register a group whose rank 0 has started. `problem` says why the group cannot train at all."""
        self._end_lost_lease(group, "its workers were restarted", died=True)
        if problem:
            self._fail_sweep(problem)
        self._notify()

    async def lease(self, group: int, result: LeaseResult | None, wait_s: float) -> Lease | Literal["wait"] | None:
        """End the group's lease with `result` and return its next one.

        Returns "wait" if no run became available within `wait_s`, and None if there will be no more.
        """
        if result is not None:
            self.end_lease(group, result)
        until = asyncio.get_running_loop().time() + wait_s
        while not self.closed and self.remaining:
            if (run := self._next()) is not None:
                self.lease_count += 1
                run.state = "leased"
                lease = self._group(group).lease = Lease(self.lease_count, run.spec)
                return lease
            if not await self._wait_for_change(until):
                return "wait"
        return None

    def end_lease(self, group: int, result: LeaseResult) -> None:
        """End a lease. Has no effect if the lease was ended before, because the group had failed."""
        run = self._leased_run(result.number)
        if run is None:
            return
        state = self._group(group)
        state.lease, state.idle_failures = None, 0
        if result.outcome == "busy":
            run.state = "foreign"
            self._spawn(self._follow_foreign(run))
        else:
            self._end_run(run, result.event or final_event(run.spec, self.store.run(run.spec.run_id)))
        self._notify()

    async def report(self, number: int, event: Event) -> None:
        """Pass on the progress of the run of lease `number`. Has no effect after the lease has ended."""
        if (run := self._leased_run(number)) is not None:
            run.latest = event
            self._add_event(event)

    async def watch(self, group: int, after: int) -> int:
        """Wait until a lease of `group` with a number above `after` is to be interrupted; return its number."""
        while True:
            lease = self._group(group).lease
            if lease is not None and lease.number > after and (self.closed or self.runs[lease.run.run_id].stopped):
                return lease.number
            await self._wait_for_change(None)

    # -- controllers -----------------------------------------------------------------------------------------------

    async def group_failed(self, group: int, reason: str, died: bool) -> None:
        """Workers of a group died or raised an error. Ray Train restarts them."""
        state = self._group(group)
        if not self._end_lost_lease(group, reason, died):
            state.idle_failures += 1
            if state.idle_failures >= MAX_IDLE_FAILURES:
                self._fail_sweep(f"the workers of group {group} fail before they train anything: {reason}")
        self._notify()

    # -- trials ----------------------------------------------------------------------------------------------------

    async def open(self, run_id: str, process: str) -> None:
        """Start the trial of a run, in the process `process`: this run and those before it may be leased."""
        if not self.trial_processes:
            self.lease_limit = 0
            asyncio.get_running_loop().call_later(TRIALS_START_TIMEOUT_S, self.all_trials_started.set)
        self.trial_processes.add(process)
        if len(self.trial_processes) >= self.trials:
            self.all_trials_started.set()
        self.lease_limit = max(self.lease_limit, self.runs[run_id].turn[1] + 1 + self.ahead)
        self._notify()

    async def progress(self, run_id: str, wait_s: float) -> tuple[Event, bool]:
        """The run's latest event, and whether the run has ended; waits up to `wait_s` for its end.

        No run is reported as ended before all of the first trials have started. Otherwise, Tune would give the freed
        process to the next trial, kill the process that is starting for that trial, and start another one; with
        short runs this would never end.
        """
        run = self.runs[run_id]
        ended = await _wait(run.ended, wait_s) and await _wait(self.all_trials_started, wait_s)
        return run.latest, ended

    async def interrupt(self, run_id: str) -> None:
        """The trial of a run was stopped. If the run has not ended, it is interrupted and not trained any further."""
        run = self.runs[run_id]
        run.stopped = True
        if run.state in ("pending", "foreign"):
            self._mark_ended(run)
            self.events_available.set()
        self._notify()

    # -- the driver ------------------------------------------------------------------------------------------------

    async def poll_events(self, after: int, wait_s: float) -> EventBatch:
        """The events with numbers above `after`; waits up to `wait_s` for one. Earlier events are dropped."""
        self.events = [item for item in self.events if item[0] > after]
        if not self.events:
            self.events_available.clear()
            await _wait(self.events_available, wait_s)
        return EventBatch(
            events=tuple(self.events),
            leased=sum(group.lease is not None for group in self.groups.values()),
            ended=self.remaining == 0,
            fatal=self.fatal,
        )

    async def close(self) -> None:
        """Grant no more leases, and interrupt the runs in training."""
        self.closed = True
        self._notify()

    # -- internals -------------------------------------------------------------------------------------------------

    def _group(self, group: int) -> _Group:
        return self.groups.setdefault(group, _Group())

    def _leased_run(self, number: int) -> _Run | None:
        """The run of a lease; None if the lease has ended."""
        for group in self.groups.values():
            if group.lease is not None and group.lease.number == number:
                return self.runs[group.lease.run.run_id]
        return None

    def _next(self) -> _Run | None:
        """Remove the next run that may be leased from the queue."""
        while self.queue:
            (_, index), run_id = self.queue[0]
            if self.runs[run_id].state == "pending":
                if index >= self.lease_limit:
                    return None
                heapq.heappop(self.queue)
                return self.runs[run_id]
            heapq.heappop(self.queue)
        return None

    def _requeue(self, run: _Run, *, defer: bool) -> None:
        """Put a run back into the queue: at its old place, or with `defer` after the others."""
        if defer:
            run.turn = (run.turn[0] + 1, run.turn[1])
        run.state = "pending"
        heapq.heappush(self.queue, (run.turn, run.spec.run_id))

    def _end_lost_lease(self, group: int, reason: str, died: bool) -> bool:
        """End the lease of a group whose workers failed, if it had one; whether it had one.

        The run is leased again, or it has failed: if its worker died too often, or if one of its ranks raised an error
        for the second time. The first error does not count, because an error on one rank and the death of another
        rank look alike.
        """
        state = self._group(group)
        if state.lease is None:
            return False
        run = self.runs[state.lease.run.run_id]
        state.lease = None
        run.deaths += died
        run.errors += not died
        if run.deaths > self.max_failures or run.errors > 1:
            self._fail_run(run, reason, died)
        elif self.closed or run.stopped:
            self._end_run(run, replace(run.latest, status="interrupted"))
        else:
            self._requeue(run, defer=False)
        return True

    def _fail_run(self, run: _Run, reason: str, died: bool) -> None:
        """Record the failure of a run in place of its worker, which died."""
        folder = self.store.run(run.spec.run_id)
        text = " ".join(reason.split())
        message = (f"its worker died {run.deaths} times: {text}" if died else text)[:MAX_MESSAGE_CHARACTERS]
        with folder.lock() as locked:
            if locked and folder.result is None:
                if folder.spec is None:
                    folder.begin(run.spec, run.latest.worker_id)
                if died or folder.state["status"] != "failed":
                    folder.fail(message, reason)
        self._end_run(run, replace(final_event(run.spec, folder), status="failed"))

    async def _follow_foreign(self, run: _Run) -> None:
        """Poll a run that another process trains, until it has ended or can be leased here."""
        foreign = ForeignRun(self.store.run(run.spec.run_id))
        while run.state == "foreign" and not self.closed:
            # In a thread, so that a slow shared disk does not delay other calls.
            state = await asyncio.to_thread(foreign.poll)
            if run.state != "foreign":
                return
            if state == "ended":
                self._end_run(run, await asyncio.to_thread(final_event, run.spec, foreign.folder))
            elif state == "free":
                self._requeue(run, defer=foreign.seen_running)
            else:
                await asyncio.sleep(FOREIGN_POLL_INTERVAL_S)
            self._notify()

    def _end_run(self, run: _Run, event: Event) -> None:
        run.latest = event
        self._mark_ended(run)
        self._add_event(event)

    def _mark_ended(self, run: _Run) -> None:
        run.state = "ended"
        run.ended.set()
        self.remaining -= 1

    def _add_event(self, event: Event) -> None:
        """Queue an event for the driver. A progress event replaces an earlier one of the same run in the queue."""
        self.event_count += 1
        if event.status == "running":
            self.events = [
                item for item in self.events if item[1].run_id != event.run_id or item[1].status != "running"
            ]
        self.events.append((self.event_count, event))
        self.events_available.set()

    def _fail_sweep(self, reason: str) -> None:
        self.fatal = self.fatal or reason
        self.closed = True
        self.events_available.set()

    def _notify(self) -> None:
        """Wake up everything that waits in `_wait_for_change`."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _wait_for_change(self, until: float | None) -> bool:
        """Wait for the next `_notify`; False if the event loop's time `until` came first."""
        left_s = None if until is None else until - asyncio.get_running_loop().time()
        return await _wait(self.changed, left_s)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # The event loop keeps only weak references to its tasks.
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def _wait(event: asyncio.Event, wait_s: float | None) -> bool:
    """Whether `event` is set, or is set within `wait_s`."""
    if event.is_set():
        return True
    if wait_s is not None and wait_s <= 0:
        return False
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
