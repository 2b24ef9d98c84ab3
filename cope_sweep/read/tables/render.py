"""The texts of a table and of its comparisons (headings, cells and notes), and their formats.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
It has the metric's number of digits, or more if the published value or a small mean needs them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group
from rich.table import Table as RichTable
from rich.text import Text

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

if TYPE_CHECKING:
    import pandas as pd

MISSING = "–"
STUCK = "†"
"""Follows a mean if most seeds are stuck."""
MAX_DECIMALS = 6
STARS = (0.05, 0.01, 0.001)
"""Largest p for one star, two and three."""
FORMULA = re.compile(r"^[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
    """Details, for formats that show them on demand."""
    runs: tuple[str, ...] = ()
    """Ids of the runs behind the number, for formats that link to them."""
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
        return TextCell(MISSING, hint=row.progress)
    show, text = _printer(column, decimals_of(column, metric)), mean_text(metric, column)
    hints = [f"n = {summary.n}"]
    if summary.n > 1:
        hints.append(_interval_hint(metric, show))
        hints.append(f"median {show(summary.median)}, range {show(summary.low)} … {show(summary.high)}")
    if metric.stuck:
        hints.append(f"{len(metric.stuck)} of {summary.n} seeds stuck: {', '.join(map(str, metric.stuck))}")
    if metric.rule_error is not None:
        hints.append(f"error of the best simple rule: {show(metric.rule_error)}")
    if summary.n != row.seeds:
        text += f" (n={summary.n})"
    if metric.mostly_stuck:
        text += f" {STUCK}"
    runs = tuple(run.run_id for run, _ in row.runs if run.seed in metric.values)
    stars = 0
    if metric.comparison is not None and metric.comparison.p_adjusted is not None:
        stars = sum(metric.comparison.p_adjusted <= bound for bound in STARS)
    return TextCell(text, metric.best, "; ".join(hints), runs, stars)


def mean_text(metric: MetricCell, column: Column) -> str:
    """The mean and the standard deviation over seeds: `3.40 ± 4.72`."""
    show, summary = _printer(column, decimals_of(column, metric)), metric.summary
    if summary.n == 0:
        return MISSING
    if summary.n == 1 or column.exact:
        return show(summary.mean)
    return f"{show(summary.mean)} ± {show(summary.std)}"


def published_text(published: PublishedValue, column: Column) -> str:
    """A published value with the digits of its source: `14.4 ± 3.0`."""
    show = _printer(column, _published_decimals(published, column))
    return show(published.value) if published.std is None else f"{show(published.value)} ± {show(published.std)}"


def _printer(column: Column, digits: int, sign: str = "") -> Callable[[float], str]:
    """A function that prints values of a column in its unit."""
    return lambda value: format(value * column.scale, f"{sign}.{digits}f")


def _interval_hint(metric: MetricCell, show: Callable[[float], str]) -> str:
    summary = metric.summary
    if math.isnan(summary.ci_low):
        return "no interval: all seeds are at the end of the range"
    return f"95 % interval {show(summary.ci_low)} … {show(summary.ci_high)} ({summary.method})"


def _published_cell(published: PublishedValue | None, column: Column) -> TextCell:
    if published is None:
        return TextCell(MISSING)
    return TextCell(published_text(published, column), hint=published.source)


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


PADDING = 3
"""Spaces between columns of a table in a terminal."""
MAX_LINKED = 50
"""Maximum number of runs in the link of a number."""


def markdown(model: TableModel) -> str:
    """GitHub-flavoured Markdown tables and their notes. Columns are aligned in the source as well."""
    parts = []
    for table_layout in _layouts(model):
        parts.append(markdown_table(table_layout))
        for index, text in enumerate(map(markdown_text, table_layout.notes)):
            parts.append(f"**{text}**" if index < len(table_layout.warnings) else text)
    return "\n\n".join(parts) + "\n"


def _layouts(model: TableModel) -> list[Layout]:
    """The layout of the table, and the layout of its comparisons, if it has any."""
    comparisons = comparison_layout(model)
    return [layout(model)] + ([comparisons] if comparisons else [])


def markdown_table(table_layout: Layout) -> str:
    """The headings and rows, without notes."""
    grid = [[markdown_text(header.text) for header in table_layout.headers]]
    for row in table_layout.rows:
        texts = [markdown_text(cell.text) for cell in row]
        grid.append([f"**{text}**" if cell.best else text for cell, text in zip(row, texts, strict=True)])
    is_numeric = [header.numeric for header in table_layout.headers]
    widths = [max(3, *map(len, column)) for column in zip(*grid, strict=True)]
    delimiters = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, is_numeric, strict=True)]
    lines = []
    for texts in [grid[0], delimiters, *grid[1:]]:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, is_numeric, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def markdown_text(text: str) -> str:
    """`text` on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


LATEX_PACKAGES = "booktabs, multirow, threeparttable"


def latex(
    model: TableModel, *, stars: bool = False, caption: str | None = None, label: str | None = None, notes: bool = True
) -> str:
    r"""A LaTeX `table` environment, and a second one with the comparisons, drawn with booktabs.

    Args:
        model: The table. Grouped rows share one cell for the label of their group.
        stars: Mark significant differences by stars, instead of a table of comparisons.
        caption: LaTeX code; None: the title.
        label: For `\ref`; None: `tab:` and the ablation's name. The label of the comparisons ends with `-comparisons`.
        notes: Whether notes follow below the table (`tablenotes`).
    """
    title = _latex_text(model.title) if caption is None else caption
    name = label or "tab:" + re.sub(r"[^A-Za-z0-9:-]+", "-", model.ablation)
    table_layout, comparisons = layout(model), comparison_layout(model)
    note_texts = list(table_layout.notes)
    if stars and comparisons is not None:
        note_texts += comparisons.notes
        if any(cell.stars for row in table_layout.rows for cell in row):
            marks = [f"{'*' * (index + 1)} p ≤ {bound:g}" for index, bound in enumerate(STARS)]
            note_texts.append(f"{', '.join(marks)}.")
    grouped = model.group is not None
    tables = [_latex_table(table_layout, title, name, note_texts if notes else (), stars=stars, grouped=grouped)]
    if comparisons is not None and not stars:
        note_texts = list(comparisons.notes) if notes else []
        caption_of_comparisons, label_of_comparisons = f"{title}: comparisons", f"{name}-comparisons"
        tables.append(
            _latex_table(comparisons, caption_of_comparisons, label_of_comparisons, note_texts, grouped=grouped)
        )
    return f"% \\usepackage{{{LATEX_PACKAGES}}}\n" + "\n".join(tables)


def _latex_table(
    table_layout: Layout, caption: str, label: str, notes: Sequence[str], *, stars: bool = False, grouped: bool = False
) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \begin{threeparttable}",
        rf"    \caption{{{caption}}}",
        rf"    \label{{{label}}}",
        rf"    \begin{{tabular}}{{{''.join('r' if header.numeric else 'l' for header in table_layout.headers)}}}",
        r"      \toprule",
        f"      {' & '.join(_latex_text(header.text) for header in table_layout.headers)} \\\\",
        r"      \midrule",
    ]
    groups = [list(rows) for _, rows in itertools.groupby(table_layout.rows, key=lambda row: row[0].text)]
    for number, group in enumerate(groups):
        if grouped and number > 0:
            lines.append(rf"      \cmidrule{{1-{len(table_layout.headers)}}}")
        for index, row in enumerate(group):
            cells = [_latex_cell(cell, stars=stars) for cell in row]
            if grouped and index:
                cells[0] = ""
            elif grouped and len(group) > 1:
                cells[0] = rf"\multirow[t]{{{len(group)}}}{{*}}{{{cells[0]}}}"
            lines.append(f"      {' & '.join(cells)} \\\\")
    lines += [r"      \bottomrule", r"    \end{tabular}"]
    if notes:
        items = [rf"      \item {_latex_text(text)}" for text in notes]
        lines += [r"    \begin{tablenotes}\footnotesize", *items, r"    \end{tablenotes}"]
    return "\n".join([*lines, r"  \end{threeparttable}", r"\end{table}"]) + "\n"


def _latex_cell(cell: TextCell, *, stars: bool) -> str:
    text = _latex_text(cell.text)
    mark = f"$^{{{'*' * cell.stars}}}$" if stars and cell.stars else ""
    return (rf"\textbf{{{text}}}" if cell.best else text) + mark


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "†": r"\textdagger{}",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "−": r"$-$",
    "√": r"$\surd$",
    "·": r"$\cdot$",
    "–": "--",
    "…": r"\ldots{}",
} | {character: "\\" + character for character in "&%$#_{}"}


def _latex_text(text: str) -> str:
    signed = re.sub(r"(?<![\w.])-(?=[\d.])", "−", " ".join(text.split()))  # before a dash becomes two hyphens
    return "".join(_LATEX_ESCAPES.get(character, character) for character in signed)


def without_formula(text: Any) -> Any:
    """The value; an apostrophe precedes a text that a spreadsheet would read as a formula."""
    if isinstance(text, str) and FORMULA.match(text) and not NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def csv_text(frame: pd.DataFrame) -> str:
    """A frame as CSV, without an index. No text is a formula to a spreadsheet."""
    frame = frame.copy(deep=False)
    for name in frame.columns[[dtype in ("str", "object") for dtype in frame.dtypes]]:
        frame[name] = frame[name].map(without_formula)
    return frame.to_csv(index=False, lineterminator="\n")


def html(model: TableModel, *, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table class="ablation">` element whose numbers link to their runs, and one with the comparisons.

    Cells of numeric columns have the class `number`, the best means `best`; details are in `title` attributes.

    Args:
        model: The table.
        runs_url: The URL of a list of runs, which takes ids in the parameter `run`. None: another table lists the runs,
            and the numbers link to its rows.
        anchors: Prefix of the ids of these rows, different for each table of a document.
    """
    # pandas' Styler does not escape `title` attributes, and cannot set `scope` or the class of a heading.
    classes = ("ablation", "comparison")
    tables = [
        html_table(table_layout, name, runs_url, anchors)
        for table_layout, name in zip(_layouts(model), classes, strict=False)
    ]
    if runs_url is None:
        tables.append(_html_runs(model, anchors))
    return "".join(tables)


def html_table(table_layout: Layout, name: str, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table>` element of the class `name`; for the other arguments, see `html`."""
    headers = "".join(
        f'<th scope="col"{_html_class(number=header.numeric)}>{escape(header.text)}</th>'
        for header in table_layout.headers
    )
    rows = []
    for row in table_layout.rows:
        cells = []
        for index, (cell, header) in enumerate(zip(row, table_layout.headers, strict=True)):
            tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
            classes = _html_class(number=header.numeric, best=cell.best)
            hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
            cells.append(f"<{tag}{scope}{classes}{hint}>{_linked(cell, runs_url, anchors)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="{name}">\n<caption>{_html_notes(table_layout)}</caption>\n'
        f"<thead><tr>{headers}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
    )


def _linked(cell: TextCell, runs_url: str | None, anchors: str) -> str:
    text = escape(cell.text)
    if not cell.runs:
        return text
    if runs_url is None:
        return f'<a href="#{anchors}run-{cell.runs[0]}">{text}</a>'
    query = "&".join(f"run={quote(run_id)}" for run_id in cell.runs[:MAX_LINKED])
    return f'<a href="{escape(f"{runs_url}?{query}")}">{text}</a>'


def _html_notes(table_layout: Layout) -> str:
    warnings = "".join(f"<strong>Warning: {escape(text)}</strong> " for text in table_layout.warnings)
    return warnings + escape(" ".join(table_layout.notes[len(table_layout.warnings) :]))


def _html_runs(model: TableModel, anchors: str) -> str:
    """A `<table class="runs">` with every run: row, seed, status, id, and the values of the table's metrics."""
    columns = [column.name for column in model.columns]
    headers = "".join(f'<th scope="col">{escape(text)}</th>' for text in ("row", "seed", "status", "run", *columns))
    rows = []
    for row in model.rows:
        for run, record in row.runs:
            values = [row.metrics[name].values.get(run.seed) for name in columns]
            texts = [
                row.row,
                str(run.seed),
                record.status,
                run.run_id,
                *("" if v is None else f"{v:.6g}" for v in values),
            ]
            cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
            rows.append(f'<tr id="{anchors}run-{run.run_id}">{cells}</tr>\n')
    return f'<table class="runs">\n<thead><tr>{headers}</tr></thead>\n<tbody>\n{"".join(rows)}</tbody>\n</table>\n'


def _html_class(**classes: bool) -> str:
    names = " ".join(name for name, applies in classes.items() if applies)
    return f' class="{names}"' if names else ""


def rich(model: TableModel) -> Group:
    """Tables for `rich.print`: the best means in green, and the progress of rows with failed runs in red."""
    table_layout, comparisons = layout(model), comparison_layout(model)
    label_count = len(model.axes) or 1
    rows = [[Text(cell.text, style="bold green" if cell.best else "") for cell in cells] for cells in table_layout.rows]
    for row, texts in zip(model.rows, rows, strict=True):
        if row.counts["failed"]:
            texts[-1].stylize("red")
    parts: list[Any] = [_FittedTable(table_layout, rows, label_count, model.title)]
    if comparisons is not None:
        rows = [[Text(cell.text) for cell in cells] for cells in comparisons.rows]
        parts.append(_FittedTable(comparisons, rows, label_count, "Comparison"))
    if model.answer:
        parts.append(Text(model.answer, style="bold"))
    return Group(*parts)


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


def rich_runs(model: TableModel) -> Group:
    """A table for `rich.print` with a line for each run; failed and damaged runs are red."""
    table_layout = runs_layout(model)
    records = [record for row in model.rows for _, record in row.runs]
    styles = ["red" if record.status in ("failed", "damaged") else "" for record in records]
    rows = [
        [Text(cell.text, style=style) for cell in cells] for cells, style in zip(table_layout.rows, styles, strict=True)
    ]
    return Group(_FittedTable(table_layout, rows, 1, model.title))


@dataclass(frozen=True)
class _FittedTable:
    """A table for a terminal of any width: columns that do not fit side by side continue in tables below."""

    layout: Layout
    rows: Sequence[Sequence[Text]]
    label_count: int
    """The number of leading columns that name the rows, and are repeated in each table."""
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for number, columns in enumerate(self._split_columns(options.max_width)):
            part = RichTable(title=Text("" if number else self.title), box=SIMPLE_HEAD, title_justify="left")
            for column, width in zip(columns, self._widths(columns, options.max_width), strict=True):
                header = self.layout.headers[column]
                part.add_column(Text(header.text), justify="right" if header.numeric else "left", width=width)
            for texts in self.rows:
                part.add_row(*(texts[column] for column in columns))
            yield part
        for index, text in enumerate(self.layout.notes):
            yield Text(text, style="bold red" if index < len(self.layout.warnings) else "dim")
        yield Text()

    def _split_columns(self, width: int) -> list[list[int]]:
        """The columns of each table, for a terminal of this width."""
        labels = list(range(self.label_count))
        parts: list[list[int]] = []
        room = 0
        for column in range(self.label_count, len(self.layout.headers)):
            needed = self._least_width(column, width) + PADDING
            if not parts or room < needed:
                parts.append([*labels])
                room = width - 1 - sum(self._least_width(label, width) + PADDING for label in labels)
            parts[-1].append(column)
            room -= needed
        return parts or [labels]

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """The widths of columns side by side: wide enough for their cells and, if there is room, for their headings.

        Rich gets all widths, because it would make columns wider than the terminal and cut what does not fit.
        """
        widths = [self._least_width(column, width) for column in columns]
        room = width - 1 - sum(least + PADDING for least in widths)
        for index, column in enumerate(columns):
            more = max(0, min(room, len(self.layout.headers[column].text) - widths[index]))
            widths[index] += more
            room -= more
        return widths

    def _least_width(self, column: int, width: int) -> int:
        """The least width of a column: headings may wrap, and so may cells that need more than half of the terminal."""
        words = self.layout.headers[column].text.split()
        longest = max(map(len, [*words, *(texts[column].plain for texts in self.rows)]), default=0)
        return min(longest, width // 2)
