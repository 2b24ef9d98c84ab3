"""A figure, with the files that are made of it; the kinds of figures. Their options are those of `GetFigure`.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from cope_sweep.api.questions import FigureFormat
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

FORMATS: tuple[FigureFormat, ...] = get_args(FigureFormat)
Show = Literal["gates", "positions", "position_attention", "attention"]


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

    def render(self, file_format: FigureFormat) -> bytes:
        """The content of a file in this format."""
        if file_format == "csv":
            from cope_sweep.read.tables.runs import csv_text

            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        from cope_sweep.read.figures.canvas import render

        return render(self.draw, file_format)

    def write(self, path: Path | str, file_format: FigureFormat | None = None) -> None:
        """Write a file; without a format, its suffix names it. Raises FigureError (the suffix) and OSError."""
        path = Path(path)
        chosen = file_format or next((each for each in FORMATS if path.suffix.lower() == f".{each}"), None)
        if chosen is None:
            suffixes = ", ".join(f".{each}" for each in FORMATS)
            raise FigureError(f"{path}: its suffix names no format; end it with {suffixes}, or give --format")
        path.write_bytes(self.render(chosen))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """How notebooks show the figure."""
        return {"image/png": base64.b64encode(self.render("png")).decode(), "text/plain": self.title}


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure."""

    name: str
    shows: str
    """Content of the figure in one line."""
    needs: Literal["ablation", "checkpoint"]
    """ablation: made of Results and a GetFigure. checkpoint: of a Predictor, token ids and the `Maps` of a file."""
    module: str
    """Where the function is that computes its data; it has the name of the kind."""

    def make(self, *arguments: Any) -> Figure:
        """Compute the data. Raises FigureError, StoreError; for a checkpoint what `cope_sweep.inference.probe` raises.

        pandas, and torch for a checkpoint, are imported now.
        """
        made: Figure = getattr(import_module(f"{__package__}.{self.module}"), self.name)(*arguments)
        return made


FIGURES = {
    kind.name: kind
    for kind in (
        FigureKind(
            "curves", "learning curves: metrics by step or time, mean and band over seeds", "ablation", "curves"
        ),
        FigureKind("convergence", "test metrics by step, with the step of each row's best mean", "ablation", "curves"),
        FigureKind("values", "final metrics against a parameter that varies", "ablation", "values"),
        FigureKind("contexts", "a metric against the length of the evaluation context", "ablation", "values"),
        FigureKind("summary", "final metrics of each row beside the published values", "ablation", "values"),
        FigureKind("budget", "the best value of the first n draws of a random search", "ablation", "values"),
        FigureKind("importance", "how much of a metric's variance each parameter explains", "ablation", "importance"),
        FigureKind("parallel", "parallel coordinates: parameters and metric of each row", "ablation", "importance"),
        FigureKind("maps", "gates, positions or attention of heads over the tokens (--show)", "checkpoint", "heads"),
    )
}
"""Name → kind."""
