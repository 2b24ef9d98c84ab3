"""The runs that the broker knows: which wait for a group, which another sweep trains, which have ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event
from cope_sweep.sweep.broker_state import BrokerRun, EventBuffer, RunQueue


class RunTable:
    """The runs of a sweep and what they wait for. A change of state takes constant or logarithmic time."""

    def __init__(self, events: EventBuffer, max_failed: int | None) -> None:
        """Create a table without runs.

        Args:
            events: Gets the ends of runs.
            max_failed: After this number of failed runs, no more are started; None: no limit.
        """
        self.events, self.max_failed = events, max_failed
        self.by_id: dict[str, BrokerRun] = {}
        self.remaining = 0
        """Number of runs that have not ended."""
        self.to_do: Counter[int] = Counter()
        """Shape → number of runs that have not ended and that no other sweep trains."""
        self.elsewhere: dict[str, None] = {}
        """Runs that another sweep trains (an ordered set)."""
        self.failed: set[str] = set()
        self._queues: defaultdict[int, RunQueue] = defaultdict(RunQueue)
        """Shape → its runs that wait for a group."""

    @property
    def draining(self) -> bool:
        """Whether no more runs are started, because too many have failed."""
        return self.max_failed is not None and len(self.failed) >= self.max_failed

    def add(self, run: RunSpec, shape: int) -> None:
        """Add a run that has to be trained."""
        event = Event(run.run_id, "pending", steps=run.train.steps)
        self.by_id[run.run_id] = BrokerRun(run, len(self.by_id), event, shape)
        self.remaining += 1
        self.to_do[shape] += 1

    def queue(self, run: BrokerRun) -> None:
        """Have a run wait for a group of its shape."""
        self._queues[run.shape].put(run)

    def next(self, shape: int) -> BrokerRun | None:
        """Remove the first run of a shape from the queue."""
        run_id = None if self.draining else self._queues[shape].get()
        return None if run_id is None else self.by_id[run_id]

    def has_queued(self, shape: int) -> bool:
        """Whether a run of a shape waits for a group."""
        return next(iter(self._queues[shape]), None) is not None

    async def wait(self, shape: int, until: float) -> bool:
        """Wait for a run of a shape, or for another reason to look again; False if there was none before `until`."""
        return await self._queues[shape].wait(until)

    def wake_all(self) -> None:
        """Wake up all groups that wait."""
        for queue in self._queues.values():
            queue.wake()

    def take_waiting(self, shape: int) -> list[BrokerRun]:
        """Remove all runs of a shape that wait for a trial or a group, and return them as if they were leased."""
        while self._queues[shape].get() is not None:
            pass
        waiting = [run for run in self.by_id.values() if run.shape == shape and run.state in ("pending", "queued")]
        for run in waiting:
            run.state = "leased"
        return waiting

    def mark_ended(self, run: BrokerRun, event: Event | None) -> None:
        """A run has ended with this event; None: its latest."""
        if run.state == "ended":
            return
        self.to_do[run.shape] -= run.state != "elsewhere"
        run.state, run.latest = "ended", event or run.latest
        self.elsewhere.pop(run.spec.run_id, None)
        self.remaining -= 1
        if run.latest.status == "failed":
            self.failed.add(run.spec.run_id)
            if self.draining:
                self._tell_trials(run_id for queue in self._queues.values() for run_id in queue)
        self.events.add(run.latest)
        run.tell_trial()
        self._queues[run.shape].wake(1)

    def move_elsewhere(self, run: BrokerRun) -> None:
        """Another sweep trains a run."""
        self.to_do[run.shape] -= run.state != "elsewhere"
        run.state, run.lost = "elsewhere", False
        self.elsewhere[run.spec.run_id] = None
        run.tell_trial()
        self._queues[run.shape].wake(1)

    def bring_back(self, run: BrokerRun) -> None:
        """The other sweep has given a run up."""
        del self.elsewhere[run.spec.run_id]
        run.state = "pending"
        self.to_do[run.shape] += 1

    def _tell_trials(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            self.by_id[run_id].tell_trial()
