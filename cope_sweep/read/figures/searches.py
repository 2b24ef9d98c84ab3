"""The course of a search: the best value so far (`budget`), and values against each parameter (`slice`)."""

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
    is_finite_number,
    is_log_parameter,
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
"""Colours from the first suggested row (light) to the last."""


# -- the best value so far ---------------------------------------------------------------------------------------------


def budget(results: Results, question: GetFigure) -> Figure:
    """The value of each row of a search and the best so far, in the order of the search.

    `metric` defaults to the one of `cope-sweep best`. A random search has a line for each point of its grid. If points
    differ on several axes, the labels of the axis with the fewest have a panel each.

    Raises FigureError; QueryError for an ablation without a search.
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
    ranking = rank_rows(results, *(column.name for column in chosen[:1]))
    column = metric_title(plan, ranking.metric)
    split = panel_key(plan, question.panels)
    if len(ranking.groups) > 1:
        groups, series, split = _grid_groups(plan, ranking.groups, question.row, split)
    elif split is not None:
        raise FigureError(
            f"--panels {question.panels}: all rows of {plan.name} are one search, so its figure `budget` is one panel; "
            "leave it out",
            code="no_panels",
            ablation=plan.name,
        )
    else:
        (group,) = ranking.groups
        selected = {row.name for row in selected_rows(plan, question.row)}
        candidates = tuple(candidate for candidate in group.candidates if candidate.row.name in selected)
        groups = (replace(group, candidates=candidates),)
        series = {group.name: "best so far"}
    data = pd.DataFrame(
        [line for group in groups for line in _history(plan, group, split, column, series[group.name])],
        columns=list(BUDGET_COLUMNS),
    ).astype(BUDGET_COLUMNS)
    title = question.title or plan.ablation.content.title
    names = list(dict.fromkeys(series.values()))
    x_title = "number of draws" if plan.search is None else "number of suggested rows"
    return Figure("budget", title, data, partial(_draw_budget, data, names, column, title, x_title, question))


def _grid_groups(
    plan: Plan, groups: Sequence[Group], rows: Sequence[str], split: str | None
) -> tuple[tuple[Group, ...], dict[str, str], str | None]:
    """The selected groups, the name of each group's line, and the axis that has panels."""
    names = [group.name for group in groups]
    for row in rows:
        if row not in names:
            message = f"{plan.name} has no row {row!r}{suggest(row, names)}"
            raise FigureError(message, code="unknown_row", row=row, allowed=names)
    labels = {key: {group.labels.get(key) for group in groups} for key in plan.axes}
    varying = [key for key, values in labels.items() if len(values) > 1]
    shared = [key for key in varying if None not in labels[key]]  # every group has a label on these axes
    if split is None and len(varying) > 1 and shared:
        split = min(shared, key=lambda key: len(labels[key]))
    series = {}
    for group in groups:
        own_labels = [label for key, label in group.labels.items() if key in varying and key != split]
        series[group.name] = " · ".join(own_labels) or group.name
    return tuple(group for group in groups if group.name in (rows or names)), series, split


def _history(plan: Plan, group: Group, split: str | None, column: Column, series: str) -> list[dict[str, Any]]:
    panel = f"{plan.axes[split]} = {group.labels.get(split, '–')}" if split else ""
    best: float | None = None
    lines = []
    for number, candidate in enumerate(group.candidates, start=1):
        if candidate.score is not None:
            best = candidate.score if best is None else column.best(best, candidate.score)
        if best is not None:
            lines.append({
                "panel": panel, "metric": column.name, "series": series, "row": candidate.row.name, "x": number,
                "n": len(candidate.scores), "value": candidate.score, "best": best,
            })  # fmt: skip
    return lines


def _draw_budget(
    data: pd.DataFrame, series: Sequence[str], column: Column, title: str, x_title: str, question: GetFigure
) -> Drawing:
    drawn_series = [name for name in series if name in set(data["series"])]
    panel_names = list(dict.fromkeys(data["panel"]))
    own_panels = canvas.has_own_panels(len(drawn_series), len(panel_names))
    has_dots = own_panels or len(drawn_series) <= canvas.FEW_LINES  # dots of more lines could not be told apart
    contents = [(name, own) for name in panel_names for own in (drawn_series if own_panels else [None])]
    drawing, axes = canvas.panels(max(1, len(contents)), title=title, small=own_panels)
    if data.empty:
        canvas.say_empty(axes[0])
        return drawing
    handles: dict[str, Any] = {}
    for panel, (panel_name, own_series) in zip(axes, contents, strict=True):
        of_panel = data[data["panel"] == panel_name]
        canvas.panel_title(panel, [part for part in (own_series, panel_name) if part])
        for index, name in enumerate(series):
            lines = of_panel[of_panel["series"] == name]
            if own_series in (None, name) and len(lines):
                style = canvas.series_style(0 if own_series else index) | {"marker": ""}
                if has_dots:
                    panel.plot(lines["x"], lines["value"], "o", color=style["color"], alpha=0.35, markersize=3)
                (handles[name],) = panel.plot(lines["x"], lines["best"], drawstyle="steps-post", **style)
            elif len(lines):
                canvas.background(panel, lines["x"], lines["best"])
        canvas.metric_axis(panel, data["value"].tolist(), column, log=question.log)  # panels share a scale
        canvas.parameter_axis(panel, sorted(set(of_panel["x"])), None, log=bool(question.log_x))
        panel.set_xlabel(x_title)
    canvas.share_limits(axes)
    artists, texts = [handles[name] for name in drawn_series], drawn_series
    if own_panels:
        canvas.label_edges(axes)
        artists, texts = [artists[0], canvas.background(axes[0], [], [])], ["best so far", "the other rows"]
    if has_dots:
        artists.append(axes[0].plot([], [], "o", color=canvas.GREY, markersize=3)[0])
        texts = [*texts, "each row" if len(drawn_series) == 1 else "each draw"]
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
    """A metric of each row against each axis on which the rows differ, as points.

    The value of a row is the mean of its finished seeds. `metric` defaults to the one of `cope-sweep best`. An axis is
    logarithmic if it is in the search space.

    Raises FigureError for an axis that the ablation does not have, and if no axis has several values; QueryError for an
    unknown metric.
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
    metrics: list[str | None] = [column.name for column in chosen_metrics(plan, results.frame, question.metric, ())]
    panels, lines = [], []
    selected = {row.name for row in rows}
    numbers = {row.name: number for number, row in enumerate(plan.rows, start=1)}
    for metric in metrics or [None]:
        ranking = rank_rows(results, metric)
        column = metric_title(plan, ranking.metric)
        scored = [
            candidate
            for group in ranking.groups
            for candidate in group.candidates
            if candidate.scores and candidate.row.name in selected
        ]
        scored.sort(key=lambda candidate: numbers[candidate.row.name])
        for key in keys:
            panels.append(_Panel(column, key, plan.axes[key]))
            lines += _slice_lines(scored, column, key, numbers)
    data = pd.DataFrame(lines, columns=list(SLICE_COLUMNS)).astype(SLICE_COLUMNS)
    title = question.title or plan.ablation.content.title
    return Figure("slice", title, data, partial(_draw_slices, data, panels, plan, title, question))


def _slice_lines(
    scored: Sequence[Candidate], column: Column, key: str, numbers: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The lines of a panel, for the rows that have the parameter; `numbers` are their places in the plan."""
    candidates = [candidate for candidate in scored if key in candidate.row.labels]
    settings = [setting(candidate.row, key) for candidate in candidates]
    is_numeric = all(map(is_finite_number, settings))
    labels = [candidate.row.labels[key] for candidate in candidates]
    places = {label: float(index) for index, label in enumerate(dict.fromkeys(labels))}
    return [
        {
            "metric": column.name, "parameter": key, "row": candidate.row.name, "number": numbers[candidate.row.name],
            "n": len(candidate.scores), "x": float(value) if is_numeric else places[label],
            "x_label": "" if is_numeric else label, "value": statistics.fmean(candidate.scores),
        }
        for candidate, label, value in zip(candidates, labels, settings, strict=True)
    ]  # fmt: skip


def _draw_slices(data: pd.DataFrame, panels: Sequence[_Panel], plan: Plan, title: str, question: GetFigure) -> Drawing:
    drawing, axes = canvas.panels(max(1, len(panels)), title=title)
    if data.empty:
        canvas.say_empty(axes[0])
        for unused in axes[1:]:
            unused.remove()
        return drawing
    has_metric_titles = len({panel.metric.name for panel in panels}) > 1
    is_suggested = plan.search is not None
    axes_by_metric: dict[str, list[Axes]] = {}
    for axis, panel in zip(axes, panels, strict=True):
        axes_by_metric.setdefault(panel.metric.name, []).append(axis)
        of_metric = data[data["metric"] == panel.metric.name]
        points = of_metric[of_metric["parameter"] == panel.key]
        if has_metric_titles:
            canvas.panel_title(axis, [panel.metric.label])
        _draw_points(axis, points, panel.metric, is_suggested=is_suggested)
        canvas.metric_axis(axis, of_metric["value"].tolist(), panel.metric, log=question.log)
        places = points.drop_duplicates("x").sort_values("x")
        labels = None if (points["x_label"] == "").all() else places["x_label"].tolist()
        log_x = is_log_parameter(plan, panel.key) if question.log_x is None else question.log_x
        canvas.parameter_axis(axis, places["x"].tolist(), labels, log=log_x)
        axis.set_xlabel(canvas.shortened(panel.title))
    for axes_of_metric in axes_by_metric.values():
        canvas.share_limits(axes_of_metric)
    marks = [
        axes[0].plot([], [], "o", color=OTHER)[0],
        axes[0].plot([], [], "o", color=BEST, markerfacecolor="none")[0],
    ]
    canvas.legend(drawing, marks, ["a row; the later, the darker" if is_suggested else "a row", "the best row"])
    return drawing


def _draw_points(axis: Axes, points: pd.DataFrame, metric: Column, *, is_suggested: bool) -> None:
    """Draw a point for each row, darker for later suggestions, and a ring around the best."""
    if points.empty:
        return
    colours: Any = OTHER
    if is_suggested:
        share = points["number"] / max(1, int(points["number"].max()))
        colours = mpl.colormaps[ORDER](0.25 + 0.7 * share)
    axis.scatter(points["x"], points["value"], s=14, c=colours, linewidths=0, alpha=None if is_suggested else 0.7)
    best = points.sort_values("value", ascending=metric.goal == "min", kind="stable").head(1)
    axis.plot(best["x"], best["value"], "o", color=BEST, markerfacecolor="none", markersize=8)
