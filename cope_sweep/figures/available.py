"""The figures that an ablation has: those that its file declares, and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cope_sweep.config import Plan
from cope_sweep.errors import NotFoundError
from cope_sweep.figures.base import Figure, FigureError, Format
from cope_sweep.figures.declared import Declared, declared_figures, draw_declared
from cope_sweep.figures.kinds import FIGURES
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
    declared: Declared | None = None
    """None: no figure of the file, but one with default options."""


def available_figures(plan: Plan) -> tuple[Available, ...]:
    """The figures of a plan: the declared ones in the order of the file, then the others."""
    declared = tuple(
        Available(each.name, each.figure.kind, each.figure.title or FIGURES[each.figure.kind].shows, each)
        for each in declared_figures(plan)
    )
    names = {each.name for each in declared}
    return (*declared, *(Available(kind, kind, FIGURES[kind].shows) for kind in _kinds(plan) if kind not in names))


def draw_available(plan: Plan, store: Store, name: str, file_format: Format, *, scale: str | None = None) -> bytes:
    """The file of a figure. Raises NotFoundError, StoreError, and FigureError for one that cannot be drawn now."""
    known = {each.name: each for each in available_figures(plan)}
    if name not in known:
        raise NotFoundError(f"{plan.name} has no figure {name[:80]!r}; its figures are: {', '.join(known)}")
    if len(plan.rows) > MAX_ROWS and file_format != "csv":
        raise FigureError(
            f"{plan.name} has {len(plan.rows):,} rows, and pictures show at most {MAX_ROWS}; take the data as csv, or "
            "draw some rows with `cope-sweep figure --row`"
        )
    return _made(plan, store, known[name], scale).render(file_format)


def _made(plan: Plan, store: Store, figure: Available, scale: str | None) -> Figure:
    if figure.declared is not None:
        return draw_declared(plan, store, figure.declared, scale=scale)
    return FIGURES[figure.kind].make(plan, store)


def _kinds(plan: Plan) -> Iterator[str]:
    yield from COMMON
    if any(len({row.labels.get(key) for row in plan.rows}) > 1 for key in plan.axes):
        yield from VARYING
