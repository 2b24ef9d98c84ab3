"""Tidy frames of an ablation's runs: from the ledger, or from what MLflow holds.

`frame` has one line per run of the plan, whether begun or not, with the columns

    run_id, status, row, seed      who it is; `row` is the name of the plan's row
    <axis key>, …                  the label of the axis' value (`model.position`: "CoPE"); missing where a row has none
    <metric>, …                    final metrics (`in_dist/token_error`); missing until the run is finished
    facts.<name>, …                parameters, train_s, tokens_per_s, device, … of finished runs
    message                        why it failed, in one line

and always has the ablation's own metrics among them, so that a frame of an untrained ablation has the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from cope_sweep.plan import Plan
from cope_sweep.record import Ledger, RunFolder, Status

if TYPE_CHECKING:
    from cope_sweep.record.tracking import Tracking


@dataclass(frozen=True)
class Reading:
    """What a record says about one run."""

    status: Status = "pending"
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    message: str | None = None


def frame(plan: Plan, ledger: Ledger) -> pd.DataFrame:
    """The runs of `plan`, row by row, as the ledger has them. Raises StoreError for a file that is not whole."""
    return _tidy(plan, {run.run_id: read(ledger.run(run.run_id)) for run in plan.runs})


def frame_from_tracking(plan: Plan, tracking: Tracking) -> pd.DataFrame:
    """The same from MLflow, each run found by its `run_id` tag, in whatever experiment. Raises TrackingError."""
    from cope_sweep.record.translate import TAG, reading_of

    readings = {}
    for run in plan.runs:
        if tracked := tracking.find({f"{TAG}run_id": run.run_id}):
            readings[run.run_id] = Reading(**reading_of(tracked))
    return _tidy(plan, readings)


def curves(plan: Plan, ledger: Ledger) -> pd.DataFrame:
    """Learning curves: a line per logged value, with run_id, row, seed, step, metric, value. Unfinished runs too."""
    lines = [
        (run.run_id, row.name, run.seed, int(point["step"]), metric, float(value))
        for row in plan.rows
        for run in row.runs
        for point in ledger.run(run.run_id).curve()
        for metric, value in point.items()
        if metric != "step"
    ]
    columns = {"run_id": "str", "row": "str", "seed": "int64", "step": "int64", "metric": "str", "value": "float64"}
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


def read(folder: RunFolder) -> Reading:
    """A run's folder, as little of it as its status needs. Raises StoreError."""
    status = folder.status
    if status == "finished":
        result = folder.result or {}
        return Reading(status, result.get("metrics", {}), result.get("facts", {}))
    message = folder.state.get("message") if status == "failed" else None
    return Reading(status, message=message)


def _tidy(plan: Plan, readings: Mapping[str, Reading]) -> pd.DataFrame:
    ordered = [readings.get(run.run_id, Reading()) for row in plan.rows for run in row.runs]
    axes = list(plan.axes)
    own = [metric.name for metric in plan.ablation.content.metrics]
    metrics = list(dict.fromkeys([*own, *sorted({name for reading in ordered for name in reading.metrics})]))
    facts = list(dict.fromkeys(name for reading in ordered for name in reading.facts))
    runs = [(row, run) for row in plan.rows for run in row.runs]
    columns: dict[str, pd.Series[Any]] = {
        "run_id": pd.Series([run.run_id for _, run in runs], dtype="str"),
        "status": pd.Series([reading.status for reading in ordered], dtype="str"),
        "row": pd.Series([row.name for row, _ in runs], dtype="str"),
        "seed": pd.Series([run.seed for _, run in runs], dtype="int64"),
    }
    columns |= {key: pd.Series([row.labels.get(key) for row, _ in runs], dtype="str") for key in axes}
    columns |= {name: pd.Series([_value(r, name) for r in ordered], dtype="float64") for name in metrics}
    columns |= {
        f"facts.{name}": _series([r.facts.get(name) for r in ordered]) for name in facts if f"facts.{name}" not in own
    }
    columns["message"] = pd.Series([reading.message for reading in ordered], dtype="str")
    return pd.DataFrame(columns)


def _value(reading: Reading, name: str) -> float | None:
    """A metric, or a fact that the ablation has among its metrics."""
    fact = name.removeprefix("facts.")
    return reading.metrics.get(name) if fact == name else reading.facts.get(fact)


def _series(values: list[Any]) -> pd.Series[Any]:
    """A column of its own type, whatever is missing: Int64, Float64, boolean, or text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pd.Series(values, dtype="boolean")
    if kinds == {int}:
        return pd.Series(values, dtype="Int64")
    if kinds <= {int, float}:
        return pd.Series(values, dtype="Float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")
