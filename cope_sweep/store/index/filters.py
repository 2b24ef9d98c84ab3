"""Turns a `RunQuery` into SQL."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Float,
    String,
    Text,
    case,
    cast,
    func,
    literal,
    or_,
    select,
)

from cope_sweep.config.explain import near_names, suggest
from cope_sweep.config.filters import OPERATORS, Filter
from cope_sweep.config.keys import is_field
from cope_sweep.config.source import spellings
from cope_sweep.records import STATUSES, Value
from cope_sweep.store.curve import is_unicode
from cope_sweep.store.index.model import RECORD_COLUMNS, QueryError, RunQuery
from cope_sweep.store.index.rows import among
from cope_sweep.store.index.tables import MAX_INTEGER, SECTIONS, runs, sweep_runs, sweeps

COLUMNS = tuple(name for name in RECORD_COLUMNS if name not in ("status", "metrics", "facts"))
"""Columns of `runs` that a key can name. `status` is another."""
TAGS = "tags."
"""Prefix of keys that name the place of a run in sweeps: `tags.row`, `tags.model.position` (a label)."""
PLACES = {"sweep": sweep_runs.c.sweep_id, "ablation": sweeps.c.ablation, "row": sweep_runs.c.row}
"""Tags that are columns. All others are labels of axes."""
UNUSABLE = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
"""SQLite's paths cannot name a key with one of these characters: JSON text has it escaped, and so does not match."""
HINT_RUNS = 1000
"""The keys of the newest runs are suggested for an unknown one. Those of 100,000 runs would take seconds."""


def conditions(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """The WHERE clause of a query; `status` is the status by which runs are counted. Raises QueryError.

    A key that no run has matches no run: see `check_unmatched`.
    """
    clauses: list[ColumnElement[bool]] = []
    if query.statuses:
        # Only these depend on leases and workers. The others are read from the index of the column.
        depends = not {"running", "interrupted", "pending"}.isdisjoint(query.statuses)
        clauses.append((status if depends else runs.c.status).in_(query.statuses))
    if query.run_ids is not None:
        clauses.append(among(connection, runs.c.run_id, query.run_ids))
    if query.sweep_id is not None:
        _check_value("sweep", query.sweep_id)
        clauses.append(runs.c.run_id.in_(select(sweep_runs.c.run_id).where(sweep_runs.c.sweep_id == query.sweep_id)))
    for word in query.search_words:
        _check_value("search", word)
        clauses.append(_contains(word))
    return clauses + [_condition(connection, filter_, status) for filter_ in query.filters]


def has_name(column: ColumnElement[str], name: str) -> ColumnElement[bool]:
    """The condition that a column has a name, in whichever form of Unicode."""
    return column.in_(spellings(name))


def _contains(word: str) -> ColumnElement[bool]:
    """The condition that a run contains a word of a search, whatever its case."""
    columns = (sweep_runs.c.row, sweeps.c.ablation, sweeps.c.title)
    joined = select(sweep_runs.c.run_id).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)

    def has_word(column: ColumnElement[Any]) -> ColumnElement[bool]:
        # Escaped: `%` and `_` are characters of a word, and no wildcards.
        return or_(*(column.icontains(form, autoescape=True) for form in spellings(word)))

    return or_(
        runs.c.run_id.istartswith(word, autoescape=True),
        has_word(runs.c.message),
        runs.c.run_id.in_(joined.where(or_(*map(has_word, columns)))),
    )


def _condition(connection: Connection, wanted: Filter, status: ColumnElement[str]) -> ColumnElement[bool]:
    if wanted.operator not in OPERATORS:
        raise QueryError(
            f"{wanted.operator!r} is not an operator; use one of {' '.join(OPERATORS)}",
            code="unknown_operator",
            operator=wanted.operator,
            allowed=list(OPERATORS),
        )
    _check_value(wanted.key, wanted.value)
    if wanted.key == "status" and wanted.value not in STATUSES:
        hint = suggest(str(wanted.value), STATUSES)
        raise QueryError(f"{wanted.value!r} is not a status{hint}", code="unknown_status", status=wanted.value)
    if wanted.key == "status" or wanted.key in COLUMNS:
        column = status if wanted.key == "status" else runs.c[wanted.key]
        is_text = isinstance(runs.c[wanted.key].type, String)
        # A bool is a number to Python, but not to PostgreSQL.
        if is_text != isinstance(wanted.value, str) or isinstance(wanted.value, bool):
            kind = "a text" if is_text else "a number"
            raise QueryError(
                f"{wanted.key} is {kind}; it cannot be compared with {wanted.value!r}",
                code="not_comparable",
                key=wanted.key,
                value=wanted.value,
            )
        return _compared(column, wanted)
    content = _text(wanted.value)
    if wanted.key.startswith(TAGS):
        joined = select(sweep_runs.c.run_id).join(sweeps, sweeps.c.sweep_id == sweep_runs.c.sweep_id)
        # Labels are texts: a number is compared as it was typed.
        typed = str(wanted.value) if wanted.typed is None else wanted.typed
        named = replace(wanted, value=typed if content is None else content)
        return runs.c.run_id.in_(joined.where(_compared(_tag(wanted.key), named)))
    number, text = values_of(connection, wanted.key)
    if content is None:
        return _compared(number, wanted)
    return _compared(text, replace(wanted, value=content))


def _compared(column: ColumnElement[Any], wanted: Filter) -> ColumnElement[bool]:
    """The condition on a column; a text is equal in whichever form of Unicode."""
    if isinstance(wanted.value, str) and len(forms := spellings(wanted.value)) > 1:
        values = [literal(form, String) for form in forms]
        if wanted.operator == "=":
            return column.in_(values)
        if wanted.operator == "!=":
            return column.not_in(values)
    condition: ColumnElement[bool] = OPERATORS[wanted.operator](column, _literal(wanted.value))
    return condition


def _check_value(key: str, value: Value) -> None:
    """Raise QueryError for a value that not every database can hold; it would answer as if it were out of order."""
    problem = None
    if isinstance(value, str):
        if "\0" in value:
            problem = "contains a null character"
        elif not is_unicode(value):
            problem = "is not Unicode text"
    elif isinstance(value, float):
        problem = None if math.isfinite(value) else "is not a finite number"
    elif abs(value) > MAX_INTEGER:
        problem = "is too large for an integer"
    if problem is not None:
        # As a text: JSON has no NaN, and many readers of it no such integers.
        raise QueryError(f"{key}: {value!r} {problem}", code="invalid_value", key=key, value=repr(value))


def _literal(value: Value) -> ColumnElement[Any]:
    """A value with its own type: PostgreSQL would round 1.5 to compare it with a column of integers."""
    if isinstance(value, str):
        return literal(value, String)
    return literal(value, Float if isinstance(value, float) else BigInteger)


def _text(value: Value) -> str | None:
    """A value as a text; None for a number. Booleans are compared as texts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else None


def _tag(key: str) -> ColumnElement[str]:
    """The place of a run in a sweep: the sweep, its ablation, the row, or the row's label of an axis."""
    name = key.removeprefix(TAGS)
    if name in PLACES:
        return PLACES[name]
    _check_usable(key)
    label: ColumnElement[str] = sweep_runs.c.labels[name].as_string()
    return label


def _place(key: str) -> tuple[ColumnElement[Any], str]:
    """The column of `runs` that has the value of a key, and its name there."""
    if key.startswith("facts."):
        return runs.c.facts, key.removeprefix("facts.")
    return (runs.c.spec if _is_spec(key) else runs.c.metrics), key


def _is_spec(key: str) -> bool:
    return key.partition(".")[0] in SECTIONS


def values_of(connection: Connection, key: str) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """A value as a number and as a text, one of them null. Raises QueryError for a key that no run can have.

    Metrics count for finished runs only. The type is checked before a value is converted, which could fail.
    """
    _check_usable(key)
    number, text = _values_at(connection, key)
    # `{kind: muon, momentum: 0.9}` has its name below `train.optimizer`, and `muon` alone has it there.
    return number, func.coalesce(text, _values_at(connection, f"{key}.kind")[1]) if _is_spec(key) else text


def _values_at(connection: Connection, key: str) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    column, name = _place(key)
    value = column[name]
    if column is runs.c.metrics:
        return case((runs.c.status == "finished", value.as_float())), cast(None, Text)
    if connection.dialect.name == "sqlite":
        kind = func.json_type(column, f'$."{name}"')
        text = case((kind == "text", value.as_string()), (kind.in_(["true", "false"]), kind))
        return case((kind.in_(["integer", "real"]), value.as_float())), text
    kind = func.json_typeof(value)
    text = case((kind.in_(["string", "boolean"]), value.as_string()))
    return case((kind == "number", value.as_float())), text


def check_unmatched(connection: Connection, query: RunQuery) -> None:
    """Raise QueryError if a filter of a query that matches no run could match none: a wrong key, or a wrong type.

    It looks for a run that has the key, which may read all of them; so it is not called where runs match.
    """
    for filter_ in query.filters:
        check_keys(connection, [filter_.key])
        if not filter_.key.startswith(TAGS) and filter_.key not in (*COLUMNS, "status"):
            _check_type(connection, filter_)


def _check_type(connection: Connection, filter_: Filter) -> None:
    """Raise QueryError for a text where all values of a key are numbers, and the reverse."""
    number, text = values_of(connection, filter_.key)
    is_text = _text(filter_.value) is not None
    wanted, other = (text, number) if is_text else (number, text)
    if _example(connection, wanted) is None and (other_value := _example(connection, other)) is not None:
        kind = "number" if is_text else "text"
        raise QueryError(
            f"{filter_.key} is a {kind} in all runs, for example {other_value!r}, so it cannot be compared with "
            f"{filter_.value!r}",
            code="not_comparable",
            key=filter_.key,
            value=filter_.value,
        )


def _example(connection: Connection, value: ColumnElement[Any]) -> Value | None:
    first: Value | None = connection.execute(select(value).where(value.is_not(None)).limit(1)).scalar()
    return first


def check_keys(connection: Connection, names: Iterable[str]) -> None:
    """Raise QueryError with near names if a key is neither a column of runs nor a value of any run."""
    for name in names:
        if name in COLUMNS or name == "status" or _is_known(connection, name):
            continue
        known = [*COLUMNS, "status", *filter(_is_shown, _known_keys(connection, tags=name.startswith(TAGS)))]
        near = near_names(name, known)
        hint = "; write a key like `model.layers`, `test/perplexity` or `facts.device`"
        if near:
            hint = f"; similar keys: {', '.join(near)}"
        raise QueryError(f"no run of this store has {name!r}{hint}", code="unknown_key", key=name, near=near)


def _is_known(connection: Connection, key: str) -> bool:
    if UNUSABLE.search(key):
        return False
    if key.startswith(TAGS):
        return key.removeprefix(TAGS) in PLACES or _example(connection, _tag(key)) is not None
    column, name = _place(key)
    # The metrics of a run in training are known, too, although `values_of` has none for it.
    values = [column[name].as_float()] if column is runs.c.metrics else values_of(connection, key)
    has_value = or_(*(value.is_not(None) for value in values))
    return connection.execute(select(runs.c.id).where(has_value).limit(1)).scalar() is not None


def _check_usable(key: str) -> None:
    if UNUSABLE.search(key):
        raise QueryError(f"no run of this store has {key!r}", code="unknown_key", key=key, near=[])


def _known_keys(connection: Connection, *, tags: bool) -> list[str]:
    """The keys of the newest runs, or of their tags."""
    if tags:
        newest = select(sweep_runs.c.labels).order_by(sweep_runs.c.sweep_id.desc()).limit(HINT_RUNS)
        labels = {name for labels in connection.execute(newest).scalars() for name in labels}
        return [f"{TAGS}{name}" for name in sorted({*PLACES, *labels})]
    newest = select(runs.c.spec, runs.c.metrics, runs.c.facts).order_by(runs.c.id.desc()).limit(HINT_RUNS)
    known = set()
    for spec, metrics, facts in connection.execute(newest):
        known |= {*spec, *metrics, *(f"facts.{name}" for name, value in facts.items() if is_value(value))}
    return sorted(known)


def is_value(value: object) -> bool:
    """The fact can be filtered: it is no list and no object."""
    return isinstance(value, (bool, int, float, str))


def _is_shown(name: str) -> bool:
    """Hints do not name the place of an encoding, which its kind names as well."""
    return not (is_field(name) and name.split(".")[2].isdigit())


def sort_columns(connection: Connection, query: RunQuery, status: ColumnElement[str]) -> list[ColumnElement[Any]]:
    """The columns that a query is sorted by, before the run id; none if it is sorted by that. Raises QueryError."""
    if query.sort in (None, "run_id"):
        return []
    if query.sort == "status" or query.sort in COLUMNS:
        return [status if query.sort == "status" else runs.c[query.sort]]
    if query.sort.startswith(TAGS):
        raise QueryError(
            f"{query.sort}: runs cannot be sorted by tags; sort by a value of the run, or run_id, step, …",
            code="not_sortable",
            key=query.sort,
        )
    return list(values_of(connection, query.sort))
