"""The texts of a table, which every text format renders: headings, cells and notes.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
Its digits are those of the metric, or of the published value beside it if that has more, or those a small mean needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cope_sweep.results.compare import PAPER, places
from cope_sweep.results.stats import STUCK_RULE
from cope_sweep.results.table_model import Column, Comparison, MetricCell, PublishedValue, TableModel, TableRow

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
    note: str
    """Legend of the numbers."""
    rules: tuple[str, ...] = ()
    """How they were compared."""
    warnings: tuple[str, ...] = ()
    """Why they may not be comparable."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences below the table, the warnings first."""
        return (*(f"Warning: {text}" for text in self.warnings), self.note, *self.rules)


def layout(model: TableModel) -> Layout:
    """The texts of a table.

    Columns: axes; parameters, if known and not a metric of the table; each metric, its published values and its
    comparison, if any row has them; and the progress of the runs, if some are missing.
    """
    published = {c.name for c in model.columns if any(row.metrics[c.name].published for row in model.rows)}
    compared = {c.name for c in model.columns if any(row.metrics[c.name].comparison for row in model.rows)}
    incomplete = any(not row.complete for row in model.rows)
    sized = any(row.parameters is not None for row in model.rows) and not any(c.exact for c in model.columns)
    headers = [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
    headers += [ColumnHeader("parameters")] if sized else []
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.name in published:
            headers.append(ColumnHeader(f"{column.label}, published"))
        if column.name in compared:
            headers.append(ColumnHeader(f"{column.label}, {_against(model, column)}"))
    headers += [ColumnHeader("runs", numeric=False)] if incomplete else []
    rows = []
    for row in model.rows:
        cells = [TextCell(row.labels.get(key, "")) for key in model.axes] or [TextCell(row.row)]
        if sized:
            cells.append(TextCell(MISSING if row.parameters is None else f"{row.parameters:,}"))
        for column in model.columns:
            metric = row.metrics[column.name]
            cells.append(_metric_cell(metric, column, row))
            if column.name in published:
                cells.append(_published_cell(metric.published, column))
            if column.name in compared:
                cells.append(_comparison_cell(metric, column))
        if incomplete:
            cells.append(TextCell(row.progress))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), _note(model), model.rules, model.warnings)


def _against(model: TableModel, column: Column) -> str:
    found = (row.metrics[column.name].comparison for row in model.rows)
    name = next(each.against for each in found if each is not None)
    return "against the paper" if name == PAPER else f"minus {name}"


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


def _comparison_cell(cell: MetricCell, column: Column) -> TextCell:
    comparison = cell.comparison
    if comparison is None:
        return TextCell(MISSING)
    found, digits = comparison.difference, decimals_of(column, cell)
    show = _printer(column, digits)
    text = _printer(column, digits, "+z")(found.difference)
    interval = "" if math.isnan(found.ci_low) else f"[{show(found.ci_low)}, {show(found.ci_high)}]"
    hint = [f"n = {found.n[0]} and {found.n[1]}"] + ([f"95 % interval {interval}"] if interval else [])
    if comparison.against == PAPER:
        hint.append(f"margin {show(comparison.margin or 0)}")
        return TextCell(f"{text}: {comparison.verdict}", hint="; ".join(hint))
    return TextCell(
        f"{text} {interval}".strip() + f": {_p_text(comparison)}",
        hint="; ".join([*hint, *_details(comparison, show)]),
    )


def _p_text(comparison: Comparison) -> str:
    if comparison.p_adjusted is None:
        return comparison.verdict
    p = "p < 0.001" if comparison.p_adjusted < 0.001 else f"p = {comparison.p_adjusted:.3f}"
    return f"{comparison.verdict}, {p}"


def _details(comparison: Comparison, show: Callable[[float], str]) -> Iterable[str]:
    found = comparison.difference
    if found.test:
        yield f"{found.test}: p = {found.p:.3g}, exact p = {found.p_exact:.3g}"
    if not math.isnan(found.effect):
        yield f"Hedges' g {found.effect:.2f} [{found.effect_low:.2f}, {found.effect_high:.2f}]"
    if not math.isnan(found.detectable):
        yield f"detectable with 80 % power: {show(found.detectable)}"


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
    sources = dict.fromkeys(c.published.source for _, _, c in cells if c.published and c.published.source)
    if sources:
        parts.append(f"published: {', '.join(sources)}")
    return "; ".join(parts) + "."
