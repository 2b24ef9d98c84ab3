"""What the broker keeps: runs, the queue of those that wait for a group, trials that start, events for the driver."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event

TRIAL_START_TIMEOUT_S = 30.0
"""The process of a trial takes 2 to 10 s to start."""

State = Literal["pending", "queued", "leased", "elsewhere", "ended"]
"""`elsewhere`: another sweep trains the run."""


@dataclass
class BrokerRun:
    """One run of the sweep."""

    spec: RunSpec
    index: int
    latest: Event
    shape: int = 0
    """The shape of the groups that can train it."""
    state: State = "pending"
    deaths: int = 0
    """How often its worker died or hung."""
    errors: int = 0
    """How often one of its ranks ended with an error."""
    assignment: int | None = None
    """The number of its assignment."""
    lost: bool = False
    """Whether its lease expired or was taken by another sweep."""
    stop_reason: str | None = None
    """Why the scheduler ended it."""
    evaluations: deque[Event] = field(default_factory=deque)
    """Evaluations that its trial has not reported yet."""
    evaluated_step: int = 0
    """The step of the last evaluation that was received."""
    news: asyncio.Event | None = None
    """Set when there is something for its trial, which waits."""

    def add_evaluations(self, events: Sequence[Event]) -> None:
        """Keep evaluations for the trial. Those of steps that were trained again are dropped."""
        for event in events:
            if event.step > self.evaluated_step:
                self.evaluated_step = event.step
                self.evaluations.append(event)
        self.tell_trial()

    def tell_trial(self) -> None:
        """Wake up the run's trial, if it waits."""
        if self.news is not None:
            self.news.set()


class RunQueue:
    """The runs of one shape that wait for a group, in the order of the plan, and the groups that wait for a run."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __iter__(self) -> Iterator[str]:
        """The ids of the runs, in no order."""
        return (run_id for _, run_id in self._heap)

    def put(self, run: BrokerRun) -> None:
        """Add a run, and wake up a group."""
        run.state = "queued"
        heapq.heappush(self._heap, (run.index, run.spec.run_id))
        self.wake(1)

    def get(self) -> str | None:
        """Remove the first run and return its id; None if there is none."""
        return heapq.heappop(self._heap)[1] if self._heap else None

    async def wait(self, until: float) -> bool:
        """Wait until this group is woken up; False if that did not happen before `until`, by `time.monotonic`."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await asyncio.wait_for(future, left_s)
        except TimeoutError:
            return False
        return True

    def wake(self, count: int | None = None) -> None:
        """Wake up as many waiting groups; None: all."""
        while self._waiting and (count is None or count > 0):
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                count = None if count is None else count - 1


class TrialStarts:
    """The trials that Tune has created and whose process does not ask for progress yet."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        """Run → when its trial was announced."""
        self._early: set[str] = set()
        """Runs whose trial has asked before it was announced."""
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def none_left(self) -> bool:
        """Whether all of them have started."""
        return self._none_left.is_set()

    def announce(self, run_id: str) -> None:
        """Tune has created the trial of a run."""
        if run_id in self._early:
            self._early.discard(run_id)
        else:
            self._since_s[run_id] = time.monotonic()
            self._none_left.clear()

    def asked_early(self, run_id: str) -> None:
        """The trial's call has overtaken that of the driver."""
        self._early.add(run_id)

    def started(self, run_id: str) -> None:
        """The trial's process runs, or is not waited for any more."""
        self._since_s.pop(run_id, None)
        if not self._since_s:
            self._none_left.set()

    def give_up(self, now_s: float) -> None:
        """Do not wait any more for trials that take longer than `TRIAL_START_TIMEOUT_S`."""
        for run_id in [run_id for run_id, since_s in self._since_s.items() if now_s - since_s > TRIAL_START_TIMEOUT_S]:
            self.started(run_id)

    async def wait(self) -> None:
        """Wait until all of them have started."""
        await is_set_within(self._none_left, TRIAL_START_TIMEOUT_S)


class EventBuffer:
    """Numbered events that the driver has not acknowledged. Of each run it keeps the latest progress only."""

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}
        self._progress: dict[str, int] = {}
        """Run id → the number of its progress event."""
        self._count = 0
        self.available = asyncio.Event()
        """Set when there is an event, or anything else that the driver waits for."""

    def add(self, event: Event) -> None:
        """Add an event. Progress replaces the progress that the run reported before; an end replaces nothing."""
        self._count += 1
        earlier = self._progress.pop(event.run_id, None)
        if event.status == "running":
            self._progress[event.run_id] = self._count
            if earlier is not None:
                self._events.pop(earlier, None)
        self._events[self._count] = event
        self.available.set()

    async def after(self, number: int, wait_s: float) -> tuple[tuple[int, Event], ...]:
        """Drop the events up to `number` and return the others; waits up to `wait_s` for one."""
        for old in list(itertools.takewhile(lambda each: each <= number, self._events)):
            event = self._events.pop(old)
            if self._progress.get(event.run_id) == old:
                del self._progress[event.run_id]
        if not self._events:
            self.available.clear()
            await is_set_within(self.available, wait_s)
        return tuple(self._events.items())


async def is_set_within(event: asyncio.Event, wait_s: float) -> bool:
    """Whether `event` is set, or is set within `wait_s`."""
    if not event.is_set() and wait_s > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), wait_s)
    return event.is_set()
