"""Writes runs and sweeps into the index. What a run's folder says is one row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from sqlalchemy import ARRAY, Connection, Table, any_, case, delete, func, insert, literal, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import ColumnElement

from cope_sweep.config.keys import flatten
from cope_sweep.records import ACTIVE, RunRecord, SweepSummary, Value
from cope_sweep.store.index.model import RECORD_COLUMNS
from cope_sweep.store.index.tables import MAX_INTEGER, SECTIONS, counters, runs, sweep_runs, sweeps


def replace_row(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Insert a row, or replace the values of the one that has its key."""
    statement = insert_into(connection.dialect.name, table).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=table.primary_key, set_=values))


def write_counters(connection: Connection, **values: int) -> None:
    """Set counters by their names."""
    for name, value in values.items():
        replace_row(connection, counters, {"name": name, "value": value})


def insert_into(dialect: str, table: Table) -> Any:
    """An INSERT of a database's own dialect, which has `on_conflict_do_update` and `on_conflict_do_nothing`."""
    if dialect == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # not needed with an index in SQLite

    return postgresql.insert(table)


def next_revision(connection: Connection, count: int = 1) -> int:
    """The first of `count` new revisions. Other writers wait until this transaction ends."""
    counter = update(counters).where(counters.c.name == "revision").values(value=counters.c.value + count)
    last = connection.execute(counter.returning(counters.c.value)).scalar_one()
    return int(last) - count + 1


def write_runs(connection: Connection, rows: Sequence[RunRecord]) -> None:
    """Insert or replace runs, in the caller's writing transaction; their leases end.

    A run is at most once in `rows`.
    """
    if not rows:
        return
    first = next_revision(connection, len(rows))
    values = [{**_columns(row), "revision": first + index} for index, row in enumerate(rows)]
    connection.execute(_write_run(connection.dialect.name, tuple(values[0])), values)


def write_sweep(
    connection: Connection, summary: SweepSummary, members: Sequence[Mapping[str, Any]], expires_s: Any = None
) -> None:
    """Insert or replace a sweep, in the caller's writing transaction. For the arguments, see `Index.write_sweep`.

    `expires_s` is the end of its lease. A sweep that has ended has none, and no request to stop.
    """
    existing = connection.execute(
        select(sweeps.c.runs, sweeps.c.reused).where(sweeps.c.sweep_id == summary.sweep_id)
    ).one_or_none()
    is_start = expires_s is not None
    values = summary.model_dump(exclude={"counts"}) | {"revision": next_revision(connection)}
    if is_start:
        values["expires_s"] = expires_s
    elif summary.status not in ACTIVE:
        values |= {"expires_s": None, "stop_requested": False}
    # The members of a sweep stay, and only more may follow: most calls write none. The record of a killed sweep may
    # lack rows that its search has suggested.
    if existing is not None and existing.runs > len(members):
        values |= existing._asdict()
    replace_row(connection, sweeps, values)
    # Between the submission of a sweep and its start, others may have finished runs of it.
    if existing is None or existing.runs < len(members) or (is_start and existing.runs == len(members)):
        connection.execute(delete(sweep_runs).where(sweep_runs.c.sweep_id == summary.sweep_id))
        write_members(connection, summary.sweep_id, members)


def write_members(connection: Connection, sweep_id: str, members: Sequence[Mapping[str, Any]], first: int = 0) -> None:
    """Insert runs of a sweep, from the place `first`."""
    entries = [{"sweep_id": sweep_id, "ordinal": first + place, **member} for place, member in enumerate(members)]
    if entries:
        connection.execute(insert(sweep_runs), entries)


@cache
def _write_run(dialect: str, names: tuple[str, ...]) -> Any:
    """The statement that inserts or replaces a run's row. Built once: building takes longer than executing."""
    statement = insert_into(dialect, runs)
    replaced = {name: statement.excluded[name] for name in names if name != "run_id"}
    # A folder of an older version does not say which sweep trained its run.
    replaced["sweep_id"] = func.coalesce(replaced["sweep_id"], runs.c.sweep_id)
    # Never less: the file that has the number may be lost, and an attempt with a number of before could still write.
    replaced["attempt"] = case((replaced["attempt"] > runs.c.attempt, replaced["attempt"]), else_=runs.c.attempt)
    return statement.on_conflict_do_update(index_elements=[runs.c.run_id], set_=replaced)


def spec_values(spec: Mapping[str, Any]) -> dict[str, Value]:
    """The values of a spec by dotted key, without its seed, which is a column; whole numbers are integers.

    Fields of encodings are named by their kinds, and by their places too, for filters: `model.position.0.p_max`.
    """
    sections = {name: spec.get(name) for name in SECTIONS}
    return {
        # One file may say 1e3 where another says 1000. Beyond 64 bits no column could hold the integer.
        key: int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INTEGER else value
        for key, value in flatten(sections, by_place=True)
    }


def among(connection: Connection, column: Any, wanted: Iterable[str | int]) -> ColumnElement[bool]:
    """The column has one of any number of values."""
    # They are one variable of the statement, because both databases limit the number of variables.
    values = list(wanted)
    if connection.dialect.name == "sqlite":
        return cast(
            ColumnElement[bool], column.in_(select(func.json_each(json.dumps(values)).table_valued("value").c.value))
        )
    return cast(ColumnElement[bool], column == any_(literal(values, ARRAY(column.type))))


def _columns(row: RunRecord) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in RECORD_COLUMNS}
    documents = {"metrics": dict(row.metrics), "facts": dict(row.facts), "spec": spec_values(row.spec or {})}
    return values | documents | {"expires_s": None}
