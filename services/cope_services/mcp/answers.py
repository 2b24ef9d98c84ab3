"""Answers as Markdown, in pages of at most `MAX_TOKENS` tokens.

A tool makes all lines of its answer, and `page` sends those from `start` on that fit. The last line says how to get the
others: `next: start=41`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from cope_sweep.read.numbers import significant
from cope_sweep.store import QueryError

MAX_TOKENS = 2_000
"""The most tokens of an answer, as `token_bound` counts them."""
NEXT_TOKENS = 60
"""Tokens that are kept free for the last line."""
MAX_CELL_CHARACTERS = 160
MAX_LINE_CHARACTERS = 1_200
LETTERS_PER_TOKEN = 3
_PIECES = re.compile(r"[^\W\d_]+|\d{1,3}|\n|[^\w\s]|_|[^\S\n]{2,}")
_WORD = re.compile(r"[^\W\d_]+")


def token_bound(text: str) -> int:
    """At least as many tokens as the tokenizers of common models make of a text.

    These cut a text into words, numbers of up to three digits, and signs before they merge bytes. So each sign and
    each three digits count as one token, and a word as one for each three of its bytes. A single space is part of the
    word after it.
    """
    tokens = 0
    for piece in _PIECES.findall(text):
        is_word = _WORD.fullmatch(piece) is not None
        tokens += -(-len(piece.encode()) // LETTERS_PER_TOKEN) if is_word or not piece.isascii() else 1
    return tokens


def page(lines: Sequence[str], start: int = 0, after: str = "", address: str = "") -> str:
    """The lines from `start` on that fit, and how to get the others: by an argument, or at `address`, if it has one.

    A page that begins within a table repeats the table's head. `after` is the last line of the last page: how to get
    what is not in `lines`. Raises QueryError if there is no such line.
    """
    if start and start >= len(lines):
        raise QueryError(
            f"start: the answer has {len(lines)} lines; start with 0",
            code="beyond_the_end",
            start=start,
            lines=len(lines),
        )
    shown = [*_head_before(lines, start)]
    left = MAX_TOKENS - NEXT_TOKENS - sum(map(_cost, shown))
    end = start
    while end < len(lines):
        line = _shortened(lines[end], MAX_LINE_CHARACTERS)
        cost = _cost(line)
        if cost > left:
            if end > start:
                break
            line = line[: max(left, 1)]  # a character is a token at most, unless it is not ASCII
        shown.append(line)
        left -= cost
        end += 1
    next_start = f"{address}?start={end}" if address else f"start={end}"
    more = f"next: {next_start} ({len(lines) - end} more lines)" if end < len(lines) else after
    return "\n".join([*shown, *([more] if more else [])])


def _cost(line: str) -> int:
    return token_bound(line) + 1  # the end of the line


def _head_before(lines: Sequence[str], start: int) -> Sequence[str]:
    """The head of the table that a page from `start` on begins within."""
    first = start
    while first > 0 and lines[first - 1].startswith("|"):
        first -= 1
    is_within = start < len(lines) and lines[start].startswith("|") and start - first >= 2
    return [_shortened(line, MAX_LINE_CHARACTERS) for line in lines[first : first + 2]] if is_within else []


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(answer: BaseModel | Sequence[BaseModel], shown: Sequence[str] = ()) -> list[str]:
    """An answer as lines: its fields, and a table for each list of models. Fields without a value are left out.

    `shown` are the fields to show, of the answer and of the models in its lists; none: all.
    """
    if isinstance(answer, BaseModel):
        return _mapping(_values(answer), shown)
    return table([_values(item) for item in answer], shown) or ["none"]


def _values(answer: BaseModel) -> dict[str, Any]:
    return answer.model_dump(mode="json")


def _mapping(values: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    lines, tables = [], []
    for name, value in values.items():
        if (shown and name not in shown) or value in (None, "", [], {}):
            continue
        if isinstance(value, list) and isinstance(value[0], Mapping):
            tables += ["", f"{name}:", "", *table(value, shown)]
        elif isinstance(value, str) and "\n" in value.strip():
            tables += ["", f"{name}:", "", *value.strip().splitlines()]
        else:
            lines.append(f"{name}: {_cell(value)}")
    return lines + tables


def table(rows: Sequence[Mapping[str, Any]], shown: Sequence[str] = ()) -> list[str]:
    """A table of what rows have, see `table_lines`; of the columns that `shown` names, if they have one of them."""
    columns = {name: None for row in rows for name, value in row.items() if value not in (None, "", [], {})}
    # A list of other models than those that were chosen from is shown with all that it has.
    chosen = [name for name in columns if name in shown] or list(columns)
    return table_lines(chosen, [[row.get(name) for name in chosen] for row in rows]) if rows else []


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table in Markdown. Numbers have four significant digits; long texts are shortened."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(_shortened(_cell(value), MAX_CELL_CHARACTERS) for value in row)} |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(inner)}" for name, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return " ".join(str(value).split()).replace("|", "\\|")
