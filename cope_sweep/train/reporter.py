"""Reports a run's progress: metrics to its folder, events to a listener."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from cope_sweep.config import RunSpec
from cope_sweep.store import Event, RunFolder, Status

REPORT_EVERY_S = 0.2
"""Shortest time between two progress events."""


class Diverged(Exception):
    """A metric is not finite."""


def check_finite(name: str, value: float, step: int) -> None:
    """Raises Diverged where the value of a metric at a step is not finite."""
    if not math.isfinite(value):
        raise Diverged(f"{name} is {value} at step {step}; lower train.lr, or set train.clip")


class RunReporter:
    """Writes a run's metrics to its folder and sends progress events to a listener."""

    def __init__(
        self, spec: RunSpec, worker_id: str, folder: RunFolder | None, on_event: Callable[[Event], None]
    ) -> None:
        """`folder` is None in workers that write nothing: those of rank 1 and above."""
        self.step = 0
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self._spec, self._worker_id, self._folder, self._on_event = spec, worker_id, folder, on_event
        self._first_step = 0
        self._started_s = self._reported_s = time.monotonic()

    def start(self, step: int) -> None:
        """Training starts after `step` completed steps; the first event says so, and speed is measured from here."""
        self.step = self._first_step = step
        self._started_s = time.monotonic()
        self.report("running")

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append metrics of the current step to the run's curve. Raises Diverged where a value is not finite."""
        for name, value in metrics.items():
            check_finite(name, value, self.step)
        self.metrics |= metrics
        if self._folder:
            self._folder.log({"step": self.step, **metrics})

    def report_throttled(self) -> None:
        """Send a `running` event, unless the last event was sent less than REPORT_EVERY_S ago."""
        if time.monotonic() - self._reported_s >= REPORT_EVERY_S:
            self.report("running")

    def report(self, status: Status, message: str | None = None, *, evaluated: bool = False) -> None:
        """Send an event. `evaluated` says that the test sets were evaluated at the present step."""
        self._reported_s = time.monotonic()
        steps, elapsed_s = self.step - self._first_step, self._reported_s - self._started_s
        self._on_event(
            Event(
                run_id=self._spec.run_id,
                status=status,
                step=self.step,
                steps=self._spec.train.steps,
                metrics=dict(self.metrics),
                steps_per_s=steps / elapsed_s if steps and elapsed_s > 0 else None,
                worker_id=self._worker_id,
                message=message,
                evaluated=evaluated,
            )
        )
