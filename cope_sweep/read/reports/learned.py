"""How many seeds of each row have learned the task, and the errors of those that have.

Errors of tasks that a seed either learns or does not learn are near 0 or large, so that their mean describes no seed:
it is the share that learned, and the error of those that did.
"""

from __future__ import annotations

from collections.abc import Sequence

from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import Column, MetricCell, TableModel
from cope_sweep.read.tables.rules import learning_metric


def learned(model: TableModel) -> Layout | None:
    """A line for each row with runs that have ended; None if no column defines `learned`, or no seed has learned.

    Rows are judged by the first such column, as in `thresholds` and heatmaps.
    """
    column = learning_metric(model.columns)
    if column is None:
        return None
    shown = [each for each in model.columns if each.compared]
    lines = []
    learned_seeds = 0
    for row in model.rows:
        cell = row.metrics[column.name]
        seeds = cell.learned_seeds
        if cell.learned is None or not cell.learned.n:
            continue
        learned_seeds += len(seeds)
        texts = [row.short, cell.learned_text, *(_of_seeds(row.metrics[each.name], seeds) for each in shown)]
        lines.append(tuple(map(TextCell, texts)))
    if not learned_seeds:
        return None
    headers = [ColumnHeader("row", numeric=False), ColumnHeader("seeds that learned")]
    headers += [ColumnHeader(each.title) for each in shown]
    return Layout(tuple(headers), tuple(lines), _note(column))


def _of_seeds(cell: MetricCell, seeds: Sequence[int]) -> str:
    """The mean and the standard deviation over some seeds; with their number, if not all have a value."""
    values = [cell.values[seed] for seed in seeds if seed in cell.values]
    summary = summarise(values, cell.column.bounds)
    text = cell.number_text(summary.mean)
    if summary.n > 1:
        text += f" ± {cell.number_text(summary.std)}"
    return text if summary.n in (0, len(seeds)) else f"{text} (n={summary.n})"


def _note(column: Column) -> str:
    return (
        f"Seeds that learned: those with {column.learned_title} {column.unit}".rstrip()
        + ", with the 95 % Wilson interval of their share. Metrics: mean ± standard deviation over these seeds alone. "
        "This choice is made after training, so it describes, and tests nothing."
    )
