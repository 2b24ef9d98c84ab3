"""Turns records of the index into answers: the main facts of a run, all of them or chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cope_sweep.api.answers import RunSummary
from cope_sweep.read.queries.ablations import Place
from cope_sweep.store import RunRecord, SweepSummary
from cope_sweep.store.errors import DamagedError

T = TypeVar("T")

VALUE_COLUMNS = frozenset(RunRecord.__dataclass_fields__) - {"metrics", "facts"}
ALWAYS = ("run_id", "status")
"""Fields of a run that every answer has."""
SUMMARY_FIELDS = tuple(name for name in RunSummary.model_fields if name != "values")


@dataclass(frozen=True)
class Chosen:
    """Fields of each run in an answer."""

    fields: frozenset[str] = frozenset(SUMMARY_FIELDS)
    """Fields of `RunSummary`."""
    keys: frozenset[str] = frozenset()
    """Keys of a run, as in filters: their values are in `values`."""
    every: bool = True
    """Whether no field was chosen: then nothing is left out."""

    @property
    def places(self) -> bool:
        """Whether the answer says in which ablations a run is; seed and steps of a pending one are in their plans."""
        return bool(self.fields & {"ablations", "row", "seed", "steps"})

    @property
    def values(self) -> bool:
        """Whether metrics and facts are needed."""
        return "metrics" in self.fields or any(key not in VALUE_COLUMNS for key in self.keys)


def chosen(fields: Sequence[str], keys: Collection[str]) -> Chosen:
    """Fields to show; none: all. `keys` are those of filters and the order, whose values are shown."""
    names = [name for field in fields for name in map(str.strip, field.split(",")) if name]
    if not names:
        return Chosen(keys=frozenset(keys))
    known = frozenset(SUMMARY_FIELDS) & set(names)
    return Chosen(known | set(ALWAYS), frozenset(names) - known - {"values"} | frozenset(keys), every=False)


def summary(record: RunRecord, places: Sequence[Place], spec: Mapping[str, Any], wanted: Chosen) -> RunSummary:
    """The chosen facts of a run; `spec` are the values of its spec by dotted key."""
    fields = run_fields(record, places)
    if not wanted.every:
        fields = {name: value for name, value in fields.items() if name in wanted.fields}
    values = {"values": found} if (found := _values(record, spec, wanted.keys)) or wanted.every else {}
    return RunSummary(**fields, **values)


def run_fields(record: RunRecord, places: Sequence[Place]) -> dict[str, Any]:
    """The fields of a RunSummary. A run that was never begun has the seed and steps of its plan."""
    planned = next((place.spec for place in places if place.spec), None)
    begun = record.revision > 0
    return {
        "run_id": record.run_id,
        "status": record.status,
        "ablations": list(dict.fromkeys(place.ablation for place in places)),
        "row": places[0].row if places else None,
        "seed": record.seed if begun else planned.seed if planned else None,
        "step": record.step,
        "steps": record.steps if begun else planned.train.steps if planned else None,
        "attempt": record.attempt,
        "created_ms": record.created_ms,
        "updated_ms": max((ms for ms in (record.updated_ms, record.ended_ms) if ms is not None), default=None),
        "worker_id": record.worker_id,
        "sweep_id": record.sweep_id,
        "parent_id": record.parent_id,
        "message": record.message,
        "metrics": dict(record.metrics),
    }


def _values(record: RunRecord, spec: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The values of a run by the keys of filters. Those that are no number or text are left out."""
    found = {}
    for key in sorted(keys):
        value = getattr(record, key) if key in VALUE_COLUMNS else spec.get(key, record.value(key))
        if isinstance(value, (bool, int, float, str)):
            found[key] = value
    return found


def sweep_fields(summary: SweepSummary) -> dict[str, Any]:
    """The fields of a SweepEntry, without the counts."""
    return dict(summary.__dict__)


def readable(read: Callable[[], T]) -> T | None:
    """Call `read`; None for a file that cannot be read."""
    try:
        return read()
    except DamagedError:
        return None
