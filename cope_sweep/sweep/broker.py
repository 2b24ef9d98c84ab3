"""The broker of a sweep: it takes the leases of runs, and connects Tune's trials, worker groups and the driver.

One asyncio object. A sweep runs it as a Ray actor, but it does not use Ray itself. Its callers are

    a trial            progress, progress, …: each returns a new evaluation or the end
    a worker group     lease → report, report, … → lease (which ends the last one) → … → None at the end
    the driver         start (when Tune has created a trial), poll, poll, … → (stop, group_failed, close)

A run is in the queue of its shape from the start of its trial until a group of that shape takes it. Its life does not
depend on its trial's process: only `stop` and `close` end it early. Every operation takes constant or logarithmic time.
Whatever reads or writes the store runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, LeaseHolder, Status, Store
from cope_sweep.sweep.broker_groups import GroupTable
from cope_sweep.sweep.broker_records import RunRecords
from cope_sweep.sweep.broker_runs import RunTable
from cope_sweep.sweep.broker_state import BrokerRun, EventBuffer, TrialStarts
from cope_sweep.sweep.executor import (
    FOREIGN_POLL_INTERVAL_S,
    evaluations_of,
    final_event,
)
from cope_sweep.sweep.messages import Assignment, AssignmentResult, Failure, Poll, Report, StopOrder
from cope_sweep.sweep.parents import Parents

HOUSEKEEPING_INTERVAL_S = 0.5
"""Time between two checks for lost leases and runs without progress."""
START_POLL_INTERVAL_S = 0.05


class Broker:
    """The state of a running sweep. Everything that must outlive the sweep is in the store."""

    def __init__(
        self,
        store: Store,
        sweep_id: str,
        runs: Sequence[RunSpec],
        *,
        shapes: Mapping[str, int] | None = None,
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
            shapes: Run id → number of the shape of the groups that can train it; no entry: 0.
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
        self.step_timeout_s, self.replay = step_timeout_s, replay
        self.events = EventBuffer()
        self.table = RunTable(self.events, max_failed_runs)
        self.runs = self.table.by_id
        for run in runs:
            self.table.add(run, (shapes or {}).get(run.run_id, 0))
        self.more_runs = more_runs
        self.refused: dict[int, str] = {}
        """Shape of which no group can be started → why."""
        self.groups = GroupTable()
        self.trials = TrialStarts()
        self.returned: list[str] = []
        self.hanging: list[int] = []
        self.records = RunRecords(
            store, self.leases, self.table, max_failures=max_failures, on_problem=self._end_with_problem
        )
        self.housekeeping: asyncio.Task[None] | None = None

    @property
    def remaining(self) -> int:
        """Number of runs that have not ended."""
        return self.table.remaining

    # -- worker groups ---------------------------------------------------------------------------------------------

    async def lease(
        self, group: int, result: AssignmentResult | None, wait_s: float, leaves: bool = False, shape: int = 0
    ) -> Assignment | Literal["wait"] | None:
        """End the group's assignment with `result` and return its next one, a run of the group's shape.

        Returns "wait" if no run became available within `wait_s`, and None if the group is not needed any more, or
        if it `leaves`: its node is taken away.
        """
        if result is not None:
            self.end_assignment(result)
        self.groups.of(group, shape)
        until = time.monotonic() + wait_s
        while not leaves and not self.records.closed and self._is_needed(group, shape):
            run = self.table.next(shape)
            if run is not None:
                if assignment := await self._take(run, group):
                    return assignment
            elif not await self.table.wait(shape, until):
                return "wait"
        self.groups.remove(group)
        return None

    def _is_needed(self, group: int, shape: int) -> bool:
        if self.groups.is_leaving(group, has_run=self.table.has_queued(shape)):
            return False
        if self.table.draining:
            return self.groups.counts[shape] <= self.groups.busy[shape] + len(self.records.tasks)
        return self.groups.counts[shape] <= self.table.to_do[shape] + self.more_runs

    def end_assignment(self, result: AssignmentResult) -> None:
        """End an assignment. Has no effect if it was ended before, because its group had failed."""
        run = self._release(result.number)
        if run is None:
            return
        if result.outcome == "fenced" or (result.outcome == "interrupted" and run.lost):
            self.table.move_elsewhere(run)
        elif result.outcome == "interrupted" and not self.records.closed:
            self.records.spawn(self.records.start_again(run))  # its worker was preempted
        else:
            if result.outcome == "failed":
                self.table.failed.add(run.spec.run_id)  # at once, so that the group starts no other run
            self.records.spawn(self.records.end(run, result.event))

    async def report(self, number: int, event: Event) -> None:
        """Pass on the progress of a run. Has no effect after the assignment has ended."""
        group = self.groups.with_assignment(number)
        if group is None:
            return
        run = self.runs[event.run_id]
        run.latest = event
        self.leases.progress(event.run_id, event.step, event.worker_id)
        if event.step != group.step:
            group.step, group.progress_s = event.step, time.monotonic()
        if event.evaluated:
            run.add_evaluations([event])
        self.events.add(event)

    async def watch(self, group: int, shape: int = 0) -> StopOrder:
        """Wait until the group is to end its run early."""
        state = self.groups.of(group, shape)
        await state.ordered.wait()
        state.ordered.clear()
        return cast(StopOrder, state.order)

    # -- trials ----------------------------------------------------------------------------------------------------

    async def add_no_more(self) -> None:
        """The search has nothing new to suggest."""
        self.more_runs = 0
        self.table.wake_all()

    async def start(self, run_id: str, added: RunSpec | None = None, shape: int = 0) -> None:
        """Put a run into the queue: Tune has created its trial, whose process may have to be started.

        Args:
            run_id: The run.
            added: The run, if a search has suggested it after the start of the sweep.
            shape: The shape of a run that is added.
        """
        if added is not None and run_id not in self.runs:
            self.table.add(added, shape)
            self.more_runs = max(0, self.more_runs - 1)
        run = self.runs[run_id]
        self.trials.announce(run_id)
        if run.state == "pending" and not self.records.closed and not self.table.draining:
            if run.shape in self.refused:
                self.records.spawn(self.records.refuse(run, self.refused[run.shape]))
            else:
                self.table.queue(run)

    async def progress(self, run_id: str) -> Report:
        """The run's next evaluation, or its end.

        No end is reported while the process of another trial is starting: Tune would give the freed process to that
        trial, kill the one that is starting, and start another for the next; with short runs this would never end.
        """
        await self._wait_for_start(run_id)
        if (run := self.runs.get(run_id)) is None:  # the sweep ended before
            return Report(Event(run_id, "pending"), ended=True)
        self.trials.started(run_id)
        while True:
            if run.evaluations:
                return Report(run.evaluations.popleft(), ended=False)
            not_started = run.state in ("pending", "queued") and self.table.draining
            if not_started or run.state in ("ended", "elsewhere") or self.records.closed:
                await self.trials.wait()
                return Report(run.latest, ended=True, elsewhere=run.state == "elsewhere")
            run.news = asyncio.Event()
            await run.news.wait()

    async def _wait_for_start(self, run_id: str) -> None:
        """Wait for the `start` of a run: the trial's call may overtake that of the driver."""
        while (run_id not in self.runs or self.runs[run_id].state == "pending") and not (
            self.records.closed or self.table.draining
        ):
            self.trials.asked_early(run_id)
            await asyncio.sleep(START_POLL_INTERVAL_S)

    async def stop(self, run_id: str, reason: str) -> None:
        """End a run early, as the scheduler has decided. It becomes `stopped`."""
        run = self.runs[run_id]
        if self.records.closed or run.state in ("elsewhere", "ended") or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if run.assignment is not None:
            self.groups.order(run.assignment, "stopped", reason)

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
            leased=self.groups.training + len(self.records.tasks),
            to_train=self._to_train(),
            idle=self.groups.idle() if len(self.table.to_do) > 1 else frozenset(),
            returned=returned,
            hanging=hanging,
            draining=self.table.draining,
            ended=self._has_ended(),
            problem=self.records.problem,
        )

    def _has_ended(self) -> bool:
        if self.table.draining:
            return not (self.groups.training or self.records.tasks)
        return not (self.table.remaining or self.more_runs)

    async def group_failed(self, group: int, reason: str, failure: Failure) -> bool:
        """The workers of a group failed, and the group is gone; whether it had a run."""
        assignment = self.groups.assignment_of(group)
        run = None if assignment is None else self._release(assignment)
        self.groups.remove(group)
        if run is not None:
            self.records.spawn(self.records.after_failure(run, reason, failure))
        return run is not None

    async def ask_to_leave(self, groups: Sequence[int]) -> None:
        """Have groups end when their runs have ended: another shape needs their room."""
        self.groups.ask_to_leave(groups)
        self.table.wake_all()

    async def refuse(self, shape: int, reason: str) -> None:
        """Let the runs of a shape fail that wait for a group, now and later: none can be started."""
        self.refused[shape] = reason
        waiting = self.table.take_waiting(shape)

        async def refuse_all() -> None:
            for run in waiting:
                await self.records.refuse(run, reason)

        self.records.spawn(refuse_all())

    async def close(self) -> None:
        """Assign no more runs, and interrupt the runs in training."""
        self.records.closed = True
        self.groups.order_all("interrupted")
        self.table.wake_all()
        for run in self.runs.values():
            run.tell_trial()

    async def _end_with_problem(self) -> None:
        self.events.available.set()
        await self.close()

    async def release(self) -> None:
        """Wait for what is being written, and give the leases back. The last call."""
        while self.records.tasks:
            await asyncio.gather(*self.records.tasks, return_exceptions=True)
        if self.housekeeping is not None:
            self.housekeeping.cancel()
        await asyncio.to_thread(self.leases.close)

    # -- leases ----------------------------------------------------------------------------------------------------

    async def _take(self, run: BrokerRun, group: int) -> Assignment | None:
        """Take the lease of a run from the queue; None if another sweep has it or has finished it."""
        lease = await self.records.acquire(run)
        if lease is None:
            return None
        if self.replay and not run.evaluated_step:
            run.add_evaluations(await self.records.in_thread(evaluations_of, run.spec, self.store) or [])
        parent_id = await self.records.in_thread(self.parents.of, run.spec)
        if self.records.closed or run.stop_reason is not None:
            await self.records.spawn(self.records.end(run, None))
            return None
        return self.groups.assign(group, run, lease.attempt, parent_id)

    def _release(self, number: int) -> BrokerRun | None:
        """Remove an assignment and return its run; None if it has ended before."""
        run_id = self.groups.release(number)
        if run_id is None:
            return None
        run = self.runs[run_id]
        run.assignment = None
        return run

    def _to_train(self) -> dict[int, int]:
        """Shape → number of runs in training or waiting for it. Those still to be suggested count as of shape 0."""
        if self.table.draining:
            return dict(self.groups.busy)
        return {**self.table.to_do, 0: self.table.to_do[0] + self.more_runs}

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
                    self.groups.order(run.assignment, "interrupted")
            if self.step_timeout_s is not None:
                self._find_hanging(now_s, self.step_timeout_s)
            self.trials.give_up(now_s)
            if self.table.elsewhere and now_s - foreign_s > FOREIGN_POLL_INTERVAL_S:
                await self._follow_elsewhere()
                foreign_s = time.monotonic()

    def _find_hanging(self, now_s: float, timeout_s: float) -> None:
        """End the assignments of runs that make no steps. Their groups have to be killed."""
        for group, assignment in self.groups.hanging(now_s - timeout_s):
            if run := self._release(assignment):
                reason = f"it made no step for {timeout_s:g} s (resources.step_timeout_s)"
                self.records.spawn(self.records.after_failure(run, reason, "died"))
                self.groups.remove(group)
                self.hanging.append(group)
                self.events.available.set()

    async def _follow_elsewhere(self) -> None:
        """End the runs that other sweeps have ended; have those trained here that they gave up."""
        watched = list(self.table.elsewhere)
        statuses: Mapping[str, Status] | None = await self.records.in_thread(self.store.index.statuses, watched)
        if statuses is None:
            return
        for run_id in watched:
            # A run that was given up before it was begun is not in the index.
            run, status = self.runs[run_id], statuses.get(run_id, "pending")
            if run.state != "elsewhere" or status == "running":
                continue
            if status in ("finished", "failed", "stopped"):
                self.table.mark_ended(run, await self.records.in_thread(final_event, run.spec, self.store))
            else:
                self.table.bring_back(run)
                self.returned.append(run_id)
                self.events.available.set()
