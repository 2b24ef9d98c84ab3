"""A figure: its data, and the files that are made of it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.formats import FigureFormat
from cope_sweep.read.figures.canvas import NATURAL, Size, render
from cope_sweep.read.figures.kinds import FORMATS, FigureError
from cope_sweep.read.tables.render import csv_text


@dataclass(frozen=True)
class Figure:
    """The data of a figure. Rendering the same data gives the same bytes; it is thread-safe."""

    kind: str
    title: str
    frame: pd.DataFrame
    """Data that is drawn; the function that computed it describes the columns."""
    draw: Callable[[], Drawing]
    """Draws `frame`; called by `render`, which sets the style first."""
    size: Size = NATURAL

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw yet. The drawing then says so."""
        return self.frame.empty

    def render(self, file_format: FigureFormat) -> bytes:
        """The content of a file in this format."""
        if file_format == "csv":
            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        return render(self.draw, file_format, self.size)

    def write(self, path: Path | str, file_format: FigureFormat | None = None) -> None:
        """Write a file; without a format, its suffix names it. Raises FigureError (the suffix) and OSError."""
        path = Path(path)
        chosen = file_format or next((each for each in FORMATS if path.suffix.lower() == f".{each}"), None)
        if chosen is None:
            suffixes = ", ".join(f".{each}" for each in FORMATS)
            raise FigureError(
                f"{path}: its suffix names no format; end it with {suffixes}, or give --format",
                code="unknown_format",
                file=str(path),
                allowed=list(FORMATS),
            )
        path.write_bytes(self.render(chosen))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The figure for notebooks."""
        return {"image/png": base64.b64encode(self.render("png")).decode(), "text/plain": self.title}
