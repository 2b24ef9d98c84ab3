"""`--rows`: a part of a plan, so that some rows can have a command, and resources, of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cope_sweep.config.expand import Plan, Row
from cope_sweep.config.explain import near_names, suggest
from cope_sweep.config.filters import OPERATORS, Filter, parse_filter
from cope_sweep.config.keys import flatten
from cope_sweep.config.source import composed, default_label, spelled_as
from cope_sweep.errors import InvalidValue, NotFoundError

Values = Mapping[str, list[bool | int | float | str]]
"""Key → what a condition on it may be about, in one row: the label of an axis, and the value in the run."""
MAX_SHOWN = 20
"""Rows or values that an error lists."""


def only_rows(plan: Plan, texts: Sequence[str]) -> Plan:
    """The plan with the rows that `--rows` chooses; with no texts, the plan itself. Run ids stay as they are.

    Args:
        plan: The plan.
        texts: Each is the name of a row, or a condition on labels of axes, by key or short name, and on values of runs
            (`model.dim>=256`). Conditions have to hold all; a row that lacks the key does not match. Of several names,
            each adds a row.

    Raises:
        NotFoundError: No row has the name, or meets the conditions.
        InvalidValue: A condition cannot be read, is on a key that no row has, or compares a text by size; or a search
            suggests the rows later.
    """
    if not texts:
        return plan
    if plan.search is not None:
        raise InvalidValue(
            f"--rows: the search {plan.search.kind} of {plan.name} suggests rows later; leave it out",
            code="not_with_suggestions",
            key="rows",
            ablation=plan.name,
        )
    names = [row.name for row in plan.rows]
    texts = [spelled_as(text, names) for text in texts]
    chosen_names = [text for text in texts if text in names]
    rows = [row for row in plan.rows if not chosen_names or row.name in chosen_names]
    values = {row.name: _values(plan, row) for row in plan.rows}
    for text in texts:
        if text not in names:
            matching = _matching(plan, text, values)
            rows = [row for row in rows if row.name in matching]
    if not rows:
        raise NotFoundError(f"--rows: no row meets {' and '.join(texts)}", code="no_row", rows=list(texts))
    return replace(plan, rows=tuple(rows), chosen=tuple(texts))


def _matching(plan: Plan, text: str, values: Mapping[str, Values]) -> set[str]:
    """The names of the rows that meet a condition, at least one."""
    if not any(sign in text for sign in OPERATORS):
        names = list(values)
        hint = suggest(text, names[:MAX_SHOWN]) if len(names) <= MAX_SHOWN else _near(text, names)
        raise NotFoundError(
            f"--rows: {plan.name} has no row {text!r}{hint}", code="unknown_row", row=text, allowed=names[:MAX_SHOWN]
        )
    condition = parse_filter(text)
    key = condition.key
    found = {name: row[key] for name, row in values.items() if key in row}
    if not found:
        known = list(dict.fromkeys(name for row in values.values() for name in row))
        near = near_names(key, known)
        raise InvalidValue(
            f"--rows {text}: no row has {key!r}{_near(key, known)}", code="unknown_key", key=key, near=near
        )
    if condition.operator not in ("=", "!="):
        numbers = any(_is_number(value) for row in found.values() for value in row)
        if not numbers or not _is_number(condition.value):
            raise InvalidValue(
                f"--rows {text}: only numbers can be compared by size", code="not_comparable", key=key, value=text
            )
    matching = {name for name, row in found.items() if _meets(row, condition)}
    if not matching:
        shown = list(dict.fromkeys(default_label(value) for row in found.values() for value in row))[:MAX_SHOWN]
        hint = suggest(default_label(condition.value), shown)
        raise NotFoundError(f"--rows {text}: no row{hint}", code="no_row", rows=[text], allowed=shown)
    return matching


def _values(plan: Plan, row: Row) -> Values:
    values: dict[str, list[bool | int | float | str]] = {}
    for key, label in row.labels.items():
        for name in (key, plan.axes[key]):
            values.setdefault(name, []).append(label)
    for key, value in flatten(row.runs[0].model_dump(mode="json", exclude={"seed"})):
        values.setdefault(key, []).append(value)
        short = plan.axes.get(key)
        if short is not None and short != key and key in row.labels:
            values[short].append(value)
    return values


def _meets(values: Sequence[bool | int | float | str], condition: Filter) -> bool:
    wanted = condition.value
    if condition.operator in ("=", "!="):
        is_equal = any(_is_same(value, wanted) or value == condition.typed for value in values)
        return is_equal == (condition.operator == "=")
    return any(_is_number(value) and OPERATORS[condition.operator](value, wanted) for value in values)


def _is_same(value: bool | int | float | str, wanted: bool | int | float | str) -> bool:
    if _is_number(value) and _is_number(wanted):
        return value == wanted
    # Values are typed as labels are shown: `true` is what Python calls True.
    return composed(default_label(value)) == composed(default_label(wanted))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _near(name: str, known: Sequence[str]) -> str:
    near = near_names(name, known)
    return f"; similar: {', '.join(near)}" if near else ""
