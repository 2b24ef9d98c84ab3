"""Finds rows by what people type: the name in a table, with or without its punctuation, `AXIS=LABEL`, or a label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from cope_sweep.config import Plan, Row
from cope_sweep.config.explain import suggest
from cope_sweep.config.source import composed, spelled_as
from cope_sweep.errors import UserError

Labels = Mapping[str, str]
"""Axis key → label of a row."""


def find_rows(plan: Plan, text: str) -> list[Row]:
    """The rows of a plan that a text names, in the plan's order; empty if it names none. See `named_rows`."""
    names = named_rows(text, {row.name: row.labels for row in plan.rows}, plan.axes)
    return [row for row in plan.rows if row.name in names]


def rows_named(plan: Plan, text: str, error: type[UserError]) -> list[Row]:
    """`find_rows`, at least one. Raises `error` where the text names none."""
    rows = find_rows(plan, text)
    if not rows:
        allowed = [row.name for row in plan.rows]
        raise error(
            f"{plan.name} has no row {text!r}{suggest(text, allowed)}", code="unknown_row", row=text, allowed=allowed
        )
    return rows


def named_rows(text: str, rows: Mapping[str, Labels], axes: Mapping[str, str]) -> list[str]:
    """The names of the rows that a text names; empty if it names none.

    `RoPE · layers 2`, `rope 2` and `position=RoPE, layers=2` name the row with these labels. They have to be all labels
    on the axes on which rows differ, in the table's order. `layers=2` names every row with this label. Only letters and
    digits count, so a text names several rows if their labels differ in other characters alone. So does `rope` where it
    is a label of one axis alone: it names every row with it.

    Args:
        text: What a user typed.
        rows: Name → labels, of all rows.
        axes: Axis key → short name.
    """
    text = spelled_as(text, rows)
    if text in rows:
        return [text]
    normalised = _normalise(text)
    varying = _varying(rows.values(), axes)
    if normalised:
        names = [name for name, labels in rows.items() if re.fullmatch(_pattern(labels, axes, varying), normalised)]
        if names:
            return names
    axis, _, label = text.partition("=")
    found = axis_of_label(text, list(rows.values()), axes)
    key, label = found or (find_axis(axes, axis.strip()), label.strip())
    if key is None:
        return []
    label = composed(label)
    return [name for name, labels in rows.items() if key in labels and composed(labels[key]) == label]


def axis_of_label(text: str, rows: Sequence[Labels], axes: Mapping[str, str]) -> tuple[str, str] | None:
    """The axis that alone has this label, of those on which rows differ, and the label as the table spells it.

    None: no axis has it, or several do.
    """
    normalised = _normalise(text)
    found = {
        (key, labels[key])
        for key in _varying(rows, axes)
        for labels in rows
        if key in labels and normalised and _normalise(labels[key]) == normalised
    }
    return found.pop() if len(found) == 1 else None


def find_axis(axes: Mapping[str, str], name: str) -> str | None:
    """The key of an axis, given the key or its short name."""
    return next((key for key, short in axes.items() if name in (key, short)), None)


def _varying(rows: Iterable[Labels], axes: Iterable[str]) -> list[str]:
    """The axes on which rows differ."""
    rows = list(rows)
    return [key for key in axes if len({labels.get(key) for labels in rows}) > 1]


def _pattern(labels: Labels, axes: Mapping[str, str], varying: Sequence[str]) -> str:
    """A regular expression for a row: its labels, each with or without the name of its axis in front."""
    parts = []
    for key, label in labels.items():
        names = "|".join(map(re.escape, (_normalise(axes[key]), _normalise(key))))
        part = f"(?:{names})?{re.escape(_normalise(label))}"
        parts.append(part if key in varying else f"(?:{part})?")
    return "".join(parts)


def _normalise(text: str) -> str:
    """The words of a text in lower case, each followed by a space; a word has letters and digits only."""
    return "".join(f"{word} " for word in re.findall(r"[^\W_]+", composed(text.casefold())))
