"""Runs, resources and event handlers for tests of sweeps."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cope_sweep.config import Resources, RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import Callbacks, Executor, Workload
from cope_sweep.sweep.leases import Leases
from cope_sweep.train import Outcome
from tests.helpers.tiny import tiny_run

LONG = {"train.steps": 100_000, "evaluate.every": 100_000}
ONE_GROUP = Resources(groups=1, device="cpu", checkpoint_every_s=0.2)


def seeds(count: int, **overrides: object) -> list[RunSpec]:
    """Tiny runs that differ by seed."""
    return [tiny_run(seed=seed, **overrides) for seed in range(count)]


def train_by(
    executor: Executor,
    runs: Sequence[RunSpec],
    store: Store,
    resources: Resources,
    *,
    sweep_id: str = "this-sweep",
    stop: threading.Event | None = None,
    **options: Any,
) -> None:
    """Have an executor train runs in a sweep. `options` are fields of a `Workload`, and callbacks."""
    stop = stop or threading.Event()
    options["callbacks"] = Callbacks(**{name: options.pop(name) for name in list(options) if name.startswith("on_")})
    with contextlib.closing(Leases(store, sweep_id, stop=stop)) as leases:
        executor(Workload(runs, store, resources, leases, stop=stop, **options))


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


class Recorded:
    """What a worker has written of a run: an attempt that was begun, with more to come."""

    def __init__(self, store: Store, run: RunSpec, attempt: int | None = None) -> None:
        self.folder = store.run(run.run_id).begin(run, "host:1", attempt)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.log({"step": step, **metrics})

    def end(self, outcome: Outcome, metrics: Mapping[str, float] | None = None) -> None:
        """End the attempt. A failure, too, is in the folder."""
        match outcome:
            case "finished":
                self.folder.finish(metrics or {"in_dist/loss": 0.5}, {"steps": 6, "worker_id": "host:1"})
            case "failed":
                self.folder.fail("Diverged: the loss is nan", "Traceback …")
            case "interrupted" | "stopped":
                self.folder.set_state(outcome)


@contextlib.contextmanager
def other_sweep(store: Store) -> Iterator[Leases]:
    """The leases of another sweep on the same store, held by a process that lives."""
    with contextlib.closing(Leases(store, "other-sweep", stop=threading.Event())) as leases:
        yield leases
