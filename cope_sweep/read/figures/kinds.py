"""The kinds of figures. Their options are the fields of `GetFigure`.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cope_sweep.read.figures.figure import Figure


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure."""

    name: str
    shows: str
    """The content of the figure in one line."""
    needs: Literal["ablation", "checkpoint"]
    """The arguments of `make`: for an ablation, Results, a GetFigure and perhaps the figure that a file declares; for a
    checkpoint, its folder, a `Maps` and perhaps a text."""
    offered: Literal["always", "axes", "search", "declared"]
    """The ablations that have it without declaring it: all; those whose rows differ on an axis; searches; none."""
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
        FigureKind("summary", "final metrics of each row beside the published values", "ablation", "always", "values"),
        FigureKind(
            "curves", "learning curves: metrics by step or time, mean and band over seeds", "ablation", "always",
            "curves",
        ),
        FigureKind("values", "final metrics against a parameter that varies", "ablation", "axes", "values"),
        FigureKind("heatmap", "final metrics of many rows, sorted by mean rank", "ablation", "axes", "heatmap"),
        FigureKind(
            "contexts", "a metric against the length of the evaluation context, or the place in it", "ablation",
            "declared", "values",
        ),
        FigureKind("budget", "the history of a search: the best value so far", "ablation", "search", "budget"),
        FigureKind(
            "maps", "gates, positions or attention of heads over the tokens (--show)", "checkpoint", "declared",
            "heads",
        ),
    )
}  # fmt: skip
"""Name → kind."""
