"""Who trains what: worker groups lease runs here, Tune's trials open and stop them, the driver hears of everything.

One asyncio object. In a sweep it is a Ray actor, yet nothing in it knows of Ray.

    a trial      opens its run        open → progress, progress, … → (interrupt)
    a group      leases, one by one   hello → lease → tell, tell, … → lease (that one ended) → … → None: the end
    a controller says what died       lost
    the driver   listens              news, news, … → (close)

Runs are leased in the plan's order, and no further than a little ahead of the trials that have opened them. Until the
first trial is up the gate stands open, so that the first runs (the ones that Tune starts with) need not wait for it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import RunSpec
from cope_sweep.sweep.executor import Elsewhere, event_of

LOOK_EVERY_S = 0.5
"""Seconds from one look at a run that another process trains to the next."""
TRIALS_UP_S = 30.0
"""The first trials' processes take 2 to 10 s to start."""
IDLE_LOSSES = 2
"""A group whose workers die this often in a row without having trained anything will never train."""

State = Literal["pending", "leased", "elsewhere", "over"]
Outcome = Literal["finished", "failed", "interrupted", "busy"]


@dataclass(frozen=True)
class Lease:
    """A run, given to a group to train."""

    number: int
    """Counts up over the sweep; 1 is the first."""
    run: RunSpec


@dataclass(frozen=True)
class Ended:
    """How a lease ended."""

    number: int
    outcome: Outcome
    event: Event | None
    """The run's last; None where `train_run` had nothing to tell."""


@dataclass(frozen=True)
class News:
    """What the driver learns."""

    events: tuple[tuple[int, Event], ...]
    """Events by their number."""
    leased: int
    """Runs in training."""
    over: bool
    """Every run is over."""
    fatal: str | None
    """Why the sweep cannot go on."""


@dataclass
class _Run:
    spec: RunSpec
    place: tuple[int, int]
    """Its turn: the round (0, and more each time it was put off), then its place in the plan."""
    latest: Event
    state: State = "pending"
    lost: int = 0
    """How often its worker died."""
    errors: int = 0
    """How often one of its ranks ended in an error."""
    stopped: bool = False
    """Its trial was stopped: it is not to be trained any further in this sweep."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Group:
    lease: Lease | None = None
    idle_losses: int = 0


class Broker:
    """The sweep's state, for as long as it runs. The ledger keeps what must outlive it."""

    def __init__(self, root: str, runs: Sequence[RunSpec], *, max_failures: int, trials: int, ahead: int) -> None:
        """`trials` are as many as are up at a time; `ahead` is how many runs may be leased before their trials."""
        self.ledger = Ledger(root)
        self.max_failures = max_failures
        self.trials = trials
        self.ahead = ahead
        self.runs = {
            run.run_id: _Run(run, (0, index), Event(run.run_id, "pending", steps=run.train.steps))
            for index, run in enumerate(runs)
        }
        self.left = len(self.runs)
        """Runs that are not over."""
        self.turns = [(run.place, run_id) for run_id, run in self.runs.items()]
        self.opened = len(self.runs)
        """The runs before this place in the plan may be leased."""
        self.trial_processes: set[str] = set()
        self.all_trials_up = asyncio.Event()
        self.groups: dict[int, _Group] = {}
        self.leases = 0
        self.closed = False
        self.fatal: str | None = None
        self.events: list[tuple[int, Event]] = []
        self.told = 0
        self.news_came = asyncio.Event()
        self.changed = asyncio.Event()
        """Set, and replaced by a new one, whenever something that a group waits for may have happened."""
        self.tasks: set[asyncio.Task[None]] = set()

    # -- worker groups ---------------------------------------------------------------------------------------------

    async def hello(self, group: int, problem: str | None) -> None:
        """A group's rank 0 is up; `problem` says why it can never train."""
        self._given_up(group, "its workers were started anew", died=True)
        if problem:
            self._fail_sweep(problem)
        self._wake()

    async def lease(self, group: int, ended: Ended | None, wait_s: float) -> Lease | Literal["wait"] | None:
        """End the group's lease, and give it the next; "wait": there is none just now, ask again; None: no more."""
        if ended is not None:
            self._end_lease(group, ended)
        until = asyncio.get_running_loop().time() + wait_s
        while not self.closed and self.left:
            if (run := self._next()) is not None:
                self.leases += 1
                run.state = "leased"
                lease = self._group(group).lease = Lease(self.leases, run.spec)
                return lease
            if not await self._change(until):
                return "wait"
        return None

    async def tell(self, number: int, event: Event) -> None:
        """Progress under a lease."""
        if (run := self._leased(number)) is not None:
            run.latest = event
            self._report(event)

    async def watch(self, group: int, after: int) -> int:
        """Returns the number of a lease of `group`, later than `after`, that is to be interrupted; it may take long."""
        while True:
            lease = self._group(group).lease
            if lease is not None and lease.number > after and (self.closed or self.runs[lease.run.run_id].stopped):
                return lease.number
            await self._change(None)

    # -- controllers -----------------------------------------------------------------------------------------------

    async def lost(self, group: int, reason: str, died: bool) -> None:
        """Workers of a group ended, by dying or by an error; they are started anew."""
        state = self._group(group)
        if not self._given_up(group, reason, died):
            state.idle_losses += 1
            if state.idle_losses >= IDLE_LOSSES:
                self._fail_sweep(f"the workers of group {group} die before they train anything: {reason}")
        self._wake()

    # -- trials ----------------------------------------------------------------------------------------------------

    async def open(self, run_id: str, process: str) -> None:
        """A trial, in one of Tune's processes, stands for this run: it, and the ones before it, may be leased."""
        if not self.trial_processes:
            self.opened = 0
            asyncio.get_running_loop().call_later(TRIALS_UP_S, self.all_trials_up.set)
        self.trial_processes.add(process)
        if len(self.trial_processes) >= self.trials:
            self.all_trials_up.set()
        self.opened = max(self.opened, self.runs[run_id].place[1] + 1 + self.ahead)
        self._wake()

    async def progress(self, run_id: str, wait_s: float) -> tuple[Event, bool]:
        """The run's latest event, and whether it is over; at once if it is, else after `wait_s`.

        While the first trials start, none is told of its end: Tune would give the process that becomes free to the next
        trial, kill the one that was starting for it, and start another, which never ends where runs are short.
        """
        run = self.runs[run_id]
        over = await _wait(run.ended, wait_s) and await _wait(self.all_trials_up, wait_s)
        return run.latest, over

    async def interrupt(self, run_id: str) -> None:
        """Its trial is gone: a run that is not over is interrupted, and left."""
        run = self.runs[run_id]
        run.stopped = True
        if run.state in ("pending", "elsewhere"):
            self._end(run)
            self.news_came.set()
        self._wake()

    # -- the driver ------------------------------------------------------------------------------------------------

    async def news(self, after: int, wait_s: float) -> News:
        """What happened after event number `after`; waits up to `wait_s` for there to be something."""
        self.events = [item for item in self.events if item[0] > after]
        if not self.events:
            self.news_came.clear()
            await _wait(self.news_came, wait_s)
        return News(
            events=tuple(self.events),
            leased=sum(group.lease is not None for group in self.groups.values()),
            over=self.left == 0,
            fatal=self.fatal,
        )

    async def close(self) -> None:
        """Lease nothing more, and interrupt what is in training."""
        self.closed = True
        self._wake()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _group(self, group: int) -> _Group:
        return self.groups.setdefault(group, _Group())

    def _leased(self, number: int) -> _Run | None:
        """The run under a lease, unless the lease was given up: then its holder has nothing to say any more."""
        for group in self.groups.values():
            if group.lease is not None and group.lease.number == number:
                return self.runs[group.lease.run.run_id]
        return None

    def _end_lease(self, group: int, ended: Ended) -> None:
        run = self._leased(ended.number)
        if run is None:
            return
        state = self._group(group)
        state.lease, state.idle_losses = None, 0
        if ended.outcome == "busy":
            run.state = "elsewhere"
            self._spawn(self._await_elsewhere(run))
        else:
            self._over(run, ended.event or event_of(run.spec, self.ledger.run(run.spec.run_id)))
        self._wake()

    def _next(self) -> _Run | None:
        while self.turns:
            (_, index), run_id = self.turns[0]
            if self.runs[run_id].state == "pending":
                if index >= self.opened:
                    return None
                heapq.heappop(self.turns)
                return self.runs[run_id]
            heapq.heappop(self.turns)
        return None

    def _again(self, run: _Run, *, later: bool) -> None:
        """Put a run back: in its old place, or after the others."""
        if later:
            run.place = (run.place[0] + 1, run.place[1])
        run.state = "pending"
        heapq.heappush(self.turns, (run.place, run.spec.run_id))

    def _given_up(self, group: int, reason: str, died: bool) -> bool:
        """End the lease of a group whose workers are gone, if it held one: its run is tried again, or has failed.

        An error on one rank takes the other ranks down, and a death shows as an error on the others: so an error is
        believed when it comes a second time.
        """
        state = self._group(group)
        if state.lease is None:
            return False
        run = self.runs[state.lease.run.run_id]
        state.lease = None
        run.lost += died
        run.errors += not died
        if run.lost > self.max_failures or run.errors > 1:
            self._fail_lost(run, reason, died)
        elif self.closed or run.stopped:
            self._over(run, replace(run.latest, status="interrupted"))
        else:
            self._again(run, later=False)
        return True

    def _fail_lost(self, run: _Run, reason: str, died: bool) -> None:
        """Enter the failure that a dead process could not."""
        folder = self.ledger.run(run.spec.run_id)
        text = " ".join(reason.split())
        message = (f"its worker died {run.lost} times: {text}" if died else text)[:500]
        with folder.lock() as held:
            if held and folder.result is None:
                if folder.spec is None:
                    folder.begin(run.spec, run.latest.worker_id)
                if died or folder.state["status"] != "failed":
                    folder.fail(message, reason)
        self._over(run, replace(event_of(run.spec, folder), status="failed"))

    async def _await_elsewhere(self, run: _Run) -> None:
        """Follow a run that another process trains, until it is over or ours."""
        elsewhere = Elsewhere(self.ledger.run(run.spec.run_id))
        while run.state == "elsewhere" and not self.closed:
            # Files are looked at in a thread: a slow shared disk must not hold up everybody's leases.
            look = await asyncio.to_thread(elsewhere.look)
            if run.state != "elsewhere":
                return
            if look == "over":
                self._over(run, await asyncio.to_thread(event_of, run.spec, elsewhere.folder))
            elif look == "free":
                self._again(run, later=elsewhere.seen_running)
            else:
                await asyncio.sleep(LOOK_EVERY_S)
            self._wake()

    def _over(self, run: _Run, event: Event) -> None:
        run.latest = event
        self._end(run)
        self._report(event)

    def _end(self, run: _Run) -> None:
        run.state = "over"
        run.ended.set()
        self.left -= 1

    def _report(self, event: Event) -> None:
        """Queue an event for the driver; a newer step of a run takes the place of the one still unheard."""
        self.told += 1
        if event.status == "running":
            self.events = [
                item for item in self.events if item[1].run_id != event.run_id or item[1].status != "running"
            ]
        self.events.append((self.told, event))
        self.news_came.set()

    def _fail_sweep(self, reason: str) -> None:
        self.fatal = self.fatal or reason
        self.closed = True
        self.news_came.set()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _change(self, until: float | None) -> bool:
        """Wait for the next change; False where `until` came first."""
        left_s = None if until is None else until - asyncio.get_running_loop().time()
        return await _wait(self.changed, left_s)

    def _spawn(self, coroutine: Any) -> None:
        # The loop keeps weak references only.
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def _wait(event: asyncio.Event, wait_s: float | None) -> bool:
    """Whether `event` was set within `wait_s`."""
    if event.is_set():
        return True
    if wait_s is not None and wait_s <= 0:
        return False
    try:
        await asyncio.wait_for(event.wait(), wait_s)
    except TimeoutError:
        return False
    return True
