"""A figure: its data, and its files."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.figures import FIGURE_FORMATS, FigureFormat
from cope_sweep.errors import FigureError
from cope_sweep.read.figures.base import FigureData
from cope_sweep.read.figures.canvas import Size, empty, render
from cope_sweep.read.tables.render import csv_text


@dataclass(frozen=True)
class Figure:
    """The data of a figure. Rendering is thread-safe, and the same data give the same bytes."""

    kind: str
    title: str
    data: FigureData
    size: Size | None = None
    """None: what the content needs."""
    style: str | None = None
    """A style sheet of matplotlib: a file, or a name of one that it has."""

    @property
    def frame(self) -> pd.DataFrame:
        """The data; the file of the kind describes the columns."""
        return self.data.frame

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw yet; the drawing then says so."""
        return self.frame.empty

    def draw(self) -> Drawing:
        """The drawing, in the style that is set."""
        return empty(self.title, self.size, self.data.EMPTY) if self.empty else self.data.draw(self.title, self.size)

    def render(self, file_format: FigureFormat) -> bytes:
        """The bytes of a file in this format. Raises FigureError for an unknown style."""
        if file_format == "csv":
            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        return render(self.draw, file_format, self.size, self.style)

    def write(self, path: Path | str, file_format: FigureFormat | None = None) -> None:
        """Write a file, by default in the format of its suffix. Raises FigureError (unknown suffix), OSError."""
        path = Path(path)
        suffixes: dict[str, FigureFormat] = {f".{name}": name for name in FIGURE_FORMATS}
        chosen = file_format or suffixes.get(path.suffix.lower())
        if chosen is None:
            raise FigureError(
                f"{path}: its suffix names no format; end it with {', '.join(suffixes)}, or give --format",
                code="unknown_format",
                file=str(path),
                allowed=list(FIGURE_FORMATS),
            )
        path.write_bytes(self.render(chosen))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Called by notebooks."""
        return {"image/png": base64.b64encode(self.render("png")).decode(), "text/plain": self.title}
