"""The executor without Ray: one run after another, in this process."""

from __future__ import annotations

from cope_sweep.registry import load_plugins
from cope_sweep.store import Event
from cope_sweep.sweep.driver import DrivenRun, Driver
from cope_sweep.sweep.executor import LOOK_INTERVAL_S, Workload, worker_id


def run_local(work: Workload) -> None:
    """Train one run after another, with one worker, in this process: an `Executor`.

    No run is ended early by the schedule, which compares runs that are trained side by side.
    """
    load_plugins(work.plugins)
    sweep = _LocalSweep(work)
    if not sweep.driver.runs and work.search is None:
        return
    if work.schedule is not None:
        work.callbacks.on_note(f"{work.schedule.rule} does not apply: --local trains one run after another, to its end")
    if work.resources.workers > 1:
        work.callbacks.on_note("--local trains with one worker; the results are the same as with several")
    sweep.execute()


class _LocalSweep:
    """One sweep in this process."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.driver = Driver(work)
        self.error: BaseException | None = None
        """An error of `on_event`, which is raised again when the run in training has written its state."""

    def execute(self) -> None:
        """Train the runs, then those that the search suggests."""
        while not self.driver.is_over and self.error is None:
            if (run := self.driver.take()) is not None:
                self._train(run)
            elif not self.driver.is_over:
                self.work.stop.wait(LOOK_INTERVAL_S)
                self.driver.look_elsewhere()
            if self.error is None:
                self.driver.flush_events()
        if self.error is not None:
            raise self.error

    def _train(self, run: DrivenRun) -> None:
        from cope_sweep.train import Runtime, train_run  # imports torch; a sweep may find nothing to train

        self._last: Event | None = None
        train_run(
            run.spec, self.work.store.run(run.run_id).of_sweep(self.work.leases.sweep_id),
            Runtime.of(self.work.resources, worker_id=worker_id()), attempt=run.attempt, on_event=self._report,
            should_stop=lambda: "interrupted" if self._ends(run) else None,
        )  # fmt: skip
        self.driver.end(run, self._last)

    def _ends(self, run: DrivenRun) -> bool:
        return self.work.stop.is_set() or self.driver.leases.is_lost(run.run_id)

    def _report(self, event: Event) -> None:
        self._last = event
        if event.status != "running" or self.error is not None:  # its end is reported when its lease has ended
            return
        self.driver.report(event)
        was_stopping = self.work.stop.is_set()
        try:
            self.driver.flush_events()
        except BaseException as error:
            if was_stopping and isinstance(error, KeyboardInterrupt):  # a second Ctrl-C: the run was given its time
                raise
            self.error = error
            self.work.stop.set()
