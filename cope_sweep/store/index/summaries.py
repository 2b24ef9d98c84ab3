"""Summaries over the tables of an index: sweeps with the status of their runs, and where runs are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, bindparam, func, select, text

from cope_sweep.store.event import Status
from cope_sweep.store.index.index import Index, summary_of
from cope_sweep.store.index.model import SweepSummary
from cope_sweep.store.index.rows import among
from cope_sweep.store.index.tables import counters, runs, sweep_runs, sweeps

SHOWN = 40
"""Characters of an unknown id that a message shows."""
SHORTEST_PREFIX, DAY = 4, 8
"""Characters of ids of runs and of sweeps that have to be equal for a proposal."""
PROPOSED = 3


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


def sweeps_with_status(index: Index, statuses: Collection[Status]) -> list[SweepSummary]:
    """The sweeps with one of these statuses, oldest first."""
    query = select(sweeps).where(sweeps.c.status.in_(list(statuses))).order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
    with index.database.reading() as connection:
        found = [summary_of(row) for row in connection.execute(query)]
    return [each for each in found if each.status in statuses]


def sweep_counts(index: Index, sweep_ids: Iterable[str]) -> dict[str, dict[Status, int]]:
    """Sweep id → status → the present number of its runs."""
    found: dict[str, Counter[Status]] = {}
    query = f"""
        SELECT member.sweep_id, coalesce(run.status, 'pending'), count(*)
        FROM sweep_runs AS member LEFT JOIN runs AS run {_small_index(index)} ON run.run_id = member.run_id
        WHERE member.sweep_id IN :sweep_ids GROUP BY 1, 2
    """  # noqa: S608 - constants
    wanted: BindParameter[list[str]] = bindparam("sweep_ids", list(sweep_ids), expanding=True)
    with index.database.reading() as connection:
        for sweep_id, name, number in connection.execute(text(query).bindparams(wanted)):
            found.setdefault(sweep_id, Counter())[name] = int(number)
    for in_sweeps in places(index, _expired(index)).values():
        for sweep_id in {place[0] for place in in_sweeps} & found.keys():
            _correct(found[sweep_id], 1)
    return {sweep_id: _positive(counts) for sweep_id, counts in found.items()}


def plan_counts(index: Index, run_ids: Sequence[str]) -> dict[Status, int]:
    """Status → number of the runs with these ids; those that are not in the index are pending."""
    ids = "SELECT value FROM json_each(:ids)" if index.database.is_sqlite else "SELECT unnest(CAST(:ids AS text[]))"
    query = f"SELECT status, count(*) FROM runs {_small_index(index)} WHERE run_id IN ({ids}) GROUP BY 1"  # noqa: S608
    values = json.dumps(run_ids) if index.database.is_sqlite else list(run_ids)
    with index.database.reading() as connection:
        counts = Counter({row[0]: int(row[1]) for row in connection.execute(text(query), {"ids": values})})
    if counts["running"]:
        _correct(counts, len(set(_expired(index)) & set(run_ids)))
    counts["pending"] = len(run_ids) - sum(counts.values())
    return _positive(counts)


def newest_ms(index: Index, run_ids: Iterable[str]) -> int | None:
    """When the last of the runs with these ids changed, in ms since 1970; None if none was begun."""
    changed = func.max(func.coalesce(runs.c.ended_ms, runs.c.updated_ms, runs.c.created_ms))
    with index.database.reading() as connection:
        return connection.execute(select(changed).where(among(connection, runs.c.run_id, run_ids))).scalar()


def facts(index: Index, run_ids: Iterable[str], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Run id → its facts with these names; null for those that it lacks."""
    query = select(runs.c.run_id, *(runs.c.facts[name] for name in names))
    with index.database.reading() as connection:
        rows = connection.execute(query.where(among(connection, runs.c.run_id, run_ids)))
        return {row[0]: tuple(row[1:]) for row in rows}


def _small_index(index: Index) -> str:
    """Makes SQLite read run ids and statuses from the index that holds both, instead of the wide rows of the runs.

    Without statistics, it prefers the unique index of run ids. SQLAlchemy has no hints for SQLite.
    """
    return "INDEXED BY runs_by_id_and_status" if index.database.is_sqlite else ""


def _positive(counts: Counter[Status]) -> dict[Status, int]:
    return {status: number for status, number in counts.items() if number > 0}


def _expired(index: Index) -> list[str]:
    """The runs that are marked as running and read as interrupted."""
    return [run_id for run_id, _ in index.expired()]


def _correct(counts: Counter[Status], number: int) -> None:
    """Count `number` running runs as interrupted."""
    if number:
        counts.update({"running": -number, "interrupted": number})


def places(index: Index, run_ids: Iterable[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Run id → sweep id, ablation and row of the sweeps that contained it, oldest first."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    query = (
        select(sweep_runs.c.run_id, sweep_runs.c.sweep_id, sweeps.c.ablation, sweep_runs.c.row)
        .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        .order_by(sweeps.c.started_ms, sweeps.c.sweep_id)
    )
    with index.database.reading() as connection:
        for run_id, *place in connection.execute(query.where(among(connection, sweep_runs.c.run_id, run_ids))):
            found.setdefault(run_id, []).append((place[0], place[1], place[2]))
    return found


def sweep_rows(index: Index, sweep_id: str) -> dict[str, str]:
    """Run id → row, of the runs of a sweep, in its order."""
    query = select(sweep_runs.c.run_id, sweep_runs.c.row).where(sweep_runs.c.sweep_id == sweep_id)
    with index.database.reading() as connection:
        return {row[0]: row[1] for row in connection.execute(query.order_by(sweep_runs.c.ordinal))}


def no_run(index: Index, name: str, location: str) -> str:
    """A message about an unknown run, which proposes ids that begin alike."""
    return f"no run {name[:SHOWN]!r} in the store {location}{_similar(index, runs.c.run_id, name, SHORTEST_PREFIX)}" + (
        "; `cope-sweep runs` lists them"
    )


def no_sweep(index: Index, name: str, location: str) -> str:
    """A message about an unknown sweep, which proposes ids that begin alike, such as those of the same day."""
    return f"no sweep {name[:SHOWN]!r} in the store {location}{_similar(index, sweeps.c.sweep_id, name, DAY)}" + (
        "; `cope-sweep status` lists them"
    )


def _similar(index: Index, column: ColumnElement[str], name: str, shortest: int) -> str:
    """`; did you mean …?` with the ids that share the longest beginning, of at least `shortest` characters."""
    with index.database.reading() as connection:
        for length in range(min(len(name), SHOWN), shortest - 1, -1):
            query = select(column).where(column.startswith(name[:length], autoescape=True)).order_by(column)
            if found := list(connection.execute(query.limit(PROPOSED)).scalars()):
                return f"; did you mean {' or '.join(found)}?"
    return ""


def recorded_rows(index: Index, ablation: str) -> list[tuple[str, dict[str, str]]]:
    """Run id and labels of the runs in the sweeps of an ablation, each once, oldest first."""
    query = (
        select(sweep_runs.c.run_id, sweep_runs.c.labels)
        .join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        .where(sweeps.c.ablation == ablation)
        .order_by(sweeps.c.started_ms, sweep_runs.c.sweep_id, sweep_runs.c.ordinal)
    )
    with index.database.reading() as connection:
        found = {row.run_id: dict(row.labels) for row in connection.execute(query)}
    return list(found.items())
