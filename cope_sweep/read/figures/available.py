"""The figures that an ablation has: those that its file declares, and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures.base import Figure, FigureError
from cope_sweep.read.figures.declared import declared_figures, draw_declared
from cope_sweep.read.figures.kinds import FIGURES, Options
from cope_sweep.store import Store

COMMON = ("summary", "curves", "convergence")
VARYING = ("values", "importance", "parallel")
"""Kinds for an ablation with an axis of several values."""
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
    return (*declared, *(Available(kind, kind, FIGURES[kind].shows) for kind in _kinds(plan) if kind not in names))


def draw_available(plan: Plan, store: Store, question: GetFigure) -> bytes:
    """The file of a figure. Raises NotFoundError, StoreError, and FigureError for one that cannot be drawn now."""
    file_format = question.format or "svg"
    if len(plan.rows) > MAX_ROWS and file_format != "csv" and not question.row:
        raise FigureError(
            f"{plan.name} has {len(plan.rows):,} rows, and pictures show at most {MAX_ROWS}; take the data as csv, or "
            "draw some rows with `row`"
        )
    return figure(plan, store, question).render(file_format)


def figure(plan: Plan, store: Store, question: GetFigure) -> Figure:
    """A declared figure, or one of a kind with the options of the question. Raises as `draw_available`."""
    options = Options(
        tuple(question.metric), tuple(question.row), question.x, question.panels, question.band, question.log,
        question.log_x, question.title,
    )  # fmt: skip
    name = question.figure
    declared = {each.name: each for each in declared_figures(plan)}
    if name in declared and options == Options():
        return draw_declared(plan, store, declared[name], scale=question.scale)
    if name not in FIGURES or FIGURES[name].needs != "ablation":
        kinds = [each for each, kind in FIGURES.items() if kind.needs == "ablation" and each not in declared]
        raise NotFoundError(f"{plan.name} has no figure {name[:80]!r}{suggest(name, [*declared, *kinds])}")
    return FIGURES[name].make(plan, store, options)


def _kinds(plan: Plan) -> Iterator[str]:
    yield from COMMON
    if any(len({row.labels.get(key) for row in plan.rows}) > 1 for key in plan.axes):
        yield from VARYING
