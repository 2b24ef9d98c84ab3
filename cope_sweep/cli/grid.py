"""A table without lines. Rich's own table takes a millisecond to print a row, and plans have ten thousand."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

GAP = "  "
"""After each column."""


class Grid(Table):
    """Columns of short texts, which rich prints. Where the console is too narrow, the widest columns are wrapped.

    Cells are rich's markup. Of rich's settings, the headers, the alignment of columns and the styles of rows count.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [[_parsed(cast(str, cell)) for cell in (column.header, *column.cells)] for column in self.columns]
        widths = _fitted([max(map(_width, cells)) for cells in columns], options.max_width)
        right = [column.justify == "right" for column in self.columns]
        styles = [console.get_style(each or "none") for each in ("bold", *(row.style for row in self.rows))]
        for style, *cells in zip(styles, *columns, strict=True):
            lines = [_lines(cell, width, console) for cell, width in zip(cells, widths, strict=True)]
            for line in zip_longest(*lines, fillvalue=""):
                for part, width, at_right in zip(line, widths, right, strict=True):
                    spaces = " " * (width - _width(part))
                    before, after = (spaces, GAP) if at_right else ("", spaces + GAP)
                    if isinstance(part, str):
                        yield Segment(before + part + after, style)
                    else:
                        yield Segment(before, style)
                        yield from Segment.apply_style(part.render(console), style)
                        yield Segment(after, style)
                yield Segment.line()


def _parsed(cell: str) -> str | Text:
    """A cell with its markup applied; the same text if it has neither markup nor escapes, emoji codes or new lines."""
    return Text.from_markup(cell) if any(sign in cell for sign in "[\\:\n") else cell


def _width(cell: str | Text) -> int:
    """The number of columns of a terminal that a cell takes."""
    if isinstance(cell, str):
        return len(cell) if cell.isascii() else cell_len(cell)
    return cell.cell_len


def _fitted(widths: list[int], most: int) -> list[int]:
    """The widths of columns, less what the widest ones have to give up so that `most` holds all."""
    while sum(widths) + len(GAP) * len(widths) > most and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _lines(cell: str | Text, width: int, console: Console) -> Sequence[str | Text]:
    if isinstance(cell, str):
        if _width(cell) <= width:
            return (cell,)
        if _width(cell) == len(cell):
            return textwrap.wrap(cell, width, break_on_hyphens=False)
        cell = Text(cell)
    return list(cell.wrap(console, width))
