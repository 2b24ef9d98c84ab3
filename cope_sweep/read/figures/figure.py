"""A figure, with the files that are made of it; the kinds of figures, and their options.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from cope_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

Format = Literal["png", "svg", "pdf", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)
Band = Literal["auto", "interval", "range"]
Show = Literal["gates", "positions", "position_attention", "attention"]


@dataclass(frozen=True)
class Options:
    """Options of the figures of an ablation. Each kind uses some of them, and raises FigureError for unknown names."""

    metrics: tuple[str, ...] = ()
    """Names of metrics; empty: the kind's default."""
    rows: tuple[str, ...] = ()
    """Names of the plan's rows; empty: all."""
    x: str | None = None
    """curves, convergence: `step` or `time`. values: an axis, another key of a run, or a fact."""
    panels: str | None = None
    """values, contexts: an axis, one panel for each of its values."""
    band: Band = "auto"
    """interval: 95 % interval of the mean. range: least and greatest value. auto: interval from 3 seeds on."""
    log: bool | None = None
    """Whether the metrics' axis is logarithmic; None: as the data ask for."""
    log_x: bool | None = None
    """Whether the other axis is logarithmic; None: as the data ask for."""
    title: str = ""
    """Above the figure; empty: the ablation's title."""


@dataclass(frozen=True)
class MapOptions:
    """Options of the maps of heads."""

    show: Show = "position_attention"
    """position_attention: attention induced by position alone, scaled to 1 at the maximum of each query."""
    heads: tuple[tuple[int, int], ...] | int = 4
    """Pairs of layer and head; or a number: those heads whose gates separate the marked tokens best (AUC), or, without
    gates or marks, the first ones."""
    mark: str | None = None
    """Marked tokens, drawn as plus signs; None: the first mark that the tokens have."""
    title: str = ""
    """Above the figure; empty: the run and its encodings."""


DEFAULTS, MAP_DEFAULTS = Options(), MapOptions()


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
            from cope_sweep.read.tables.runs import csv_text

            return csv_text(self.frame).encode("utf-8", "backslashreplace")
        from cope_sweep.read.figures.canvas import render

        return render(self.draw, file_format)

    def write(self, path: Path | str, file_format: Format | None = None) -> None:
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
    """ablation: made of Results and Options. checkpoint: of a Predictor, token ids and MapOptions."""
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
