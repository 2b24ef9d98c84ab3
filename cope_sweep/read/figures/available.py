"""The figures that an ablation has: those that its file declares (`figures:`), and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from cope_sweep.api.figures import FIGURE_FORMATS, FigureInfo, GetFigure
from cope_sweep.api.question import API
from cope_sweep.config import Plan
from cope_sweep.config.ablation import AnyFigure, Contexts, Heatmap, Maps, RandomSearch
from cope_sweep.config.explain import suggest
from cope_sweep.errors import FigureError, NotFoundError
from cope_sweep.read.figures.kinds import FIGURES
from cope_sweep.read.tables.model import varying_axes
from cope_sweep.read.tables.runs import Results

if TYPE_CHECKING:
    from cope_sweep.read.figures.figure import Figure

MAX_ROWS = 300
"""Images of more rows cannot be read and have hundreds of megabytes: services refuse them, and reports leave them out.
Tables in reports have this many rows at most."""


def available_figures(plan: Plan) -> list[FigureInfo]:
    """The figures of a plan: the declared ones in the order of the file, then those that any ablation has."""
    declared = {figure.name: figure.figure for figure in declared_figures(plan)}
    figures: list[tuple[str, str, str]] = [(name, figure.kind, figure.title) for name, figure in declared.items()]
    offered = {
        "always": True,
        "axes": bool(varying_axes(plan, plan.rows)),
        "search": plan.is_drawn,
        "declared": False,
    }
    figures += [
        (kind.name, kind.name, "") for kind in FIGURES.values() if offered[kind.offered] and kind.name not in declared
    ]
    return [
        FigureInfo(
            name=name, title=title or FIGURES[kind].shows, kind=kind, declared=name in declared,
            formats=list(FIGURE_FORMATS), url=f"{API}/ablations/{quote(plan.name, safe='')}/{figure_path(plan, name)}",
        )
        for name, kind, title in figures
    ]  # fmt: skip


def figure_path(plan: Plan, name: str, **parameters: str) -> str:
    """The path of a plan's figure on a service, relative to the paths of its table and report."""
    if plan.ablation.scale:
        parameters["scale"] = plan.ablation.scale
    path = f"figures/{quote(name)}"
    return f"{path}?{urlencode(parameters)}" if parameters else path


def draw_figure(results: Results, question: GetFigure, style: str | None = None) -> Figure:
    """The figure that a question names: a declared one if the question has no options, otherwise one of a kind.

    `style` is a style sheet of matplotlib: its name, or a file.

    Raises NotFoundError, StoreError, and FigureError if it cannot be drawn now.
    """
    from cope_sweep.read.figures.figure import inches  # matplotlib

    plan, name = results.plan, question.figure
    declared = {figure.name: figure for figure in declared_figures(plan)}
    size = inches(question.size)
    if name in declared and selects_nothing(question):
        return replace(draw_declared(results, declared[name]), size=size, style=style)
    if name not in FIGURES or FIGURES[name].needs != "ablation":
        kinds = [kind.name for kind in FIGURES.values() if kind.needs == "ablation" and kind.name not in declared]
        allowed = [*declared, *kinds]
        message = f"{plan.name} has no figure {name[:80]!r}{suggest(name, allowed)}"
        raise NotFoundError(message, figure=name[:80], allowed=allowed)
    return replace(FIGURES[name].make(results, question), size=size, style=style)


def drawn_lines(plan: Plan, figure: str, rows: int) -> int:
    """The number of lines, bars or cells in a figure of some rows of a plan, by its kind."""
    if figure != "budget":
        return rows
    search = plan.ablation.content.search
    return rows // search.samples if isinstance(search, RandomSearch) else 1  # one line for all draws of a row


def selects_nothing(question: GetFigure) -> bool:
    """Whether a question leaves all options about the content of the figure at their defaults."""
    other_fields = {"name", "figure", "scale", "format", "size"}
    return not question.model_dump(exclude_defaults=True, exclude=other_fields)


@dataclass(frozen=True)
class Declared:
    """A figure of an ablation file."""

    name: str
    """Its kind, followed by a number from 1 if the file has several figures of this kind: `maps-2`."""
    figure: AnyFigure
    rows: tuple[str, ...]
    """The names of the plan's rows to draw."""


def declared_figures(plan: Plan) -> tuple[Declared, ...]:
    """The figures of the plan's ablation, in the order of the file."""
    figures = plan.ablation.content.figures
    totals, numbers = Counter(figure.kind for figure in figures), Counter[str]()
    declared = []
    for index, figure in enumerate(figures):
        numbers[figure.kind] += 1
        name = figure.kind if totals[figure.kind] == 1 else f"{figure.kind}-{numbers[figure.kind]}"
        rows = tuple(row.name for row in plan.rows if index in row.figures)
        declared.append(Declared(name, figure, rows))
    return tuple(declared)


def claimed_figures(plan: Plan) -> dict[str, Maps]:
    """The figures of a plan that claim something about the heads of its rows, by name."""
    figures = {declared.name: declared.figure for declared in declared_figures(plan)}
    return {name: figure for name, figure in figures.items() if isinstance(figure, Maps) and figure.claim}


def draw_declared(results: Results, declared: Declared, *, head: tuple[int, int] | None = None) -> Figure:
    """A declared figure of some results; maps show the checkpoint of a finished run.

    Args:
        results: The results.
        declared: The figure.
        head: Layer and head to draw in maps, if the file gives a number of heads.

    Raises FigureError, StoreError, and what a probe of a checkpoint raises.
    """
    if isinstance(declared.figure, Maps):
        figure = declared.figure
        if head is not None and isinstance(figure.heads, int):
            figure = figure.model_copy(update={"heads": [head]})
        return FIGURES["maps"].make(_checkpoint(results, declared, figure.seed), figure)
    question = declared_question(results.plan, declared)
    drawn = FIGURES[declared.figure.kind].make(results, question, declared.figure)
    return replace(drawn, title=declared.figure.title or drawn.title)


def declared_question(plan: Plan, declared: Declared) -> GetFigure:
    """The question that a declared figure answers; not for maps."""
    figure = declared.figure
    fields: dict[str, Any] = {name: getattr(figure, name) for name in ("x", "panels", "log") if hasattr(figure, name)}
    metrics = getattr(figure, "metrics", ())
    if isinstance(figure, Contexts):
        metrics = [figure.metric]
    elif isinstance(figure, Heatmap):
        metrics = dict.fromkeys(name for columns in figure.columns.values() for name in columns)
    # A file may have more metrics and rows than a request.
    fields |= {"metric": list(metrics), "row": list(declared.rows)}
    return GetFigure(name=plan.name, figure=figure.kind).model_copy(update=fields)


def _checkpoint(results: Results, declared: Declared, seed: int | None) -> Path:
    """The checkpoint that a declared map shows. Raises FigureError if its run is not finished."""
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
