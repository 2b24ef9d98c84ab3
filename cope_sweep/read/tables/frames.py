"""pandas frames: the runs of a plan, their learning curves, and the rows of a table.

`plan_frame` has one line per run of the plan, started or not, with the columns

    run_id, status, row, seed      `row` is the name of the plan's row
    <axis key>, …                  the row's label on the axis (`model.position`: "CoPE"); missing if the row has none
    <key of the spec>, …           other values of the configuration: `task.kind`, `train.lr`, …
    <metric>, …                    final metrics (`in_dist/token_error`); missing unless the run is finished
    facts.<name>, …                parameters, train_s, tokens_per_s, device, … of finished runs
    message                        why a run failed or was stopped, or what it has lost

The ablation's metrics always have columns, so the frame of an untrained ablation has the same shape.

`curve_frame` has one line per logged value of a started run, finished or not, with the columns

    run_id, row, seed, step, metric, value
    status, time_s    of the run; time since its first start, including pauses; missing if unknown
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.config.keys import flatten
from cope_sweep.read.tables.model import MetricCell, TableModel
from cope_sweep.records import Value
from cope_sweep.store import STATUSES, RunRecord, Status, Store
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.tables import SECTIONS

CURVE_TYPES = {
    "run_id": "str", "row": "str", "seed": "int64", "step": "int64", "metric": "str", "value": "float64",
    "status": "str", "time_s": "float64",
}  # fmt: skip
"""Column of `curve_frame` → its type."""


def plan_frame(plan: Plan, records: Mapping[str, RunRecord], label: str = "") -> pd.DataFrame:
    """The runs of a plan, row by row; the module describes the columns.

    Args:
        plan: The plan.
        records: Run id → record, of every run of the plan.
        label: Prefix of the columns of labels; empty: the label of an axis replaces the value of its key.
    """
    runs = [(row, run) for row in plan.rows for run in row.runs]
    ordered = [records[run.run_id] for _, run in runs]
    finished = [record if record.status == "finished" else RunRecord(run_id=record.run_id) for record in ordered]
    table_metrics = [metric.name for metric in plan.ablation.content.metrics]
    other_metrics = sorted({name for record in finished for name in record.metrics})
    metrics = list(dict.fromkeys([*table_metrics, *other_metrics]))
    facts = list(dict.fromkeys(name for record in finished for name in record.facts))
    columns: dict[str, pd.Series[Any]] = {
        "run_id": pd.Series([run.run_id for _, run in runs], dtype="str"),
        "status": pd.Series([record.status for record in ordered], dtype="str"),
        "row": pd.Series([row.name for row, _ in runs], dtype="str"),
        "seed": pd.Series([run.seed for _, run in runs], dtype="int64"),
    }
    columns |= {label + key: pd.Series([row.labels.get(key) for row, _ in runs], dtype="str") for key in plan.axes}
    configurations = _configurations(run for _, run in runs)
    for key in dict.fromkeys(key for values in configurations for key in values):
        if key not in columns:
            columns[key] = _typed_series([values.get(key) for values in configurations])
    columns |= {name: pd.Series([record.value(name) for record in finished], dtype="float64") for name in metrics}
    columns |= {
        f"facts.{name}": _typed_series([record.facts.get(name) for record in finished])
        for name in facts
        if f"facts.{name}" not in table_metrics
    }
    columns["message"] = pd.Series([record.message for record in ordered], dtype="str")
    return pd.DataFrame(columns)


def _configurations(runs: Iterable[RunSpec]) -> list[dict[str, Value]]:
    """The values of each run's spec by dotted key, without the seed.

    Runs share most sections of their specs, and each section is converted once.
    """
    converted: dict[tuple[str, str], dict[str, Value]] = {}
    configurations = []
    for run in runs:
        values: dict[str, Value] = {}
        for section in SECTIONS:
            text = getattr(run, section).model_dump_json()
            if (section, text) not in converted:
                converted[section, text] = dict(flatten(json.loads(text), section))
            values |= converted[section, text]
        configurations.append(values)
    return configurations


def _typed_series(values: list[Any]) -> pd.Series[Any]:
    """A column with a nullable type: boolean, Int64, Float64, or text."""
    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return pd.Series(values, dtype="boolean")
    if types == {int}:
        return pd.Series(values, dtype="Int64")
    if types <= {int, float}:
        return pd.Series(values, dtype="Float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")


def curve_frame(plan: Plan, records: Mapping[str, RunRecord], store: Store) -> pd.DataFrame:
    """The learning curves of the started runs of a plan; the module describes the columns.

    A damaged curve is left out.
    """
    lines = [
        line
        for row in plan.rows
        for run in row.runs
        if records[run.run_id].status != "pending" or records[run.run_id].step
        for line in _curve_lines(store, row, run, records[run.run_id].status)
    ]
    return pd.DataFrame(lines, columns=list(CURVE_TYPES)).astype(CURVE_TYPES)


def _curve_lines(store: Store, row: Row, run: RunSpec, status: Status) -> Iterator[tuple[object, ...]]:
    folder = store.run(run.run_id)
    try:
        logged = list(folder.logged_values())
        started_ms = (folder.spec or {}).get("created_ms") if logged else None
    except DamagedError:
        return
    for step, metric, value, time_ms in logged:
        time_s = None
        if time_ms is not None and started_ms is not None:
            time_s = max(0.0, time_ms - started_ms) / 1000
        yield run.run_id, row.name, run.seed, step, metric, value, status, time_s


def table_frame(model: TableModel, *, compared: bool) -> pd.DataFrame:
    """One line per row of the plan, with the columns

    row, <axis key>, …                                      its name, and its labels on the axes
    seeds                                                   the number of its runs, finished or not
    finished, stopped, failed, running, interrupted, pending    the number of runs with this status
    parameters                                              of the model; missing before a run is finished
    <metric>.mean, .std, .n, .ci_low, .ci_high              over the n finished seeds; `tables.stats`
    <metric>.median, .low, .high, .stuck                    smallest and largest value, number of stuck seeds
    <metric>.published, .published_std                      the paper's numbers, if it has them
    <metric>.best                                           whether it is the best mean of the complete rows
    <metric>.learned                                        the number of seeds that learned the task
    <metric>.difference, .difference_low, .difference_high, .p, .smallest_p, .p_adjusted, .effect, .detectable,
    <metric>.verdict                                        of a comparison, if there is one: `tables.comparisons`
    """
    types = {"row": "str"} | dict.fromkeys(model.axes, "str") | {"seeds": "int64"}
    types |= dict.fromkeys((str(status) for status in STATUSES), "int64") | {"parameters": "Int64"}
    for column in model.columns:
        parts = CELL_TYPES | (COMPARISON_TYPES if compared else {})
        if column.learned is None:
            del parts["learned"]
        types |= {f"{column.name}.{part}": kind for part, kind in parts.items()}
    lines = [
        {"row": row.row, **row.labels, "seeds": row.seeds, **row.counts, "parameters": row.parameters}
        | {f"{name}.{part}": value for name, cell in row.metrics.items() for part, value in _cell_line(cell).items()}
        for row in model.rows
    ]
    return pd.DataFrame(lines, columns=list(types)).astype(types)


CELL_TYPES = {
    "mean": "float64", "std": "float64", "n": "int64", "ci_low": "float64", "ci_high": "float64", "median": "float64",
    "low": "float64", "high": "float64", "stuck": "int64", "learned": "Int64", "published": "float64",
    "published_std": "float64", "best": "bool",
}  # fmt: skip
COMPARISON_TYPES = {
    "difference": "float64", "difference_low": "float64", "difference_high": "float64", "p": "float64",
    "smallest_p": "float64", "effect": "float64", "detectable": "float64", "p_adjusted": "float64", "verdict": "str",
}  # fmt: skip
"""Last part of the columns of a metric → type."""


def _cell_line(cell: MetricCell) -> dict[str, Any]:
    """The values of the columns of a metric (`CELL_TYPES`, `COMPARISON_TYPES`) and others."""
    line = vars(cell.summary) | {"stuck": len(cell.stuck), "best": cell.best}
    if cell.learned is not None:
        line["learned"] = cell.learned.k
    if cell.published is not None:
        line |= {"published": cell.published.value, "published_std": cell.published.std}
    if cell.comparison is not None:
        difference = vars(cell.comparison.difference)
        line |= {part: difference[part] for part in ("difference", "p", "smallest_p", "effect", "detectable")}
        line |= {"difference_low": difference["ci_low"], "difference_high": difference["ci_high"]}
        line |= {"p_adjusted": cell.comparison.p_adjusted, "verdict": cell.comparison.verdict}
    return line
