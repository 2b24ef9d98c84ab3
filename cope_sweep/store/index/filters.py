"""Turns a `RunQuery` into SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import CTE, ColumnElement, Connection, Select, Text, and_, case, cast, func, or_, select

from cope_sweep.config.explain import near_names, suggest
from cope_sweep.config.filters import OPERATORS, Filter
from cope_sweep.config.keys import is_field
from cope_sweep.records import STATUSES, Value
from cope_sweep.store.index.cursors import INVALID, SortPosition
from cope_sweep.store.index.model import RECORD_COLUMNS, QueryError, RunQuery
from cope_sweep.store.index.rows import among
from cope_sweep.store.index.tables import SECTIONS, keys, parts, runs, sweep_runs, sweeps

COLUMNS = tuple(name for name in RECORD_COLUMNS if name not in ("status", "metrics", "facts"))
"""Columns of `runs` that a key can name. `status` is another."""
TAGS = "tags."
"""Prefix of keys that name the place of a run in sweeps: `tags.row`, `tags.model.position` (a label)."""
TEXT_COLUMNS = ("run_id", "worker_id", "message", "sweep_id", "status")


def conditions(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """The WHERE clause of a query; `status` is the status with expired leases. Raises QueryError."""
    clauses: list[ColumnElement[bool]] = []
    if query.statuses:
        # Only these two depend on leases. The others are read from the index of the column.
        depends = not {"running", "interrupted"}.isdisjoint(query.statuses)
        clauses.append((status if depends else runs.c.status).in_(query.statuses))
    if query.run_ids is not None:
        clauses.append(among(connection, runs.c.run_id, query.run_ids))
    if query.sweep_id is not None:
        clauses.append(runs.c.run_id.in_(select(sweep_runs.c.run_id).where(sweep_runs.c.sweep_id == query.sweep_id)))
    clauses += [_contains(word) for word in query.search_words]
    return clauses + [_condition(connection, filter_, status) for filter_ in query.filters]


def _contains(word: str) -> ColumnElement[bool]:
    """The condition that a run contains a word of a search, whatever its case."""
    columns = (sweep_runs.c.row, sweeps.c.ablation, sweeps.c.title)
    joined = select(sweep_runs.c.run_id).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
    return or_(
        runs.c.run_id.istartswith(word, autoescape=True),
        runs.c.message.icontains(word, autoescape=True),
        runs.c.run_id.in_(joined.where(or_(*(column.icontains(word, autoescape=True) for column in columns)))),
    )


def _condition(connection: Connection, wanted: Filter, status: ColumnElement[str]) -> ColumnElement[bool]:
    if wanted.operator not in OPERATORS:
        raise QueryError(
            f"{wanted.operator!r} is not an operator; use one of {' '.join(OPERATORS)}",
            code="unknown_operator",
            operator=wanted.operator,
            allowed=list(OPERATORS),
        )
    compare = OPERATORS[wanted.operator]
    if wanted.key == "status" and wanted.value not in STATUSES:
        hint = suggest(str(wanted.value), STATUSES)
        raise QueryError(f"{wanted.value!r} is not a status{hint}", code="unknown_status", status=wanted.value)
    if wanted.key == "status" or wanted.key in COLUMNS:
        column = status if wanted.key == "status" else runs.c[wanted.key]
        if (wanted.key in TEXT_COLUMNS) != isinstance(wanted.value, str) or isinstance(wanted.value, bool):
            kind = "a text" if wanted.key in TEXT_COLUMNS else "a number"
            raise QueryError(
                f"{wanted.key} is {kind}; it cannot be compared with {wanted.value!r}",
                code="not_comparable",
                key=wanted.key,
                value=wanted.value,
            )
        condition: ColumnElement[bool] = compare(column, wanted.value)
        return condition
    if wanted.key.startswith(TAGS):
        return _tag_condition(wanted, compare)
    check_keys(connection, [wanted.key])
    number, text = values_of(connection, wanted.key)
    content = _text(wanted.value)
    _check_type(connection, wanted)
    matches: ColumnElement[bool] = compare(number, wanted.value) if content is None else compare(text, content)
    section = _section(wanted.key)
    if section is None:
        return matches
    return runs.c[f"{section}_part"].in_(select(parts.c.id).where(parts.c.section == section, matches))


def _check_type(connection: Connection, filter_: Filter) -> None:
    """Raise QueryError for a text where all values of a key are numbers, and the reverse: no run could match."""
    number, text = values_of(connection, filter_.key)
    section, is_text = _section(filter_.key), _text(filter_.value) is not None
    if section is None and not filter_.key.startswith("facts.") and not is_text:
        return  # metrics are numbers
    table = runs if section is None else parts
    own = table.c.id.is_not(None) if section is None else parts.c.section == section

    def example(value: ColumnElement[Any]) -> Value | None:
        first: Value | None = connection.execute(select(value).where(own, value.is_not(None)).limit(1)).scalar()
        return first

    wanted, other = (text, number) if is_text else (number, text)
    if example(wanted) is None and (other_value := example(other)) is not None:
        kind = "number" if is_text else "text"
        raise QueryError(
            f"{filter_.key} is a {kind} in all runs, for example {other_value!r}, so it cannot be compared with "
            f"{filter_.value!r}",
            code="not_comparable",
            key=filter_.key,
            value=filter_.value,
        )


def _tag_condition(filter_: Filter, compare: Callable[[Any, Any], Any]) -> ColumnElement[bool]:
    """A condition on the place of a run in a sweep: the sweep, its ablation, the row, or the row's label of an axis."""
    name = filter_.key.removeprefix(TAGS)
    named = {"sweep": sweep_runs.c.sweep_id, "ablation": sweeps.c.ablation, "row": sweep_runs.c.row}
    column = named[name] if name in named else sweep_runs.c.labels[name].as_string()
    joined = select(sweep_runs.c.run_id).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
    return runs.c.run_id.in_(joined.where(compare(column, _text(filter_.value) or str(filter_.value))))


def _text(value: Value) -> str | None:
    """A value as a text; None for a number. Booleans are compared as texts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else None


def _section(key: str) -> str | None:
    """The section of a spec's value; None for a metric or a fact."""
    section = key.partition(".")[0]
    return section if section in SECTIONS else None


def values_of(connection: Connection, key: str) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """A value as a number and as a text, one of them null: a column of `runs`, or, for a spec, of `parts`.

    Metrics count for finished runs only. The type is checked before a value is converted, which could fail.
    """
    fact = key.removeprefix("facts.")
    if _section(key) is None and fact == key:
        finished = runs.c.status == "finished"
        return case((finished, runs.c.metrics[key].as_float())), cast(None, Text)
    column, name = (runs.c.facts, fact) if _section(key) is None else (parts.c.content, key)
    value = column[name]
    if connection.dialect.name == "sqlite":
        kind = func.json_type(column, f'$."{name}"')
        text = case((kind == "text", value.as_string()), (kind.in_(["true", "false"]), kind))
        return case((kind.in_(["integer", "real"]), value.as_float())), text
    kind = func.json_typeof(value)
    text = case((kind.in_(["string", "boolean"]), value.as_string()))
    return case((kind == "number", value.as_float())), text


def check_keys(connection: Connection, names: Iterable[str]) -> None:
    """Raise QueryError with near names if a key is neither a column of runs nor a value of any run."""
    for name in names:
        if name in COLUMNS or name == "status":
            continue
        if connection.execute(select(keys.c.id).where(keys.c.name == name)).scalar() is not None:
            continue
        known = [*COLUMNS, "status", *filter(_is_shown, connection.execute(select(keys.c.name)).scalars())]
        near = near_names(name, known)
        hint = "; write a key like `model.layers`, `test/perplexity` or `facts.device`"
        if near:
            hint = f"; similar keys: {', '.join(near)}"
        raise QueryError(f"no run of this store has {name!r}{hint}", code="unknown_key", key=name, near=near)


def _is_shown(name: str) -> bool:
    """Whether a hint names a key: not the place of an encoding, which its kind names as well."""
    return not (is_field(name) and name.split(".")[2].isdigit())


@dataclass(frozen=True)
class Order:
    """The order of a query: columns, each ascending or descending, without values last; at the end the run id."""

    columns: tuple[ColumnElement[Any], ...]
    """The last one is the run id, which no two runs share."""
    descending: tuple[bool, ...]
    part: ColumnElement[int] | None = None
    """The column of `runs` that names the part with the values, if they are of the spec."""
    values: CTE | None = None
    """The values of these parts, each read from its JSON once: there are few parts, and many runs."""

    def joined(self, statement: Select[Any]) -> Select[Any]:
        """A statement about `runs` with the table of the columns."""
        return statement if self.values is None else statement.outerjoin(self.values, self.values.c.id == self.part)

    def sorted(self, statement: Select[Any]) -> Select[Any]:
        """A statement that has the columns, in this order."""
        directions = zip(self.columns, self.descending, strict=True)
        return statement.order_by(
            *((column.desc() if down else column.asc()).nulls_last() for column, down in directions)
        )

    def after(self, position: SortPosition) -> ColumnElement[bool]:
        """The condition that a run comes after a position. Raises QueryError for one of another order."""
        if len(position) != len(self.columns):
            raise QueryError(INVALID, code="another_cursor")
        clauses: list[ColumnElement[bool]] = []
        equal: list[ColumnElement[bool]] = []
        for column, down, value in zip(self.columns, self.descending, position, strict=True):
            if value is not None:  # nothing of a column comes after a missing value
                later = column < value if down else column > value
                clauses.append(and_(*equal, or_(later, column.is_(None))))
            equal.append(column.is_(None) if value is None else column == value)
        return or_(*clauses)


def count_statements(
    query: RunQuery, where: Sequence[ColumnElement[bool]], order: Order
) -> tuple[Select[Any], ColumnElement[int], Order]:
    """Statements for the numbers of the runs that match, with the columns of the order, and for how many they are.

    A filter by a metric or a fact parses the JSON of every run. The matching runs are then selected once for both, and
    the order is one of what was selected.
    """
    statement = order.joined(select(runs.c.id, *order.columns).where(*where))
    if all(
        filter_.key in (*COLUMNS, "status") or filter_.key.startswith(TAGS) or _section(filter_.key)
        for filter_ in query.filters
    ):
        total = select(func.count()).select_from(runs).where(*where).correlate(None).scalar_subquery()
        return statement, total, order
    once = statement.cte("matching")
    total = select(func.count()).select_from(once).scalar_subquery()
    return select(once), total, replace(order, columns=tuple(once.c)[1:], part=None, values=None)


def order_of(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> Order:
    """The order of a query. Raises QueryError."""
    if query.sort == "run_id":
        return Order((runs.c.run_id,), (query.descending,))
    down = query.descending
    if query.sort == "status" or query.sort in COLUMNS:
        column = status if query.sort == "status" else runs.c[query.sort]
        return Order((column, runs.c.run_id), (down, False))
    if query.sort.startswith(TAGS):
        raise QueryError(
            f"{query.sort}: runs cannot be sorted by tags; sort by a value of the run, or run_id, step, …",
            code="not_sortable",
            key=query.sort,
        )
    check_keys(connection, [query.sort])
    section = _section(query.sort)
    number, text = values_of(connection, query.sort)
    if section is None:
        return Order((number, text, runs.c.run_id), (down, down, False))
    of_parts = select(parts.c.id, number.label("number"), text.label("text")).where(parts.c.section == section)
    values = of_parts.cte("sorted_by").prefix_with("MATERIALIZED")
    columns = (values.c.number, values.c.text, runs.c.run_id)
    return Order(columns, (down, down, False), runs.c[f"{section}_part"], values)
