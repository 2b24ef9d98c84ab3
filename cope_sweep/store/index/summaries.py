"""Answers from the tables of an index: sweeps with the status of their runs, the places of runs, and totals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, bindparam, func, select, text, update

from cope_sweep.store.event import Status
from cope_sweep.store.index.filters import conditions, order_of
from cope_sweep.store.index.index import Index, summary_of
from cope_sweep.store.index.model import RunQuery, SweepSummary
from cope_sweep.store.index.owners import is_gone
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
    for in_sweeps in places(index, dict(index.expired())).values():
        for sweep_id in {place[0] for place in in_sweeps} & found.keys():
            _interrupt(found[sweep_id], 1)
    return {sweep_id: +counts for sweep_id, counts in found.items()}


def plan_counts(index: Index, run_ids: Sequence[str]) -> dict[Status, int]:
    """Status → number of the runs with these ids; those that are not in the index are pending."""
    ids = "SELECT value FROM json_each(:ids)" if index.database.is_sqlite else "SELECT unnest(CAST(:ids AS text[]))"
    query = f"SELECT status, count(*) FROM runs {_small_index(index)} WHERE run_id IN ({ids}) GROUP BY 1"  # noqa: S608
    values = json.dumps(run_ids) if index.database.is_sqlite else list(run_ids)
    with index.database.reading() as connection:
        counts = Counter({row[0]: int(row[1]) for row in connection.execute(text(query), {"ids": values})})
    if counts["running"]:
        _interrupt(counts, len(dict(index.expired()).keys() & set(run_ids)))
    counts["pending"] = len(run_ids) - sum(counts.values())
    return +counts


def newest_ms(index: Index, run_ids: Iterable[str]) -> int | None:
    """The time of the last change of the runs with these ids, in ms since 1970; None if none was begun."""
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


def _interrupt(counts: Counter[Status], number: int) -> None:
    """Count `number` of those that are marked as running as interrupted."""
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


@dataclass(frozen=True)
class Activity:
    """The present state of all runs and sweeps of an index."""

    runs: Mapping[Status, int]
    """Status → number of the runs that were begun."""
    steps: int
    """Training steps of all runs: of a running one, those up to its last heartbeat."""
    shortest_lease_s: float | None
    """Seconds until the first lease of the running runs expires; None if no run is running."""
    sweeps: Mapping[Status, int]
    """Status → number of sweeps. `pending` ones were submitted, and wait for the cluster."""
    waiting: int
    """Runs of the running sweeps that were not begun yet."""
    left_out: int
    """Nodes that the running sweeps have left out because they cannot train."""


def activity(index: Index) -> Activity:
    """The present state: two queries with groups, and one over the runs of running sweeps. Raises StoreError."""
    with index.database.reading() as connection:
        status = index.status_column(connection)
        left_s = func.min(runs.c.expires_s) - index.database.now_s()
        grouped = select(status, func.count(), func.sum(runs.c.step), left_s).group_by(status)
        of_runs = connection.execute(grouped).all()
        of_sweeps = connection.execute(select(sweeps.c.status, func.count()).group_by(sweeps.c.status)).all()
        query = select(sweeps.c.sweep_id, sweeps.c.owner, sweeps.c.left_out).where(sweeps.c.status == "running")
        running = connection.execute(query).all()
    dead = [each for each in running if each.owner and is_gone(each.owner)]
    by_status: Counter[Status] = Counter({row[0]: int(row[1]) for row in of_sweeps})
    _interrupt(by_status, len(dead))
    alive = [each for each in running if each not in dead]
    counts = sweep_counts(index, [each.sweep_id for each in alive]) if alive else {}
    return Activity(
        runs={row[0]: int(row[1]) for row in of_runs},
        steps=sum(int(row[2] or 0) for row in of_runs),
        shortest_lease_s=next((float(row[3]) for row in of_runs if row[0] == "running"), None),
        sweeps=+by_status,
        waiting=sum(each.get("pending", 0) for each in counts.values()),
        left_out=sum(int(each.left_out) for each in alive),
    )


def note_left_out(index: Index, sweep_id: str, nodes: int) -> None:
    """Note how many nodes a sweep has left out. Raises StoreError."""
    with index.database.writing() as connection:
        connection.execute(update(sweeps).where(sweeps.c.sweep_id == sweep_id).values(left_out=nodes))


@dataclass(frozen=True)
class SweepTotals:
    """A sweep and its runs that were begun, by the statuses that were written."""

    revision: int
    """Revision of the index before this was read."""
    sweep: SweepSummary
    runs: dict[Status, tuple[int, int, int]]
    """Status → number of runs, their steps that are done, and all their steps."""
    workers: list[str]
    """The workers of the runs in training."""
    failed: list[tuple[str, str, str | None]]
    """Run id, row and message of the runs that failed last, the newest last."""


def sweep_totals(index: Index, sweep_id: str, most_failed: int) -> SweepTotals | None:
    """The progress of a sweep, with at most so many failed runs; None: there is no such sweep. Raises StoreError."""
    own = (sweep_runs.c.run_id == runs.c.run_id) & (sweep_runs.c.sweep_id == sweep_id)
    grouped = select(runs.c.status, func.count(), func.sum(runs.c.step), func.sum(runs.c.steps)).group_by(runs.c.status)
    failed = select(runs.c.run_id, sweep_runs.c.row, runs.c.message).order_by(runs.c.revision.desc()).limit(most_failed)
    with index.database.reading() as connection:
        # Before the rows: what changes in between is read again.
        revision = connection.execute(select(counters.c.value).where(counters.c.name == "revision")).scalar_one()
        row = connection.execute(select(sweeps).where(sweeps.c.sweep_id == sweep_id)).one_or_none()
        if row is None:
            return None
        found = connection.execute(grouped.join(sweep_runs, own)).all()
        workers = select(runs.c.worker_id).join(sweep_runs, own).where(runs.c.status == "running")
        return SweepTotals(
            int(revision),
            summary_of(row),
            {each[0]: (int(each[1]), int(each[2] or 0), int(each[3] or 0)) for each in found},
            [worker_id or "" for worker_id in connection.execute(workers).scalars()],
            [
                (run_id, name, message)
                for run_id, name, message in connection.execute(
                    failed.join(sweep_runs, own).where(runs.c.status == "failed")
                )
            ][::-1],
        )


def matching(index: Index, query: RunQuery) -> list[str]:
    """The ids of all runs that match, in the order of the query, whose limit and offset are ignored.

    Raises QueryError, StoreError.
    """
    with index.database.reading() as connection:
        status = index.status_column(connection)
        order = order_of(connection, query, status)
        statement = order.joined(select(runs.c.run_id).where(*conditions(connection, query, status)))
        return list(connection.execute(order.sorted(statement)).scalars())
