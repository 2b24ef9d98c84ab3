"""The runs that match a query, read a batch at a time: for exports, whose memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import select

from cope_sweep.store.index.filters import conditions, ordered
from cope_sweep.store.index.index import Index, part_values_of, record_columns, record_of
from cope_sweep.store.index.model import RunQuery, RunRecord, Value
from cope_sweep.store.index.tables import SECTIONS, runs

BATCH = 2_000
"""Runs that are read at a time."""


@dataclass(frozen=True)
class RunBatch:
    """Some runs with their specs."""

    records: dict[str, RunRecord]
    """Run id → record."""
    parts: dict[str, tuple[int | None, ...]]
    """Run id → the numbers of the parts of its spec, one for each of `SECTIONS`; runs with equal parts share them."""
    values: dict[int, dict[str, Value]]
    """Part → its values by dotted key (`model.layers`), of the parts of these runs."""


def matching(index: Index, query: RunQuery) -> list[int]:
    """The numbers of all runs that match, in the order of the query, whose limit and offset are ignored.

    Raises QueryError, StoreError.
    """
    with index.database.reading() as connection:
        status = index.status_column(connection)
        statement = select(runs.c.id).where(*conditions(connection, query, status))
        return list(connection.execute(ordered(connection, statement, query, status)).scalars())


def batches(index: Index, numbers: Sequence[int], size: int = BATCH) -> Iterator[RunBatch]:
    """The runs with these numbers in their order, `size` at a time, with the values of all parts that they name.

    A run that has been deleted since is left out. Raises StoreError.
    """
    names = [*(column.name for column in record_columns()), "status"]
    part_columns = [runs.c[f"{section}_part"] for section in SECTIONS]
    remaining = iter(numbers)
    values: Mapping[int, dict[str, Value]] = {}
    while wanted := list(islice(remaining, size)):
        with index.database.reading() as connection:
            columns = [*record_columns(), index.status_column(connection)]
            query = select(runs.c.id, *columns, *part_columns).where(runs.c.id.in_(wanted))
            rows = {row[0]: tuple(row[1:]) for row in connection.execute(query)}
            ordered_rows = [rows[number] for number in wanted if number in rows]
            parts = {row[0]: row[len(names) :] for row in ordered_rows}
            used = {part for each in parts.values() for part in each if part is not None}
            known = {part: values[part] for part in used & values.keys()}
            values = known | part_values_of(connection, used - known.keys())
        records = {row[0]: record_of(names, row[: len(names)]) for row in ordered_rows}
        yield RunBatch(records, parts, dict(values))
