"""The formats of a table: Markdown, LaTeX, CSV, and text for a terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group
from rich.table import Table as RichTable
from rich.text import Text

from cope_sweep.config.explain import suggest
from cope_sweep.read.tables.latex_text import after_command, latex_text, unknown_characters
from cope_sweep.read.tables.layout import Layout, TextCell, comparison_layout, layout, runs_layout
from cope_sweep.read.tables.model import STARS, TableModel, TableRow, mark_best, varying_axes
from cope_sweep.read.tables.row_names import find_axis
from cope_sweep.store import QueryError
from cope_sweep.terminal import visible

if TYPE_CHECKING:
    import pandas as pd

FORMULA = re.compile(r"^[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
PADDING = 3
"""Spaces between columns of a table in a terminal."""


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
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", visible(" ".join(text.split())))


LATEX_PACKAGES = "booktabs, multirow, threeparttable"
LATEX_OPTIONS = ("stars", "caption", "label", "notes", "group")
"""Fields of a question (`GetTable`) that `latex` takes, and no other format."""


def latex(
    model: TableModel,
    *,
    stars: bool = False,
    caption: str | None = None,
    label: str | None = None,
    notes: bool = True,
    group: str | None = None,
) -> str:
    r"""A LaTeX `table` environment, and a second one with the comparisons, drawn with booktabs.

    Args:
        model: The table.
        stars: Mark significant differences by stars, instead of a table of comparisons.
        caption: LaTeX code; None: the title.
        label: For `\ref`; None: `tab:` and the ablation's name. The label of the comparisons ends with `-comparisons`.
        notes: Whether notes follow below the table (`tablenotes`).
        group: Group rows by their label on this axis, for which they share one cell, and mark the best values of each
            group; None: group them by the first axis on which they differ, and mark the values that other formats mark.

    Raises QueryError for an unknown axis.
    """
    model = _grouped(model, group)
    title = latex_text(model.title) if caption is None else caption
    name = label or "tab:" + re.sub(r"[^A-Za-z0-9:-]+", "-", model.ablation)
    table_layout, comparisons = layout(model), comparison_layout(model)
    note_texts = list(table_layout.notes)
    if stars and comparisons is not None:
        note_texts += comparisons.notes
        if any(cell.stars for row in table_layout.rows for cell in row):
            marks = [f"{'*' * (index + 1)} p ≤ {bound:g}" for index, bound in enumerate(STARS)]
            note_texts.append(f"{', '.join(marks)}.")
    is_grouped = model.group is not None
    tables = [_latex_table(table_layout, title, name, note_texts if notes else (), stars=stars, is_grouped=is_grouped)]
    if comparisons is not None and not stars:
        note_texts = list(comparisons.notes) if notes else []
        caption_of_comparisons, label_of_comparisons = f"{title}: comparisons", f"{name}-comparisons"
        tables.append(
            _latex_table(comparisons, caption_of_comparisons, label_of_comparisons, note_texts, is_grouped=is_grouped)
        )
    code = "\n".join(tables)
    preamble = f"% \\usepackage{{{LATEX_PACKAGES}}}\n"
    if unknown := unknown_characters(code):
        preamble += f"% Compile with XeLaTeX or LuaLaTeX, and a font that has {unknown}: pdfLaTeX does not.\n"
    return preamble + code


def _grouped(model: TableModel, name: str | None) -> TableModel:
    """The table grouped by the labels of an axis, which becomes the first.

    Args:
        model: The table. If its rows differ on one axis only, it is returned unchanged.
        name: The axis, in whose groups best means are marked; None: the first axis on which rows differ. Marks stay.

    Raises QueryError for an unknown axis.
    """
    varying = varying_axes(model.axes, model.rows)
    key = find_axis(model.axes, name) if name else next(iter(varying), None)
    if name and key is None:
        axes = list(model.axes.values())
        message = f"{model.ablation} has no axis {name!r}{suggest(name, axes)}"
        raise QueryError(message, code="unknown_axis", axis=name, allowed=axes)
    if key is None or len(varying) < 2:
        return model
    groups: dict[str, list[TableRow]] = {}
    for row in model.rows:
        metrics = row.metrics
        if name:
            metrics = {metric: replace(cell, best=False) for metric, cell in metrics.items()}
        groups.setdefault(row.labels.get(key, ""), []).append(replace(row, metrics=metrics))
    rows = [row for group in groups.values() for row in (mark_best(group, model.columns) if name else group)]
    with_groups = replace(model, rows=tuple(rows), group=key, marks_groups=bool(name))
    return replace(with_groups, axes={key: model.axes[key], **model.axes})


def _latex_table(
    table_layout: Layout,
    caption: str,
    label: str,
    notes: Sequence[str],
    *,
    stars: bool = False,
    is_grouped: bool = False,
) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \begin{threeparttable}",
        rf"    \caption{{{caption}}}",
        rf"    \label{{{label}}}",
        rf"    \begin{{tabular}}{{{''.join('r' if header.numeric else 'l' for header in table_layout.headers)}}}",
        r"      \toprule",
        _latex_row([latex_text(header.text) for header in table_layout.headers]),
        r"      \midrule",
    ]
    groups = [list(rows) for _, rows in itertools.groupby(table_layout.rows, key=lambda row: row[0].text)]
    for number, group in enumerate(groups):
        if is_grouped and number > 0:
            lines.append(rf"      \cmidrule{{1-{len(table_layout.headers)}}}")
        for index, row in enumerate(group):
            cells = [_latex_cell(cell, stars=stars) for cell in row]
            if is_grouped and index:
                cells[0] = ""
            elif is_grouped and len(group) > 1:
                cells[0] = rf"\multirow[t]{{{len(group)}}}{{*}}{{{cells[0]}}}"
            lines.append(_latex_row(cells))
    lines += [r"      \bottomrule", r"    \end{tabular}"]
    if notes:
        items = [rf"      \item {after_command(latex_text(text))}" for text in notes]
        lines += [r"    \begin{tablenotes}\footnotesize", *items, r"    \end{tablenotes}"]
    return "\n".join([*lines, r"  \end{threeparttable}", r"\end{table}"]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return f"      {after_command(' & '.join(cells))} \\\\"


def _latex_cell(cell: TextCell, *, stars: bool) -> str:
    text = latex_text(cell.text)
    mark = f"$^{{{'*' * cell.stars}}}$" if stars and cell.stars else ""
    return (rf"\textbf{{{text}}}" if cell.best else text) + mark


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


def rich_runs(model: TableModel) -> Group:
    """A table for `rich.print` with a line for each run; failed runs are red."""
    table_layout = runs_layout(model)
    records = [record for row in model.rows for _, record in row.runs]
    styles = ["red" if record.status == "failed" else "" for record in records]
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
