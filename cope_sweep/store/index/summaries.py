"""Summaries over the tables of an index: sweeps with the status of their runs, and where runs are."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func, select

from cope_sweep.store.event import Status
from cope_sweep.store.index.index import Index, summary_of
from cope_sweep.store.index.model import SweepSummary
from cope_sweep.store.index.rows import chunks
from cope_sweep.store.index.tables import counters, runs, sweep_runs, sweeps


def version(index: Index) -> tuple[int, int]:
    """A value that changes with every change of the index, also when it is made again from the run folders."""
    with index.database.reading() as connection:
        found: dict[str, int] = {row.name: row.value for row in connection.execute(select(counters))}
    return found.get("built", 0), found["revision"]


def sweep_page(
    index: Index, *, ablation: str | None = None, limit: int = 100, offset: int = 0
) -> tuple[int, list[SweepSummary]]:
    """The number of all sweeps, or of those of an ablation, and a page of them, newest first."""
    where = () if ablation is None else (sweeps.c.ablation == ablation,)
    page = select(sweeps).where(*where).order_by(sweeps.c.started_ms.desc(), sweeps.c.sweep_id.desc())
    with index.database.reading() as connection:
        total = connection.execute(select(func.count()).select_from(sweeps).where(*where)).scalar_one()
        return int(total), [summary_of(row) for row in connection.execute(page.limit(limit).offset(offset))]


def sweep_counts(index: Index, sweep_ids: Iterable[str]) -> dict[str, dict[Status, int]]:
    """Sweep id → status → the present number of its runs."""
    found: dict[str, dict[Status, int]] = {}
    with index.database.reading() as connection:
        status = func.coalesce(index.status_column(connection), "pending").label("status")
        joined = sweep_runs.outerjoin(runs, runs.c.run_id == sweep_runs.c.run_id)
        query = select(sweep_runs.c.sweep_id, status, func.count()).select_from(joined)
        for chunk in chunks(sweep_ids):
            grouped = query.where(sweep_runs.c.sweep_id.in_(chunk)).group_by(sweep_runs.c.sweep_id, status)
            for sweep_id, name, number in connection.execute(grouped):
                found.setdefault(sweep_id, {})[name] = int(number)
    return found


def places(index: Index, run_ids: Iterable[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Run id → sweep id, ablation and row of the sweeps that contained it, oldest first."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    query = (
        select(sweep_runs.c.run_id, sweep_runs.c.sweep_id, sweeps.c.ablation, sweep_runs.c.row)
        .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        .order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
    )
    with index.database.reading() as connection:
        for chunk in chunks(run_ids):
            for run_id, *place in connection.execute(query.where(sweep_runs.c.run_id.in_(chunk))):
                found.setdefault(run_id, []).append((place[0], place[1], place[2]))
    return found
