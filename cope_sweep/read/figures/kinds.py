"""The kinds of figures. Their options are the fields of `GetFigure`.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from cope_sweep.api.formats import FigureFormat
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.read.figures.figure import Figure

FORMATS: tuple[FigureFormat, ...] = get_args(FigureFormat)
Show = Literal["gates", "positions", "position_attention", "attention"]


class FigureError(UserError):
    """A figure cannot be made. The message names what exists."""

    default_code = "invalid_figure"


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure."""

    name: str
    shows: str
    """The content of the figure in one line."""
    needs: Literal["ablation", "checkpoint"]
    """The arguments of `make`: for an ablation, Results and a GetFigure; for a checkpoint, its folder, a `Maps` and
    perhaps a text."""
    module: str
    """The module of the function that computes the data; the function has the name of the kind."""

    def make(self, *arguments: Any) -> Figure:
        """Compute the data. This imports the module: pandas, matplotlib, and torch for a checkpoint.

        Raises FigureError, StoreError; for a checkpoint, also what `cope_sweep.inference.probe` raises.
        """
        figure: Figure = getattr(import_module(f"{__package__}.{self.module}"), self.name)(*arguments)
        return figure


FIGURES = {
    kind.name: kind
    for kind in (
        FigureKind(
            "curves", "learning curves: metrics by step or time, mean and band over seeds", "ablation", "curves"
        ),
        FigureKind("convergence", "test metrics by step, with the step of each row's best mean", "ablation", "curves"),
        FigureKind("values", "final metrics against a parameter that varies", "ablation", "values"),
        FigureKind("contexts", "a metric against the length of the evaluation context", "ablation", "values"),
        FigureKind("positions", "perplexity against the place in the context", "ablation", "values"),
        FigureKind("summary", "final metrics of each row beside the published values", "ablation", "values"),
        FigureKind("heatmap", "final metrics of many rows, sorted by mean rank", "ablation", "heatmap"),
        FigureKind("budget", "the history of a search: the best value so far", "ablation", "searches"),
        FigureKind("slice", "values of all rows against each parameter", "ablation", "searches"),
        FigureKind("importance", "how much of a metric's variance each parameter explains", "ablation", "importance"),
        FigureKind("maps", "gates, positions or attention of heads over the tokens (--show)", "checkpoint", "heads"),
    )
}
"""Name → kind."""
