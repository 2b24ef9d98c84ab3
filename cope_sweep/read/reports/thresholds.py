"""Steps and sequences until the seeds of a row have learned the task (`learned` of a metric)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.table_model import Column, TableModel

RESAMPLES = 9_999
LEVEL = 0.95


def thresholds(model: TableModel, curves: pd.DataFrame) -> Layout | None:
    """The table of the finished runs; None where no column says from which value on the task is learned, or none has.

    Args:
        model: The table of results.
        curves: The learning curves of its runs, as `results.frame.curves` has them.
    """
    column = next((column for column in model.columns if column.learned is not None), None)
    if column is None or column.learned is None:
        return None
    # A run that has not finished may still learn the task.
    finished = [run.run_id for row in model.rows for run, record in row.runs if record.status == "finished"]
    first_steps = _first_steps(curves[curves["run_id"].isin(finished)], column, column.learned)
    lines = []
    for row in model.rows:
        train = row.runs[0][0].train
        steps = [first_steps[run.run_id] for run, _ in row.runs if run.run_id in first_steps]
        if steps:
            cells = [row.row, f"{sum(map(math.isfinite, steps))}/{len(steps)}"]
            cells += [_interval(steps, train.steps, sequences) for sequences in (1, train.batch)]
            lines.append(tuple(map(TextCell, cells)))
    if not any(map(math.isfinite, first_steps.values())):
        return None
    headers = [ColumnHeader("row", numeric=False), *map(ColumnHeader, ("seeds", "steps", "sequences"))]
    sign = "≤" if column.goal == "min" else "≥"
    note = (
        f"The first evaluation with {column.label} {sign} {column.learned * column.scale:g} {column.unit}: the median "
        f"of the seeds, and its {100 * LEVEL:g} % bootstrap interval. A seed that never reaches it counts as later "
        "than the end of training. A seed that reaches it may lose it again."
    )
    return Layout(tuple(headers), tuple(lines), note)


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its percentile interval over resampled seeds; infinite values are later than all others."""
    seeds = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds)))
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.median(drawn, axis=1), tails, method="inverted_cdf")
    return float(np.median(seeds)), float(low), float(high)


def _first_steps(curves: pd.DataFrame, column: Column, threshold: float) -> dict[str, float]:
    """Run id → the first step at which its value has reached the threshold; infinite if none has."""
    own = curves[curves["metric"] == column.name]
    reached = own["value"] <= threshold if column.goal == "min" else own["value"] >= threshold
    steps = own["step"].where(reached, math.inf).groupby(own["run_id"]).min()
    return {str(run_id): float(step) for run_id, step in steps.items()}


def _interval(steps: Sequence[float], last: int, times: int) -> str:
    """Median and interval, in steps or, with `times` sequences in a step, in sequences."""

    def shown(step: float) -> str:
        return f"> {last * times:,}" if math.isinf(step) else f"{step * times:,.0f}"

    middle, low, high = map(shown, bootstrap_median(steps))
    return middle if low == high == middle else f"{middle} [{low}, {high}]"
