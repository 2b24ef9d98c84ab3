"""The runs of a store as one tidy Arrow table: one line per run, read from the index, no file of a run.

    run_id, status, ablation, row, seed    `ablation` and `row` are those of the first sweep that contained the run
    sweep_id, sweeps                       the sweep that trained it last, and all that contained it, oldest first
    attempt, step, steps, created_ms, updated_ms, ended_ms, parent_id, message
    <key of the spec>, …                   `task.kind`, `model.layers`, `model.position` ("cope+rope"), …
    <metric>, …                            of finished runs: `in_dist/token_error`
    facts.<name>, …                        of finished runs: parameters, durations, device, versions of Python and torch

Lines are sorted by run id. A column that a run lacks is null there. `RunReader` reads again only what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cope_sweep.store import RunRecord, Store
from cope_sweep.store.index import summaries
from cope_sweep.store.index.changes import run_changes
from cope_sweep.store.index.model import Value
from cope_sweep.store.index.tables import SECTIONS

if TYPE_CHECKING:
    import pyarrow as pa

RECORD_COLUMNS = ("attempt", "step", "steps", "created_ms", "updated_ms", "ended_ms", "parent_id", "message")


def run_table(store: Store, run_ids: Iterable[str] | None = None) -> pa.Table:
    """All runs of the store, or those with these ids that it has. Raises StoreError."""
    return RunReader(store).read(run_ids)


class RunReader:
    """Reads the runs of a store, and afterwards only those that have changed. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        self._index = store.index
        self._version: tuple[int, int, int] | None = None
        """When the index was made, its last revision, and its number of runs."""
        self._records: dict[str, RunRecord] = {}
        self._parts: dict[str, tuple[int | None, ...]] = {}
        self._values: dict[int, dict[str, Value]] = {}
        self._places: dict[str, list[tuple[str, str, str]]] = {}

    def read(self, run_ids: Iterable[str] | None = None) -> pa.Table:
        """The table of all runs, or of some; the module describes it. Raises StoreError."""
        self.update()
        ids = sorted(self._records if run_ids is None else self._records.keys() & set(run_ids))
        expired = {run_id for run_id, _ in self._index.expired()}
        records = [
            replace(self._records[run_id], status="interrupted") if run_id in expired else self._records[run_id]
            for run_id in ids
        ]
        return _table(records, self._places, [self._parts[run_id] for run_id in ids], self._values)

    def update(self) -> int:
        """Read what has changed; returns the number of runs that were read. Raises StoreError."""
        version = (*summaries.version(self._index), sum(self._index.counts().values()))
        if version == self._version:
            return 0
        same = self._version is not None and version[0] == self._version[0]
        found = run_changes(self._index, self._version[1] if self._version and same else 0, self._values)
        if same and len(self._records.keys() | found.records.keys()) != found.total:  # runs were deleted
            same, found = False, run_changes(self._index)
        if not same:
            self._records, self._parts, self._values = {}, {}, {}
        self._records |= found.records
        self._parts |= found.parts
        self._values |= found.values
        self._places = summaries.places(self._index, self._records)
        self._version = version
        return len(found.records)


def _table(
    records: Sequence[RunRecord],
    places: dict[str, list[tuple[str, str, str]]],
    parts: Sequence[tuple[int | None, ...]],
    values: dict[int, dict[str, Value]],
) -> pa.Table:
    import pyarrow as pa

    where = [places.get(record.run_id, []) for record in records]
    columns: dict[str, pa.Array] = {
        "run_id": pa.array([record.run_id for record in records], pa.string()),
        "status": pa.array([record.status for record in records], pa.string()),
        "ablation": pa.array([each[0][1] if each else None for each in where], pa.string()),
        "row": pa.array([each[0][2] if each else None for each in where], pa.string()),
        "seed": pa.array([record.seed for record in records], pa.int64()),
        "sweep_id": pa.array([record.sweep_id for record in records], pa.string()),
        "sweeps": pa.array([[place[0] for place in each] for each in where], pa.list_(pa.string())),
    }
    for name in RECORD_COLUMNS:
        kind = pa.string() if name in ("parent_id", "message") else pa.int64()
        columns[name] = pa.array([getattr(record, name) for record in records], kind)
    for section in range(len(SECTIONS)):
        columns |= _spec_columns([each[section] for each in parts], values)
    finished = [record if record.status == "finished" else RunRecord(record.run_id) for record in records]
    for name in sorted({name for record in finished for name in record.metrics}):
        columns[name] = pa.array([record.metrics.get(name) for record in finished], pa.float64())
    for name in dict.fromkeys(name for record in finished for name in record.facts):
        columns[f"facts.{name}"] = _array([record.facts.get(name) for record in finished])
    return pa.table(columns)


def _spec_columns(parts: Sequence[int | None], values: dict[int, dict[str, Value]]) -> dict[str, pa.Array]:
    """The columns of a section of the specs. Runs share few parts, so each part is converted once."""
    import pyarrow as pa

    distinct = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    taken = pa.array([distinct[part] for part in parts], pa.int32())
    contents: list[dict[str, Value]] = [{} if part is None else values.get(part, {}) for part in distinct]
    keys = dict.fromkeys(key for content in contents for key in content)
    return {key: _array([content.get(key) for content in contents]).take(taken) for key in keys}


def _array(values: Sequence[Any]) -> pa.Array:
    """Values of one type; of several types, their texts."""
    import pyarrow as pa

    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return pa.array(values, pa.bool_())
    if types == {int}:
        return pa.array(values, pa.int64())
    if types and types <= {int, float}:
        return pa.array(values, pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())
