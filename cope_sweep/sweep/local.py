"""The local twin: runs one after another in this process. No Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.sweep.executor import INTERRUPT_S, Elsewhere, event_of, unfinished, worker_id

if TYPE_CHECKING:
    from cope_sweep.train import Runtime

LOOK_EVERY_S = 0.5
"""Seconds from one look at a run that another process trains to the next."""


def run_local(
    runs: Sequence[RunSpec],
    ledger: Ledger,
    resources: Resources,
    *,
    on_event: Callable[[Event], None],
    stop: threading.Event,
) -> None:
    """An `Executor`: one worker, in a thread of this process; `resources.groups` and `.workers` count as 1.

    Raises ValueError where `resources` ask for CUDA and there is none, and whatever `on_event` raises.
    """
    worker = _Worker(unfinished(runs, ledger), ledger, resources, stop)
    worker.start()
    try:
        while (event := worker.events.get()) is not None:
            on_event(event)
    except BaseException:
        # Ctrl-C, or a display that broke: the run in training is still worth its checkpoint.
        impatient = stop.is_set()
        stop.set()
        if not impatient:
            worker.join(INTERRUPT_S)
        raise
    worker.join()
    if worker.error is not None:
        raise worker.error


class _Worker(threading.Thread):
    """Trains in a thread, so that a signal in the main thread never cuts a step in two."""

    def __init__(self, runs: list[RunSpec], ledger: Ledger, resources: Resources, stop: threading.Event) -> None:
        super().__init__(name="training", daemon=True)
        self.runs, self.ledger, self.resources, self.stop_asked = runs, ledger, resources, stop
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """What happened; None at the end."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._train_all()
        except Exception as error:
            self.error = error
        finally:
            self.events.put(None)

    def _train_all(self) -> None:
        if not self.runs:
            return
        from cope_sweep.train import Runtime

        runtime = Runtime.of(self.resources, worker_id=worker_id())
        busy = [run for run in self.runs if self._train(run, runtime) == "busy"]
        for run in busy:
            self._await(run, runtime)

    def _train(self, run: RunSpec, runtime: Runtime) -> str:
        from cope_sweep.train import train_run

        if self.stop_asked.is_set():
            return "interrupted"
        return train_run(run, self.ledger, runtime, on_event=self.events.put, should_stop=self.stop_asked.is_set)

    def _await(self, run: RunSpec, runtime: Runtime) -> None:
        """Wait until the process that trains `run` is done with it; train it if it was given up."""
        elsewhere = Elsewhere(self.ledger.run(run.run_id))
        while not self.stop_asked.is_set():
            match elsewhere.look():
                case "over":
                    self.events.put(event_of(run, elsewhere.folder))
                    return
                case "free" if self._train(run, runtime) != "busy":
                    return
            self.stop_asked.wait(LOOK_EVERY_S)
