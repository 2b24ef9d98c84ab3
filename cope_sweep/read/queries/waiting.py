"""Why runs of a sweep are not in training there: what they wait for, or which other sweep trains them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cope_sweep.store import ACTIVE, ENDED, RunRecord, Status, SweepSummary


@dataclass(frozen=True)
class Waiting:
    """What the index knows about a sweep, to say why one of its runs waits."""

    sweep: SweepSummary
    records: Mapping[str, RunRecord]
    """Run id → what the index has of the run; without those that nobody has started."""
    leave_out: Collection[Status]
    """Statuses of runs that the sweep does not train."""
    is_stopping: bool
    """The sweep was asked to stop."""

    @property
    def training(self) -> int:
        """The number of runs that the sweep trains now."""
        return sum(self._trains(run) for run in self.records.values() if run.sweep_id == self.sweep.sweep_id)

    def status(self, run: RunRecord) -> Status:
        """The status by which the sweep counts a run: an active one waits for the runs that another one trains."""
        is_elsewhere = self._trains(run) and run.sweep_id != self.sweep.sweep_id
        return "pending" if is_elsewhere and self.sweep.status in ACTIVE else run.as_counted().status

    def reason(self, run: RunRecord, training: int) -> str | None:
        """Why a run is not in training in the sweep, which trains `training` others; None: it is, or it has ended."""
        is_active, is_own = self.sweep.status in ACTIVE, run.sweep_id == self.sweep.sweep_id
        is_leased = run.status == "running"
        if is_leased and not is_own:
            does = "trains it" if self._trains(run) else "has leased it"
            if is_active:
                return f"waits for the sweep {run.sweep_id}, which {does}"
            return f"the sweep {run.sweep_id} {does}"
        is_kept = run.status == "stopped" and "stopped" in self.leave_out
        has_ended = run.status == "finished" or is_kept or (run.status in ENDED and is_own)
        if not is_active or has_ended or self._trains(run):
            return None
        if self.is_stopping:
            return "is not started: the sweep was asked to stop"
        if self.sweep.status == "pending":
            return "waits for the sweep to start"
        if run.status in self.leave_out:
            return f"stays {run.status}: the sweep leaves such runs out"
        workers = f"a free worker ({training} in training)" if training else "the first worker to start"
        place = f"waits for {workers}"
        if is_leased:  # it is next, or its process starts
            return f"next: {place}" + (f"; attempt {run.attempt}" if run.attempt > 1 else "")
        if run.status == "failed":
            return f"{place}; failed in the sweep {run.sweep_id} and is tried again"
        return f"{place}; continues from step {run.step}" if run.status in ("interrupted", "stopped") else place

    @staticmethod
    def _trains(run: RunRecord) -> bool:
        """A worker trains the run."""
        return run.status == "running" and run.worker_id is not None
