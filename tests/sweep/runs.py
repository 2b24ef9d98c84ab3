"""Runs, resources and event handlers for tests of sweeps."""

import threading
import time
from collections.abc import Callable

from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event
from tests.tiny import tiny_run

LONG = {"train.steps": 100_000, "evaluate.every": 100_000}
ONE_GROUP = Resources(groups=1, device="cpu", checkpoint_every_s=0.2)
TIMEOUT_S = 240.0
"""Limit of every wait for a condition. Ray starts in seconds on an idle machine and in minutes on a busy one."""


def seeds(count: int, **overrides: object) -> list[RunSpec]:
    """Tiny runs that differ by seed."""
    return [tiny_run(seed=seed, **overrides) for seed in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after `TIMEOUT_S`."""
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


class EventLog(list[Event]):
    """The events that an executor has sent, in order; and the `stop` event for that executor."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, run: RunSpec) -> list[Event]:
        return [event for event in self if event.run_id == run.run_id]

    def ends(self) -> list[tuple[str, str]]:
        """(run id, status) of the events that end runs, in order."""
        return [(event.run_id, event.status) for event in self if event.status not in ("running", "pending")]


class Listener:
    """Records events in `events`, then calls `act` with each of them."""

    def __init__(self, events: EventLog, act: Callable[[Event], None]) -> None:
        self.events, self.act = events, act

    def __call__(self, event: Event) -> None:
        self.events(event)
        self.act(event)
