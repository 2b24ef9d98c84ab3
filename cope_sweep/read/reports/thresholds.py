"""Steps and sequences until a task is learned: until a metric reaches the value that `learned` names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from cope_sweep.read.numbers import integer
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import Column, TableModel, TableRow
from cope_sweep.read.tables.results import first_learned
from cope_sweep.read.tables.rules import learning_metric, stuck_from
from cope_sweep.read.tables.stats import LEVEL, RESAMPLES, TAILS
from cope_sweep.store import Store
from cope_sweep.store.errors import DamagedError


def thresholds(model: TableModel, store: Store) -> Layout | None:
    """Steps and sequences until runs have learned the task; runs that failed have not.

    None if no column defines `learned`, or no run has learned the task. Raises StoreError.

    Args:
        model: The table of results.
        store: The store with the learning curves of its runs.
    """
    column = learning_metric(model.columns)
    if column is None:
        return None
    first_steps = [(row, list(_first_steps(row, column, store))) for row in model.rows]
    if not any(math.isfinite(step) for _, steps in first_steps for step in steps):
        return None
    lines = []
    for row, steps in first_steps:
        train = row.runs[0][0].train
        if steps:
            median = bootstrap_median(steps)
            cells = [row.short, f"{sum(map(math.isfinite, steps))}/{len(steps)}"]
            cells += [_median_text(median, train.steps, unit) for unit in (1, train.batch)]
            lines.append(tuple(map(TextCell, cells)))
    headers = [ColumnHeader("row", numeric=False), *map(ColumnHeader, ("seeds", "steps", "sequences"))]
    or_failed = ", or whose run failed," if any(row.counts["failed"] for row in model.rows) else ""
    note = (
        f"Training until the first evaluation with {column.learned_title} {column.unit}: the median over seeds, and "
        f"its {100 * LEVEL:g} % bootstrap interval. A seed that never gets there{or_failed} counts as later than the "
        "end of training; one that gets there may lose it again."
    )
    return Layout(tuple(headers), tuple(lines), note)


def _first_steps(row: TableRow, column: Column, store: Store) -> Iterator[float]:
    """The first step at which each run that has ended has learned the task; infinite if it never has."""
    cell = row.metrics[column.name]
    for run, record in row.runs:
        if record.status == "failed" and run.seed in cell.lost:
            yield math.inf
        elif record.status == "finished":  # others may still learn the task
            with suppress(DamagedError):
                first = first_learned(store.run(run.run_id).curve(), column, stuck_from(cell.rule_error))
                if first is not None:
                    yield first


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its percentile interval over resampled seeds. Values may be infinite."""
    seeds = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds)))
    low, high = np.quantile(np.median(drawn, axis=1), TAILS, method="inverted_cdf")
    return float(np.median(seeds)), float(low), float(high)


def _median_text(steps: tuple[float, float, float], last_step: int, unit: int) -> str:
    """`1,200 [800, > 4,000]`: a median of steps and the ends of its interval, each multiplied by `unit`."""

    def format_step(step: float) -> str:
        return f"> {integer(last_step * unit)}" if math.isinf(step) else integer(step * unit)

    median, low, high = map(format_step, steps)
    return median if low == high == median else f"{median} [{low}, {high}]"
