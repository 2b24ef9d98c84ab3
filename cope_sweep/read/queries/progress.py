"""The progress of a running sweep, from the totals of its runs in the index."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from cope_sweep.read.queries.unknown import no_sweep
from cope_sweep.store import Store, SweepProgress

MAX_FAILURES = 20
"""Maximum number of failed runs in an answer."""
RATE_WINDOW_S = 60.0
"""The speed is measured over this time: a run's step is written every few seconds."""


class ProgressTracker:
    """Reads the progress of a sweep repeatedly, and computes its speed from the steps in between."""

    def __init__(self, store: Store, sweep_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.sweep_id, self.clock = store, sweep_id, clock
        self.revision = 0
        """Revision of the index at the last call."""
        self._samples: deque[tuple[float, int]] = deque()
        """(time, number of steps), one per change of the number."""

    def poll(self) -> SweepProgress:
        """The progress of the sweep now. Raises NotFoundError, StoreError."""
        progress = self.store.index.sweep_progress(self.sweep_id, MAX_FAILURES)
        if progress is None:
            raise no_sweep(self.store, self.sweep_id)
        self.revision, now_s = progress.revision, self.clock()
        if not self._samples or self._samples[-1][1] != progress.steps_done:
            self._samples.append((now_s, progress.steps_done))
        while self._samples and self._samples[0][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()
        rate = self._rate() if progress.status == "running" else None
        return progress.model_copy(update={"steps_per_s": rate, "eta_s": progress.steps_left / rate if rate else None})

    def _rate(self) -> float | None:
        """Steps per second in the window."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None
