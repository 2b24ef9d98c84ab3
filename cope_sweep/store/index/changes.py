"""What has changed in an index since a revision: for readers that keep what they have read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import func, select

from cope_sweep.store.event import Status
from cope_sweep.store.index.index import Index, part_values_of, record_columns, record_of, summary_of
from cope_sweep.store.index.model import RunRecord, SweepSummary, Value
from cope_sweep.store.index.tables import SECTIONS, counters, runs, sweep_runs, sweeps


@dataclass(frozen=True)
class RunChanges:
    """Runs that changed after a revision."""

    records: dict[str, RunRecord]
    """Run id → record, with the status that was written: it does not tell that a lease has expired since."""
    parts: dict[str, tuple[int | None, ...]]
    """Run id → the numbers of the parts of its spec, one for each of `SECTIONS`; runs with equal parts share them."""
    values: dict[int, dict[str, Value]]
    """Part → its values by dotted key (`model.layers`), of the parts that the reader did not know."""
    total: int
    """Number of runs in the index."""


def run_changes(index: Index, after: int = 0, known_parts: Collection[int] = ()) -> RunChanges:
    """The runs whose revision is greater than `after`. Raises StoreError."""
    part_columns = [runs.c[f"{section}_part"] for section in SECTIONS]
    columns = [*record_columns(), runs.c.status]
    names = [column.name for column in columns]
    query = select(*columns, *part_columns).where(runs.c.revision > after)
    with index.database.reading() as connection:
        total = int(connection.execute(select(func.count()).select_from(runs)).scalar_one())
        rows = [tuple(row) for row in connection.execute(query)]
        parts = {row[0]: row[len(columns) :] for row in rows}
        wanted = {part for each in parts.values() for part in each} - set(known_parts)
        values = part_values_of(connection, wanted)
    records = {row[0]: record_of(names, row[: len(columns)]) for row in rows}
    return RunChanges(records, parts, values, total)


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
    """What has changed in a sweep after a revision."""

    revision: int
    """Of the index when this was read."""
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
