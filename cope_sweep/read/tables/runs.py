"""The results of a plan, frames of runs, and their files.

`Results` has what is known of the runs of a plan: their records from the index, and two pandas frames, of which tables,
figures and reports are made. `frame` has one line per run of the plan, started or not, with the columns

    run_id, status, row, seed      `row` is the name of the plan's row
    <axis key>, …                  the label of the axis value (`model.position`: "CoPE"); missing if the row has none
    <key of the spec>, …           other values of the configuration: `task.kind`, `train.lr`, …
    <metric>, …                    final metrics (`in_dist/token_error`); missing unless the run is finished
    facts.<name>, …                parameters, train_s, tokens_per_s, device, … of finished runs
    message                        why a run failed, was stopped or is damaged, in one line

The metrics of the ablation always have a column, so that the frame of an untrained ablation has the same shape.
`curves` has one line per logged value of a started run, finished or not: run_id, row, seed, step, metric, value, and

    status, time_s    of the run; the time since it was first begun, pauses included, missing where no times are known

Arrow tables of any runs of a store, in batches, so that memory does not grow with the number of runs: `run_batches` has
one line per run, read from the index, no file of a run, with the columns

    run_id, status, ablation, row, seed    `ablation` and `row` are those of the first sweep that contained the run
    sweep_id, sweeps                       the sweep that trained it last, and all that contained it, oldest first
    attempt, step, steps, created_ms, updated_ms, ended_ms, parent_id, message
    <key of the spec>, …, <metric>, …, facts.<name>, …    as above, null where a run lacks them

`write_runs` writes them, or the learning curves, as Parquet, CSV or JSON. JSON is a list with one object a line. In CSV
and JSON, missing values are empty and null; NaN and infinity are null in JSON. The sweeps of a run are joined by spaces
in CSV, which has no lists. No spreadsheet takes a text in CSV for a formula.

pandas and pyarrow are imported when a frame is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.read.tables.stats import finite
from cope_sweep.store import RunFolder, RunQuery, RunRecord, Store
from cope_sweep.store.artifacts import TIME_KEY
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import summaries
from cope_sweep.store.index.model import Value, flatten
from cope_sweep.store.index.summaries import matching
from cope_sweep.store.index.tables import SECTIONS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


RECORD_COLUMNS = ("attempt", "step", "steps", "created_ms", "updated_ms", "ended_ms", "parent_id", "message")
FACT = "facts."
CURVE_TYPES = {
    "run_id": "str", "row": "str", "seed": "int64", "step": "int64", "metric": "str", "value": "float64",
    "status": "str", "time_s": "float64",
}  # fmt: skip
"""Column of `Results.curves` → its type."""
BATCH = 2_000
"""Runs that are read at a time."""
CURVE_ROWS = 50_000
"""Logged values in a batch of curves, at least."""
FORMULA = r"^[=+\-@\t\r]"
_FORMULA, _NUMBER = re.compile(FORMULA), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Results:
    """The runs of a plan with what is known of them: of a store (`read_results`), or of a report (`reports.runs`)."""

    plan: Plan
    records: Mapping[str, RunRecord]
    """Run id → record, for every run of the plan."""
    store: Store | None = None
    """Where curves and checkpoints are; None: in the files of a report, which has no checkpoints."""

    @property
    def place(self) -> str:
        """Where the runs are, for messages."""
        return f"the store {self.store.location}" if self.store else "a report"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The runs, row by row; the module describes the columns."""
        return frame_of_records(self.plan, self.records)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves; the module describes the columns. A curve that cannot be read is left out."""
        import pandas as pd

        lines = [line for row in self.plan.rows for run in row.runs for line in self._curve(row, run)]
        return pd.DataFrame(lines, columns=list(CURVE_TYPES)).astype(CURVE_TYPES)

    def picture(self, name: str) -> bytes | None:
        """The SVG of a figure in the report, whatever the name is; None without it."""
        return None

    def _curve(self, row: Row, run: RunSpec) -> Iterator[tuple[object, ...]]:
        status = self.records[run.run_id].status
        if self.store is None or status == "pending":
            return
        folder = self.store.run(run.run_id)
        try:
            logged = list(_logged(folder))
            begun_ms = (folder.spec or {}).get("created_ms") if logged else None
        except DamagedError:
            return
        for step, metric, value, time_ms in logged:
            time_s = None if time_ms is None or begun_ms is None else max(0.0, time_ms - begun_ms) / 1000
            yield run.run_id, row.name, run.seed, step, metric, value, status, time_s


def read_results(plan: Plan, store: Store) -> Results:
    """The results of a plan as the index has them now; curves are read when they are first asked for.

    Raises StoreError.
    """
    found = store.index.records(run.run_id for run in plan.runs)
    return Results(plan, {run.run_id: found.get(run.run_id) or RunRecord(run.run_id) for run in plan.runs}, store)


def frame_of_records(plan: Plan, records: Mapping[str, RunRecord], label: str = "") -> pd.DataFrame:
    """The frame of records that were read already, by run id. `label` begins the names of the columns of labels.

    Without it, the label of an axis is in the place of the value of its key.
    """
    import pandas as pd

    runs = [(row, run) for row in plan.rows for run in row.runs]
    ordered = [records[run.run_id] for _, run in runs]
    finished = [record if record.status == "finished" else RunRecord(record.run_id) for record in ordered]
    own = [metric.name for metric in plan.ablation.content.metrics]
    metrics = list(dict.fromkeys([*own, *sorted({name for record in finished for name in record.metrics})]))
    facts = list(dict.fromkeys(name for record in finished for name in record.facts))
    columns: dict[str, pd.Series[Any]] = {
        "run_id": pd.Series([run.run_id for _, run in runs], dtype="str"),
        "status": pd.Series([record.status for record in ordered], dtype="str"),
        "row": pd.Series([row.name for row, _ in runs], dtype="str"),
        "seed": pd.Series([run.seed for _, run in runs], dtype="int64"),
    }
    columns |= {label + key: pd.Series([row.labels.get(key) for row, _ in runs], dtype="str") for key in plan.axes}
    configurations = _configurations(run for _, run in runs)
    keys = dict.fromkeys(key for each in configurations for key in each)
    columns |= {key: _typed_series([each.get(key) for each in configurations]) for key in keys if key not in columns}
    columns |= {name: pd.Series([record.value(name) for record in finished], dtype="float64") for name in metrics}
    columns |= {
        f"facts.{name}": _typed_series([record.facts.get(name) for record in finished])
        for name in facts
        if f"facts.{name}" not in own
    }
    columns["message"] = pd.Series([record.message for record in ordered], dtype="str")
    return pd.DataFrame(columns)


def _configurations(runs: Iterable[RunSpec]) -> list[dict[str, Value]]:
    """The values of each run's spec by dotted key, without the seed. Runs share parts, so each is converted once."""
    known: dict[int, dict[str, Value]] = {}
    found = []
    for run in runs:
        values: dict[str, Value] = {}
        for section in SECTIONS:
            part = getattr(run, section)
            if id(part) not in known:
                known[id(part)] = dict(flatten(part.model_dump(mode="json"), section))
            values |= known[id(part)]
        found.append(values)
    return found


def setting(row: Row, key: str) -> Any:
    """The value that a row's runs have for a dotted key of the spec, as JSON; None where there is none."""
    value: Any = row.runs[0].model_dump(mode="json")
    for part in key.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


def _typed_series(values: list[Any]) -> pd.Series[Any]:
    """A column with a nullable type: boolean, Int64, Float64, or text."""
    import pandas as pd

    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return pd.Series(values, dtype="boolean")
    if types == {int}:
        return pd.Series(values, dtype="Int64")
    if types <= {int, float}:
        return pd.Series(values, dtype="Float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")


def run_batches(store: Store, query: RunQuery, size: int = BATCH) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """All runs that match a query, as batches of a table with the columns of the module, in the order of the query.

    The runs are read twice, the first time for the columns and their types. Only one batch is in memory.
    The query's limit and offset are ignored. Raises QueryError, StoreError.
    """
    import pyarrow as pa

    index, ids = store.index, matching(store.index, query)
    texts = ("run_id", "status", "ablation", "row", "sweep_id", "parent_id", "message")
    first = ("run_id", "status", "ablation", "row", "seed", "sweep_id", "sweeps")
    types = {name: pa.string() if name in texts else pa.int64() for name in (*first, *RECORD_COLUMNS)}
    types["sweeps"] = pa.list_(pa.string())
    spec: dict[str, set[type]] = {}
    facts: dict[str, set[type]] = {}
    metrics: set[str] = set()
    for some in _batches(ids, size):
        for content in index.specs(some).values():
            for key, value in content.items():
                if key not in types:
                    spec.setdefault(key, set()).add(type(value))
        for record in index.records(some).values():
            if record.status == "finished":
                metrics |= record.metrics.keys()
                for name, value in record.facts.items():
                    facts.setdefault(name, set()).add(type(value))
    types |= {key: _arrow_type(spec[key]) for key in sorted(spec, key=_place_in_spec)}
    types |= dict.fromkeys(sorted(metrics), pa.float64())
    types |= {f"{FACT}{name}": _arrow_type(found) for name, found in facts.items()}
    schema = pa.schema(list(types.items()))

    def read() -> Iterator[pa.RecordBatch]:
        for some in _batches(ids, size):
            records, specs, places = index.records(some), index.specs(some), summaries.places(index, some)
            found = [records[run_id] for run_id in some if run_id in records]  # others have been deleted since
            finished = [each if each.status == "finished" else RunRecord(each.run_id) for each in found]
            where = [places.get(each.run_id, []) for each in found]
            values: dict[str, list[Any]] = {
                "ablation": [each[0][1] if each else None for each in where],
                "row": [each[0][2] if each else None for each in where],
                "sweeps": [[place[0] for place in each] for each in where],
            }
            values |= {key: [specs.get(each.run_id, {}).get(key) for each in found] for key in spec}
            values |= {name: [each.metrics.get(name) for each in finished] for name in metrics}
            values |= {FACT + name: [each.facts.get(name) for each in finished] for name in facts}
            own = ([getattr(each, name) for each in found] if name not in values else values[name] for name in types)
            arrays = [_array(column, kind) for column, kind in zip(own, types.values(), strict=True)]
            yield pa.record_batch(arrays, schema)

    return schema, read()


def _batches(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _place_in_spec(key: str) -> int:
    """The section of the spec that a key is in, by its index."""
    return SECTIONS.index(key.partition(".")[0])


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


def write_runs(store: Store, query: RunQuery, output_format: str, file: IO[bytes], *, curves: bool = False) -> None:
    """Write the runs that match a query, or their curves, to an open file in one of `WRITERS`.

    The query's limit and offset are ignored. Raises QueryError, StoreError, OSError.
    """
    schema, found = curve_batches(store, query) if curves else run_batches(store, query)
    WRITERS[output_format](schema, found, file)


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
        for some in _batches(matching(store.index, query), BATCH):
            records, places = store.index.records(some, values=False), summaries.places(store.index, some)
            for run_id, record in ((run_id, records[run_id]) for run_id in some if run_id in records):
                _, ablation, row = places.get(run_id, [("", None, None)])[0]
                with suppress(DamagedError):
                    lines += [(run_id, ablation, row, record.seed, *each[:3]) for each in _logged(store.run(run_id))]
                if len(lines) >= CURVE_ROWS:
                    yield _record_batch(lines, schema)
                    lines = []
        if lines:
            yield _record_batch(lines, schema)

    return schema, read()


def _logged(folder: RunFolder) -> Iterator[tuple[int, str, float, float | None]]:
    """Step, metric, value and time of each value that a run has logged. Raises DamagedError."""
    for point in folder.curve(times=True):
        time_ms = point.get(TIME_KEY)
        for metric, value in point.items():
            if metric not in ("step", TIME_KEY):
                yield int(point["step"]), metric, float(value), time_ms


def _record_batch(lines: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = zip(*lines, strict=True)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema
    )


def _write_parquet(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> None:
    from pyarrow import parquet

    with parquet.ParquetWriter(file, schema) as writer:
        for batch in found:
            writer.write_batch(batch)


def _write_csv(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> None:
    import pyarrow as pa
    from pyarrow import csv

    flat = pa.schema([(each.name, pa.string() if pa.types.is_list(each.type) else each.type) for each in schema])
    options = csv.WriteOptions(quoting_style="needed")
    with csv.CSVWriter(file, flat, write_options=options) as writer:
        for batch in found:
            writer.write_batch(pa.record_batch([*map(csv_column, batch.columns)], flat))


def _write_json(schema: pa.Schema, found: Iterator[pa.RecordBatch], file: IO[bytes]) -> None:
    begin = b"[\n"
    for batch in found:
        for line in batch.to_pylist():
            plain = {name: finite(value) if isinstance(value, float) else value for name, value in line.items()}
            file.write(begin + json.dumps(plain, ensure_ascii=False, allow_nan=False).encode())
            begin = b",\n"
    file.write(b"[]\n" if begin == b"[\n" else b"\n]\n")


WRITERS: Mapping[str, Callable[[pa.Schema, Iterator[pa.RecordBatch], IO[bytes]], None]] = {
    "parquet": _write_parquet,
    "csv": _write_csv,
    "json": _write_json,
}
"""Format → function that writes batches to a file."""


def without_formula(text: Any) -> Any:
    """The value; a text that begins like a formula, and is no number, with an apostrophe before it."""
    if isinstance(text, str) and _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def csv_text(frame: pd.DataFrame) -> str:
    """A frame as CSV."""
    frame = frame.copy(deep=False)
    for name in frame.columns[[dtype in ("str", "object") for dtype in frame.dtypes]]:
        frame[name] = frame[name].map(without_formula)
    return frame.to_csv(index=False, lineterminator="\n")


def csv_column(column: pa.Array) -> pa.Array:
    """A column of Arrow as `csv_text` writes it: lists are joined by blanks."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_list(column.type):
        column = compute.binary_join(column, " ")
    if pa.types.is_string(column.type) and compute.any(compute.match_substring_regex(column, FORMULA)).as_py():
        return pa.array(map(without_formula, column.to_pylist()), pa.string())
    return column
