"""The figures that an ablation file declares (`figures:`), drawn from a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan, RunSpec
from cope_sweep.config.ablation import AnyFigure, Contexts, Convergence, Curves, Maps, Values
from cope_sweep.read.figures.base import Figure, FigureError
from cope_sweep.read.figures.kinds import FIGURES, MapOptions, Options
from cope_sweep.store import Store

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor


@dataclass(frozen=True)
class Declared:
    """A figure of an ablation file."""

    name: str
    """Its kind; with a number from 1 where the file has several of this kind: `maps-2`."""
    figure: AnyFigure
    rows: tuple[str, ...]
    """The names of the plan's rows that it draws; empty: all."""


def declared_figures(plan: Plan) -> tuple[Declared, ...]:
    """The figures of the plan's ablation, in the order of the file."""
    figures = plan.ablation.content.figures
    totals, seen = Counter(each.kind for each in figures), Counter[str]()
    found = []
    for index, each in enumerate(figures):
        seen[each.kind] += 1
        name = each.kind if totals[each.kind] == 1 else f"{each.kind}-{seen[each.kind]}"
        found.append(Declared(name, each, tuple(row.name for row in plan.rows if index in row.figures)))
    return tuple(found)


def summary_figure(plan: Plan, store: Store) -> Figure:
    """The figure of an ablation that declares none: its final metrics. Raises StoreError."""
    return FIGURES["summary"].make(plan, store)


def draw_declared(plan: Plan, store: Store, declared: Declared, *, scale: str | None = None) -> Figure:
    """A declared figure from the finished runs of a store; maps are those of a finished run's checkpoint.

    `scale` is that of the plan, for the command that errors name. Raises FigureError, StoreError, and what a probe of a
    checkpoint raises.
    """
    if isinstance(declared.figure, Maps):
        return _draw_maps(plan, store, declared, declared.figure, scale)
    return FIGURES[declared.figure.kind].make(plan, store, ablation_options(declared))


def ablation_options(declared: Declared) -> Options:
    """Arguments of the functions of `FIGURES`."""
    figure = declared.figure
    common: dict[str, Any] = {"rows": declared.rows, "title": figure.title}
    match figure:
        case Curves() | Convergence():
            return Options(metrics=tuple(figure.metrics), log=figure.log, **common)
        case Values():
            return Options(metrics=tuple(figure.metrics), x=figure.x, log_x=figure.log_x, **common)
        case Contexts():
            return Options(metrics=(figure.metric,), panels=figure.panels, **common)
        case _:
            raise FigureError(
                f"{declared.name}: a figure of the kind {figure.kind} is not drawn from an ablation's runs"
            )


def _draw_maps(plan: Plan, store: Store, declared: Declared, figure: Maps, scale: str | None) -> Figure:
    from cope_sweep.inference import Predictor
    from cope_sweep.inference.probe import split_sequences

    run = _wanted_run(plan, declared, figure)
    folder = store.run(run.run_id)
    status = store.status(run.run_id)
    if status != "finished":
        options = f" --scale {scale}" if scale else ""
        raise FigureError(
            f"{declared.name} of {plan.name} shows the checkpoint of run {run.run_id} ({declared.rows[0]}, seed "
            f"{run.seed}), which is {status} in the store {store.location}; train it with: "
            f"cope-sweep run {plan.name}{options}"
        )
    predictor: Predictor = Predictor.load(folder.fetch_checkpoint())
    token_ids = split_sequences(run.task, figure.split, figure.index)[0][: figure.first]
    heads = figure.heads if isinstance(figure.heads, int) else tuple(figure.heads)
    make: Callable[..., Figure] = FIGURES["maps"].make
    return make(predictor, token_ids, MapOptions(show=figure.show, heads=heads, mark=figure.mark, title=figure.title))


def _wanted_run(plan: Plan, declared: Declared, figure: Maps) -> RunSpec:
    row = next(row for row in plan.rows if row.name in declared.rows)
    return next(run for run in row.runs if figure.seed in (None, run.seed))
