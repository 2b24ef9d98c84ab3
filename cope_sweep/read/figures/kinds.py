"""The kinds of figures: what each shows, what it needs, and the options of all of them.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cope_sweep.config import Plan
    from cope_sweep.inference import Predictor, TokenIds
    from cope_sweep.read.figures.base import Figure
    from cope_sweep.store import Store

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


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure."""

    name: str
    shows: str
    """Content of the figure in one line."""
    needs: Literal["ablation", "checkpoint"]
    """ablation: called with a plan, a store and Options. checkpoint: with a Predictor, token ids and MapOptions."""
    make: Callable[..., Figure]
    """Computes the data. Raises FigureError, StoreError; for a checkpoint what `cope_sweep.inference.probe` raises."""


def _curves(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.curves import curves

    return curves(plan, store, options)


def _convergence(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.curves import convergence

    return convergence(plan, store, options)


def _values(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.values import values

    return values(plan, store, options)


def _contexts(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.values import contexts

    return contexts(plan, store, options)


def _summary(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.summary import summary

    return summary(plan, store, options)


def _importance(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.importance import importance

    return importance(plan, store, options)


def _parallel(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    from cope_sweep.read.figures.parallel import parallel

    return parallel(plan, store, options)


def _maps(predictor: Predictor, token_ids: TokenIds, options: MapOptions = MAP_DEFAULTS) -> Figure:
    from cope_sweep.read.figures.maps import maps

    return maps(predictor, token_ids, options)


FIGURES = {
    kind.name: kind
    for kind in (
        FigureKind("curves", "learning curves: metrics by step or time, mean and band over seeds", "ablation", _curves),
        FigureKind(
            "convergence", "test metrics by step, with the step of each row's best mean", "ablation", _convergence
        ),
        FigureKind("values", "final metrics against a parameter that varies (--x)", "ablation", _values),
        FigureKind("contexts", "a metric against the length of the evaluation context", "ablation", _contexts),
        FigureKind("summary", "final metrics of each row beside the published values", "ablation", _summary),
        FigureKind("importance", "how much of a metric's variance each parameter explains", "ablation", _importance),
        FigureKind("parallel", "parallel coordinates: parameters and metric of each row", "ablation", _parallel),
        FigureKind("maps", "gates, positions or attention of heads over the tokens (--show)", "checkpoint", _maps),
    )
}
"""Name → kind."""
