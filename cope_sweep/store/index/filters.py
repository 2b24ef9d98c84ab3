"""Turns a `RunQuery` into SQL."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, select

from cope_sweep.store.index.flatten import columns
from cope_sweep.store.index.model import Filter, QueryError, RunQuery
from cope_sweep.store.index.rows import among
from cope_sweep.store.index.tables import SECTIONS, keys, part_values, run_values, runs, sweep_runs

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COLUMNS = (
    "run_id", "seed", "step", "steps", "attempt", "worker_id", "message", "sweep_id", "parent_id", "created_ms",
    "updated_ms", "ended_ms", "revision",
)  # fmt: skip
"""Columns of `runs` that can be named as they are. `status` can be named, too."""
TEXT_COLUMNS = ("run_id", "worker_id", "message", "sweep_id", "parent_id", "status")


def conditions(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """The WHERE clause of a query; `status` is the status with expired leases. Raises QueryError."""
    found: list[ColumnElement[bool]] = []
    if query.statuses:
        found.append(status.in_(query.statuses))
    if query.run_ids is not None:
        found.append(among(connection, runs.c.run_id, query.run_ids))
    if query.sweep_id is not None:
        found.append(runs.c.run_id.in_(select(sweep_runs.c.run_id).where(sweep_runs.c.sweep_id == query.sweep_id)))
    return found + [_condition(connection, each, status) for each in query.filters]


def _condition(connection: Connection, each: Filter, status: ColumnElement[str]) -> ColumnElement[bool]:
    if each.operator not in OPERATORS:
        raise QueryError(f"{each.operator!r} is no operator; use one of {' '.join(OPERATORS)}")
    compare = OPERATORS[each.operator]
    if each.key == "status" or each.key in COLUMNS:
        column = status if each.key == "status" else runs.c[each.key]
        if (each.key in TEXT_COLUMNS) != isinstance(each.value, str) or isinstance(each.value, bool):
            kind = "a text" if each.key in TEXT_COLUMNS else "a number"
            raise QueryError(f"{each.key} is {kind}; it cannot be compared with {each.value!r}")
        condition: ColumnElement[bool] = compare(column, each.value)
        return condition
    key = _key(connection, each.key)
    section = each.key.partition(".")[0]
    table, owner = (part_values, part_values.c.part) if section in SECTIONS else (run_values, run_values.c.run)
    number, text = columns(each.value)
    column = table.c.text if number is None else table.c.number
    matching = select(owner).where(table.c.key == key, compare(column, text if number is None else number))
    target = runs.c[f"{section}_part"] if section in SECTIONS else runs.c.id
    return target.in_(matching)


def _key(connection: Connection, name: str) -> int:
    """The number of a key. Raises QueryError with near names."""
    number = connection.execute(select(keys.c.id).where(keys.c.name == name)).scalar()
    if number is None:
        known = [*COLUMNS, "status", *connection.execute(select(keys.c.name)).scalars()]
        near = difflib.get_close_matches(name, known, n=3)
        hint = (
            f"; near ones: {', '.join(near)}"
            if near
            else "; keys are as `model.layers`, `test/perplexity`, `facts.device`"
        )
        raise QueryError(f"no run of this store has {name!r}{hint}")
    return int(number)


def ordered(connection: Connection, statement: Select[Any], query: RunQuery, status: ColumnElement[str]) -> Select[Any]:
    """A statement in the order of a query; runs without a value come last. Raises QueryError."""
    tail = runs.c.run_id.asc()
    if query.sort == "run_id":
        return statement.order_by(runs.c.run_id.desc() if query.descending else tail)
    if query.sort == "status" or query.sort in COLUMNS:
        columns_of = [status if query.sort == "status" else runs.c[query.sort]]
    else:
        key = _key(connection, query.sort)
        if query.sort.partition(".")[0] in SECTIONS:
            part = runs.c[f"{query.sort.partition('.')[0]}_part"]
            joined = and_(part_values.c.part == part, part_values.c.key == key)
            statement, table = statement.outerjoin(part_values, joined), part_values
        else:
            joined = and_(run_values.c.run == runs.c.id, run_values.c.key == key)
            statement, table = statement.outerjoin(run_values, joined), run_values
        columns_of = [table.c.number, table.c.text]
    order = [(column.desc() if query.descending else column.asc()).nulls_last() for column in columns_of]
    return statement.order_by(*order, tail)
