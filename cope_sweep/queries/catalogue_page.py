"""Selects the runs of a page from columns in memory, and writes the page as JSON: the same as `RunPage`'s."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cachetools import LRUCache
from pydantic_core import to_json

from cope_sweep.queries import cursors
from cope_sweep.queries.answers import RunSummary
from cope_sweep.queries.records import Chosen
from cope_sweep.queries.runs import PageRequest
from cope_sweep.store import Filter, RunQuery
from cope_sweep.store.index.columns import NONE, Bools, Column, Places, RunColumns
from cope_sweep.store.index.filters import COLUMNS, OPERATORS, TEXT_COLUMNS
from cope_sweep.store.index.flatten import columns as as_columns
from cope_sweep.store.index.index import value_of
from cope_sweep.store.index.model import Position

MAX_MASKS = 256
"""Conditions whose runs are known; each has a byte for a run."""


@dataclass(frozen=True)
class Order:
    """All runs in an order."""

    places: Places
    ranks: Places
    """The index of each place in `places`."""

    @classmethod
    def of(cls, places: Places) -> Order:
        ranks = np.empty_like(places)
        ranks[places] = np.arange(len(places))
        return cls(places, ranks)

    def first(self, mask: Bools | None, start: int, count: int) -> Places:
        """The places of the first `count` runs from index `start` on that are in a mask; fewer if there are no more."""
        if mask is None:
            return self.places[start : start + count]
        ranks = self.ranks[np.flatnonzero(mask)]
        if start:
            ranks = ranks[ranks >= start]
        if count < len(ranks):
            ranks = np.partition(ranks, count)[:count]
        return self.places[np.sort(ranks)]


@dataclass(frozen=True)
class View:
    """The columns of all runs, with what was computed of them."""

    runs: RunColumns
    expired: frozenset[str] = frozenset()
    """Runs that are marked as running and read as interrupted."""
    orders: dict[tuple[str, bool], Order] = field(default_factory=dict)
    """By key and whether it is descending."""
    masks: LRUCache[Filter, Bools] = field(default_factory=lambda: LRUCache(MAX_MASKS))

    def column(self, key: str) -> Column:
        """A column, with the status as it reads."""
        column = self.runs.columns[key]
        if key != "status" or not self.expired:
            return column
        places = [place for place, run_id in enumerate(self.runs.run_ids) if run_id in self.expired]
        return column.with_text(places, "interrupted")

    def can_order(self, key: str) -> bool:
        """Whether the column of an order is known."""
        return key == "run_id" or key in self.runs.columns

    def make_order(self, key: str, *, descending: bool) -> None:
        """Sort all runs by a column."""
        ranks = self.runs.run_ranks
        if key == "run_id":
            places = np.argsort(-ranks if descending else ranks)
        else:
            places = self.column(key).order(ranks, descending=descending)
        self.orders[key, descending] = Order.of(places)

    def position(self, place: int, key: str) -> Position:
        """The values of a run in an order: those of its cursor."""
        run_id = self.runs.run_ids[place]
        if key == "run_id":
            return (run_id,)
        number, text = self.runs.columns[key].at(place) if key != "status" else self.column(key).at(place)
        if key in TEXT_COLUMNS:
            return text, run_id
        if key in COLUMNS:
            return None if number is None else int(number), run_id
        return number, text, run_id


@dataclass(frozen=True)
class Found:
    """The runs of a page."""

    total: int
    places: Places
    more: bool
    """Whether others follow."""


def select(view: View, query: RunQuery) -> Found | None:
    """The runs of a page; None for a query that is not valid, which the database explains."""
    mask: Bools | None = None
    if query.statuses:
        status = view.column("status")
        mask = np.isin(status.codes, [code for code, text in enumerate(status.texts) if text in query.statuses])
    for each in query.filters:
        matching = _matching(view, each)
        if matching is None:
            return None
        mask = matching if mask is None else mask & matching
    order = view.orders[query.sort, query.descending]
    start = 0 if query.after is None else _index_after(view, order.places, query)
    if start is None:
        return None
    found = order.first(mask, start, query.offset + query.limit + 1)[query.offset :]
    total = len(order.places) if mask is None else int(np.count_nonzero(mask))
    return Found(total, found[: query.limit], len(found) > query.limit)


def _matching(view: View, condition: Filter) -> Bools | None:
    """The runs for which a condition holds; None if it compares a number with a text."""
    known = view.masks.get(condition)
    if known is not None:
        return known
    value = condition.value
    if condition.operator not in OPERATORS:
        return None
    if (condition.key == "status" or condition.key in COLUMNS) and (
        (condition.key in TEXT_COLUMNS) != isinstance(value, str) or isinstance(value, bool)
    ):
        return None
    number, text = as_columns(value)
    found = view.column(condition.key).matching(condition.operator, str(text) if number is None else number)
    view.masks[condition] = found
    return found


def _index_after(view: View, order: Places, query: RunQuery) -> int | None:
    """The index in an order of the first run after `query.after`; None if that is the place of another order."""
    position = query.after or ()
    down = [*([query.descending] * max(len(position) - 1, 1)), False][: len(position)]

    def comes_after(place: int) -> bool:
        own = view.position(place, query.sort)
        for here, there, descending in zip(own, position, down, strict=True):
            if here == there:
                continue
            if here is None or there is None:  # missing values come last
                return here is None
            return bool(here < there if descending else here > there)  # type: ignore[operator]
        return False

    low, high = 0, len(order)
    try:
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if comes_after(int(order[middle])) else (middle + 1, high)
    except (TypeError, ValueError):  # of other types or of another length
        return None
    return low


def part_of(fields: Mapping[str, Any], wanted: Chosen) -> bytes:
    """A run as JSON, up to where `values` and the closing brace follow."""
    if not wanted.every:
        fields = {name: value for name, value in fields.items() if name in wanted.fields}
    summary = RunSummary(**fields)
    return summary.model_dump_json(exclude={"values"}, exclude_unset=not wanted.every).encode()[:-1]


def body(view: View, parts: Sequence[bytes], request: PageRequest, wanted: Chosen, found: Found) -> bytes:
    """The page as JSON; `parts` are those of its runs."""
    query, following = request.query, None
    if found.more:
        following = cursors.encode(view.position(int(found.places[-1]), query.sort), query, request.place)
    values = _values(view, found.places, sorted(wanted.keys), always=wanted.every)
    head = {"total": found.total, "limit": query.limit, "offset": query.offset, "next": following}
    lines = b",".join([part + value for part, value in zip(parts, values, strict=True)])
    return json.dumps(head, separators=(",", ":")).encode()[:-1] + b',"runs":[' + lines + b"]}"


def _values(view: View, places: Places, keys: Sequence[str], *, always: bool) -> list[bytes]:
    """The rest of each run's JSON after its part: its values of these keys."""
    names = [json.dumps(key).encode() for key in keys]
    columns = [_encoded(view.column(key), places, is_text=key in TEXT_COLUMNS) for key in keys]
    rows: Iterable[tuple[bytes | None, ...]] = zip(*columns, strict=True) if columns else [()] * len(places)
    if columns and all(None not in column for column in columns):
        template = b',"values":{' + b",".join(name.replace(b"%", b"%%") + b":%b" for name in names) + b"}}"
        return [template % row for row in rows]
    rests = []
    for row in rows:
        values = b",".join([name + b":" + value for name, value in zip(names, row, strict=True) if value is not None])
        rests.append(b',"values":{' + values + b"}}" if values or always else b"}")
    return rests


def _encoded(column: Column, places: Places, *, is_text: bool) -> list[bytes | None]:
    """Values as JSON; None where a run has none."""
    numbers, codes = column.numbers[places], column.codes[places]
    is_number = ~np.isnan(numbers)
    found: list[bytes | None] = []
    if is_number.any():
        # Those of runs without one are read as NaN here, and left out below. All others are finite.
        found += to_json(numbers.tolist())[1:-1].split(b",")
        if is_number.all():
            return found
    texts: dict[int, bytes | None] = {NONE: None}
    for code in set(codes.tolist()) - {NONE}:
        text = column.texts[code]
        texts[code] = to_json(text if is_text else value_of(None, text))
    if not found:
        return [texts[code] for code in codes.tolist()]
    return [
        number if known else texts[code]
        for number, known, code in zip(found, is_number.tolist(), codes.tolist(), strict=True)
    ]
