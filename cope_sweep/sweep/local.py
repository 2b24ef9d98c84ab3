"""The local executor: trains one run after another in this process, without Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cope_sweep.registry import load_plugins
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.executor import (
    FOREIGN_POLL_INTERVAL_S,
    INTERRUPT_TIMEOUT_S,
    ForeignRun,
    final_event,
    unfinished,
    worker_id,
)

if TYPE_CHECKING:
    from cope_sweep.train import Runtime


def run_local(
    runs: Sequence[RunSpec],
    store: Store,
    resources: Resources,
    *,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    plugins: Sequence[str] = (),
) -> None:
    """An `Executor` with one worker, in a thread of this process. `resources.groups` and `.workers` count as 1.

    Raises:
        PluginError: A plugin cannot be imported.
        ValueError: `resources` ask for CUDA and there is none.
        Exception: Whatever `on_event` raises.
    """
    load_plugins(plugins)
    worker = _Worker(unfinished(runs, store), store, resources, stop)
    worker.start()
    try:
        while (event := worker.events.get()) is not None:
            on_event(event)
    except BaseException:
        # Ctrl-C, or an error in `on_event`. The current run can still write its checkpoint, unless it was given that
        # time before.
        already_stopping = stop.is_set()
        stop.set()
        if not already_stopping:
            worker.join(INTERRUPT_TIMEOUT_S)
        raise
    worker.join()
    if worker.error is not None:
        raise worker.error


class _Worker(threading.Thread):
    """Trains in a thread, so that a signal handler in the main thread never interrupts a training step."""

    def __init__(self, runs: list[RunSpec], store: Store, resources: Resources, stop: threading.Event) -> None:
        super().__init__(name="training", daemon=True)
        self.runs, self.store, self.resources, self.stop_requested = runs, store, resources, stop
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """Events of the runs; None after the last one."""
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
            self._wait_or_train(run, runtime)

    def _train(self, run: RunSpec, runtime: Runtime) -> str:
        from cope_sweep.train import train_run

        if self.stop_requested.is_set():
            return "interrupted"
        return train_run(run, self.store, runtime, on_event=self.events.put, should_stop=self.stop_requested.is_set)

    def _wait_or_train(self, run: RunSpec, runtime: Runtime) -> None:
        """Wait until another process has ended `run`; train the run here if that process gave it up."""
        foreign = ForeignRun(self.store.run(run.run_id))
        while not self.stop_requested.is_set():
            match foreign.poll():
                case "ended":
                    self.events.put(final_event(run, foreign.folder))
                    return
                case "free" if self._train(run, runtime) != "busy":
                    return
            self.stop_requested.wait(FOREIGN_POLL_INTERVAL_S)
