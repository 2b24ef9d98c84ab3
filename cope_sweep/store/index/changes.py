"""Changes in a sweep since a revision: for readers that keep what they have read."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from cope_sweep.store.event import Status
from cope_sweep.store.index.index import Index, summary_of
from cope_sweep.store.index.model import SweepSummary
from cope_sweep.store.index.tables import counters, runs, sweep_runs, sweeps


@dataclass(frozen=True)
class MemberState:
    """How far a run of a sweep is, with the status that was written."""

    run_id: str
    row: str
    status: Status
    step: int
    steps: int
    worker_id: str | None
    message: str | None


@dataclass(frozen=True)
class SweepChanges:
    """Changes in a sweep after a revision."""

    revision: int
    """Revision of the index when this was read."""
    sweep: SweepSummary
    members: list[MemberState]


def sweep_changes(index: Index, sweep_id: str, after: int = 0) -> SweepChanges | None:
    """A sweep, and those of its runs that changed after a revision; None where there is no such sweep.

    The time that it takes grows with the number of runs that changed in the store, not with that of all runs.
    Raises StoreError.
    """
    known = select(
        runs.c.run_id, sweep_runs.c.row, runs.c.status, runs.c.step, runs.c.steps, runs.c.worker_id, runs.c.message
    ).join(sweep_runs, sweep_runs.c.run_id == runs.c.run_id)
    with index.database.reading() as connection:
        # Before the rows: what changes in between is read again.
        revision = connection.execute(select(counters.c.value).where(counters.c.name == "revision")).scalar_one()
        row = connection.execute(select(sweeps).where(sweeps.c.sweep_id == sweep_id)).one_or_none()
        if row is None:
            return None
        changed = known.where(sweep_runs.c.sweep_id == sweep_id, runs.c.revision > after)
        members = [MemberState(*each) for each in connection.execute(changed)]
        return SweepChanges(int(revision), summary_of(row), members)
