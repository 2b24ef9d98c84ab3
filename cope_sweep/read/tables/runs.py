"""The runs of a store as a tidy Arrow table in batches: one line per run, read from the index, no file of a run.

    run_id, status, ablation, row, seed    `ablation` and `row` are those of the first sweep that contained the run
    sweep_id, sweeps                       the sweep that trained it last, and all that contained it, oldest first
    attempt, step, steps, created_ms, updated_ms, ended_ms, parent_id, message
    <key of the spec>, …                   `task.kind`, `model.layers`, `model.position` ("cope+rope"), …
    <metric>, …                            of finished runs: `in_dist/token_error`
    facts.<name>, …                        of finished runs: parameters, durations, device, versions of Python and torch

A column that a run lacks is null there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cope_sweep.store import RunQuery, RunRecord, Store
from cope_sweep.store.index import summaries
from cope_sweep.store.index.model import Value
from cope_sweep.store.index.summaries import BATCH, batches, matching
from cope_sweep.store.index.tables import SECTIONS

if TYPE_CHECKING:
    import pyarrow as pa

RECORD_COLUMNS = ("attempt", "step", "steps", "created_ms", "updated_ms", "ended_ms", "parent_id", "message")


def run_batches(store: Store, query: RunQuery, size: int = BATCH) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """All runs that match a query, as batches of a table with the columns above, in the order of the query.

    The runs are read twice, the first time for the columns and their types. Only one batch is in memory.
    The query's limit and offset are ignored. Raises QueryError, StoreError.
    """
    import pyarrow as pa

    numbers = matching(store.index, query)
    found = _Columns()
    for batch in batches(store.index, numbers, size):
        found.add(batch.records.values(), batch.values.values())
    schema = pa.schema(list(found.types().items()))

    def read() -> Iterator[pa.RecordBatch]:
        for batch in batches(store.index, numbers, size):
            records = list(batch.records.values())
            parts = [batch.parts[record.run_id] for record in records]
            places = summaries.places(store.index, batch.records)
            yield from _table(records, places, parts, batch.values, found).select(schema.names).to_batches()

    return schema, read()


class _Columns:
    """The columns that runs have besides those of every run, and the types of their values."""

    def __init__(self) -> None:
        self._spec: list[dict[str, set[type]]] = [{} for _ in SECTIONS]
        self._metrics: set[str] = set()
        self._facts: dict[str, set[type]] = {}

    def add(self, records: Iterable[RunRecord], contents: Iterable[Mapping[str, Value]]) -> None:
        """Add the metrics and facts of finished records, and the keys of parts of specs."""
        for record in records:
            if record.status == "finished":
                self._metrics |= record.metrics.keys()
                for name, value in record.facts.items():
                    self._facts.setdefault(name, set()).add(type(value))
        for content in contents:
            for key, value in content.items():
                section = SECTIONS.index(key.partition(".")[0])
                self._spec[section].setdefault(key, set()).add(type(value))

    def spec(self, section: int) -> dict[str, pa.DataType]:
        """Dotted key → type, of a section of the specs."""
        return {key: _arrow_type(types) for key, types in self._spec[section].items()}

    def metrics(self) -> list[str]:
        return sorted(self._metrics)

    def facts(self) -> dict[str, pa.DataType]:
        return {name: _arrow_type(types) for name, types in self._facts.items()}

    def types(self) -> dict[str, pa.DataType]:
        """Column → type, of all columns in their order."""
        import pyarrow as pa

        found = _record_types()
        for section in range(len(SECTIONS)):
            found |= self.spec(section)
        found |= dict.fromkeys(self.metrics(), pa.float64())
        return found | {f"facts.{name}": kind for name, kind in self.facts().items()}


def _record_types() -> dict[str, pa.DataType]:
    """The columns that every run has."""
    import pyarrow as pa

    texts = ("run_id", "status", "ablation", "row", "sweep_id", "parent_id", "message")
    first = ("run_id", "status", "ablation", "row", "seed", "sweep_id", "sweeps")
    types = {name: pa.string() if name in texts else pa.int64() for name in (*first, *RECORD_COLUMNS)}
    return types | {"sweeps": pa.list_(pa.string())}


def _table(
    records: Sequence[RunRecord],
    places: Mapping[str, list[tuple[str, str, str]]],
    parts: Sequence[tuple[int | None, ...]],
    values: Mapping[int, dict[str, Value]],
    columns: _Columns,
) -> pa.Table:
    """The table of these runs; `columns` are those of the table of which they are a part."""
    import pyarrow as pa

    where = [places.get(record.run_id, []) for record in records]
    own = {
        "ablation": [each[0][1] if each else None for each in where],
        "row": [each[0][2] if each else None for each in where],
        "sweeps": [[place[0] for place in each] for each in where],
    }
    arrays: dict[str, pa.Array] = {
        name: pa.array(own[name] if name in own else [getattr(record, name) for record in records], kind)
        for name, kind in _record_types().items()
    }
    for section in range(len(SECTIONS)):
        arrays |= _spec_arrays([each[section] for each in parts], values, columns.spec(section))
    finished = [record if record.status == "finished" else RunRecord(record.run_id) for record in records]
    for name in columns.metrics():
        arrays[name] = pa.array([record.metrics.get(name) for record in finished], pa.float64())
    for name, kind in columns.facts().items():
        arrays[f"facts.{name}"] = _array([record.facts.get(name) for record in finished], kind)
    return pa.table(arrays)


def _spec_arrays(
    parts: Sequence[int | None], values: Mapping[int, dict[str, Value]], types: Mapping[str, pa.DataType]
) -> dict[str, pa.Array]:
    """The columns of a section of the specs. Runs share few parts, so each part is converted once."""
    import pyarrow as pa

    distinct = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    taken = pa.array([distinct[part] for part in parts], pa.int32())
    contents: list[dict[str, Value]] = [{} if part is None else values.get(part, {}) for part in distinct]
    return {key: _array([content.get(key) for content in contents], kind).take(taken) for key, kind in types.items()}


def _arrow_type(types: set[type]) -> pa.DataType:
    """The type of a column with values of these types: numbers or booleans, else text."""
    import pyarrow as pa

    types = types - {type(None)}
    if types == {bool}:
        return pa.bool_()
    if types == {int}:
        return pa.int64()
    return pa.float64() if types and types <= {int, float} else pa.string()


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column; where it is text, numbers are printed."""
    import pyarrow as pa

    if kind == pa.string():
        values = [None if value is None else str(value) for value in values]
    return pa.array(values, kind)
