"""The runs of an index as columns in memory: for a reader that filters and sorts them many times.

Runs are in the order of their numbers in the index; a place is an index into the arrays. `refreshed` reads only what
has changed since. Nothing that was returned is changed afterwards, so threads may share it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, select

from cope_sweep.store.index.filters import COLUMNS, OPERATORS, TEXT_COLUMNS, key_number
from cope_sweep.store.index.index import FETCHED_ROWS, Index
from cope_sweep.store.index.model import Operator
from cope_sweep.store.index.tables import SECTIONS, counters, part_values, run_values, runs, sweeps

Bools = NDArray[np.bool_]
Places = NDArray[np.intp]
Values = Sequence[tuple[int, float | None, str | None]]
"""Number of a run (or of a part), and the value as in the columns `number` and `text`."""

NONE = np.iinfo(np.int32).max
"""The code of a missing text: it sorts last."""


@dataclass(frozen=True)
class Column:
    """A value of every run: a number, a text, or neither."""

    numbers: NDArray[np.float64]
    """NaN: no number."""
    codes: NDArray[np.int32]
    """Indices into `texts`; NONE: no text."""
    texts: tuple[str, ...]
    """Sorted."""

    def matching(self, operator: Operator, value: float | str) -> Bools:
        """Which runs have a value of the same kind for which the comparison holds."""
        if not isinstance(value, str):
            found: Bools = OPERATORS[operator](self.numbers, value)  # no comparison with NaN holds but `!=`
            return found & ~np.isnan(self.numbers) if operator == "!=" else found
        # Of the sorted texts, those before `low` are less, and those from `high` on are greater; so is NONE.
        low, high = bisect_left(self.texts, value), bisect_right(self.texts, value)
        less: Bools = self.codes < low
        less_or_equal: Bools = self.codes < high
        known: Bools = self.codes != NONE
        match operator:
            case "<":
                return less
            case "<=":
                return less_or_equal
            case ">":
                return ~less_or_equal & known
            case ">=":
                return ~less & known
            case "=":
                return less_or_equal & ~less
            case "!=":
                return (less | ~less_or_equal) & known

    def order(self, run_ranks: NDArray[np.int32], *, descending: bool) -> Places:
        """All places by number, then by text, then by run id; missing values last."""
        numbers, codes = self.numbers, self.codes
        if descending:
            numbers, codes = -numbers, np.where(codes == NONE, NONE, -codes)
        return np.lexsort((run_ranks, codes, numbers) if len(self.texts) else (run_ranks, numbers))

    def at(self, place: int) -> tuple[float | None, str | None]:
        """The value of one run."""
        number, code = float(self.numbers[place]), int(self.codes[place])
        return (None if np.isnan(number) else number), (None if code == NONE else self.texts[code])

    def with_text(self, places: Sequence[int], content: str) -> Column:
        """The column with this text at some places."""
        return _column(len(self.numbers), np.array(places, np.intp), [(0, None, content)] * len(places), self)

    def take(self, indices: NDArray[np.int32]) -> Column:
        """The column of these items of it."""
        return Column(self.numbers[indices], self.codes[indices], self.texts)


def _column(size: int, places: Places, values: Values, before: Column | None = None) -> Column:
    """A column of `size` runs: these values at these places, elsewhere those of `before`, or none."""
    numbers, codes = np.full(size, np.nan), np.full(size, NONE, np.int32)
    texts: tuple[str, ...] = ()
    if before is not None:
        texts, kept = before.texts, len(before.numbers)
        numbers[:kept], codes[:kept] = before.numbers, before.codes
    numbers[places] = [np.nan if number is None else number for _, number, _ in values]
    written = [content for _, _, content in values]
    if new := {content for content in written if content is not None} - set(texts):
        merged = tuple(sorted({*texts, *new}))
        known = {content: code for code, content in enumerate(merged)}
        moved = np.array([*(known[content] for content in texts), NONE], np.int32)
        codes = moved[np.where(codes == NONE, len(texts), codes)]
        texts = merged
    code_of = {content: code for code, content in enumerate(texts)}
    codes[places] = [NONE if content is None else code_of[content] for content in written]
    return Column(numbers, codes, texts)


@dataclass(frozen=True)
class RunColumns:
    """The runs of an index at a revision."""

    built: int
    """When the index was made, in ms since 1970."""
    revision: int
    sweeps: tuple[int, int]
    """Changes when a sweep begins, gets other runs, or ends."""
    numbers: NDArray[np.int64]
    """Ascending."""
    run_ids: tuple[str, ...]
    run_ranks: NDArray[np.int32]
    """The index of each run in the order of run ids."""
    parts: NDArray[np.int64]
    """Shape (runs, sections): the parts of the specs; 0: none."""
    columns: dict[str, Column]
    """By the key of filters."""
    changed: tuple[int, ...] | None
    """Places of the runs that are not as before the last refresh; None: all."""

    def places(self, numbers: Sequence[int]) -> Places:
        """The places of runs by their numbers."""
        return np.searchsorted(self.numbers, numbers)


def read_columns(index: Index) -> RunColumns:
    """All runs, without a column yet. Raises StoreError."""
    with index.database.reading() as connection:
        return _read(connection)


def refreshed(index: Index, before: RunColumns) -> RunColumns:
    """The runs as they are now, with the columns that were read. Raises StoreError."""
    with index.database.reading() as connection:
        state = _state(connection)
        total = connection.execute(select(func.count()).select_from(runs)).scalar_one()
        rows = _rows(connection, before.revision)
        numbers = [row[0] for row in rows]
        every = np.union1d(before.numbers, numbers).astype(np.int64)
        appended = len(every) == len(before.numbers) or every[len(before.numbers)] > before.numbers[-1:].max(initial=0)
        if state[0] != before.built or len(every) != total or not appended or _is_reused(before, rows):
            found = _read(connection)
            return replace(found, columns={key: _whole(connection, found, key) for key in before.columns})
        places = np.searchsorted(every, numbers)
        run_ids = [*before.run_ids, *([""] * (len(every) - len(before.run_ids)))]
        parts = np.zeros((len(every), len(SECTIONS)), np.int64)
        parts[: len(before.parts)] = before.parts
        for place, row in zip(places.tolist(), rows, strict=True):
            run_ids[place] = row[1]
            parts[place] = [part or 0 for part in row[2:]]
        ranks = before.run_ranks if len(every) == len(before.numbers) else _ranks(run_ids)
        found = RunColumns(*state, every, tuple(run_ids), ranks, parts, {}, tuple(places.tolist()))
        columns = {
            key: _whole(connection, found, key)
            if _section(key) is not None
            else _column(len(every), places, _aligned(numbers, _values(connection, key, numbers)), column)
            for key, column in before.columns.items()
        }
    return replace(found, columns=columns)


def with_column(index: Index, found: RunColumns, key: str) -> RunColumns:
    """The same runs with a column more. It may have newer values. Raises QueryError for an unknown key, StoreError."""
    with index.database.reading() as connection:
        return replace(found, columns=found.columns | {key: _whole(connection, found, key)})


def _state(connection: Connection) -> tuple[int, int, tuple[int, int]]:
    """`built`, `revision` and `sweeps` of RunColumns. It is read before the runs: what changes then is read again."""
    values = {row.name: int(row.value) for row in connection.execute(select(counters))}
    newest = connection.execute(select(func.coalesce(func.max(sweeps.c.revision), 0), func.count())).one()
    return values.get("built", 0), values["revision"], (int(newest[0]), int(newest[1]))


def _rows(connection: Connection, after: int = 0) -> list[Any]:
    query = select(runs.c.id, runs.c.run_id, *(runs.c[f"{section}_part"] for section in SECTIONS)).order_by(runs.c.id)
    return _fetched(connection, query.where(runs.c.revision > after) if after else query)


def _fetched(connection: Connection, query: Any) -> list[Any]:
    return [row for rows in connection.execute(query).partitions(FETCHED_ROWS) for row in rows]


def _read(connection: Connection) -> RunColumns:
    state = _state(connection)
    rows = _rows(connection)
    parts = np.array([[part or 0 for part in row[2:]] for row in rows], np.int64).reshape(-1, len(SECTIONS))
    run_ids = tuple(row[1] for row in rows)
    return RunColumns(
        *state, np.array([row[0] for row in rows], np.int64), run_ids, _ranks(run_ids), parts, {}, None
    )  # fmt: skip


def _ranks(run_ids: Sequence[str]) -> NDArray[np.int32]:
    ranks = np.empty(len(run_ids), np.int32)
    ranks[sorted(range(len(run_ids)), key=run_ids.__getitem__)] = np.arange(len(run_ids), dtype=np.int32)
    return ranks


def _is_reused(before: RunColumns, rows: Sequence[Any]) -> bool:
    """Whether a run has the number of one that was deleted."""
    known = dict(zip(before.numbers.tolist(), before.run_ids, strict=True)) if rows else {}
    return any(known.get(row[0], row[1]) != row[1] for row in rows)


def _section(key: str) -> int | None:
    """The section of the spec that has a key; None: it is a metric, a fact or a column of `runs`."""
    section = key.partition(".")[0]
    return SECTIONS.index(section) if section in SECTIONS else None


def _whole(connection: Connection, found: RunColumns, key: str) -> Column:
    """A column of all runs."""
    section = _section(key)
    if section is None:
        values = [value for value in _values(connection, key) if value[0] <= found.numbers[-1:].max(initial=0)]
        return _column(len(found.numbers), found.places([value[0] for value in values]), values)
    # Runs share few parts: the values of these are read, and each run takes that of its own.
    columns = part_values.c.part, part_values.c.number, part_values.c.text
    query = select(*columns).where(part_values.c.key == key_number(connection, key))
    known = [(row[0], row[1], row[2]) for row in connection.execute(query)]
    distinct, taken = np.unique(found.parts[:, section], return_inverse=True)
    known = [value for value in known if value[0] in set(distinct.tolist())]
    return _column(len(distinct), np.searchsorted(distinct, [value[0] for value in known]), known).take(
        taken.astype(np.int32)
    )


def _values(connection: Connection, key: str, numbers: Sequence[int] | None = None) -> Values:
    """The values of a column of `runs`, or of a metric or fact: of all runs, or of those with these numbers."""
    query: Any
    if is_column := key == "status" or key in COLUMNS:
        owner, query = runs.c.id, select(runs.c.id, runs.c[key])
    else:
        owner = run_values.c.run
        query = select(owner, run_values.c.number, run_values.c.text)
        query = query.where(run_values.c.key == key_number(connection, key))
    if numbers is None:
        rows = _fetched(connection, query)
    else:
        rows = [
            row
            for start in range(0, len(numbers), FETCHED_ROWS)
            for row in connection.execute(query.where(owner.in_(numbers[start : start + FETCHED_ROWS])))
        ]
    if not is_column:
        return [(row[0], row[1], row[2]) for row in rows]
    is_text = key in TEXT_COLUMNS
    return [(row[0], None, row[1]) if is_text else (row[0], row[1], None) for row in rows]


def _aligned(numbers: Sequence[int], values: Values) -> Values:
    """One value for each of the numbers: a run may have lost it."""
    known = {value[0]: value for value in values}
    return [known.get(number, (number, None, None)) for number in numbers]
