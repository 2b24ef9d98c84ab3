"""The progress of a running sweep, followed through the changes of the index."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable

from cope_sweep.api.answers import FailedMember, SweepProgress
from cope_sweep.errors import NotFoundError
from cope_sweep.store import Status, Store, SweepSummary
from cope_sweep.store.index import IndexUnavailable, summaries
from cope_sweep.store.index.summaries import MemberState, sweep_changes

ACTIVE: tuple[Status, ...] = ("pending", "running")
"""A sweep that was submitted, and one that is executed."""
ENDED: tuple[Status, ...] = ("finished", "failed", "stopped", "damaged")
"""Runs of which a sweep trains no further step."""
MAX_FAILURES = 20
"""Failed runs that an answer lists."""
RATE_WINDOW_S = 60.0
"""Over which the speed is measured. A run's step is written every few seconds."""


class ProgressTracker:
    """Reads how far a sweep is, again and again. What a call costs grows with what has changed since the last one."""

    def __init__(self, store: Store, sweep_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.sweep_id, self.clock = store, sweep_id, clock
        self.revision = 0
        """Revision of the index at the last call."""
        self._members: dict[str, MemberState] = {}
        """The runs that were begun."""
        self._counts: Counter[Status] = Counter()
        self._failed: dict[str, None] = {}
        """The runs that failed, in the order in which that was noticed."""
        self._training: dict[str, str] = {}
        """Run in training → the machine on which it is trained."""
        self._done = self._left = 0
        """Steps of the runs in `_members`: those that are done, and those that are still to be done."""
        self._steps = 0
        """All steps of the runs in `_members`."""
        self._samples: deque[tuple[float, int]] = deque()
        """Times at which `_done` had changed, and its values."""
        self._planned = 0

    def poll(self) -> SweepProgress:
        """How far the sweep is. Raises NotFoundError, StoreError."""
        with contextlib.suppress(IndexUnavailable):  # who follows a sweep hears that its processes have died
            self.store.end_expired()
        changes = sweep_changes(self.store.index, self.sweep_id, self.revision)
        if changes is None:
            raise NotFoundError(summaries.no_sweep(self.store.index, self.sweep_id, self.store.location))
        if changes.sweep.runs != self._planned and self._planned:
            # A search has added runs, some of which may have been begun before.
            changes = sweep_changes(self.store.index, self.sweep_id) or changes
        self._planned = changes.sweep.runs
        before = self._done
        for member in changes.members:
            self._update(member)
        now_s = self.clock()
        if self._done != before or not self._samples:
            self._samples.append((now_s, self._done))
        while self._samples and self._samples[0][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()
        self.revision = changes.revision
        return self._progress(changes.sweep)

    def _update(self, member: MemberState) -> None:
        if (before := self._members.get(member.run_id)) is not None:
            self._add(before, -1)
        self._members[member.run_id] = member
        self._add(member, 1)
        for known in (self._failed, self._training):
            known.pop(member.run_id, None)
        if member.status == "failed":
            self._failed[member.run_id] = None
        elif member.status == "running":
            self._training[member.run_id] = (member.worker_id or "").rpartition(":")[0]

    def _add(self, member: MemberState, sign: int) -> None:
        self._counts[member.status] += sign
        self._done += sign * member.step
        self._steps += sign * member.steps
        if member.status not in ENDED:
            self._left += sign * (member.steps - member.step)

    def _progress(self, sweep: SweepSummary) -> SweepProgress:
        counts = Counter({status: number for status, number in self._counts.items() if number > 0})
        if unknown := sweep.runs - len(self._members):
            counts["pending"] += unknown
        is_running = sweep.status == "running"
        rate = self._rate() if is_running else None
        failed = [self._members[run_id] for run_id in list(self._failed)[-MAX_FAILURES:]]
        return SweepProgress(
            sweep_id=sweep.sweep_id,
            ablation=sweep.ablation,
            status=sweep.status,
            runs=sweep.runs,
            counts=dict(counts),
            groups=len(self._training) if is_running else None,
            nodes=len(set(self._training.values()) - {""}) if is_running else None,
            steps_per_s=rate,
            eta_s=self._steps_left(sweep.runs) / rate if rate else None,
            failures=[FailedMember(run_id=each.run_id, row=each.row, message=each.message) for each in failed],
        )

    def _rate(self) -> float | None:
        """Steps per second in the window."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None

    def _steps_left(self, runs: int) -> float:
        """Steps that are left. A run that was not begun counts with the mean of the others."""
        mean = self._steps / len(self._members) if self._members else 0.0
        return self._left + mean * max(0, runs - len(self._members))
