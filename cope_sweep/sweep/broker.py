"""The broker of a sweep: it takes the leases of runs, and connects Tune's trials, worker groups and the driver.

One asyncio object. A sweep runs it as a Ray actor, but it does not use Ray itself. Its callers are

    a trial            progress, progress, …: each returns a new evaluation or the end
    a worker group     lease → report, report, … → lease (which ends the last one) → … → None at the end
    the driver         start (when Tune has created a trial), poll, poll, … → (stop, group_failed, close)

A run is in the queue from the start of its trial until a group takes it. Its life does not depend on its trial's
process: only `stop` and `close` end it early. Every operation takes constant or logarithmic time. Whatever reads or
writes the store runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, LeaseHolder, Refusal, Status, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep.broker_state import BrokerGroup, BrokerRun, EventBuffer, RunQueue, is_set_within
from cope_sweep.sweep.executor import (
    FOREIGN_POLL_INTERVAL_S,
    evaluations_of,
    final_event,
    record_failure,
    record_stop,
)
from cope_sweep.sweep.messages import Assignment, AssignmentResult, Failure, Poll, Report, StopOrder
from cope_sweep.sweep.parents import Parents

if TYPE_CHECKING:
    from cope_sweep.train import StopRequest

HOUSEKEEPING_INTERVAL_S = 0.5
"""Time between two checks for lost leases and runs without progress."""
TRIAL_START_TIMEOUT_S = 30.0
"""The process of a trial takes 2 to 10 s to start."""

START_POLL_INTERVAL_S = 0.05

T = TypeVar("T")


class Broker:
    """The state of a running sweep. Everything that must outlive the sweep is in the store."""

    def __init__(
        self,
        store: Store,
        sweep_id: str,
        runs: Sequence[RunSpec],
        *,
        max_failures: int,
        max_failed_runs: int | None = None,
        step_timeout_s: float | None = None,
        replay: bool = False,
        more_runs: int = 0,
        leases: LeaseHolder | None = None,
    ) -> None:
        """Create the broker of a sweep.

        Args:
            store: The store.
            sweep_id: The owner of the leases.
            runs: The runs to train.
            max_failures: How often the worker of a run may die before the run fails.
            max_failed_runs: After this number of failed runs, no more are started; None: no limit.
            step_timeout_s: Seconds after which a run that makes no step is taken for hanging; None: never.
            more_runs: How many further runs may be added, which a search has still to suggest.
            replay: Whether trials first report the evaluations that a resumed run made earlier.
            leases: The holder of the leases; None: a new one.
        """
        self.store = store
        self.leases = leases or LeaseHolder(store, sweep_id)
        self.parents = Parents(store)
        self.max_failures, self.max_failed_runs = max_failures, max_failed_runs
        self.step_timeout_s, self.replay = step_timeout_s, replay
        self.runs = {
            run.run_id: BrokerRun(run, index, Event(run.run_id, "pending", steps=run.train.steps))
            for index, run in enumerate(runs)
        }
        self.remaining = len(self.runs)
        """Number of runs that have not ended."""
        self.more_runs = more_runs
        self.queue = RunQueue()
        self.groups: dict[int, BrokerGroup] = {}
        self.assignments: dict[int, int] = {}
        """The number of each running assignment → its group."""
        self.assignment_count = 0
        self.elsewhere: dict[str, None] = {}
        """Runs that another sweep trains (an ordered set)."""
        self.returned: list[str] = []
        self.hanging: list[int] = []
        self.failed: set[str] = set()
        self.closed = False
        self.problem: str | None = None
        self.events = EventBuffer()
        self.starting_trials: dict[str, float] = {}
        """Runs whose trial has no process yet → when it was announced."""
        self.all_trials_started = asyncio.Event()
        self.all_trials_started.set()
        self.early_trials: set[str] = set()
        """Runs whose trial has asked before `start` was called."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each run whose last entries are being written."""
        self.housekeeping: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether no more runs are started, because too many have failed."""
        return self.max_failed_runs is not None and len(self.failed) >= self.max_failed_runs

    # -- worker groups ---------------------------------------------------------------------------------------------

    async def lease(
        self, group: int, result: AssignmentResult | None, wait_s: float, leaves: bool = False
    ) -> Assignment | Literal["wait"] | None:
        """End the group's assignment with `result` and return its next one.

        Returns "wait" if no run became available within `wait_s`, and None if the group is not needed any more, or
        if it `leaves`: its node is taken away.
        """
        if result is not None:
            self.end_assignment(result)
        self._group(group)
        until = time.monotonic() + wait_s
        while not leaves and not self.closed and len(self.groups) <= self._to_train():
            run = self._next()
            if run is not None:
                if assignment := await self._take(run, group):
                    return assignment
            elif not await self.queue.wait(until):
                return "wait"
        self.groups.pop(group, None)
        return None

    def end_assignment(self, result: AssignmentResult) -> None:
        """End an assignment. Has no effect if it was ended before, because its group had failed."""
        run = self._release(result.number)
        if run is None:
            return
        if result.outcome == "fenced" or (result.outcome == "interrupted" and run.lost):
            self._move_elsewhere(run)
        elif result.outcome == "interrupted" and not self.closed:
            self._spawn(self._start_again(run))  # its worker was preempted
        else:
            if result.outcome == "failed":
                self.failed.add(run.spec.run_id)  # at once, so that the group starts no other run
            self._spawn(self._end_run(run, result.event))

    async def report(self, number: int, event: Event) -> None:
        """Pass on the progress of a run. Has no effect after the assignment has ended."""
        group = self.groups.get(self.assignments.get(number, -1))
        if group is None or group.assignment is None:
            return
        run = self.runs[event.run_id]
        run.latest = event
        self.leases.progress(event.run_id, event.step, event.worker_id)
        if event.step != group.step:
            group.step, group.progress_s = event.step, time.monotonic()
        if event.evaluated:
            run.add_evaluations([event])
        self.events.add(event)

    async def watch(self, group: int) -> StopOrder:
        """Wait until the group is to end its run early."""
        state = self._group(group)
        await state.ordered.wait()
        state.ordered.clear()
        return cast(StopOrder, state.order)

    # -- trials ----------------------------------------------------------------------------------------------------

    async def add_no_more(self) -> None:
        """The search has nothing new to suggest."""
        self.more_runs = 0
        self.queue.wake()

    async def start(self, run_id: str, added: RunSpec | None = None) -> None:
        """Put a run into the queue: Tune has created its trial, whose process may have to be started.

        Args:
            run_id: The run.
            added: The run, if a search has suggested it after the start of the sweep.
        """
        if added is not None and run_id not in self.runs:
            event = Event(run_id, "pending", steps=added.train.steps)
            self.runs[run_id] = BrokerRun(added, len(self.runs), event)
            self.remaining += 1
            self.more_runs = max(0, self.more_runs - 1)
        run = self.runs[run_id]
        if run_id in self.early_trials:
            self.early_trials.discard(run_id)
        else:
            self.starting_trials[run_id] = time.monotonic()
            self.all_trials_started.clear()
        if run.state == "pending" and not self.closed and not self.draining:
            self.queue.put(run)

    async def progress(self, run_id: str) -> Report:
        """The run's next evaluation, or its end.

        No end is reported while the process of another trial is starting: Tune would give the freed process to that
        trial, kill the one that is starting, and start another for the next; with short runs this would never end.
        """
        await self._wait_for_start(run_id)
        if (run := self.runs.get(run_id)) is None:  # the sweep ended before
            return Report(Event(run_id, "pending"), ended=True)
        self._trial_started(run_id)
        while True:
            if run.evaluations:
                return Report(run.evaluations.popleft(), ended=False)
            not_started = run.state in ("pending", "queued") and self.draining
            if not_started or run.state in ("ended", "elsewhere") or self.closed:
                await is_set_within(self.all_trials_started, TRIAL_START_TIMEOUT_S)
                return Report(run.latest, ended=True, elsewhere=run.state == "elsewhere")
            run.news = asyncio.Event()
            await run.news.wait()

    async def _wait_for_start(self, run_id: str) -> None:
        """Wait for the `start` of a run: the trial's call may overtake that of the driver."""
        while (run_id not in self.runs or self.runs[run_id].state == "pending") and not (self.closed or self.draining):
            self.early_trials.add(run_id)
            await asyncio.sleep(START_POLL_INTERVAL_S)

    async def stop(self, run_id: str, reason: str) -> None:
        """End a run early, as the scheduler has decided. It becomes `stopped`."""
        run = self.runs[run_id]
        if self.closed or run.state in ("elsewhere", "ended") or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if run.assignment is not None:
            self._order(run.assignment, "stopped", reason)

    # -- the driver ------------------------------------------------------------------------------------------------

    async def poll(self, after: int, wait_s: float) -> Poll:
        """The events with numbers above `after`; waits up to `wait_s` for one. Earlier events are dropped."""
        if self.housekeeping is None:
            self.housekeeping = asyncio.get_running_loop().create_task(self._keep_house())
        events = await self.events.after(after, wait_s)
        returned, self.returned = tuple(self.returned), []
        hanging, self.hanging = tuple(self.hanging), []
        return Poll(
            events=events,
            leased=len(self.assignments) + len(self.tasks),
            to_train=self._to_train(),
            returned=returned,
            hanging=hanging,
            draining=self.draining,
            ended=not (self.remaining or self.more_runs) or (self.draining and not self.assignments and not self.tasks),
            problem=self.problem,
        )

    async def group_failed(self, group: int, reason: str, failure: Failure) -> bool:
        """The workers of a group failed, and the group is gone; whether it had a run."""
        state = self.groups.get(group)
        run = None if state is None or state.assignment is None else self._release(state.assignment.number)
        self.groups.pop(group, None)
        if run is not None:
            self._spawn(self._after_failure(run, reason, failure))
        return run is not None

    async def close(self) -> None:
        """Assign no more runs, and interrupt the runs in training."""
        self.closed = True
        for number in self.assignments:
            self._order(number, "interrupted")
        self.queue.wake()
        for run in self.runs.values():
            run.tell_trial()

    async def release(self) -> None:
        """Wait for what is being written, and give the leases back. The last call."""
        while self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.housekeeping is not None:
            self.housekeeping.cancel()
        await asyncio.to_thread(self.leases.close)

    # -- leases ----------------------------------------------------------------------------------------------------

    async def _take(self, run: BrokerRun, group: int) -> Assignment | None:
        """Take the lease of a run from the queue; None if another sweep has it or has finished it."""
        run.state = "leased"
        lease = await self._in_thread(self.leases.acquire, run.spec)
        if lease is None:
            return None
        if isinstance(lease, Refusal):
            if lease.reason == "leased":
                self._move_elsewhere(run)
            else:
                self._mark_ended(run, await self._in_thread(final_event, run.spec, self.store))
            return None
        if self.replay and not run.evaluated_step:
            run.add_evaluations(await self._in_thread(evaluations_of, run.spec, self.store) or [])
        parent_id = await self._in_thread(self.parents.of, run.spec)
        state = self._group(group)
        if self.closed or run.stop_reason is not None:
            await self._spawn(self._end_run(run, None))
            return None
        self.assignment_count += 1
        number = run.assignment = self.assignment_count
        state.assignment = Assignment(number, run.spec, lease.attempt, parent_id)
        state.step, state.progress_s, state.order = -1, time.monotonic(), None
        state.ordered.clear()
        self.assignments[number] = group
        return state.assignment

    def _release(self, number: int) -> BrokerRun | None:
        """Remove an assignment and return its run; None if it has ended before."""
        state = self.groups.get(self.assignments.pop(number, -1))
        if state is None or state.assignment is None:
            return None
        run = self.runs[state.assignment.run.run_id]
        run.assignment = state.assignment = None
        return run

    def _order(self, number: int, request: StopRequest, reason: str | None = None) -> None:
        """Tell the group of an assignment to end its run early."""
        group = self.groups[self.assignments[number]]
        group.order = StopOrder(number, request, reason)
        group.ordered.set()

    async def _after_failure(self, run: BrokerRun, reason: str, failure: Failure) -> None:
        """Start a run again whose group failed, or record that it failed.

        The run has failed if its worker died too often, or if one of its ranks raised an error for the second time.
        The first error does not count, because an error on one rank and the death of another rank look alike.
        """
        run.deaths += failure == "died"
        run.errors += failure == "error"
        if run.deaths > self.max_failures or run.errors > 1:
            text = " ".join(reason.split())
            message = f"its worker died {run.deaths} times: {text}" if failure == "died" else text
            await self._in_thread(record_failure, run.spec, self.store, message, reason, failure == "error")
            await self._end_run(run, None)
        else:
            await self._start_again(run)

    async def _start_again(self, run: BrokerRun) -> None:
        """Put a run back into the queue, to be trained from its last checkpoint as a new attempt."""
        if self.closed or self.draining or run.stop_reason is not None:
            await self._end_run(run, None)
            return
        await self._in_thread(self.leases.end, run.spec.run_id)
        self.queue.put(run)

    async def _end_run(self, run: BrokerRun, event: Event | None) -> None:
        """Write a run's row, give its lease back and report its end."""
        if run.stop_reason is not None:
            await self._in_thread(record_stop, run.spec, self.store, run.stop_reason)
            event = None
        await self._in_thread(self.leases.end, run.spec.run_id)
        event = event or await self._in_thread(final_event, run.spec, self.store)
        self._mark_ended(run, event or run.latest)

    def _mark_ended(self, run: BrokerRun, event: Event | None) -> None:
        if run.state == "ended":
            return
        run.state, run.latest = "ended", event or run.latest
        self.elsewhere.pop(run.spec.run_id, None)
        self.remaining -= 1
        if run.latest.status == "failed":
            self.failed.add(run.spec.run_id)
            if self.draining:
                for run_id in self.queue:
                    self.runs[run_id].tell_trial()
        self.events.add(run.latest)
        run.tell_trial()
        self.queue.wake(1)

    def _move_elsewhere(self, run: BrokerRun) -> None:
        run.state, run.lost = "elsewhere", False
        self.elsewhere[run.spec.run_id] = None
        run.tell_trial()
        self.queue.wake(1)

    # -- the queue -------------------------------------------------------------------------------------------------

    def _next(self) -> BrokerRun | None:
        """Remove the first run from the queue."""
        run_id = None if self.draining else self.queue.get()
        return None if run_id is None else self.runs[run_id]

    def _to_train(self) -> int:
        if self.draining:
            return len(self.assignments) + len(self.tasks)
        return self.remaining + self.more_runs - len(self.elsewhere)

    def _group(self, group: int) -> BrokerGroup:
        return self.groups.setdefault(group, BrokerGroup())

    # -- housekeeping ----------------------------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Look for lost leases, hanging runs, runs that other sweeps gave up, and trials that do not start."""
        foreign_s = time.monotonic()
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
            now_s = time.monotonic()
            for run_id in self.leases.lost():
                run = self.runs[run_id]
                if run.assignment is not None and not run.lost:
                    run.lost = True
                    self._order(run.assignment, "interrupted")
            if self.step_timeout_s is not None:
                self._find_hanging(now_s, self.step_timeout_s)
            for run_id, since_s in list(self.starting_trials.items()):
                if now_s - since_s > TRIAL_START_TIMEOUT_S:
                    self._trial_started(run_id)
            if self.elsewhere and now_s - foreign_s > FOREIGN_POLL_INTERVAL_S:
                await self._follow_elsewhere()
                foreign_s = time.monotonic()

    def _find_hanging(self, now_s: float, timeout_s: float) -> None:
        """End the assignments of runs that make no steps. Their groups have to be killed."""
        for number, group in list(self.assignments.items()):
            if now_s - self.groups[group].progress_s > timeout_s and (run := self._release(number)):
                reason = f"it made no step for {timeout_s:g} s (resources.step_timeout_s)"
                self._spawn(self._after_failure(run, reason, "died"))
                self.groups.pop(group)
                self.hanging.append(group)
                self.events.available.set()

    async def _follow_elsewhere(self) -> None:
        """End the runs that other sweeps have ended; have those trained here that they gave up."""
        watched = list(self.elsewhere)
        statuses: Mapping[str, Status] | None = await self._in_thread(self.store.index.statuses, watched)
        if statuses is None:
            return
        for run_id in watched:
            # A run that was given up before it was begun is not in the index.
            run, status = self.runs[run_id], statuses.get(run_id, "pending")
            if run.state != "elsewhere" or status == "running":
                continue
            if status in ("finished", "failed", "stopped"):
                self._mark_ended(run, await self._in_thread(final_event, run.spec, self.store))
            else:
                del self.elsewhere[run_id]
                run.state = "pending"
                self.returned.append(run_id)
                self.events.available.set()

    def _trial_started(self, run_id: str) -> None:
        self.starting_trials.pop(run_id, None)
        if not self.starting_trials:
            self.all_trials_started.set()

    # -- tasks -----------------------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The result of a call that uses the store; None if it failed, which ends the sweep.

        While the index does not answer, the call is repeated.
        """
        while True:
            try:
                return await asyncio.to_thread(call, *arguments)
            except Exception as error:
                if isinstance(error, IndexUnavailable) and not self.closed:
                    await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
                    continue
                self.problem = self.problem or f"{type(error).__name__}: {error}"
                self.events.available.set()
                await self.close()
                return None

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # The event loop keeps only weak references to its tasks.
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
