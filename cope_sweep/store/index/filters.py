"""Turns a `RunQuery` into SQL."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, or_, select

from cope_sweep.store.index.flatten import columns
from cope_sweep.store.index.model import Filter, Position, QueryError, RunQuery
from cope_sweep.store.index.rows import among
from cope_sweep.store.index.tables import SECTIONS, keys, part_values, run_values, runs, sweep_runs, sweeps

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
TAGS = "tags."
"""Prefix of keys that name the place of a run in sweeps: `tags.row`, `tags.model.position` (a label)."""
TEXT_COLUMNS = ("run_id", "worker_id", "message", "sweep_id", "parent_id", "status")


def conditions(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """The WHERE clause of a query; `status` is the status with expired leases. Raises QueryError."""
    found: list[ColumnElement[bool]] = []
    if query.statuses:
        # Only these two depend on leases. The others are read from the index of the column.
        depends = not {"running", "interrupted"}.isdisjoint(query.statuses)
        found.append((status if depends else runs.c.status).in_(query.statuses))
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
    if each.key.startswith(TAGS):
        return _tag_condition(each, compare)
    key = key_number(connection, each.key)
    section = each.key.partition(".")[0]
    table, owner = (part_values, part_values.c.part) if section in SECTIONS else (run_values, run_values.c.run)
    number, text = columns(each.value)
    column = table.c.text if number is None else table.c.number
    matching = select(owner).where(table.c.key == key, compare(column, text if number is None else number))
    target = runs.c[f"{section}_part"] if section in SECTIONS else runs.c.id
    return target.in_(matching)


def _tag_condition(each: Filter, compare: Callable[[Any, Any], Any]) -> ColumnElement[bool]:
    """A condition on the place of a run in a sweep: the sweep, its ablation, the row, or the row's label of an axis."""
    name = each.key.removeprefix(TAGS)
    named = {"sweep": sweep_runs.c.sweep_id, "ablation": sweeps.c.ablation, "row": sweep_runs.c.row}
    column = named[name] if name in named else sweep_runs.c.labels[name].as_string()
    joined = select(sweep_runs.c.run_id).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
    return runs.c.run_id.in_(joined.where(compare(column, str(columns(each.value)[1] or each.value))))


def key_number(connection: Connection, name: str) -> int:
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


@dataclass(frozen=True)
class Order:
    """The order of a query: columns, each ascending or descending, without values last; at the end the run id."""

    columns: tuple[ColumnElement[Any], ...]
    """The last one is the run id, which no two runs share."""
    descending: tuple[bool, ...]
    joined: tuple[Table, ColumnElement[bool]] | None
    """The table of the values and the condition on its rows, if the values are not columns of `runs`."""

    def applied(self, statement: Select[Any]) -> Select[Any]:
        """A statement about `runs` in this order."""
        if self.joined is not None:
            statement = statement.outerjoin(*self.joined)
        directions = zip(self.columns, self.descending, strict=True)
        return statement.order_by(*((each.desc() if down else each.asc()).nulls_last() for each, down in directions))

    def after(self, position: Position) -> ColumnElement[bool]:
        """The condition that a run comes after a position. Raises QueryError for one of another order."""
        if len(position) != len(self.columns):
            raise QueryError("the cursor belongs to another query; begin with the first page")
        found: list[ColumnElement[bool]] = []
        equal: list[ColumnElement[bool]] = []
        for column, down, value in zip(self.columns, self.descending, position, strict=True):
            if value is not None:  # nothing of a column comes after a missing value
                later = column < value if down else column > value
                found.append(and_(*equal, or_(later, column.is_(None))))
            equal.append(column.is_(None) if value is None else column == value)
        return or_(*found)


def order_of(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> Order:
    """The order of a query. Raises QueryError."""
    if query.sort == "run_id":
        return Order((runs.c.run_id,), (query.descending,), None)
    down = query.descending
    if query.sort == "status" or query.sort in COLUMNS:
        column = status if query.sort == "status" else runs.c[query.sort]
        return Order((column, runs.c.run_id), (down, False), None)
    if query.sort.startswith(TAGS):
        raise QueryError(f"{query.sort}: runs cannot be sorted by tags; sort by a value of the run, or run_id, step, …")
    key, section = key_number(connection, query.sort), query.sort.partition(".")[0]
    if section in SECTIONS:
        table, owner = part_values, and_(part_values.c.part == runs.c[f"{section}_part"], part_values.c.key == key)
    else:
        table, owner = run_values, and_(run_values.c.run == runs.c.id, run_values.c.key == key)
    return Order((table.c.number, table.c.text, runs.c.run_id), (down, down, False), (table, owner))


def ordered(connection: Connection, statement: Select[Any], query: RunQuery, status: ColumnElement[str]) -> Select[Any]:
    """A statement in the order of a query; runs without a value come last. Raises QueryError."""
    return order_of(connection, query, status).applied(statement)
