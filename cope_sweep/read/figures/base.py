"""A figure: its data as a frame, and the files that are made of it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from cope_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

Format = Literal["png", "svg", "pdf", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)


class FigureError(UserError):
    """A figure that cannot be made. The message names what exists."""


@dataclass(frozen=True)
class Figure:
    """The data of a figure. Rendering the same data gives the same bytes; it is thread-safe."""

    kind: str
    title: str
    frame: pd.DataFrame
    """Data that is drawn; the function that computed it describes the columns."""
    draw: Callable[[], Drawing]
    """Draws `frame`; called by `render`, which sets the style first."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw yet. The drawing then says so."""
        return self.frame.empty

    def render(self, file_format: Format) -> bytes:
        """The content of a file in this format."""
        if file_format == "csv":
            from cope_sweep.read.tables.csv_text import csv_text

            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        from cope_sweep.read.figures.canvas import render

        return render(self.draw, file_format)

    def write(self, path: Path, file_format: Format | None = None) -> None:
        """Write a file; without a format, its suffix names it. Raises FigureError (the suffix) and OSError."""
        chosen = file_format or format_of(path)
        path.write_bytes(self.render(chosen))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """How notebooks show the figure."""
        return {"image/png": base64.b64encode(self.render("png")).decode(), "text/plain": self.title}


def format_of(path: Path) -> Format:
    """The format that a file's suffix names. Raises FigureError."""
    for each in FORMATS:
        if path.suffix.lower() == f".{each}":
            return each
    raise FigureError(
        f"{path}: its suffix names no format; end it with {', '.join(f'.{each}' for each in FORMATS)}, or give --format"
    )
