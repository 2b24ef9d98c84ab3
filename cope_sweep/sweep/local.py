"""The local executor: trains one run after another in this process, without Ray."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator

from cope_sweep.config import RunSpec
from cope_sweep.registry import load_plugins
from cope_sweep.store import Event, LeaseHolder, Refusal
from cope_sweep.sweep.executor import (
    FOREIGN_POLL_INTERVAL_S,
    INTERRUPT_TIMEOUT_S,
    Parents,
    Workload,
    final_event,
    refused,
    train_leased,
    worker_id,
)

WAIT_NOTE_S = 3.0
"""Time without an event after which a wait for a database is noted."""


def run_local(work: Workload) -> None:
    """An `Executor` with one worker, in a thread of this process. `groups` and `workers` of resources count as 1.

    No run is ended early by the schedule, which compares runs that are trained side by side.
    """
    load_plugins(work.plugins)
    todo = work.unfinished()
    if not todo and work.suggestions is None:
        return
    if work.schedule is not None:
        work.on_note(f"{work.schedule} ends no run here: --local trains one run after another, each to its end")
    if any(work.resources_of(run.run_id).workers > 1 for run in todo):
        work.on_note("--local trains with one worker; runs that ask for several have the same results")
    worker = _Worker(work, todo)
    worker.start()
    try:
        for event in worker.sent():
            if work.suggestions is not None:
                work.suggestions.publish()
            work.on_event(event)
    except BaseException:
        # Ctrl-C, or an error in `on_event`. The current run can still write its checkpoint, unless it was given that
        # time before.
        already_stopping = work.stop.is_set()
        work.stop.set()
        if not already_stopping:
            worker.join(INTERRUPT_TIMEOUT_S)
        raise
    worker.join()
    if work.suggestions is not None:
        work.suggestions.publish()
    if worker.error is not None:
        raise worker.error


class _Worker(threading.Thread):
    """Trains in a thread, so that a signal handler in the main thread never interrupts a training step."""

    def __init__(self, work: Workload, runs: list[RunSpec]) -> None:
        super().__init__(name="training", daemon=True)
        self.work, self.runs = work, deque(runs)
        self.store, self.suggestions = work.store, work.suggestions
        self.leases = LeaseHolder(work.store, work.sweep_id, stop=work.stop)
        self.failed = 0
        self.elsewhere: dict[str, RunSpec] = {}
        """Runs that other sweeps train."""
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """Events of the runs; None after the last one."""
        self.error: Exception | None = None

    def sent(self) -> Iterator[Event]:
        """The events of the runs, as they come. Notes where a database keeps the runs waiting."""
        noted_s: float | None = None
        while True:
            try:
                event = self.events.get(timeout=WAIT_NOTE_S)
            except queue.Empty:
                if self.leases.waits_since_s not in (None, noted_s):
                    noted_s = self.leases.waits_since_s
                    self.work.on_note("the index does not answer: waiting for it")
                continue
            if event is None:
                return
            yield event

    def run(self) -> None:
        try:
            self._train_all()
        except Exception as error:
            self.error = error
        finally:
            self.events.put(None)

    def _train_all(self) -> None:
        try:
            while not self.work.is_draining(self.failed):
                if (run := self._next()) is not None:
                    self._train(run)
                elif self.elsewhere:
                    self.work.stop.wait(FOREIGN_POLL_INTERVAL_S)
                    self._follow_elsewhere()
                else:
                    return
        finally:
            self.leases.close()

    def _next(self) -> RunSpec | None:
        if self.runs:
            return self.runs.popleft()
        return None if self.suggestions is None else self.suggestions.next_run()

    def _end(self, event: Event) -> None:
        """Pass on the last event of a run."""
        if self.suggestions is not None:
            self.suggestions.end(event.run_id, event.status, event.metrics.get(self.suggestions.metric))
        self.events.put(event)

    def _train(self, run: RunSpec) -> None:
        """Train a run, if no other sweep does."""
        from cope_sweep.train import Runtime

        lease = self.leases.acquire(run)
        if isinstance(lease, Refusal):
            end = refused(run, self.store, lease)
        else:
            runtime = Runtime.of(self.work.resources_of(run.run_id), worker_id=worker_id())
            parent_id = self.leases.waiting(lambda: Parents(self.store).of(run))
            end = train_leased(
                run, self.store, runtime, self.leases, lease,
                parent_id=parent_id, on_event=self.events.put,
                should_stop=lambda: "interrupted" if self.work.stop.is_set() else None,
            )  # fmt: skip
        if end.elsewhere:
            self.elsewhere[run.run_id] = run
        if end.elsewhere or end.event.status == "pending":
            return
        self.failed += end.event.status == "failed"
        self._end(end.event)

    def _follow_elsewhere(self) -> None:
        """Report the runs that other sweeps have ended; train those that they gave up."""
        statuses = self.leases.waiting(lambda: self.store.index.statuses(self.elsewhere))
        for run_id, run in list(self.elsewhere.items()):
            status = statuses.get(run_id, "pending")
            if status == "running" or self.work.is_draining(self.failed):
                continue
            del self.elsewhere[run_id]
            if status in ("finished", "failed", "stopped"):
                self._end(final_event(run, self.store))
            else:
                self._train(run)
