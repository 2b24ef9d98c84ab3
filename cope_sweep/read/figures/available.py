"""The figures that an ablation has: those that its file declares (`figures:`), and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from cope_sweep.api.answers import FigureInfo
from cope_sweep.api.questions import API, GetFigure
from cope_sweep.config import Plan
from cope_sweep.config.ablation import AnyFigure, Heatmap, Maps
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures.kinds import FIGURES, FORMATS, FigureError
from cope_sweep.read.tables.model import varying_axes
from cope_sweep.read.tables.runs import Results

if TYPE_CHECKING:
    from cope_sweep.read.figures.figure import Figure

COMMON = ("summary", "curves", "convergence")
SIZE = ("width", "height", "font_size")
"""Fields of a question that say how large a figure is."""
VARYING = ("values", "slice", "heatmap", "importance")
"""Kinds for an ablation with an axis of several values."""


def available_figures(plan: Plan) -> list[FigureInfo]:
    """The figures of a plan: the declared ones in the order of the file, then those that any ablation has."""
    declared = {each.name: each.figure for each in declared_figures(plan)}
    found = [(name, figure.kind, figure.title) for name, figure in declared.items()]
    kinds = (*COMMON, *(VARYING if varying_axes(plan, plan.rows) else ()), *(["budget"] * plan.is_drawn))
    found += [(kind, kind, "") for kind in kinds if kind not in declared]
    return [
        FigureInfo(
            name=name, title=title or FIGURES[kind].shows, kind=kind, declared=name in declared,
            formats=list(FORMATS), url=f"{API}/ablations/{quote(plan.name, safe='')}/{figure_path(plan, name)}",
        )
        for name, kind, title in found
    ]  # fmt: skip


def figure_path(plan: Plan, name: str, **parameters: str) -> str:
    """The path of a plan's figure on a service, relative to the paths of its table and report."""
    query = urlencode(parameters | ({"scale": plan.ablation.scale} if plan.ablation.scale else {}))
    return f"figures/{quote(name)}" + (f"?{query}" if query else "")


def draw_figure(results: Results, question: GetFigure) -> Figure:
    """The figure that a question names: a declared one, where no option is given; else one of a kind.

    Raises NotFoundError, StoreError, and FigureError for one that cannot be drawn now.
    """
    from cope_sweep.read.figures.canvas import Size  # matplotlib

    plan, name = results.plan, question.figure
    declared = {each.name: each for each in declared_figures(plan)}
    size = Size(question.width, question.height, question.font_size)
    if name in declared and is_plain(question):
        return replace(draw_declared(results, declared[name]), size=size)
    if name not in FIGURES or FIGURES[name].needs != "ablation":
        kinds = [each for each, kind in FIGURES.items() if kind.needs == "ablation" and each not in declared]
        known = [*declared, *kinds]
        message = f"{plan.name} has no figure {name[:80]!r}{suggest(name, known)}"
        raise NotFoundError(message, figure=name[:80], allowed=known)
    return replace(FIGURES[name].make(results, question), size=size)


def is_plain(question: GetFigure) -> bool:
    """Whether a question has no option of what is drawn."""
    other = ("name", "figure", "scale", "committed", "format", *SIZE)
    return not question.model_dump(exclude_defaults=True, exclude=set(other))


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


def claimed_figures(plan: Plan) -> dict[str, Maps]:
    """The figures of a plan that claim something about the heads of its rows, by name."""
    figures = {declared.name: declared.figure for declared in declared_figures(plan)}
    return {name: figure for name, figure in figures.items() if isinstance(figure, Maps) and figure.claim}


def draw_declared(results: Results, declared: Declared, *, head: tuple[int, int] | None = None) -> Figure:
    """A declared figure of some results; maps show the checkpoint of a finished run.

    For maps, `head` (layer and head) is drawn instead of a number of heads.

    Raises FigureError, StoreError, and what a probe of a checkpoint raises.
    """
    if isinstance(declared.figure, Maps):
        figure = declared.figure
        if head is not None and isinstance(figure.heads, int):
            figure = figure.model_copy(update={"heads": [head]})
        return FIGURES["maps"].make(_checkpoint(results, declared, figure.seed), figure)
    question = declared_question(results.plan, declared)
    if isinstance(declared.figure, Heatmap):
        return FIGURES["heatmap"].make(results, question, declared.figure)
    return FIGURES[declared.figure.kind].make(results, question)


def declared_question(plan: Plan, declared: Declared) -> GetFigure:
    """The question whose figure is the declared one, if that is no map."""
    figure = declared.figure
    fields: dict[str, Any]
    if isinstance(figure, Heatmap):
        metrics = dict.fromkeys(name for columns in figure.columns.values() for name in columns)
        fields = {"metric": tuple(metrics), "panels": figure.panels, "title": figure.title}
    else:
        fields = figure.model_dump(exclude={"kind", "source", "rows"})
        fields["metric"] = tuple(fields.pop("metrics", None) or [fields["metric"]])
    # A file may have a longer title, and more metrics and rows, than a request.
    return GetFigure(name=plan.name, figure=figure.kind).model_copy(update={**fields, "row": declared.rows})


def _checkpoint(results: Results, declared: Declared, seed: int | None) -> Path:
    """The checkpoint that a declared map shows. Raises FigureError where its run is not finished."""
    plan, store = results.plan, results.store
    row = next(row for row in plan.rows if row.name in declared.rows)
    run = next(run for run in row.runs if seed in (None, run.seed))
    status = results.records[run.run_id].status
    if status != "finished" or store is None:
        raise FigureError(
            f"{declared.name} of {plan.name} shows the checkpoint of run {run.run_id} ({declared.rows[0]}, seed "
            f"{run.seed}), which is {status} in {results.place}; train it with: "
            f"{results.training}",
            code="not_finished",
            figure=declared.name,
            run_id=run.run_id,
            status=status,
        )
    return store.run(run.run_id).fetch_checkpoint()
