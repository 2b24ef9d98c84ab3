"""The figures that an ablation has: those that its file declares (`figures:`), and those that any ablation has.

This module imports neither pandas, matplotlib nor torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, urlencode

from cope_sweep.api.figures import FIGURE_FORMATS, FIGURE_SIZE, FigureInfo, GetFigure
from cope_sweep.api.question import API
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures import FIGURES, FigureKind
from cope_sweep.read.tables.model import varying_axes
from cope_sweep.read.tables.results import Results
from cope_sweep.store import QueryError

if TYPE_CHECKING:
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.figures.figure import Figure

MAX_ROWS = 300
"""Images of more rows cannot be read and have hundreds of megabytes: services refuse them, and reports leave them out.
Tables in reports have this many rows at most."""
SVG_WIDTH = re.compile(rb'<svg[^>]* width="([0-9.]+)pt"')
"""The width of a drawing of matplotlib, in points."""
NOT_CONTENT = {"name", "figure", "scale", "set", "format", "size"}
"""Fields of a question about a figure that do not say what it shows."""


def available_figures(plan: Plan, sets: Sequence[str] = ()) -> list[FigureInfo]:
    """The figures of a plan: the declared ones in the order of the file, then those that any ablation has."""
    declared = {figure.name: figure.figure for figure in declared_figures(plan)}
    figures: list[tuple[str, str, str]] = [(name, figure.kind, figure.title) for name, figure in declared.items()]
    offered = {
        "always": True,
        "axes": bool(varying_axes(plan.axes, plan.rows)),
        "search": plan.is_drawn,
        "declared": False,
    }
    figures += [(kind, kind, "") for kind, cls in FIGURES.items() if offered[cls.OFFERED] and kind not in declared]
    return [
        FigureInfo(
            name=name, title=title or FIGURES[kind].SHOWS, kind=kind, declared=name in declared,
            formats=list(FIGURE_FORMATS),
            url=f"{API}/ablations/{quote(plan.name, safe='')}/{figure_path(plan, name, sets)}",
        )
        for name, kind, title in figures
    ]  # fmt: skip


def figure_path(plan: Plan, name: str, sets: Sequence[str] = (), **parameters: str) -> str:
    """The path of a plan's figure on a service, relative to the paths of its table and report.

    `sets` are the values of `set` in the request.
    """
    scale = plan.ablation.scale
    query = [*parameters.items(), *([("scale", scale)] if scale else []), *(("set", value) for value in sets)]
    path = f"figures/{quote(name)}"
    return f"{path}?{urlencode(query)}" if query else path


def draw_figure(results: Results, question: GetFigure, style: str | None = None) -> Figure:
    """The figure that a question names: a declared one if the question has no options, otherwise one of a kind.

    `style` is a style sheet of matplotlib: its name, or a file.

    Raises NotFoundError, StoreError, QueryError, and FigureError if it cannot be drawn now.
    """
    from cope_sweep.read.figures.figure import Figure  # matplotlib

    plan, name = results.plan, question.figure
    declared = {figure.name: figure for figure in declared_figures(plan)}
    size = inches(question.size)
    chosen = chosen_options(question)
    if name in declared and not chosen:
        return replace(draw_declared(results, declared[name]), size=size, style=style)
    kinds = {kind: cls for kind, cls in FIGURES.items() if not cls.NEEDS_CHECKPOINT}
    if name in declared and name not in kinds:
        raise QueryError(
            f"{name} is drawn as its file declares it; leave out --{chosen[0]}, or name a kind: {', '.join(kinds)}",
            code="no_effect",
            option=chosen[0],
            figure=name,
            allowed=[],
        )
    if name not in kinds:
        allowed = [*declared, *(kind for kind in kinds if kind not in declared)]
        message = f"{plan.name} has no figure {name[:80]!r}{suggest(name, allowed)}"
        raise NotFoundError(message, figure=name[:80], allowed=allowed)
    _check_options(kinds[name], name, chosen)
    data = kinds[name].undeclared().data(results, question)
    return Figure(name, plan.ablation.content.title, data, size, style)


def _check_options(kind: type[FigureKind], name: str, chosen: Sequence[str]) -> None:
    """Raise QueryError for an option about the content that the kind does not take."""
    if without_effect := [option for option in chosen if option not in kind.TAKES]:
        options = ", ".join(f"--{option}" for option in kind.TAKES)
        raise QueryError(
            f"--{without_effect[0]} has no effect on the figure {name!r}, which takes {options}",
            code="no_effect",
            option=without_effect[0],
            figure=name,
            allowed=list(kind.TAKES),
        )


def drawn_lines(plan: Plan, figure: str, rows: int) -> int:
    """The number of lines, bars or cells in a figure of some rows of a plan, by its name."""
    kind = _kind_of(plan, figure)
    return kind.drawn_lines(plan, rows) if kind else rows


def fits(svg: bytes, size: str | None) -> bool:
    """Whether an SVG, drawn without a size, is what a question with this size asks for: it fits into a width alone.

    Raises QueryError for what is not a size.
    """
    wanted, width_pt = inches(size), SVG_WIDTH.search(svg)
    if wanted is None:
        return True
    return wanted[1] is None and width_pt is not None and float(width_pt[1]) <= 72 * wanted[0]


def inches(size: str | None) -> Size | None:
    """The width and height in `3.25x2.5` or `3.25`; None without a size. Raises QueryError."""
    if size is None:
        return None
    if not re.fullmatch(FIGURE_SIZE, size):
        raise QueryError(
            f"--size {size}: write width and height in inches, each from 1 to less than 40, as in --size 3.25x2.5, or "
            "the width alone",
            code="invalid_option",
            option="--size",
            value=size,
        )
    width, _, height = size.partition("x")
    return float(width), float(height) if height else None


def needs_checkpoint(plan: Plan, figure: str) -> bool:
    """Whether a figure of a plan, by its name, shows a trained model."""
    kind = _kind_of(plan, figure)
    return kind is not None and kind.NEEDS_CHECKPOINT


def _kind_of(plan: Plan, figure: str) -> type[FigureKind] | None:
    kinds = {declared.name: type(declared.figure) for declared in declared_figures(plan)}
    return kinds.get(figure) or FIGURES.get(figure)


def chosen_options(question: GetFigure) -> list[str]:
    """The options about the content of the figure that a question does not leave at their defaults."""
    return list(question.model_dump(exclude_defaults=True, exclude=NOT_CONTENT))


@dataclass(frozen=True)
class Declared:
    """A figure of an ablation file."""

    name: str
    """Its kind, followed by a number from 1 if the file has several figures of this kind: `maps-2`."""
    figure: FigureKind
    rows: tuple[str, ...]
    """The names of the plan's rows to draw."""


def declared_figures(plan: Plan) -> tuple[Declared, ...]:
    """The figures of the plan's ablation, in the order of the file."""
    figures = cast(list[FigureKind], plan.ablation.content.figures)
    totals, numbers = Counter(figure.kind for figure in figures), Counter[str]()
    declared = []
    for index, figure in enumerate(figures):
        numbers[figure.kind] += 1
        name = figure.kind if totals[figure.kind] == 1 else f"{figure.kind}-{numbers[figure.kind]}"
        rows = tuple(row.name for row in plan.rows if index in row.figures)
        declared.append(Declared(name, figure, rows))
    return tuple(declared)


def draw_declared(results: Results, declared: Declared) -> Figure:
    """A declared figure of some results; maps show the checkpoint of a finished run.

    Raises FigureError, StoreError, and what a probe of a checkpoint raises.
    """
    from cope_sweep.read.figures.figure import Figure  # matplotlib

    figure = declared.figure
    data = figure.data(results, declared_question(results.plan, declared))
    return Figure(figure.kind, figure.title or data.title or results.plan.ablation.content.title, data)


def declared_question(plan: Plan, declared: Declared) -> GetFigure:
    """The question that a declared figure answers."""
    # Copied without checks: a file may have more metrics and rows than a request.
    fields = declared.figure.question_fields() | {"row": list(declared.rows)}
    return GetFigure(name=plan.name, figure=declared.name).model_copy(update=fields)
