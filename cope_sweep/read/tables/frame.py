"""The runs of an ablation as pandas frames.

`frame` has one line per run of the plan, started or not, with the columns

    run_id, status, row, seed      `row` is the name of the plan's row
    <axis key>, …                  the label of the axis value (`model.position`: "CoPE"); missing if the row has none
    <key of the spec>, …           other values of the configuration: `task.kind`, `train.lr`, …
    <metric>, …                    final metrics (`in_dist/token_error`); missing unless the run is finished
    facts.<name>, …                parameters, train_s, tokens_per_s, device, … of finished runs
    message                        why a run failed, was stopped or is damaged, in one line

The metrics of the ablation always have a column, so that the frame of an untrained ablation has the same shape.
pandas is imported when a frame is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan, RunSpec
from cope_sweep.store import RunRecord, Store
from cope_sweep.store.index.model import Value, flatten
from cope_sweep.store.index.tables import SECTIONS

if TYPE_CHECKING:
    import pandas as pd


def read_runs(plan: Plan, store: Store) -> dict[str, RunRecord]:
    """Run id → record, for every run of the plan, from the index. Raises StoreError."""
    records = store.index.records(run.run_id for run in plan.runs)
    return {run.run_id: records.get(run.run_id) or RunRecord(run.run_id) for run in plan.runs}


def frame(plan: Plan, store: Store) -> pd.DataFrame:
    """The runs of `plan`, row by row; the module describes the columns. Raises StoreError."""
    return frame_of_records(plan, read_runs(plan, store))


def frame_of_records(plan: Plan, records: Mapping[str, RunRecord]) -> pd.DataFrame:
    """The frame of records that were read already, by run id."""
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
    columns |= {key: pd.Series([row.labels.get(key) for row, _ in runs], dtype="str") for key in plan.axes}
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


def curves(plan: Plan, store: Store) -> pd.DataFrame:
    """The learning curves of started runs, finished or not: one line per logged value.

    The columns are run_id, row, seed, step, metric and value.
    """
    import pandas as pd

    lines = [
        (run.run_id, row.name, run.seed, int(point["step"]), metric, float(value))
        for row in plan.rows
        for run in row.runs
        for point in store.run(run.run_id).curve()
        for metric, value in point.items()
        if metric != "step"
    ]
    columns = {"run_id": "str", "row": "str", "seed": "int64", "step": "int64", "metric": "str", "value": "float64"}
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


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
