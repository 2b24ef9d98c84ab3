"""Tables as Markdown, LaTeX, HTML, and for terminals: one layout of text cells, rendered in four formats.

A cell shows `mean ± std` over the finished seeds, followed by `(n=1)` if seeds are missing, or `–` if all are missing.
"""

from __future__ import annotations

import html as html_module
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cope_sweep.results.table_model import Column, MetricCell, PublishedValue, TableModel, TableRow

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MISSING = "–"


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


@dataclass(frozen=True)
class Layout:
    """The texts of a table: headings, rows of cells, and a note below."""

    headers: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    note: str


def layout(model: TableModel) -> Layout:
    """The texts of a table.

    Columns: axes; parameters if known; each metric, and its published values if any row has one; and the progress of
    the runs if some are missing.
    """
    published = {c.name for c in model.columns if any(row.metrics[c.name].published for row in model.rows)}
    incomplete = any(not row.complete for row in model.rows)
    sized = any(row.parameters is not None for row in model.rows)
    headers = [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]
    headers += [ColumnHeader("parameters")] if sized else []
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.name in published:
            headers.append(ColumnHeader(f"{column.label}, published"))
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
        if incomplete:
            cells.append(TextCell(row.progress))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), _note(model))


def _metric_cell(metric: MetricCell, column: Column, row: TableRow) -> TextCell:
    summary = metric.summary
    if summary.n == 0:
        return TextCell(MISSING, hint=row.progress)
    text = f"{summary.mean:.{column.decimals}f}"
    hint = f"n = {summary.n}"
    if summary.n > 1:
        text += f" ± {summary.std:.{column.decimals}f}"
        hint += f"; 95 % interval {summary.ci_low:.{column.decimals}f} … {summary.ci_high:.{column.decimals}f}"
    if summary.n != row.seeds:
        text += f" (n={summary.n})"
    return TextCell(text, metric.best, hint)


def _published_cell(published: PublishedValue | None, column: Column) -> TextCell:
    if published is None:
        return TextCell(MISSING)
    text = f"{published.value:.{column.decimals}f}"
    if published.std is not None:
        text += f" ± {published.std:.{column.decimals}f}"
    return TextCell(text, hint=published.source)


def _note(model: TableModel) -> str:
    seeds = sorted({row.seeds for row in model.rows})
    counts = " or ".join(map(str, seeds))
    parts = ["One seed" if seeds == [1] else f"Mean ± standard deviation over {counts} seeds"]
    cells = [(row, cell) for row in model.rows for cell in row.metrics.values()]
    if any(0 < cell.summary.n < row.seeds for row, cell in cells):
        parts.append("(n=…): only n seeds are finished")
    if model.stopped:
        parts.append(f"{model.stopped} run{'s were' if model.stopped > 1 else ' was'} stopped early and not averaged")
    if any(cell.best for _, cell in cells):
        parts.append("bold: best")
    sources = dict.fromkeys(cell.published.source for _, cell in cells if cell.published and cell.published.source)
    if sources:
        parts.append(f"published: {', '.join(sources)}")
    return "; ".join(parts) + "."


def markdown(model: TableModel) -> str:
    """A GitHub-flavoured Markdown table and a note. Columns are aligned in the source as well."""
    drawn = layout(model)
    grid = [[_markdown_text(header.text) for header in drawn.headers]]
    for row in drawn.rows:
        texts = [_markdown_text(cell.text) for cell in row]
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
    return "\n".join(lines) + f"\n\n{_markdown_text(drawn.note)}\n"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def latex(model: TableModel) -> str:
    """A LaTeX `table` environment with the rules of booktabs."""
    drawn = layout(model)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex_text(model.title)}. {_latex_text(drawn.note)}}}",
        rf"  \label{{tab:{re.sub(r'[^A-Za-z0-9:-]+', '-', model.ablation)}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if header.numeric else 'l' for header in drawn.headers)}}}",
        r"    \toprule",
        f"    {' & '.join(_latex_text(header.text) for header in drawn.headers)} \\\\",
        r"    \midrule",
    ]
    for row in drawn.rows:
        texts = [rf"\textbf{{{_latex_text(cell.text)}}}" if cell.best else _latex_text(cell.text) for cell in row]
        lines.append(f"    {' & '.join(texts)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "–": "--",
    "…": r"\ldots{}",
} | {character: "\\" + character for character in "&%$#_{}"}


def _latex_text(text: str) -> str:
    return "".join(_LATEX_ESCAPES.get(character, character) for character in " ".join(text.split()))


def html(model: TableModel) -> str:
    """A `<table class="ablation">` element.

    Cells of numeric columns have the class `number`, the best means `best`; details are in `title` attributes.
    """
    # pandas' Styler does not escape `title` attributes, and cannot set `scope` or the class of a heading.
    drawn = layout(model)
    headers = "".join(
        f'<th scope="col"{_html_class(number=header.numeric)}>{_html_text(header.text)}</th>'
        for header in drawn.headers
    )
    rows = []
    for row in drawn.rows:
        cells = []
        for index, (cell, header) in enumerate(zip(row, drawn.headers, strict=True)):
            tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
            classes = _html_class(number=header.numeric, best=cell.best)
            hint = f' title="{_html_text(cell.hint)}"' if cell.hint else ""
            cells.append(f"<{tag}{scope}{classes}{hint}>{_html_text(cell.text)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="ablation">\n<caption>{_html_text(drawn.note)}</caption>\n'
        f"<thead><tr>{headers}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
    )


def _html_text(text: str) -> str:
    return html_module.escape(text, quote=True)


def _html_class(**classes: bool) -> str:
    names = " ".join(name for name, applies in classes.items() if applies)
    return f' class="{names}"' if names else ""


def rich(model: TableModel) -> RichTable:
    """A table for `rich.print`: the best means in green, and the progress of rows with failed runs in red."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = layout(model)
    shown = RichTable(title=Text(model.title), caption=Text(drawn.note), box=SIMPLE_HEAD, title_justify="left")
    shown.caption_justify = "left"
    for index, header in enumerate(drawn.headers):
        # In a narrow terminal headings may wrap, but numbers must not.
        widest = max((len(row[index].text) for row in drawn.rows), default=0) if header.numeric else None
        shown.add_column(Text(header.text), justify="right" if header.numeric else "left", min_width=widest)
    for row, cells in zip(model.rows, drawn.rows, strict=True):
        texts = [Text(cell.text, style="bold green" if cell.best else "") for cell in cells]
        if row.counts["failed"]:
            texts[-1].stylize("red")
        shown.add_row(*texts)
    return shown
