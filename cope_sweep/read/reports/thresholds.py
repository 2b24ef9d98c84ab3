"""Steps and sequences until a task is learned: until a metric reaches the value that `learned` names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from cope_sweep.read.numbers import integer
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import Column, TableModel
from cope_sweep.read.tables.results import first_learned
from cope_sweep.read.tables.rules import learning_metric, stuck_from
from cope_sweep.read.tables.stats import LEVEL

RESAMPLES = 9_999
"""Bootstrap samples of a median."""


def thresholds(model: TableModel, curves: pd.DataFrame) -> Layout | None:
    """Steps and sequences until finished runs have learned the task.

    None if no column defines `learned`, or no run has learned the task.

    Args:
        model: The table of results.
        curves: The learning curves of its runs, as in `Results.curves`.
    """
    column = learning_metric(model.columns)
    if column is None:
        return None
    # A run that has not finished may still learn the task.
    finished = [run.run_id for row in model.rows for run, record in row.runs if record.status == "finished"]
    limits = {run.run_id: stuck_from(row.metrics[column.name].rule_error) for row in model.rows for run, _ in row.runs}
    first_steps = _first_steps(curves[curves["run_id"].isin(finished)], column, limits)
    lines = []
    for row in model.rows:
        train = row.runs[0][0].train
        steps = [first_steps[run.run_id] for run, _ in row.runs if run.run_id in first_steps]
        if steps:
            cells = [row.short, f"{sum(map(math.isfinite, steps))}/{len(steps)}"]
            cells += [_median_text(steps, train.steps, unit) for unit in (1, train.batch)]
            lines.append(tuple(map(TextCell, cells)))
    if not any(map(math.isfinite, first_steps.values())):
        return None
    headers = [ColumnHeader("row", numeric=False), *map(ColumnHeader, ("seeds", "steps", "sequences"))]
    note = (
        f"Training until the first evaluation with {column.learned_title} {column.unit}: the median over seeds, and "
        f"its {100 * LEVEL:g} % bootstrap interval. A seed that never gets there counts as later than the end of "
        "training; one that gets there may lose it again."
    )
    return Layout(tuple(headers), tuple(lines), note)


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its percentile interval over resampled seeds. Values may be infinite."""
    seeds = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds)))
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.median(drawn, axis=1), tails, method="inverted_cdf")
    return float(np.median(seeds)), float(low), float(high)


def _first_steps(curves: pd.DataFrame, column: Column, limits: Mapping[str, float]) -> dict[str, float]:
    """Run id → the first step at which the run has learned the task; infinite if it never has.

    A run whose error is at least its value in `limits` (run id → error) is stuck: it has not learned the task.
    """
    steps = {}
    for run_id, logged in curves[curves["metric"] == column.name].groupby("run_id"):
        first = first_learned(zip(logged["step"], logged["value"], strict=True), column, limits[str(run_id)])
        if first is not None:
            steps[str(run_id)] = float(first)
    return steps


def _median_text(steps: Sequence[float], last_step: int, unit: int) -> str:
    """`1,200 [800, > 4,000]`: the median of some steps and its interval, each multiplied by `unit`."""

    def format_step(step: float) -> str:
        return f"> {integer(last_step * unit)}" if math.isinf(step) else integer(step * unit)

    median, low, high = map(format_step, bootstrap_median(steps))
    return median if low == high == median else f"{median} [{low}, {high}]"
