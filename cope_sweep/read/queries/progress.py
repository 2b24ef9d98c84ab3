"""The progress of a running sweep, from the totals of its runs in the index."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

from cope_sweep.api.answers import Counts, FailedMember, SweepProgress
from cope_sweep.errors import NotFoundError
from cope_sweep.store import Status, Store
from cope_sweep.store.index import IndexUnavailable, summaries
from cope_sweep.store.index.summaries import SweepTotals, sweep_totals

ACTIVE: tuple[Status, ...] = ("pending", "running")
"""A sweep that was submitted, and one that is executed."""
ENDED: tuple[Status, ...] = ("finished", "failed", "stopped", "damaged")
"""Runs of which a sweep trains no further step."""
MAX_FAILURES = 20
"""Failed runs that an answer lists."""
RATE_WINDOW_S = 60.0
"""Over which the speed is measured. A run's step is written every few seconds."""


class ProgressTracker:
    """Reads how far a sweep is, again and again: its speed is that of the steps between two times."""

    def __init__(self, store: Store, sweep_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.sweep_id, self.clock = store, sweep_id, clock
        self.revision = 0
        """Revision of the index at the last call."""
        self._samples: deque[tuple[float, int]] = deque()
        """Times at which the number of steps had changed, and these numbers."""

    def poll(self) -> SweepProgress:
        """The progress of the sweep now. Raises NotFoundError, StoreError."""
        with contextlib.suppress(IndexUnavailable):  # the progress shows that its processes have died
            self.store.end_expired()
        found = sweep_totals(self.store.index, self.sweep_id, MAX_FAILURES)
        if found is None:
            raise NotFoundError(summaries.no_sweep(self.store.index, self.sweep_id, self.store.location))
        self.revision = found.revision
        sweep, now_s = found.sweep, self.clock()
        done = sum(steps for _, steps, _ in found.runs.values())
        if not self._samples or self._samples[-1][1] != done:
            self._samples.append((now_s, done))
        while self._samples and self._samples[0][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()
        counts: Counts = {status: number for status, (number, *_) in found.runs.items()}
        if unknown := sweep.runs - sum(counts.values()):
            counts["pending"] = counts.get("pending", 0) + unknown
        is_running = sweep.status == "running"
        rate = self._rate() if is_running else None
        hosts = {worker_id.rpartition(":")[0] for worker_id in found.workers} - {""}
        return SweepProgress(
            sweep_id=sweep.sweep_id,
            ablation=sweep.ablation,
            status=sweep.status,
            runs=sweep.runs,
            counts=counts,
            groups=len(found.workers) if is_running else None,
            nodes=len(hosts) if is_running else None,
            steps_per_s=rate,
            eta_s=_steps_left(found) / rate if rate else None,
            failures=[FailedMember(run_id=run_id, row=row, message=message) for run_id, row, message in found.failed],
        )

    def _rate(self) -> float | None:
        """Steps per second in the window."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None


def _steps_left(found: SweepTotals) -> float:
    """Steps that are left. A run that was not begun counts with the mean of the others."""
    begun, steps = (sum(each[index] for each in found.runs.values()) for index in (0, 2))
    left = sum(total - done for status, (_, done, total) in found.runs.items() if status not in ENDED)
    return left + (steps / begun if begun else 0.0) * max(0, found.sweep.runs - begun)
