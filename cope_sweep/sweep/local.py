"""The local executor: trains one run after another in this process, without Ray."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cope_sweep.registry import load_plugins
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, LeaseHolder, Refusal, Store
from cope_sweep.sweep.executor import (
    FOREIGN_POLL_INTERVAL_S,
    INTERRUPT_TIMEOUT_S,
    Parents,
    final_event,
    refused,
    train_leased,
    unfinished,
    worker_id,
)

if TYPE_CHECKING:
    from cope_sweep.sweep.schedulers import StoppingRule
    from cope_sweep.sweep.suggestions import Suggestions


def run_local(
    runs: Sequence[RunSpec],
    store: Store,
    resources: Resources,
    *,
    sweep_id: str,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    plugins: Sequence[str] = (),
    schedule: StoppingRule | None = None,
    max_failed_runs: int | None = None,
    on_note: Callable[[str], None] = lambda text: None,
    suggestions: Suggestions | None = None,
    own_resources: Mapping[str, Resources] | None = None,
) -> None:
    """An `Executor` with one worker, in a thread of this process. `resources.groups` and `.workers` count as 1.

    What `own_resources` say about CPUs, precision, memory and the like is used; the number of workers is not.

    No run is ended early by `schedule`, which compares runs that are trained side by side.

    Raises:
        PluginError: A plugin cannot be imported.
        ValueError: `resources` ask for CUDA and there is none.
        Exception: Whatever `on_event` raises.
    """
    load_plugins(plugins)
    todo = unfinished(runs, store)
    if not todo and suggestions is None:
        return
    own = {} if own_resources is None else own_resources
    if schedule is not None:
        on_note(f"{schedule} ends no run here: --local trains one run after another, each to its end")
    if any(run.run_id in own and own[run.run_id].workers > 1 for run in todo):
        on_note("--local trains with one worker; runs that ask for several have the same results")
    worker = _Worker(todo, suggestions, store, resources, own, sweep_id, max_failed_runs, stop)
    worker.start()
    try:
        while (event := worker.events.get()) is not None:
            if suggestions is not None:
                suggestions.publish()
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
    if suggestions is not None:
        suggestions.publish()
    if worker.error is not None:
        raise worker.error


class _Worker(threading.Thread):
    """Trains in a thread, so that a signal handler in the main thread never interrupts a training step."""

    def __init__(
        self,
        runs: list[RunSpec],
        suggestions: Suggestions | None,
        store: Store,
        resources: Resources,
        own: Mapping[str, Resources],
        sweep_id: str,
        max_failed_runs: int | None,
        stop: threading.Event,
    ) -> None:
        super().__init__(name="training", daemon=True)
        self.runs, self.suggestions = deque(runs), suggestions
        self.store, self.resources, self.own, self.sweep_id = store, resources, own, sweep_id
        self.max_failed_runs, self.stop_requested = max_failed_runs, stop
        self.failed = 0
        self.elsewhere: dict[str, RunSpec] = {}
        """Runs that other sweeps train."""
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """Events of the runs; None after the last one."""
        self.error: Exception | None = None

    @property
    def ends(self) -> bool:
        """Whether no more runs are to be started."""
        too_many_failed = self.max_failed_runs is not None and self.failed >= self.max_failed_runs
        return self.stop_requested.is_set() or too_many_failed

    def run(self) -> None:
        try:
            self._train_all()
        except Exception as error:
            self.error = error
        finally:
            self.events.put(None)

    def _train_all(self) -> None:
        leases = LeaseHolder(self.store, self.sweep_id)
        try:
            while not self.ends:
                if (run := self._next()) is not None:
                    self._train(run, leases)
                elif self.elsewhere:
                    self.stop_requested.wait(FOREIGN_POLL_INTERVAL_S)
                    self._follow_elsewhere(leases)
                else:
                    return
        finally:
            leases.close()

    def _next(self) -> RunSpec | None:
        if self.runs:
            return self.runs.popleft()
        if self.suggestions is None or (run_id := self.suggestions.next_run()) is None:
            return None
        return self.suggestions.run(run_id)

    def _end(self, event: Event) -> None:
        """Pass on the last event of a run."""
        if self.suggestions is not None:
            self.suggestions.end(event.run_id, event.status, event.metrics.get(self.suggestions.metric))
        self.events.put(event)

    def _train(self, run: RunSpec, leases: LeaseHolder) -> None:
        """Train a run, if no other sweep does."""
        from cope_sweep.train import Runtime

        lease = leases.acquire(run)
        if isinstance(lease, Refusal):
            end = refused(run, self.store, lease)
        else:
            end = train_leased(
                run,
                self.store,
                Runtime.of(self.own.get(run.run_id, self.resources), worker_id=worker_id()),
                leases,
                lease,
                parent_id=Parents(self.store).of(run),
                on_event=self.events.put,
                should_stop=lambda: "interrupted" if self.stop_requested.is_set() else None,
            )
        if end.elsewhere:
            self.elsewhere[run.run_id] = run
        if end.elsewhere or end.event.status == "pending":
            return
        self.failed += end.event.status == "failed"
        self._end(end.event)

    def _follow_elsewhere(self, leases: LeaseHolder) -> None:
        """Report the runs that other sweeps have ended; train those that they gave up."""
        statuses = self.store.index.statuses(self.elsewhere)
        for run_id, run in list(self.elsewhere.items()):
            status = statuses.get(run_id, "pending")
            if status == "running" or self.ends:
                continue
            del self.elsewhere[run_id]
            if status in ("finished", "failed", "stopped"):
                self._end(final_event(run, self.store))
            else:
                self._train(run, leases)
