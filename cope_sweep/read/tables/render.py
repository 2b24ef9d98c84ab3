"""The layout of a table, and below it that of its comparisons, as Markdown, LaTeX, HTML, and for terminals."""

from __future__ import annotations

import html as html_module
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cope_sweep.read.tables.layout import Layout, TextCell, comparison_layout, layout
from cope_sweep.read.tables.table_model import TableModel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.text import Text

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
    """The layout of the table, and that of its comparisons, if it has any."""
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


def latex(model: TableModel) -> str:
    """A LaTeX `table` environment with the rules of booktabs."""
    drawn = _layouts(model)
    notes = " ".join(text for each in drawn for text in each.notes)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex_text(model.title)}. {_latex_text(notes)}}}",
        rf"  \label{{tab:{re.sub(r'[^A-Za-z0-9:-]+', '-', model.ablation)}}}",
    ]
    for index, each in enumerate(drawn):
        lines += [r"", r"  \medskip"] * (index > 0) + _latex_tabular(each)
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_tabular(drawn: Layout) -> list[str]:
    lines = [
        rf"  \begin{{tabular}}{{{''.join('r' if header.numeric else 'l' for header in drawn.headers)}}}",
        r"    \toprule",
        f"    {' & '.join(_latex_text(header.text) for header in drawn.headers)} \\\\",
        r"    \midrule",
    ]
    for row in drawn.rows:
        texts = [rf"\textbf{{{_latex_text(cell.text)}}}" if cell.best else _latex_text(cell.text) for cell in row]
        lines.append(f"    {' & '.join(texts)} \\\\")
    return [*lines, r"    \bottomrule", r"  \end{tabular}"]


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


def html(model: TableModel, *, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table class="ablation">` element whose numbers link to their runs, and one of the comparisons.

    Cells of numeric columns have the class `number`, the best means `best`; details are in `title` attributes.

    Args:
        model: The table.
        runs_url: The URL of a list of runs, which takes the ids in the parameter `run`. None: a further table, of the
            runs, follows, and the numbers link to its rows.
        anchors: What begins the ids of these rows: different for each table of a document.
    """
    # pandas' Styler does not escape `title` attributes, and cannot set `scope` or the class of a heading.
    classes = ("ablation", "comparison")
    tables = [html_table(drawn, name, runs_url, anchors) for drawn, name in zip(_layouts(model), classes, strict=False)]
    return "".join(tables) + (_html_runs(model, anchors) if runs_url is None else "")


def html_table(drawn: Layout, name: str, runs_url: str | None = None, anchors: str = "") -> str:
    """A `<table>` element of the class `name`."""
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
            cells.append(f"<{tag}{scope}{classes}{hint}>{_linked(cell, runs_url, anchors)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<table class="{name}">\n<caption>{_html_notes(drawn)}</caption>\n'
        f"<thead><tr>{headers}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
    )


def _linked(cell: TextCell, runs_url: str | None, anchors: str) -> str:
    text = _html_text(cell.text)
    if not cell.runs:
        return text
    if runs_url is None:
        return f'<a href="#{anchors}run-{cell.runs[0]}">{text}</a>'
    query = "&".join(f"run={quote(run_id)}" for run_id in cell.runs[:MAX_LINKED])
    return f'<a href="{_html_text(f"{runs_url}?{query}")}">{text}</a>'


def _html_notes(drawn: Layout) -> str:
    warnings = "".join(f"<strong>Warning: {_html_text(text)}</strong> " for text in drawn.warnings)
    return warnings + _html_text(" ".join(drawn.notes[len(drawn.warnings) :]))


def _html_runs(model: TableModel, anchors: str) -> str:
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
            rows.append(f'<tr id="{anchors}run-{run.run_id}">{cells}</tr>\n')
    return f'<table class="runs">\n<thead><tr>{headers}</tr></thead>\n<tbody>\n{"".join(rows)}</tbody>\n</table>\n'


def _html_text(text: str) -> str:
    return html_module.escape(text, quote=True)


def _html_class(**classes: bool) -> str:
    names = " ".join(name for name, applies in classes.items() if applies)
    return f' class="{names}"' if names else ""


def rich(model: TableModel) -> Group:
    """Tables for `rich.print`: the best means in green, and the progress of rows with failed runs in red."""
    from rich.console import Group
    from rich.text import Text

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


@dataclass(frozen=True)
class _Fitted:
    """A table for a terminal of any width: columns that do not fit beside the others are below them."""

    drawn: Layout
    rows: Sequence[Sequence[Text]]
    labels: int
    """Number of the first columns, which name the rows and are repeated."""
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        for number, columns in enumerate(self._parts(options.max_width)):
            part = RichTable(title=Text("" if number else self.title), box=SIMPLE_HEAD, title_justify="left")
            for column in columns:
                header = self.drawn.headers[column]
                part.add_column(Text(header.text), "", justify="right" if header.numeric else "left",
                                min_width=min(self._width(column), options.max_width // 2))  # fmt: skip
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
            if not parts or left < self._width(column) + PADDING:
                parts.append([*labels])
                left = width - 1 - sum(self._width(each) + PADDING for each in labels)
            parts[-1].append(column)
            left -= self._width(column) + PADDING
        return parts or [labels]

    def _width(self, column: int) -> int:
        """Headings may wrap, cells may not."""
        words = self.drawn.headers[column].text.split()
        return max(map(len, [*words, *(texts[column].plain for texts in self.rows)]), default=0)
