"""The layout of a table as Markdown, LaTeX, HTML, and for terminals."""

from __future__ import annotations

import html as html_module
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from cope_sweep.results.layout import Layout, TextCell, layout
from cope_sweep.results.table_model import TableModel

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

MAX_LINKED = 50
"""Runs that the link of one number names."""


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
    notes = [
        f"**{text}**" if index < len(drawn.warnings) else text
        for index, text in enumerate(map(_markdown_text, drawn.notes))
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(notes) + "\n"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def latex(model: TableModel) -> str:
    """A LaTeX `table` environment with the rules of booktabs."""
    drawn = layout(model)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex_text(model.title)}. {_latex_text(' '.join(drawn.notes))}}}",
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
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "−": r"$-$",
    "√": r"$\surd$",
    "·": r"$\cdot$",
    "–": "--",
    "…": r"\ldots{}",
} | {character: "\\" + character for character in "&%$#_{}"}


def _latex_text(text: str) -> str:
    escaped = "".join(_LATEX_ESCAPES.get(character, character) for character in " ".join(text.split()))
    return re.sub(r"(?<![\w.])-(?=[\d.])", "$-$", escaped)


def html(model: TableModel, *, runs_url: str | None = None) -> str:
    """A `<table class="ablation">` element whose numbers link to their runs.

    Cells of numeric columns have the class `number`, the best means `best`; details are in `title` attributes.

    Args:
        model: The table.
        runs_url: The URL of a list of runs, which takes the ids in the parameter `run`. None: a second table, of the
            runs, follows, and the numbers link to its rows.
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
            cells.append(f"<{tag}{scope}{classes}{hint}>{_linked(cell, runs_url)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="ablation">\n<caption>{_html_notes(drawn)}</caption>\n'
        f"<thead><tr>{headers}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
        + (_html_runs(model) if runs_url is None else "")
    )


def _linked(cell: TextCell, runs_url: str | None) -> str:
    text = _html_text(cell.text)
    if not cell.runs:
        return text
    if runs_url is None:
        return f'<a href="#run-{cell.runs[0]}">{text}</a>'
    query = "&".join(f"run={quote(run_id)}" for run_id in cell.runs[:MAX_LINKED])
    return f'<a href="{_html_text(f"{runs_url}?{query}")}">{text}</a>'


def _html_notes(drawn: Layout) -> str:
    warnings = "".join(f"<strong>Warning: {_html_text(text)}</strong> " for text in drawn.warnings)
    return warnings + _html_text(" ".join((drawn.note, *drawn.rules)))


def _html_runs(model: TableModel) -> str:
    """A `<table class="runs">` with every run: row, seed, status, id, and the values of the table's metrics."""
    columns = [column.name for column in model.columns]
    headers = "".join(f'<th scope="col">{_html_text(text)}</th>' for text in ("row", "seed", "status", "run", *columns))
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
            cells = "".join(f"<td>{_html_text(text)}</td>" for text in texts)
            rows.append(f'<tr id="run-{run.run_id}">{cells}</tr>\n')
    return f'<table class="runs">\n<thead><tr>{headers}</tr></thead>\n<tbody>\n{"".join(rows)}</tbody>\n</table>\n'


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
    shown = RichTable(title=Text(model.title), caption=_rich_notes(drawn), box=SIMPLE_HEAD, title_justify="left")
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


def _rich_notes(drawn: Layout) -> Text:
    from rich.text import Text

    lines = [Text(f"Warning: {text}", style="bold red") for text in drawn.warnings]
    return Text("\n").join([*lines, *map(Text, (drawn.note, *drawn.rules))])
