"""Files of any runs of a store, as Parquet, CSV or JSON.

Runs are read in batches, so memory does not grow with their number. `run_batches` reads the index, not the files of the
runs. It has one line per run, with the columns

    run_id, status, ablation, row, seed    `ablation` and `row` come from the first sweep that contained the run
    sweep_id, sweeps                       the sweep that trained it last, and all that contained it, oldest first
    attempt, step, steps, created_ms, updated_ms, ended_ms, message
    <key of the spec>, …, <metric>, …, facts.<name>, …    as in `tables.frames`, null where a run lacks them

`run_chunks` makes a file of runs, or of their curves: Parquet, CSV or JSON. JSON is a list with one object per line. A
missing value is empty in CSV and null in JSON, where NaN and infinity are null, too. CSV has no lists, so the sweeps of
a run are joined by spaces. An apostrophe in front of a text in CSV keeps spreadsheets from reading it as a formula.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa
from pyarrow import compute, csv, parquet

from cope_sweep.read.tables.render import FORMULA, without_formula
from cope_sweep.read.tables.stats import finite
from cope_sweep.store import RunQuery, RunRecord, Store
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.tables import SECTIONS
from cope_sweep.store.results_file import FACT

RECORD_COLUMNS = ("attempt", "step", "steps", "created_ms", "updated_ms", "ended_ms", "message")
BATCH = 2_000
"""Number of runs to read at a time."""
CURVE_ROWS = 50_000
"""Smallest number of logged values in a batch of curves, except the last."""


def run_batches(store: Store, query: RunQuery, size: int = BATCH) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """All runs that match a query, in its order, as batches with the columns in the module docstring.

    Runs are read twice, first for the columns and their types. Only one batch is in memory. The query's limit and
    offset are ignored. Raises QueryError, StoreError.
    """
    index, ids = store.index, store.index.matching(query)
    texts = ("run_id", "status", "ablation", "row", "sweep_id", "message")
    first = ("run_id", "status", "ablation", "row", "seed", "sweep_id", "sweeps")
    types = {name: pa.string() if name in texts else pa.int64() for name in (*first, *RECORD_COLUMNS)}
    types["sweeps"] = pa.list_(pa.string())
    spec: dict[str, set[type]] = {}
    facts: dict[str, set[type]] = {}
    metrics: set[str] = set()
    for batch_ids in _batches(ids, size):
        for content in index.specs(batch_ids).values():
            for key, value in content.items():
                if key not in types:
                    spec.setdefault(key, set()).add(type(value))
        for record in index.records(batch_ids).values():
            if record.status == "finished":
                metrics |= record.metrics.keys()
                for name, value in record.facts.items():
                    facts.setdefault(name, set()).add(type(value))
    types |= {key: _arrow_type(spec[key]) for key in sorted(spec, key=_place_in_spec)}
    types |= dict.fromkeys(sorted(metrics), pa.float64())
    types |= {f"{FACT}{name}": _arrow_type(value_types) for name, value_types in facts.items()}
    schema = pa.schema(list(types.items()))

    def read() -> Iterator[pa.RecordBatch]:
        for batch_ids in _batches(ids, size):
            records, specs, places = index.records(batch_ids), index.specs(batch_ids), index.places(batch_ids)
            # Others have been deleted meanwhile.
            runs = [records[run_id].as_counted() for run_id in batch_ids if run_id in records]
            finished = [run if run.status == "finished" else RunRecord(run_id=run.run_id) for run in runs]
            places_of_runs = [places.get(run.run_id, []) for run in runs]
            values: dict[str, list[Any]] = {
                "ablation": [run_places[0].ablation if run_places else None for run_places in places_of_runs],
                "row": [run_places[0].row if run_places else None for run_places in places_of_runs],
                "sweeps": [[place.sweep_id for place in run_places] for run_places in places_of_runs],
            }
            values |= {key: [specs.get(run.run_id, {}).get(key) for run in runs] for key in spec}
            values |= {name: [run.metrics.get(name) for run in finished] for name in metrics}
            values |= {FACT + name: [run.facts.get(name) for run in finished] for name in facts}
            values |= {name: [getattr(run, name) for run in runs] for name in types if name not in values}
            yield pa.record_batch([_array(values[name], kind) for name, kind in types.items()], schema)

    return schema, read()


def _batches(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _place_in_spec(key: str) -> int:
    """The index of the section of the spec that has a key."""
    return SECTIONS.index(key.partition(".")[0])


def _arrow_type(types: set[type]) -> pa.DataType:
    """The type of a column with values of these types; text for a mixture."""
    types = types - {type(None)}
    if types == {bool}:
        return pa.bool_()
    if types == {int}:
        return pa.int64()
    return pa.float64() if types and types <= {int, float} else pa.string()


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column; numbers in a column of text are printed."""
    if kind == pa.string():
        values = [None if value is None else str(value) for value in values]
    return pa.array(values, kind)


def run_chunks(store: Store, query: RunQuery, output_format: str, *, curves: bool = False) -> Iterator[bytes]:
    """The file, in one of `WRITERS`, of the runs that match a query, or of their curves, in pieces of a batch.

    Each is made when it is asked for. The query's limit and offset are ignored. Raises QueryError and StoreError at
    once; the iterator may raise StoreError.
    """
    schema, batches = curve_batches(store, query) if curves else run_batches(store, query)

    def chunks() -> Iterator[bytes]:
        file = _Pieces()
        for _ in WRITERS[output_format](schema, batches, file):
            yield file.take()
        yield file.take()

    return chunks()


class _Pieces(io.RawIOBase, IO[bytes]):
    """A file that keeps only what has been written since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[bytes] = []
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        piece = bytes(content)
        self._written.append(piece)
        self._size_bytes += len(piece)
        return len(piece)

    def tell(self) -> int:  # Parquet's footer has the places of its columns
        return self._size_bytes

    def take(self) -> bytes:
        content = b"".join(self._written)
        self._written.clear()
        return content


def curve_batches(store: Store, query: RunQuery) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The learning curves of the runs that match a query: one line per logged value.

    The columns are run_id, ablation, row, seed, step, metric and value. A damaged curve has no lines.
    """
    texts = dict.fromkeys(("run_id", "ablation", "row", "metric"), pa.string())
    names = ("run_id", "ablation", "row", "seed", "step", "metric", "value")
    numbers = {"seed": pa.int64(), "step": pa.int64(), "value": pa.float64()}
    schema = pa.schema([(name, (texts | numbers)[name]) for name in names])
    ids = store.index.matching(query)

    def read() -> Iterator[pa.RecordBatch]:
        lines: list[tuple[Any, ...]] = []
        for batch_ids in _batches(ids, BATCH):
            records, places = store.index.records(batch_ids, values=False), store.index.places(batch_ids)
            for run_id in batch_ids:
                if run_id not in records:  # deleted meanwhile
                    continue
                seed, first_place = records[run_id].seed, next(iter(places.get(run_id, ())), None)
                ablation, row = (first_place.ablation, first_place.row) if first_place else (None, None)
                with suppress(DamagedError):
                    lines += [
                        (run_id, ablation, row, seed, step, metric, value)
                        for step, metric, value, _ in store.run(run_id).logged_values()
                    ]
                if len(lines) >= CURVE_ROWS:
                    yield _record_batch(lines, schema)
                    lines = []
        if lines:
            yield _record_batch(lines, schema)

    return schema, read()


def _record_batch(lines: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*lines, strict=True)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema
    )


def _write_parquet(schema: pa.Schema, batches: Iterator[pa.RecordBatch], file: IO[bytes]) -> Iterator[None]:
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield


def _write_csv(schema: pa.Schema, batches: Iterator[pa.RecordBatch], file: IO[bytes]) -> Iterator[None]:
    flat = pa.schema([(field.name, pa.string() if pa.types.is_list(field.type) else field.type) for field in schema])
    options = csv.WriteOptions(quoting_style="needed")
    with csv.CSVWriter(file, flat, write_options=options) as writer:
        for batch in batches:
            writer.write_batch(pa.record_batch([*map(csv_column, batch.columns)], flat))
            yield


def _write_json(schema: pa.Schema, batches: Iterator[pa.RecordBatch], file: IO[bytes]) -> Iterator[None]:
    separator = b"[\n"
    for batch in batches:
        for line in batch.to_pylist():
            plain = {name: finite(value) if isinstance(value, float) else value for name, value in line.items()}
            file.write(separator + json.dumps(plain, ensure_ascii=False, allow_nan=False).encode())
            separator = b",\n"
        yield
    file.write(b"[]\n" if separator == b"[\n" else b"\n]\n")


WRITERS: Mapping[str, Callable[[pa.Schema, Iterator[pa.RecordBatch], IO[bytes]], Iterator[None]]] = {
    "parquet": _write_parquet,
    "csv": _write_csv,
    "json": _write_json,
}
"""Format → function that writes batches to a file, and yields after each of them."""


def csv_column(column: pa.Array) -> pa.Array:
    """A column for a CSV file: lists are joined by spaces, and no text is a formula to a spreadsheet."""
    if pa.types.is_list(column.type):
        column = compute.binary_join(column, " ")
    if pa.types.is_string(column.type) and compute.any(compute.match_substring_regex(column, FORMULA.pattern)).as_py():
        return pa.array(map(without_formula, column.to_pylist()), pa.string())
    return column
