"""A figure: its data, and its files."""

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
    """The data of a figure. Rendering is thread-safe, and the same data give the same bytes."""

    kind: str
    title: str
    frame: pd.DataFrame
    """The data; the function that computed them describes the columns."""
    draw: Callable[[], Drawing]
    """Draws `frame`; `render` sets the style, then calls it."""
    size: Size = NATURAL

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw yet; the drawing then says so."""
        return self.frame.empty

    def render(self, file_format: FigureFormat) -> bytes:
        """The bytes of a file in this format."""
        if file_format == "csv":
            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        return render(self.draw, file_format, self.size)

    def write(self, path: Path | str, file_format: FigureFormat | None = None) -> None:
        """Write a file, by default in the format of its suffix. Raises FigureError (unknown suffix), OSError."""
        path = Path(path)
        suffixes: dict[str, FigureFormat] = {f".{name}": name for name in FORMATS}
        chosen = file_format or suffixes.get(path.suffix.lower())
        if chosen is None:
            raise FigureError(
                f"{path}: its suffix names no format; end it with {', '.join(suffixes)}, or give --format",
                code="unknown_format",
                file=str(path),
                allowed=list(FORMATS),
            )
        path.write_bytes(self.render(chosen))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Called by notebooks."""
        return {"image/png": base64.b64encode(self.render("png")).decode(), "text/plain": self.title}
