"""The figures that an ablation has: those that its file declares (`figures:`), and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan
from cope_sweep.config.ablation import AnyFigure, Contexts, Convergence, Curves, Maps, Values
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures.figure import FIGURES, Figure, FigureError, MapOptions, Options
from cope_sweep.read.figures.metrics import varying_axes
from cope_sweep.read.tables.runs import Results

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

COMMON = ("summary", "curves", "convergence")
VARYING = ("values", "importance", "parallel")
"""Kinds for an ablation with an axis of several values."""
SEARCHED = 64
"""Sequences in which a mark is looked for."""
MAX_ROWS = 300
"""Rows of an ablation whose figures are drawn: more make pictures that nobody can read, of hundreds of megabytes."""


@dataclass(frozen=True)
class Available:
    """A figure that can be drawn of an ablation."""

    name: str
    kind: str
    title: str
    """Its title in the file, else that of its kind."""
    declared: bool = False
    """Whether the file declares it."""


def available_figures(plan: Plan) -> tuple[Available, ...]:
    """The figures of a plan: the declared ones in the order of the file, then the others."""
    declared = tuple(
        Available(each.name, each.figure.kind, each.figure.title or FIGURES[each.figure.kind].shows, declared=True)
        for each in declared_figures(plan)
    )
    names = {each.name for each in declared}
    kinds = (*COMMON, *(VARYING if varying_axes(plan, plan.rows) else ()))
    kinds += ("budget",) if plan.is_drawn else ()
    return (*declared, *(Available(kind, kind, FIGURES[kind].shows) for kind in kinds if kind not in names))


def draw_available(results: Results, question: GetFigure) -> bytes:
    """The file of a figure. Raises NotFoundError, StoreError, and FigureError for one that cannot be drawn now."""
    plan, file_format = results.plan, question.format or "svg"
    if len(plan.rows) > MAX_ROWS and file_format != "csv" and not question.row:
        raise FigureError(
            f"{plan.name} has {len(plan.rows):,} rows, and pictures show at most {MAX_ROWS}; take the data as csv, or "
            "draw some rows with `row`"
        )
    made = figure(results, question)
    if made.empty and file_format != "csv":
        raise FigureError(f"nothing to draw: no run, or too few, of {plan.name} are finished")
    return made.render(file_format)


def figure(results: Results, question: GetFigure) -> Figure:
    """The figure that a question names. Raises as `draw_available`."""
    options = Options(
        tuple(question.metric), tuple(question.row), question.x, question.panels, question.band, question.log,
        question.log_x, question.title,
    )  # fmt: skip
    return named_figure(results, question.figure, options)


def named_figure(results: Results, name: str, options: Options) -> Figure:
    """A declared figure, where no option is given; else one of a kind. Raises as `draw_available`."""
    plan = results.plan
    declared = {each.name: each for each in declared_figures(plan)}
    if name in declared and options == Options():
        return draw_declared(results, declared[name])
    if name not in FIGURES or FIGURES[name].needs != "ablation":
        kinds = [each for each, kind in FIGURES.items() if kind.needs == "ablation" and each not in declared]
        raise NotFoundError(f"{plan.name} has no figure {name[:80]!r}{suggest(name, [*declared, *kinds])}")
    return FIGURES[name].make(results, options)


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


def draw_declared(results: Results, declared: Declared) -> Figure:
    """A declared figure of some results; maps are those of a finished run's checkpoint.

    Raises FigureError, StoreError, and what a probe of a checkpoint raises.
    """
    if isinstance(declared.figure, Maps):
        return _draw_maps(results, declared, declared.figure)
    return FIGURES[declared.figure.kind].make(results, ablation_options(declared))


def ablation_options(declared: Declared) -> Options:
    """Arguments of the functions of `FIGURES`."""
    figure = declared.figure
    common: dict[str, Any] = {"rows": declared.rows, "title": figure.title}
    match figure:
        case Curves() | Convergence():
            return Options(metrics=tuple(figure.metrics), log=figure.log, **common)
        case Values():
            return Options(
                metrics=tuple(figure.metrics), x=figure.x, panels=figure.panels, log_x=figure.log_x, **common
            )
        case Contexts():
            return Options(metrics=(figure.metric,), panels=figure.panels, **common)
        case _:
            raise FigureError(
                f"{declared.name}: a figure of the kind {figure.kind} is not drawn from an ablation's runs"
            )


def _draw_maps(results: Results, declared: Declared, figure: Maps) -> Figure:
    from cope_sweep.inference import Predictor

    plan, store = results.plan, results.store
    row = next(row for row in plan.rows if row.name in declared.rows)
    run = next(run for run in row.runs if figure.seed in (None, run.seed))
    status = results.records[run.run_id].status
    if status != "finished" or store is None:
        raise FigureError(
            f"{declared.name} of {plan.name} shows the checkpoint of run {run.run_id} ({declared.rows[0]}, seed "
            f"{run.seed}), which is {status} in {results.place}; train it with: "
            f"cope-sweep run {plan.ablation.words}"
        )
    predictor: Predictor = Predictor.load(store.run(run.run_id).fetch_checkpoint())
    heads = figure.heads if isinstance(figure.heads, int) else tuple(figure.heads)
    options = MapOptions(show=figure.show, heads=heads, mark=figure.mark, title=figure.title)
    return FIGURES["maps"].make(predictor, _shown_tokens(predictor, figure), options)


def _shown_tokens(predictor: Predictor, figure: Maps) -> list[int]:
    """The tokens of a map: of the sequence with this index, or of the first with a marked token, or else the first."""
    import numpy as np

    from cope_sweep.inference.probe import split_sequences, token_marks

    task, mark = predictor.run.task, figure.mark
    searched = SEARCHED if figure.index is None and mark else 1
    parts = [each[: figure.first] for each in split_sequences(task, figure.split, figure.index or 0, searched)]
    if searched == 1 or mark is None:
        return parts[0]
    tokenizer = predictor.tokenizer if predictor.reads_text else None
    return next(
        (each for each in parts if np.any(token_marks(task, np.array(each), tokenizer).get(mark, False))), parts[0]
    )
