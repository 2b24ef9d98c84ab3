"""How a search went: the best value so far (`budget`), and values against each parameter that varied (`slice`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.figures.metrics import (
    chosen_metrics,
    is_log_parameter,
    is_number,
    metric_title,
    panel_key,
    selected_rows,
)
from cope_sweep.read.tables.best import Candidate, Group, rank_rows
from cope_sweep.read.tables.model import Column, varying_axes
from cope_sweep.read.tables.row_names import find_axis
from cope_sweep.read.tables.runs import Results, setting
from cope_sweep.store import QueryError

BUDGET_COLUMNS = {
    "panel": "str", "metric": "str", "series": "str", "row": "str", "x": "int64", "n": "int64", "value": "float64",
    "best": "float64",
}  # fmt: skip
SLICE_COLUMNS = {
    "metric": "str", "parameter": "str", "row": "str", "number": "int64", "n": "int64", "x": "float64",
    "x_label": "str", "value": "float64",
}  # fmt: skip
BEST, OTHER = canvas.PALETTE[1], canvas.PALETTE[0]
ORDER = "Blues"
"""Colours from the first row that a search has suggested (light) to the last one."""


# -- the best value so far ---------------------------------------------------------------------------------------------


def budget(results: Results, question: GetFigure) -> Figure:
    """The value of each row of a search, and the best so far, in the order of the search; by default of the metric of
    `cope-sweep best`.

    A random search has a line for each point of its grid. Where these differ in several axes, the one with the fewest
    labels has panels.

    Raises FigureError, and QueryError for an ablation without a search.
    """
    plan = results.plan
    if not plan.is_drawn:
        raise QueryError(
            f"{plan.name} trains every row of its grid, which has no order; its best rows: cope-sweep best "
            f"{plan.ablation.cli_args}, or the figure `slice`",
            code="not_a_search",
            ablation=plan.name,
        )
    chosen = chosen_metrics(plan, results.frame, question.metric, ()) if question.metric else []
    found = rank_rows(results, *(column.name for column in chosen[:1]))
    column = metric_title(plan, found.metric)
    split = panel_key(plan, question.panels)
    if len(found.groups) > 1:
        groups, series, split = _of_grid(plan, found.groups, question.row, split)
    elif split is not None:
        raise FigureError(
            f"--panels {question.panels}: all rows of {plan.name} are one search, so its figure `budget` is one panel; "
            "leave it out",
            code="no_panels",
            ablation=plan.name,
        )
    else:
        (group,) = found.groups
        selected = {row.name for row in selected_rows(plan, question.row)}
        groups = (replace(group, candidates=tuple(each for each in group.candidates if each.row.name in selected)),)
        series = {group.name: "best so far"}
    data = pd.DataFrame(
        [line for group in groups for line in _history(plan, group, split, column, series[group.name])],
        columns=list(BUDGET_COLUMNS),
    ).astype(BUDGET_COLUMNS)
    title = question.title or plan.ablation.content.title
    known = list(dict.fromkeys(series.values()))
    x_title = "number of draws" if plan.search is None else "number of suggested rows"
    return Figure("budget", title, data, partial(_draw_budget, data, known, column, title, x_title, question))


def _of_grid(
    plan: Plan, groups: Sequence[Group], rows: Sequence[str], split: str | None
) -> tuple[tuple[Group, ...], dict[str, str], str | None]:
    """The groups of the points of a grid that are drawn, the name of the line of each, and the axis that has panels."""
    names = [group.name for group in groups]
    if unknown := next((name for name in rows if name not in names), None):
        message = f"{plan.name} has no row {unknown!r}{suggest(unknown, names)}"
        raise FigureError(message, code="unknown_row", row=unknown, allowed=names)
    labels = {key: {group.labels.get(key) for group in groups} for key in plan.axes}
    several = [key for key, values in labels.items() if len(values) > 1]
    whole = [key for key in several if None not in labels[key]]  # every group has such a label
    if split is None and len(several) > 1 and whole:
        split = min(whole, key=lambda key: len(labels[key]))
    series = {
        group.name: " · ".join(label for key, label in group.labels.items() if key in several and key != split)
        or group.name
        for group in groups
    }
    return tuple(group for group in groups if group.name in (rows or names)), series, split


def _history(plan: Plan, group: Group, split: str | None, column: Column, series: str) -> list[dict[str, Any]]:
    panel = f"{plan.axes[split]} = {group.labels.get(split, '–')}" if split else ""
    better, best, lines = (min if column.goal == "min" else max), None, []
    for number, each in enumerate(group.candidates, start=1):
        if each.score is not None:
            best = each.score if best is None else better(best, each.score)
        if best is not None:
            lines.append({
                "panel": panel, "metric": column.name, "series": series, "row": each.row.name, "x": number,
                "n": len(each.scores), "value": each.score, "best": best,
            })  # fmt: skip
    return lines


def _draw_budget(
    data: pd.DataFrame, series: Sequence[str], column: Column, title: str, x_title: str, question: GetFigure
) -> Drawing:
    known = [each for each in series if each in set(data["series"])]
    by_name = list(dict.fromkeys(data["panel"]))
    many = canvas.are_apart(len(known), len(by_name))
    dotted = many or len(known) <= canvas.FEW_LINES  # of more lines, nobody could tell whose dots they are
    names = [(name, each) for name in by_name for each in (known if many else [None])]
    drawing, axes = canvas.panels(max(1, len(names)), title=title, small=many)
    if data.empty:
        canvas.say_empty(axes[0])
        return drawing
    handles: dict[str, Any] = {}
    for panel, (name, own) in zip(axes, names, strict=True):
        shown = data[data["panel"] == name]
        canvas.panel_title(panel, [part for part in (own, name) if part])
        for index, each in enumerate(series):
            lines = shown[shown["series"] == each]
            if own in (None, each) and len(lines):
                style = canvas.series_style(0 if own else index) | {"marker": ""}
                if dotted:
                    panel.plot(lines["x"], lines["value"], "o", color=style["color"], alpha=0.35, markersize=3)
                (handles[each],) = panel.plot(lines["x"], lines["best"], drawstyle="steps-post", **style)
            elif len(lines):
                canvas.background(panel, lines["x"], lines["best"])
        canvas.metric_axis(panel, data["value"].tolist(), column, log=question.log)  # panels share a scale
        canvas.parameter_axis(panel, sorted(set(shown["x"])), None, log=bool(question.log_x))
        panel.set_xlabel(x_title)
    canvas.share_limits(axes)
    if many:
        canvas.label_edges(axes)
        artists, texts = [handles[known[0]], canvas.background(axes[0], [], [])], ["best so far", "the other rows"]
    else:
        artists, texts = [handles[each] for each in known], known
    if dotted:
        artists.append(axes[0].plot([], [], "o", color=canvas.GREY, markersize=3)[0])
        texts = [*texts, "each row" if len(known) == 1 else "each draw"]
    canvas.legend(drawing, artists, texts)
    return drawing


# -- values against each parameter -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """A metric against a parameter."""

    metric: Column
    key: str
    title: str


def slice(results: Results, question: GetFigure) -> Figure:  # noqa: A001 - the name of its kind
    """A metric of each row against each axis in which the rows differ: a point for each row, and none joined.

    A row is the mean of its finished seeds, in the metric's unit. Default metric: the one by which `cope-sweep best`
    ranks. An axis is logarithmic where the search space is. Raises FigureError for an axis that the ablation does not
    have, and where no axis has several values; QueryError for an unknown metric.
    """
    plan = results.plan
    rows = selected_rows(plan, question.row)
    keys = varying_axes(plan, rows)
    if question.x is not None:
        key = find_axis(plan.axes, question.x)
        if key is None:
            axes = list(plan.axes)
            message = f"--x {question.x}: {plan.name} has no such axis{suggest(question.x, axes)}"
            raise FigureError(message, code="unknown_axis", axis=question.x, allowed=axes)
        keys = [key]
    if not keys and rows:
        raise FigureError(
            f"{plan.name} has no axis with several values, so nothing can be drawn against one",
            code="no_axis",
            ablation=plan.name,
        )
    chosen: list[str | None] = [column.name for column in chosen_metrics(plan, results.frame, question.metric, ())]
    panels, lines = [], []
    selected = {row.name for row in rows}
    for name in chosen or [None]:
        ranking = rank_rows(results, name)
        column = metric_title(plan, ranking.metric)
        number_of = {row.name: number for number, row in enumerate(plan.rows, start=1)}
        scored = [
            each for group in ranking.groups for each in group.candidates if each.scores and each.row.name in selected
        ]
        scored.sort(key=lambda each: number_of[each.row.name])
        for key in keys:
            panels.append(_Panel(column, key, plan.axes[key]))
            lines += _slice(scored, column, key, number_of)
    data = pd.DataFrame(lines, columns=list(SLICE_COLUMNS)).astype(SLICE_COLUMNS)
    title = question.title or plan.ablation.content.title
    return Figure("slice", title, data, partial(_draw_slices, data, panels, plan, title, question))


def _slice(scored: Sequence[Candidate], column: Column, key: str, number_of: Mapping[str, int]) -> list[dict[str, Any]]:
    """The lines of a panel: the rows that have the parameter."""
    own = [each for each in scored if key in each.row.labels]
    settings = [setting(each.row, key) for each in own]
    numeric = all(map(is_number, settings))
    places = {label: float(index) for index, label in enumerate(dict.fromkeys(each.row.labels[key] for each in own))}
    return [
        {
            "metric": column.name, "parameter": key, "row": each.row.name, "number": number_of[each.row.name],
            "n": len(each.scores), "x": float(value) if numeric else places[each.row.labels[key]],
            "x_label": "" if numeric else each.row.labels[key], "value": statistics.fmean(each.scores),
        }
        for each, value in zip(own, settings, strict=True)
    ]  # fmt: skip


def _draw_slices(data: pd.DataFrame, panels: Sequence[_Panel], plan: Plan, title: str, question: GetFigure) -> Drawing:
    drawing, axes = canvas.panels(max(1, len(panels)), title=title)
    if data.empty:
        canvas.say_empty(axes[0])
        for each in axes[1:]:
            each.remove()
        return drawing
    several = len({panel.metric.name for panel in panels}) > 1
    of_suggestions = plan.search is not None
    of_metric: dict[str, list[Axes]] = {}
    for axis, panel in zip(axes, panels, strict=True):
        of_metric.setdefault(panel.metric.name, []).append(axis)
        same = data[data["metric"] == panel.metric.name]
        shown = same[same["parameter"] == panel.key]
        if several:
            canvas.panel_title(axis, [panel.metric.label])
        _draw_points(axis, shown, panel.metric, of_suggestions=of_suggestions)
        canvas.metric_axis(axis, same["value"].tolist(), panel.metric, log=question.log)
        places = shown.drop_duplicates("x").sort_values("x")
        labels = None if (shown["x_label"] == "").all() else places["x_label"].tolist()
        log_x = is_log_parameter(plan, panel.key) if question.log_x is None else question.log_x
        canvas.parameter_axis(axis, places["x"].tolist(), labels, log=log_x)
        axis.set_xlabel(canvas.shortened(panel.title))
    for same_axes in of_metric.values():
        canvas.share_limits(same_axes)
    marks = [
        axes[0].plot([], [], "o", color=OTHER)[0],
        axes[0].plot([], [], "o", color=BEST, markerfacecolor="none")[0],
    ]
    canvas.legend(drawing, marks, ["a row; the later, the darker" if of_suggestions else "a row", "the best row"])
    return drawing


def _draw_points(axis: Axes, shown: pd.DataFrame, metric: Column, *, of_suggestions: bool) -> None:
    if shown.empty:
        return
    colours: Any = OTHER
    if of_suggestions:
        share = shown["number"] / max(1, int(shown["number"].max()))
        colours = mpl.colormaps[ORDER](0.25 + 0.7 * share)
    axis.scatter(shown["x"], shown["value"], s=14, c=colours, linewidths=0, alpha=None if of_suggestions else 0.7)
    best = shown.sort_values("value", ascending=metric.goal == "min", kind="stable").head(1)
    axis.plot(best["x"], best["value"], "o", color=BEST, markerfacecolor="none", markersize=8)
