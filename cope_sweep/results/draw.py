"""Tables as Markdown, LaTeX, HTML, and for terminals: one layout of cells, drawn four ways.

A cell is `mean ± std` over the finished seeds, with `(n=1)` behind it where some are missing, and `–` where all are.
"""

from __future__ import annotations

import html as html_module
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cope_sweep.results.sheet import Column, Line, Measured, Sheet, Stated

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING = "–"


@dataclass(frozen=True)
class Head:
    """A column's heading."""

    text: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell's text."""

    text: str
    best: bool = False
    hint: str = ""
    """More, where there is room for it."""


@dataclass(frozen=True)
class Layout:
    """Cells in their places, and what is to be said below them."""

    heads: tuple[Head, ...]
    lines: tuple[tuple[Cell, ...], ...]
    note: str


def layout(sheet: Sheet) -> Layout:
    """Columns: axes, parameters, each metric (and the published one, where a row has it), and runs, where some lack."""
    published = {c.name for c in sheet.columns if any(line.metrics[c.name].published for line in sheet.lines)}
    incomplete = any(not line.complete for line in sheet.lines)
    sized = any(line.parameters is not None for line in sheet.lines)
    heads = [Head(short, numeric=False) for short in sheet.axes.values()] or [Head("row", numeric=False)]
    heads += [Head("parameters")] if sized else []
    for column in sheet.columns:
        heads.append(Head(column.title))
        if column.name in published:
            heads.append(Head(f"{column.label}, published"))
    heads += [Head("runs", numeric=False)] if incomplete else []
    lines = []
    for line in sheet.lines:
        cells = [Cell(line.labels.get(key, "")) for key in sheet.axes] or [Cell(line.row)]
        if sized:
            cells.append(Cell(NOTHING if line.parameters is None else f"{line.parameters:,}"))
        for column in sheet.columns:
            measured = line.metrics[column.name]
            cells.append(_measured(measured, column, line))
            if column.name in published:
                cells.append(_stated(measured.published, column))
        if incomplete:
            cells.append(Cell(line.progress))
        lines.append(tuple(cells))
    return Layout(tuple(heads), tuple(lines), _note(sheet))


def _measured(measured: Measured, column: Column, line: Line) -> Cell:
    summary = measured.summary
    if summary.n == 0:
        return Cell(NOTHING, hint=line.progress)
    text = f"{summary.mean:.{column.decimals}f}"
    hint = f"n = {summary.n}"
    if summary.n > 1:
        text += f" ± {summary.std:.{column.decimals}f}"
        hint += f"; 95 % interval {summary.ci_low:.{column.decimals}f} … {summary.ci_high:.{column.decimals}f}"
    if summary.n != line.seeds:
        text += f" (n={summary.n})"
    return Cell(text, measured.best, hint)


def _stated(stated: Stated | None, column: Column) -> Cell:
    if stated is None:
        return Cell(NOTHING)
    text = f"{stated.value:.{column.decimals}f}"
    return Cell(text if stated.std is None else f"{text} ± {stated.std:.{column.decimals}f}", hint=stated.source)


def _note(sheet: Sheet) -> str:
    seeds = sorted({line.seeds for line in sheet.lines})
    counted = " or ".join(map(str, seeds))
    parts = ["One seed" if seeds == [1] else f"Mean ± standard deviation over {counted} seeds"]
    if any(0 < cell.summary.n < line.seeds for line in sheet.lines for cell in line.metrics.values()):
        parts.append("(n=…): the finished ones, where some are missing")
    if any(cell.best for line in sheet.lines for cell in line.metrics.values()):
        parts.append("bold: best")
    stated = [cell.published for line in sheet.lines for cell in line.metrics.values() if cell.published]
    if sources := list(dict.fromkeys(each.source for each in stated if each.source)):
        parts.append(f"published: {', '.join(sources)}")
    return "; ".join(parts) + "."


def markdown(sheet: Sheet) -> str:
    """A GitHub-flavoured table with its note, columns aligned in the source too."""
    drawn = layout(sheet)
    grid = [[_markdown_text(head.text) for head in drawn.heads]]
    for line in drawn.lines:
        texts = [_markdown_text(cell.text) for cell in line]
        grid.append([f"**{text}**" if cell.best else text for cell, text in zip(line, texts, strict=True)])
    widths = [max(3, *(len(line[i]) for line in grid)) for i in range(len(drawn.heads))]

    def joined(line: list[str]) -> str:
        padded = [
            text.rjust(width) if head.numeric else text.ljust(width)
            for text, width, head in zip(line, widths, drawn.heads, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rules = [
        "-" * (width - 1) + ":" if head.numeric else "-" * width
        for width, head in zip(widths, drawn.heads, strict=True)
    ]
    lines = [joined(grid[0]), f"| {' | '.join(rules)} |", *(joined(line) for line in grid[1:])]
    return "\n".join(lines) + f"\n\n{_markdown_text(drawn.note)}\n"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def latex(sheet: Sheet) -> str:
    """A float with booktabs' rules."""
    drawn = layout(sheet)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex_text(sheet.title)}. {_latex_text(drawn.note)}}}",
        rf"  \label{{tab:{re.sub(r'[^A-Za-z0-9:-]+', '-', sheet.ablation)}}}",
        rf"  \begin{{tabular}}{{{''.join('r' if head.numeric else 'l' for head in drawn.heads)}}}",
        r"    \toprule",
        f"    {' & '.join(_latex_text(head.text) for head in drawn.heads)} \\\\",
        r"    \midrule",
    ]
    for line in drawn.lines:
        texts = [rf"\textbf{{{_latex_text(cell.text)}}}" if cell.best else _latex_text(cell.text) for cell in line]
        lines.append(f"    {' & '.join(texts)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"


_LATEX = {
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
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def html(sheet: Sheet) -> str:
    """A `<table class="ablation">`; numbers have class `number`, the best `best`; cells explain themselves on hover."""
    drawn = layout(sheet)
    heads = "".join(
        f'<th scope="col"{_html_class("number" if head.numeric else "")}>{_html_text(head.text)}</th>'
        for head in drawn.heads
    )
    lines = []
    for line in drawn.lines:
        cells = []
        for index, (cell, head) in enumerate(zip(line, drawn.heads, strict=True)):
            classes = _html_class(*(["number"] if head.numeric else []), *(["best"] if cell.best else []))
            hint = f' title="{_html_text(cell.hint)}"' if cell.hint else ""
            tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
            cells.append(f"<{tag}{scope}{classes}{hint}>{_html_text(cell.text)}</{tag}>")
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="ablation">\n<caption>{_html_text(drawn.note)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table>\n"
    )


def _html_text(text: str) -> str:
    return html_module.escape(text, quote=True)


def _html_class(*names: str) -> str:
    joined = " ".join(name for name in names if name)
    return f' class="{joined}"' if joined else ""


def rich(sheet: Sheet) -> RichTable:
    """For `rich.print`: the best in green, rows with failed runs in red at their end."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = layout(sheet)
    drawing = RichTable(title=Text(sheet.title), caption=Text(drawn.note), box=SIMPLE_HEAD, title_justify="left")
    drawing.caption_justify = "left"
    for index, head in enumerate(drawn.heads):
        # Headings may wrap where room is short; numbers may not.
        widest = max(len(line[index].text) for line in drawn.lines) if head.numeric else None
        drawing.add_column(Text(head.text), justify="right" if head.numeric else "left", min_width=widest)
    for line, cells in zip(sheet.lines, drawn.lines, strict=True):
        texts = [Text(cell.text, style="bold green" if cell.best else "") for cell in cells]
        if line.counts["failed"]:
            texts[-1].stylize("red")
        drawing.add_row(*texts)
    return drawing
