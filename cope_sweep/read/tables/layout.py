"""The texts of a table and of its comparisons, which every text format renders: headings, cells and notes.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
Its digits are those of the metric, or of the published value beside it if that has more, or those a small mean needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cope_sweep.read.tables.compare import PAPER, p_text, places
from cope_sweep.read.tables.stats import STUCK_RULE
from cope_sweep.read.tables.table_model import Column, Comparison, MetricCell, PublishedValue, TableModel, TableRow

MISSING = "–"
MAX_DECIMALS = 6


@dataclass(frozen=True)
class ColumnHeader:
    """The heading of a column."""

    text: str
    numeric: bool = True
    """Numeric columns are right-aligned."""


@dataclass(frozen=True)
class TextCell:
    """The text of a cell."""

    text: str
    best: bool = False
    hint: str = ""
    """Details, for formats that can show them on demand."""
    runs: tuple[str, ...] = ()
    """Ids of the runs that the number was computed from, for formats that can link to them."""


@dataclass(frozen=True)
class Layout:
    """The texts of a table: headings, rows of cells, and notes below."""

    headers: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    note: str = ""
    """Legend of the numbers."""
    rules: tuple[str, ...] = ()
    """How rows were compared."""
    warnings: tuple[str, ...] = ()
    """Why they may not be comparable."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences below the table, the warnings first."""
        return (*(f"Warning: {text}" for text in self.warnings), *([self.note] if self.note else []), *self.rules)


def layout(model: TableModel) -> Layout:
    """The texts of a table.

    Columns: axes; parameters, if known and not a metric of the table; each metric, the seeds that have learned the task
    by it, and its published values, if any row has them; and the progress of the runs, if some are missing.
    """
    published = {c.name for c in model.columns if any(row.metrics[c.name].published for row in model.rows)}
    incomplete = any(not row.complete for row in model.rows)
    sized = any(row.parameters is not None for row in model.rows) and not any(c.exact for c in model.columns)
    headers = [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
    headers += [ColumnHeader("parameters")] if sized else []
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.learned is not None:
            headers.append(ColumnHeader(_learned_title(column)))
        if column.name in published:
            headers.append(ColumnHeader(f"{column.label}, published"))
    headers += [ColumnHeader("runs", numeric=False)] if incomplete else []
    rows = []
    for row in model.rows:
        cells = _label_cells(model, row)
        if sized:
            cells.append(TextCell(MISSING if row.parameters is None else f"{row.parameters:,}"))
        for column in model.columns:
            metric = row.metrics[column.name]
            cells.append(_metric_cell(metric, column, row))
            if column.learned is not None:
                cells.append(_learned_cell(metric))
            if column.name in published:
                cells.append(_published_cell(metric.published, column))
        if incomplete:
            cells.append(TextCell(row.progress))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), _note(model), warnings=model.warnings)


def comparison_layout(model: TableModel) -> Layout | None:
    """The texts of the comparisons, a line for each; None without any.

    With a row: the comparisons that were tested, or that too few seeds left untested. With the paper: every number.
    """
    found = [
        (column, row, cell, cell.comparison)
        for column in sorted(model.columns, key=lambda column: not column.primary)
        for row in model.rows
        if (cell := row.metrics[column.name]).comparison is not None
    ]
    if not found:
        return None
    if found[0][3].against == PAPER:
        titles: tuple[str, ...] = ("metric", "difference", "margin", "verdict")
        lines: list[tuple[str, ...]] = [_paper_cells(column, cell, each) for column, _, cell, each in found]
    else:
        first = found[0][0]
        found = [each for each in found if each[0] is first]
        titles = ("difference", "95 % interval", "p", "verdict", "Hedges' g", "detectable")
        lines = [_tested_cells(column, cell, each) for column, _, cell, each in found]
    against = len({each.against for *_, each in found}) > 1
    headers = [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
    headers += [ColumnHeader("against", numeric=False)] * against
    headers += [ColumnHeader(title, numeric=title not in ("metric", "verdict")) for title in titles]
    rows = [
        (*_label_cells(model, row), *([TextCell(each.against)] * against), *map(TextCell, cells))
        for (_, row, _, each), cells in zip(found, lines, strict=True)
    ]
    return Layout(tuple(headers), tuple(rows), rules=model.rules)


def _label_cells(model: TableModel, row: TableRow) -> list[TextCell]:
    return [TextCell(row.labels.get(key, "")) for key in model.axes] or [TextCell(row.row)]


def _learned_title(column: Column) -> str:
    sign = "≤" if column.goal == "min" else "≥"
    return f"{column.label} {sign} {(column.learned or 0.0) * column.scale:g}"


def _learned_cell(cell: MetricCell) -> TextCell:
    if cell.learned is None or not cell.learned.n:
        return TextCell(MISSING)
    low, high = (100 * end for end in cell.learned.interval)
    return TextCell(f"{cell.learned.k}/{cell.learned.n} ({low:.0f}–{high:.0f} %)")


def _paper_cells(column: Column, cell: MetricCell, each: Comparison) -> tuple[str, ...]:
    """Metric, difference, margin, verdict."""
    digits = decimals_of(column, cell)
    show, margin = _printer(column, digits, "+z"), _printer(column, digits)
    return column.label, show(each.difference.difference), f"± {margin(each.margin or 0)}", each.verdict


def _tested_cells(column: Column, cell: MetricCell, each: Comparison) -> tuple[str, ...]:
    """Difference, interval, p, verdict, effect, detectable difference."""
    found, digits = each.difference, decimals_of(column, cell)
    show = _printer(column, digits)
    interval = MISSING if math.isnan(found.ci_low) else f"[{show(found.ci_low)}, {show(found.ci_high)}]"
    p = MISSING if each.p_adjusted is None else p_text(each.p_adjusted)
    effect = MISSING if math.isnan(found.effect) else f"{found.effect:.1f}"
    detectable = MISSING if math.isnan(found.detectable) else show(found.detectable)
    return _printer(column, digits, "+z")(found.difference), interval, p, each.verdict, effect, detectable


def decimals_of(column: Column, cell: MetricCell) -> int:
    """Digits after the decimal point in a cell, at most `MAX_DECIMALS`."""
    digits = column.decimals
    if cell.published is not None:
        digits = max(digits, _published_decimals(cell.published, column))
    mean = abs(cell.summary.mean) * column.scale
    if 0 < mean < 0.5 * 10.0**-digits:
        digits = math.ceil(-math.log10(mean))
    return min(digits, MAX_DECIMALS)


def _published_decimals(published: PublishedValue, column: Column) -> int:
    written = (places(value, column.scale) for value in (published.value, published.std) if value is not None)
    return min(max(column.decimals, *written), MAX_DECIMALS)


def _metric_cell(metric: MetricCell, column: Column, row: TableRow) -> TextCell:
    summary = metric.summary
    if summary.n == 0:
        return TextCell(MISSING, hint=row.progress)
    digits = decimals_of(column, metric)
    show = _printer(column, digits)
    text = show(summary.mean)
    hints = [f"n = {summary.n}"]
    if summary.n > 1:
        text += "" if column.exact else f" ± {show(summary.std)}"
        hints.append(_interval_hint(metric, show))
        hints.append(f"median {show(summary.median)}, range {show(summary.low)} … {show(summary.high)}")
    if metric.stuck:
        hints.append(f"{len(metric.stuck)} of {summary.n} seeds stuck: {', '.join(map(str, metric.stuck))}")
    if summary.n != row.seeds:
        text += f" (n={summary.n})"
    runs = tuple(run.run_id for run, _ in row.runs if run.seed in metric.values)
    return TextCell(text, metric.best, "; ".join(hints), runs)


def _printer(column: Column, digits: int, sign: str = "") -> Callable[[float], str]:
    """Prints values of a column in its unit."""
    return lambda value: format(value * column.scale, f"{sign}.{digits}f")


def _interval_hint(metric: MetricCell, show: Callable[[float], str]) -> str:
    summary = metric.summary
    if math.isnan(summary.ci_low):
        return "no interval: all seeds are at the end of the range"
    return f"95 % interval {show(summary.ci_low)} … {show(summary.ci_high)} ({summary.method})"


def _published_cell(published: PublishedValue | None, column: Column) -> TextCell:
    if published is None:
        return TextCell(MISSING)
    show = _printer(column, _published_decimals(published, column))
    text = show(published.value)
    if published.std is not None:
        text += f" ± {show(published.std)}"
    return TextCell(text, hint=published.source)


def _note(model: TableModel) -> str:
    seeds = sorted({row.seeds for row in model.rows})
    counts = " or ".join(map(str, seeds))
    parts = ["One seed" if seeds == [1] else f"Mean ± standard deviation over {counts} seeds"]
    cells = [(row, column, row.metrics[column.name]) for row in model.rows for column in model.columns]
    if any(0 < cell.summary.n < row.seeds for row, _, cell in cells):
        parts.append("(n=…): only n seeds are finished")
    if model.stopped:
        parts.append(f"{model.stopped} run{'s were' if model.stopped > 1 else ' was'} stopped early and not averaged")
    if any(cell.best for _, _, cell in cells):
        parts.append("bold: best")
    far = [
        f"{len(c.stuck)} of {c.summary.n} seeds of {row.row} ({column.label})" for row, column, c in cells if c.stuck
    ]
    if far:
        parts += [f"stuck: {', '.join(far)}", STUCK_RULE]
    if any(column.learned is not None for column in model.columns):
        parts.append("k/n: seeds that learned the task, with the 95 % interval of their share (Wilson)")
    sources = dict.fromkeys(c.published.source for _, _, c in cells if c.published and c.published.source)
    if sources:
        parts.append(f"published: {', '.join(sources)}")
    return "; ".join(parts) + "."
