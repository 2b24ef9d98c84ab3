"""Exports of many runs to a file: all values of each run, or their learning curves, as Parquet, CSV or JSON.

Both are written batch by batch, so that memory does not grow with the number of runs. `runs` and `frame` describe the
columns. JSON is a list with one object a line. In CSV and JSON, missing values are empty and null; NaN and infinity are
null in JSON. The sweeps of a run are joined by spaces in CSV, which has no lists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from cope_sweep.read.tables.csv_text import csv_column
from cope_sweep.read.tables.runs import run_batches
from cope_sweep.store import RunQuery, Store
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import summaries
from cope_sweep.store.index.summaries import batches, matching

if TYPE_CHECKING:
    import pyarrow as pa

CURVE_ROWS = 50_000
"""Logged values in a batch of curves, at least."""


def write_runs(store: Store, query: RunQuery, output_format: str, file: IO[bytes], *, curves: bool = False) -> int:
    """Write the runs that match a query, or their curves, to an open file in one of `WRITERS`.

    The query's limit and offset are ignored. Returns the number of lines. Raises QueryError, StoreError, OSError.
    """
    schema, found = curve_batches(store, query) if curves else run_batches(store, query)
    return WRITERS[output_format](schema, found, file)


def curve_batches(store: Store, query: RunQuery) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The learning curves of the runs that match a query: one line for each logged value.

    The columns are run_id, ablation, row, seed, step, metric and value. A curve that cannot be read has no lines.
    """
    import pyarrow as pa

    texts = dict.fromkeys(("run_id", "ablation", "row", "metric"), pa.string())
    names = ("run_id", "ablation", "row", "seed", "step", "metric", "value")
    numbers = {"seed": pa.int64(), "step": pa.int64(), "value": pa.float64()}
    schema = pa.schema([(name, (texts | numbers)[name]) for name in names])

    def read() -> Iterator[pa.RecordBatch]:
        lines: list[tuple[Any, ...]] = []
        for batch in batches(store.index, matching(store.index, query)):
            places = summaries.places(store.index, batch.records)
            for run_id, record in batch.records.items():
                _, ablation, row = places.get(run_id, [("", None, None)])[0]
                lines += [(run_id, ablation, row, record.seed, *logged) for logged in _logged(store, run_id)]
                if len(lines) >= CURVE_ROWS:
                    yield _record_batch(lines, schema)
                    lines = []
        if lines:
            yield _record_batch(lines, schema)

    return schema, read()


def _logged(store: Store, run_id: str) -> Iterator[tuple[int, str, float]]:
    """Step, metric and value of each value that a run has logged."""
    try:
        points = store.run(run_id).curve()
    except DamagedError:
        return
    for point in points:
        for metric, value in point.items():
            if metric != "step":
                yield int(point["step"]), metric, float(value)


def _record_batch(lines: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = zip(*lines, strict=True)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema
    )


def _write_parquet(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> int:
    from pyarrow import parquet

    lines = 0
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in found:
            writer.write_batch(batch)
            lines += batch.num_rows
    return lines


def _write_csv(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> int:
    import pyarrow as pa
    from pyarrow import csv

    flat = pa.schema([(each.name, pa.string() if pa.types.is_list(each.type) else each.type) for each in schema])
    lines = 0
    options = csv.WriteOptions(quoting_style="needed")
    with csv.CSVWriter(file, flat, write_options=options) as writer:
        for batch in found:
            writer.write_batch(pa.record_batch([*map(csv_column, batch.columns)], flat))
            lines += batch.num_rows
    return lines


def _write_json(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> int:
    lines = 0
    for batch in found:
        for line in batch.to_pylist():
            file.write((",\n" if lines else "[\n").encode())
            file.write(json.dumps(_finite(line), ensure_ascii=False, allow_nan=False).encode())
            lines += 1
    file.write(b"\n]\n" if lines else b"[]\n")
    return lines


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }


WRITERS: Mapping[str, Callable[[pa.Schema, Iterator[pa.RecordBatch], IO[bytes]], int]] = {
    "parquet": _write_parquet,
    "csv": _write_csv,
    "json": _write_json,
}
"""Format → function that writes batches to a file."""
