"""The texts of a table and of its comparisons, which every text format renders: headings, cells and notes.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
It has the metric's number of digits, or more if the published value beside it or a small mean needs them.
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

from cope_sweep.read.tables.model import (
    PAPER,
    Column,
    Comparison,
    MetricCell,
    PublishedValue,
    TableModel,
    TableRow,
    encoding_groups,
    p_text,
    places,
)
from cope_sweep.read.tables.rules import are_most

if TYPE_CHECKING:
    import pandas as pd

MISSING = "–"
STUCK = "†"
"""Follows a mean where most seeds are stuck."""
MAX_DECIMALS = 6
STARS = (0.05, 0.01, 0.001)
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
    """Details, for formats that can show them on demand."""
    runs: tuple[str, ...] = ()
    """Ids of the runs that the number was computed from, for formats that can link to them."""
    stars: int = 0
    """The number of `STARS` that the p of the comparison does not exceed, where the comparison was tested."""


@dataclass(frozen=True)
class Layout:
    """The texts of a table: headings, rows of cells, and notes below."""

    headers: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    note: str = ""
    """Legend of the numbers."""
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

    Columns: axes; parameters, if known and not a metric of the table; each metric, the seeds that have learned the task
    by it, and its published values, if any row has them and the runs are of the paper's size; and the progress of the
    runs, if some are missing.
    """
    published = {
        c.name for c in model.columns if not model.replaced and any(row.metrics[c.name].published for row in model.rows)
    }
    incomplete = any(not row.complete for row in model.rows)
    sized = any(row.parameters is not None for row in model.rows) and not any(c.exact for c in model.columns)
    headers = [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
    headers += [ColumnHeader("parameters")] if sized else []
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.learned is not None:
            headers.append(ColumnHeader(column.learned_title))
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
        titles = ("difference", "95 % interval", "p", "verdict")
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


def _learned_cell(cell: MetricCell) -> TextCell:
    if cell.learned is None or not cell.learned.n:
        return TextCell(MISSING)
    low, high = (100 * end for end in cell.learned.interval)
    return TextCell(f"{cell.learned.k}/{cell.learned.n} ({low:.0f}–{high:.0f} %)")


def _paper_cells(column: Column, cell: MetricCell, each: Comparison) -> tuple[str, ...]:
    """Metric, difference, margin, verdict."""
    digits = decimals_of(column, cell)
    show, margin = _printer(column, digits, "+z"), _printer(column, digits)
    within = MISSING if each.margin is None else f"± {margin(each.margin)}"
    return column.label, show(each.difference.difference), within, each.verdict


def _tested_cells(column: Column, cell: MetricCell, each: Comparison) -> tuple[str, ...]:
    """Difference, interval, p, verdict."""
    found, digits = each.difference, decimals_of(column, cell)
    show = _printer(column, digits)
    interval = MISSING if math.isnan(found.ci_low) else f"[{show(found.ci_low)}, {show(found.ci_high)}]"
    p = MISSING if each.p_adjusted is None else p_text(each.p_adjusted)
    return _printer(column, digits, "+z")(found.difference), interval, p, each.verdict


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
    show, text = _printer(column, decimals_of(column, metric)), mean_text(metric, column)
    hints = [f"n = {summary.n}"]
    if summary.n > 1:
        hints.append(_interval_hint(metric, show))
        hints.append(f"median {show(summary.median)}, range {show(summary.low)} … {show(summary.high)}")
    if metric.stuck:
        hints.append(f"{len(metric.stuck)} of {summary.n} seeds stuck: {', '.join(map(str, metric.stuck))}")
    if metric.rule_error is not None:
        hints.append(f"the best simple rule errs on {show(metric.rule_error)}")
    if summary.n != row.seeds:
        text += f" (n={summary.n})"
    if are_most(metric.stuck, summary.n):
        text += f" {STUCK}"
    runs = tuple(run.run_id for run, _ in row.runs if run.seed in metric.values)
    p = None if metric.comparison is None else metric.comparison.p_adjusted
    stars = 0 if p is None else sum(p <= bound for bound in STARS)
    return TextCell(text, metric.best, "; ".join(hints), runs, stars)


def mean_text(metric: MetricCell, column: Column) -> str:
    """`3.40 ± 4.72`: the mean and the standard deviation over seeds."""
    show, summary = _printer(column, decimals_of(column, metric)), metric.summary
    if summary.n == 0:
        return MISSING
    return show(summary.mean) + ("" if summary.n == 1 or column.exact else f" ± {show(summary.std)}")


def published_text(published: PublishedValue, column: Column) -> str:
    """`14.4 ± 3.0`, with the digits of the source."""
    show = _printer(column, _published_decimals(published, column))
    return show(published.value) + ("" if published.std is None else f" ± {show(published.std)}")


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
    return TextCell(published_text(published, column), hint=published.source)


def _note(model: TableModel) -> str:
    cells = [(row, column, row.metrics[column.name]) for row in model.rows for column in model.columns]
    numbers = {cell.summary.n for _, column, cell in cells if not column.exact} - {0}
    planned = sorted({row.seeds for row in model.rows})
    if numbers == {1} or planned == [1]:
        parts = ["One seed"]
    else:
        counts = " or ".join(str(seeds) for seeds in planned if seeds > 1)
        parts = [f"Mean ± standard deviation over {counts} seeds"]
        parts += ["without ±: one seed"] if planned[0] == 1 else []
    quantities = {column.quantity for column in model.columns if column.compared and column.unit == "%"}
    if len(quantities) == 1:
        parts += [f"(%): {quantity.removesuffix(' (%)')}" for quantity in quantities]
    if any(0 < cell.summary.n < row.seeds for row, _, cell in cells):
        parts.append("(n=…): only n seeds are finished")
    if model.stopped:
        parts.append(f"{model.stopped} run{'s were' if model.stopped > 1 else ' was'} stopped early and not averaged")
    if any(cell.best for _, _, cell in cells):
        grouped = model.group is not None or len(encoding_groups(model.rows)) > 1
        parts.append("bold: best of its group" if grouped else "bold: best")
    some: dict[str, list[str]] = {}
    for row, column, cell in cells:
        if cell.stuck and not are_most(cell.stuck, cell.summary.n):
            some.setdefault(f"{len(cell.stuck)} of {cell.summary.n} seeds of {row.short}", []).append(column.label)
    if any(are_most(cell.stuck, cell.summary.n) for _, _, cell in cells):
        parts.append(f"{STUCK}: most seeds are stuck, which is no better than a rule that does not solve the task")
    if some:
        parts.append("stuck: " + ", ".join(f"{seeds} ({', '.join(labels)})" for seeds, labels in some.items()))
    if any(column.learned is not None for column in model.columns):
        parts.append("k/n: seeds with such a value that are not stuck, and the 95 % interval of their share (Wilson)")
    sources = dict.fromkeys(c.published.source for _, _, c in cells if c.published and c.published.source)
    if sources and not model.replaced:
        parts.append(f"published: {', '.join(sources)}")
    return "; ".join(parts) + "."


PADDING = 3
"""Blanks between columns of a terminal's table."""
MAX_LINKED = 50
"""Runs that the link of one number names."""


def markdown(model: TableModel) -> str:
    """GitHub-flavoured Markdown tables and their notes. Columns are aligned in the source as well."""
    parts = []
    for drawn in _layouts(model):
        parts.append(markdown_table(drawn))
        for index, text in enumerate(map(markdown_text, drawn.notes)):
            parts.append(f"**{text}**" if index < len(drawn.warnings) else text)
    return "\n\n".join(parts) + "\n"


def _layouts(model: TableModel) -> list[Layout]:
    """The layout of the table, and the layout of its comparisons, if it has any."""
    comparisons = comparison_layout(model)
    return [layout(model)] + ([comparisons] if comparisons else [])


def markdown_table(drawn: Layout) -> str:
    """The headings and rows alone."""
    grid = [[markdown_text(header.text) for header in drawn.headers]]
    for row in drawn.rows:
        texts = [markdown_text(cell.text) for cell in row]
        grid.append([f"**{text}**" if cell.best else text for cell, text in zip(row, texts, strict=True)])
    numeric = [header.numeric for header in drawn.headers]
    widths = [max(3, *map(len, column)) for column in zip(*grid, strict=True)]
    rules = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = []
    for texts in [grid[0], rules, *grid[1:]]:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def markdown_text(text: str) -> str:
    """`text` on one line, without Markdown's meaning of its characters."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


LATEX_PACKAGES = "booktabs, multirow, threeparttable"


def latex(
    model: TableModel, *, stars: bool = False, caption: str | None = None, label: str | None = None, notes: bool = True
) -> str:
    r"""A LaTeX `table` environment, and one of the comparisons, with the rules of booktabs.

    Args:
        model: The table. Rows that are grouped have one cell for the label of their group.
        stars: Mark tested differences by stars instead of a table of comparisons.
        caption: LaTeX code; None: the title.
        label: For `\ref`; None: `tab:` and the ablation's name. That of the comparisons ends with `-comparisons`.
        notes: Whether the notes are below the table (`tablenotes`).
    """
    title = _latex_text(model.title) if caption is None else caption
    name = label or "tab:" + re.sub(r"[^A-Za-z0-9:-]+", "-", model.ablation)
    drawn, *comparisons = _layouts(model)
    texts = list(drawn.notes)
    if stars:
        texts += [text for each in comparisons for text in each.notes]
        if any(cell.stars for row in drawn.rows for cell in row):
            texts.append(", ".join(f"{'*' * (index + 1)} p ≤ {bound:g}" for index, bound in enumerate(STARS)) + ".")
    grouped = model.group is not None
    tables = [_latex_table(drawn, title, name, texts if notes else [], stars=stars, grouped=grouped)]
    for each in () if stars else comparisons:
        texts = list(each.notes) if notes else []
        tables.append(_latex_table(each, f"{title}: comparisons", f"{name}-comparisons", texts, grouped=grouped))
    return f"% \\usepackage{{{LATEX_PACKAGES}}}\n" + "\n".join(tables)


def _latex_table(
    drawn: Layout, caption: str, label: str, notes: Sequence[str], *, stars: bool = False, grouped: bool = False
) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \begin{threeparttable}",
        rf"    \caption{{{caption}}}",
        rf"    \label{{{label}}}",
        rf"    \begin{{tabular}}{{{''.join('r' if header.numeric else 'l' for header in drawn.headers)}}}",
        r"      \toprule",
        f"      {' & '.join(_latex_text(header.text) for header in drawn.headers)} \\\\",
        r"      \midrule",
    ]
    groups = [list(rows) for _, rows in itertools.groupby(drawn.rows, key=lambda row: row[0].text)]
    for number, group in enumerate(groups):
        lines += [rf"      \cmidrule{{1-{len(drawn.headers)}}}"] * (grouped and number > 0)
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
    """The value. A text that a spreadsheet would read as a formula gets an apostrophe in front."""
    if isinstance(text, str) and FORMULA.match(text) and not NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def csv_text(frame: pd.DataFrame) -> str:
    """A frame as CSV."""
    frame = frame.copy(deep=False)
    for name in frame.columns[[dtype in ("str", "object") for dtype in frame.dtypes]]:
        frame[name] = frame[name].map(without_formula)
    return frame.to_csv(index=False, lineterminator="\n")


def html(model: TableModel, *, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table class="ablation">` element whose numbers link to their runs, and one of the comparisons.

    Cells of numeric columns have the class `number`, the best means `best`; details are in `title` attributes.

    Args:
        model: The table.
        runs_url: The URL of a list of runs, which takes the ids in the parameter `run`. None: a further table, of the
            runs, follows, and the numbers link to its rows.
        anchors: Prefix of the ids of these rows: different for each table of a document.
    """
    # pandas' Styler does not escape `title` attributes, and cannot set `scope` or the class of a heading.
    classes = ("ablation", "comparison")
    tables = [html_table(drawn, name, runs_url, anchors) for drawn, name in zip(_layouts(model), classes, strict=False)]
    return "".join(tables) + (_html_runs(model, anchors) if runs_url is None else "")


def html_table(drawn: Layout, name: str, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table>` element of the class `name`."""
    headers = "".join(
        f'<th scope="col"{_html_class(number=header.numeric)}>{escape(header.text)}</th>' for header in drawn.headers
    )
    rows = []
    for row in drawn.rows:
        cells = []
        for index, (cell, header) in enumerate(zip(row, drawn.headers, strict=True)):
            tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
            classes = _html_class(number=header.numeric, best=cell.best)
            hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
            cells.append(f"<{tag}{scope}{classes}{hint}>{_linked(cell, runs_url, anchors)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="{name}">\n<caption>{_html_notes(drawn)}</caption>\n'
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


def _html_notes(drawn: Layout) -> str:
    warnings = "".join(f"<strong>Warning: {escape(text)}</strong> " for text in drawn.warnings)
    return warnings + escape(" ".join(drawn.notes[len(drawn.warnings) :]))


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
    drawn, *comparisons = _layouts(model)
    labels = len(model.axes) or 1
    rows = [[Text(cell.text, style="bold green" if cell.best else "") for cell in cells] for cells in drawn.rows]
    for row, texts in zip(model.rows, rows, strict=True):
        if row.counts["failed"]:
            texts[-1].stylize("red")
    shown: list[Any] = [_Fitted(drawn, rows, labels, model.title)]
    shown += [
        _Fitted(each, [[Text(cell.text) for cell in cells] for cells in each.rows], labels, "Comparison")
        for each in comparisons
    ]
    return Group(*shown, *([Text(model.answer, style="bold")] if model.answer else []))


def runs_layout(model: TableModel) -> Layout:
    """The texts of a line for each run: id, labels, seed, status, and its metrics; the reason where it failed."""
    headers = [ColumnHeader("run", numeric=False)]
    headers += [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
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
    """A table for `rich.print` with a line for each run; those that failed, or are damaged, in red."""
    drawn = runs_layout(model)
    records = [record for row in model.rows for _, record in row.runs]
    styles = ["red" if record.status in ("failed", "damaged") else "" for record in records]
    rows = [[Text(cell.text, style=style) for cell in cells] for cells, style in zip(drawn.rows, styles, strict=True)]
    return Group(_Fitted(drawn, rows, 1, model.title))


@dataclass(frozen=True)
class _Fitted:
    """A table for a terminal of any width: columns that do not fit beside the others are below them."""

    drawn: Layout
    rows: Sequence[Sequence[Text]]
    labels: int
    """Number of the first columns, which name the rows and are repeated."""
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for number, columns in enumerate(self._parts(options.max_width)):
            part = RichTable(title=Text("" if number else self.title), box=SIMPLE_HEAD, title_justify="left")
            for column, width in zip(columns, self._widths(columns, options.max_width), strict=True):
                header = self.drawn.headers[column]
                part.add_column(Text(header.text), justify="right" if header.numeric else "left", width=width)
            for texts in self.rows:
                part.add_row(*(texts[column] for column in columns))
            yield part
        for index, text in enumerate(self.drawn.notes):
            yield Text(text, style="bold red" if index < len(self.drawn.warnings) else "dim")
        yield Text()

    def _parts(self, width: int) -> list[list[int]]:
        """The columns of each table below another."""
        labels = list(range(self.labels))
        parts: list[list[int]] = []
        left = 0
        for column in range(self.labels, len(self.drawn.headers)):
            least = self._least(column, width) + PADDING
            if not parts or left < least:
                parts.append([*labels])
                left = width - 1 - sum(self._least(each, width) + PADDING for each in labels)
            parts[-1].append(column)
            left -= least
        return parts or [labels]

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """The widths of columns side by side: of their cells, and as far as there is room, of their headings.

        They are given to rich, which would make columns wider than the terminal: it cuts what is beyond.
        """
        widths = [self._least(column, width) for column in columns]
        left = width - 1 - sum(each + PADDING for each in widths)
        for index, column in enumerate(columns):
            more = max(0, min(left, len(self.drawn.headers[column].text) - widths[index]))
            widths[index] += more
            left -= more
        return widths

    def _least(self, column: int, width: int) -> int:
        """The least width of a column: headings may wrap; cells too, if they take more than half of the terminal."""
        words = self.drawn.headers[column].text.split()
        cells = max(map(len, [*words, *(texts[column].plain for texts in self.rows)]), default=0)
        return min(cells, width // 2)
