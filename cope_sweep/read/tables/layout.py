"""The texts of a table, of its comparisons and of its runs: headings, cells and notes. `render` gives them a format.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
It has the metric's number of digits, or more if the published value or a small mean needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cope_sweep.read.tables.comparisons import p_text
from cope_sweep.read.tables.model import (
    PAPER,
    Column,
    Comparison,
    MetricCell,
    PublishedValue,
    TableModel,
    TableRow,
    decimal_places,
    encoding_groups,
)
from cope_sweep.read.tables.stats import Proportion

MISSING = "–"
STUCK = "†"
"""Follows a mean if most seeds are stuck."""
MAX_DECIMALS = 6
STARS = (0.05, 0.01, 0.001)
"""Largest p for one star, two and three."""


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
    stars: int = 0
    """How many of `STARS` the p of the comparison does not exceed; 0 without a test."""


@dataclass(frozen=True)
class Layout:
    """The texts of a table: headings, rows of cells, and notes below."""

    headers: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    note: str = ""
    """Explains the numbers."""
    rules: tuple[str, ...] = ()
    """Rules of the comparisons."""
    warnings: tuple[str, ...] = ()
    """Reasons why rows may not be comparable."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences below the table, the warnings first."""
        return (*(f"Warning: {text}" for text in self.warnings), *([self.note] if self.note else []), *self.rules)


def layout(model: TableModel) -> Layout:
    """The texts of a table.

    Its columns are the axes; the number of parameters, if known and not a metric of the table; each metric, followed by
    the seeds that have learned the task and by the published values, if any row has them and the runs have the paper's
    size; and the progress of the runs, if some are missing.
    """
    published: set[str] = set()
    if not model.replaced:
        published = {
            column.name for column in model.columns if any(row.metrics[column.name].published for row in model.rows)
        }
    is_incomplete = any(not row.complete for row in model.rows)
    has_sizes = any(row.parameters is not None for row in model.rows)
    has_sizes = has_sizes and not any(column.exact for column in model.columns)
    headers = _label_headers(model)
    headers += [ColumnHeader("parameters")] * has_sizes
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.learned is not None:
            headers.append(ColumnHeader(column.learned_title))
        if column.name in published:
            headers.append(ColumnHeader(f"{column.label}, published"))
    headers += [ColumnHeader("runs", numeric=False)] * is_incomplete
    rows = []
    for row in model.rows:
        cells = _label_cells(model, row)
        if has_sizes:
            cells.append(TextCell(MISSING if row.parameters is None else f"{row.parameters:,}"))
        for column in model.columns:
            metric = row.metrics[column.name]
            cells.append(_metric_cell(metric, column, row))
            if column.learned is not None:
                cells.append(_learned_cell(metric))
            if column.name in published:
                cells.append(_published_cell(metric.published, column))
        if is_incomplete:
            cells.append(TextCell(row.progress))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), _note(model), warnings=model.warnings)


def comparison_layout(model: TableModel) -> Layout | None:
    """The texts of the comparisons, one line each; None without comparisons.

    With a row, only the first column that has comparisons is listed, which is the tested one; with the paper, all are.
    """
    comparisons: list[tuple[Column, TableRow, Comparison]] = []
    for column in sorted(model.columns, key=lambda column: not column.primary):
        for row in model.rows:
            comparison = row.metrics[column.name].comparison
            if comparison is not None:
                comparisons.append((column, row, comparison))
    if not comparisons:
        return None
    first_column, _, first_comparison = comparisons[0]
    titles: tuple[str, ...] = ("metric", "difference", "margin", "verdict")
    text_cells = _paper_texts
    if first_comparison.against != PAPER:
        titles = ("difference", "95 % interval", "p", "verdict")
        text_cells = _test_texts
        comparisons = [entry for entry in comparisons if entry[0] is first_column]
    has_references = len({comparison.against for *_, comparison in comparisons}) > 1
    headers = _label_headers(model)
    headers += [ColumnHeader("against", numeric=False)] * has_references
    headers += [ColumnHeader(title, numeric=title not in ("metric", "verdict")) for title in titles]
    rows = []
    for column, row, comparison in comparisons:
        cells = _label_cells(model, row)
        cells += [TextCell(comparison.against)] * has_references
        cells += map(TextCell, text_cells(column, row.metrics[column.name], comparison))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), rules=model.rules)


def runs_layout(model: TableModel) -> Layout:
    """A line for each run: id, labels, seed, status and metrics; if a run has failed, the reason."""
    headers = [ColumnHeader("run", numeric=False), *_label_headers(model)]
    headers += [ColumnHeader("seed"), ColumnHeader("status", numeric=False)]
    headers += [ColumnHeader(column.title) for column in model.columns]
    has_messages = any(record.message for row in model.rows for _, record in row.runs)
    headers += [ColumnHeader("message", numeric=False)] * has_messages
    rows = []
    for row in model.rows:
        for run, record in row.runs:
            cells = [TextCell(run.run_id), *_label_cells(model, row), TextCell(str(run.seed)), TextCell(record.status)]
            for column in model.columns:
                metric = row.metrics[column.name]
                show = _printer(column, decimals_of(column, metric))
                value = metric.values.get(run.seed)
                cells.append(TextCell(MISSING if value is None else show(value)))
            cells += [TextCell(record.message or "")] * has_messages
            rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), warnings=model.warnings)


def _label_headers(model: TableModel) -> list[ColumnHeader]:
    return [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]


def _label_cells(model: TableModel, row: TableRow) -> list[TextCell]:
    return [TextCell(row.labels.get(key, "")) for key in model.axes] or [TextCell(row.row)]


def _learned_cell(cell: MetricCell) -> TextCell:
    if cell.learned is None or not cell.learned.n:
        return TextCell(MISSING)
    return TextCell(f"{cell.learned.k}/{cell.learned.n} ({_percentages(cell.learned)})")


def _paper_texts(column: Column, cell: MetricCell, comparison: Comparison) -> tuple[str, ...]:
    """Metric, difference, margin, verdict."""
    digits = decimals_of(column, cell)
    difference = _printer(column, digits, "+z")(comparison.difference.difference)
    margin = MISSING if comparison.margin is None else f"± {_printer(column, digits)(comparison.margin)}"
    return column.label, difference, margin, comparison.verdict


def _test_texts(column: Column, cell: MetricCell, comparison: Comparison) -> tuple[str, ...]:
    """Difference, interval, p, verdict."""
    test, digits = comparison.difference, decimals_of(column, cell)
    difference, show = _printer(column, digits, "+z")(test.difference), _printer(column, digits)
    interval = MISSING if math.isnan(test.ci_low) else f"[{show(test.ci_low)}, {show(test.ci_high)}]"
    p = MISSING if comparison.p_adjusted is None else p_text(comparison.p_adjusted)
    return difference, interval, p, comparison.verdict


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
    numbers = [value for value in (published.value, published.std) if value is not None]
    printed = [decimal_places(value, column.scale) for value in numbers]
    return min(max(column.decimals, *printed), MAX_DECIMALS)


def _metric_cell(metric: MetricCell, column: Column, row: TableRow) -> TextCell:
    summary = metric.summary
    if summary.n == 0:
        return TextCell(MISSING)
    text = mean_text(metric, column)
    if summary.n != row.seeds:
        text += f" (n={summary.n})"
    if metric.mostly_stuck:
        text += f" {STUCK}"
    stars = 0
    if metric.comparison is not None and metric.comparison.p_adjusted is not None:
        stars = sum(metric.comparison.p_adjusted <= bound for bound in STARS)
    return TextCell(text, metric.best, stars)


def mean_text(metric: MetricCell, column: Column) -> str:
    """The mean and the standard deviation over seeds: `3.40 ± 4.72`."""
    show, summary = _printer(column, decimals_of(column, metric)), metric.summary
    if summary.n == 0:
        return MISSING
    if math.isnan(summary.std) or column.exact:
        return show(summary.mean)
    return f"{show(summary.mean)} ± {show(summary.std)}"


def published_text(published: PublishedValue, column: Column) -> str:
    """A published value with the digits of its source: `14.4 ± 3.0`."""
    show = _printer(column, _published_decimals(published, column))
    return show(published.value) if published.std is None else f"{show(published.value)} ± {show(published.std)}"


def _printer(column: Column, digits: int, sign: str = "") -> Callable[[float], str]:
    """A function that prints values of a column in its unit."""
    return lambda value: MISSING if math.isnan(value) else format(value * column.scale, f"{sign}.{digits}f")


def _published_cell(published: PublishedValue | None, column: Column) -> TextCell:
    if published is None:
        return TextCell(MISSING)
    return TextCell(published_text(published, column))


def _note(model: TableModel) -> str:
    """Sentences that explain the numbers of the table."""
    cells = [(row, column, row.metrics[column.name]) for row in model.rows for column in model.columns]
    counts = {cell.summary.n for _, column, cell in cells if not column.exact} - {0}
    planned = sorted({row.seeds for row in model.rows})
    if counts == {1} or planned == [1]:
        sentences = ["One seed"]
    else:
        seeds = " or ".join(str(count) for count in planned if count > 1)
        sentences = [f"Mean ± standard deviation over {seeds} seeds"]
        if planned[0] == 1:
            sentences.append("Without ±: one seed")
    quantities = {column.quantity for column in model.columns if column.compared and column.unit == "%"}
    if len(quantities) == 1:
        sentences.append(f"Percentages: {quantities.pop()}")
    if any(0 < cell.summary.n < row.seeds for row, _, cell in cells):
        sentences.append("(n=…): only n seeds are finished")
    if model.stopped:
        were = "runs were" if model.stopped > 1 else "run was"
        sentences.append(f"{model.stopped} {were} stopped early and left out")
    if any(cell.best for _, _, cell in cells):
        has_groups = model.group is not None or len(encoding_groups(model.rows)) > 1
        sentences.append("Bold: best of its group" if has_groups else "Bold: best")
    if any(cell.mostly_stuck for _, _, cell in cells):
        sentences.append(f"{STUCK}: most seeds are stuck")
    columns_by_seeds: dict[str, list[str]] = {}
    for row, column, cell in cells:
        if cell.stuck and not cell.mostly_stuck:
            stuck_seeds = f"{len(cell.stuck)} of {cell.summary.n} seeds of {row.short}"
            columns_by_seeds.setdefault(stuck_seeds, []).append(column.label)
    if columns_by_seeds:
        listed = [f"{stuck_seeds} ({', '.join(labels)})" for stuck_seeds, labels in columns_by_seeds.items()]
        sentences.append(f"Some seeds are stuck: {', '.join(listed)}")
    if any(cell.stuck for _, _, cell in cells):
        sentences.append("Stuck: no better than a rule that does not solve the task")
    learned = [(column, cell) for _, column, cell in cells if cell.learned and cell.learned.n]
    if learned:
        sentences.append(_learned_note(learned))
    sources = dict.fromkeys(cell.published.source for _, _, cell in cells if cell.published and cell.published.source)
    if sources and not model.replaced:
        sentences.append(f"Published: {', '.join(sources)}")
    return ". ".join(sentences) + "."


def _learned_note(cells: Sequence[tuple[Column, MetricCell]]) -> str:
    """What `k/n` means, by an example: `2/2: both seeds reached In-dist. ≤ 1 % (… of the success rate: 34–100 %)`."""
    examples = [(column, cell.learned) for column, cell in cells if cell.learned is not None]
    column, learned = next(((column, learned) for column, learned in examples if learned.k), examples[0])
    seeds = f"{learned.k or 'none'} of {learned.n} seeds"
    if learned.k == learned.n:
        seeds = {1: "the seed", 2: "both seeds"}.get(learned.n, f"all {learned.n} seeds")
    condition = f"{column.learned_title} {column.unit}".strip()
    note = (
        f"{learned.k}/{learned.n}: {seeds} reached {condition} (95 % Wilson interval of the success rate: "
        f"{_percentages(learned)})"
    )
    return f"{note}; stuck seeds do not count" if any(cell.stuck for _, cell in cells) else note


def _percentages(proportion: Proportion) -> str:
    """The interval in percent: `34–100 %`."""
    low, high = (100 * end for end in proportion.interval)
    return f"{low:.0f}–{high:.0f} %"
