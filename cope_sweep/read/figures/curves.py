"""Learning curves: metrics by training step or by time, one line per row, with bands over its finished seeds.

Means and bands are of finished runs. The curve of a run that is not finished is drawn beside them, dotted, and counted
in the legend. `convergence` also marks where each row's mean has its best value, as in the paper's Figure 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.formats import Band
from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.figures.metrics import (
    band_text,
    chosen_band,
    metric_title,
    of_rows,
    seed_statistics,
    selected_rows,
)
from cope_sweep.read.tables.model import Column, short_labels
from cope_sweep.read.tables.runs import Results

TRAIN_LOSS = "train/loss"
MOST_BANDS = 5
"""Bands of more rows in a panel cover one another."""
COLUMNS = {
    "row": "str", "metric": "str", "step": "int64", "time_s": "float64", "n": "int64", "value": "float64",
    "low": "float64", "high": "float64", "seed": "Int64", "status": "str", "best": "bool",
}  # fmt: skip


def curves(results: Results, question: GetFigure) -> Figure:
    """Learning curves. Default metrics: the training loss, and the table's metrics that were logged while training."""
    return _figure("curves", results, question, default=(TRAIN_LOSS, *_table_metrics(results.plan)))


def convergence(results: Results, question: GetFigure) -> Figure:
    """The table's metrics by step, with a ring at the step of each row's best mean."""
    return _figure("convergence", results, question, default=_table_metrics(results.plan))


def _figure(kind: str, results: Results, question: GetFigure, default: tuple[str, ...]) -> Figure:
    plan = results.plan
    x = question.x or "step"
    if x not in ("step", "time"):
        raise FigureError(
            f"--x {x}: {kind} is drawn by step or by time", code="unknown_key", key=x, allowed=["step", "time"]
        )
    points = of_rows(results.curves, plan, question.row)
    logged = list(dict.fromkeys(points["metric"]))
    metrics = question.metric or _evaluated_often(points, default)
    for metric in question.metric:
        if logged and metric not in logged:
            message = f"no run of {plan.name} has logged {metric!r}{suggest(metric, logged)}"
            raise FigureError(message, code="unknown_metric", metric=metric, allowed=logged)
    titles = [metric_title(plan, metric) for metric in dict.fromkeys(metrics)]
    band = chosen_band(question.band, points)
    rows = [row.name for row in selected_rows(plan, question.row)]
    data = curve_frame(points, rows, titles, band)
    title = question.title or plan.ablation.content.title
    labels = short_labels(plan, plan.rows)
    is_time, rings = x == "time", kind == "convergence"
    return Figure(kind, title, data, partial(_draw, data, rows, labels, titles, is_time, band, title, question, rings))


def _table_metrics(plan: Plan) -> tuple[str, ...]:
    return tuple(metric.name for metric in plan.ablation.content.metrics)


def _evaluated_often(points: pd.DataFrame, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that were logged at two steps or more; where none was, those that were logged; else all."""
    steps = points.groupby("metric")["step"].nunique()
    often = tuple(name for name in names if steps.get(name, 0) > 1)
    return often or tuple(name for name in names if name in steps.index) or names


def curve_frame(points: pd.DataFrame, rows: Sequence[str], titles: Sequence[Column], band: Band) -> pd.DataFrame:
    """One line per row, metric and step: statistics of the finished seeds; then those of each unfinished seed.

    row, metric, step
    time_s              mean over the seeds
    n, value            number of finished seeds with a value at this step, and their mean
    low, high           the band; missing for n < 2
    seed, status        of one unfinished run (n = 1, no band); missing, and `finished`, for statistics
    best                whether this is the first step with the best mean of the row
    """
    lines: list[dict[Any, Any]] = []
    by_curve = dict(list(points.groupby(["row", "metric"], sort=False)))
    for row in rows:
        for title in titles:
            group = by_curve.get((row, title.name))
            if group is None:
                continue
            is_finished = group["status"] == "finished"
            lines += _mean_lines(row, title, group[is_finished], band)
            singles = group[~is_finished].sort_values(["seed", "step"], kind="stable")
            lines += singles.assign(n=1, best=False).to_dict("records")
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _mean_lines(row: str, title: Column, finished: pd.DataFrame, band: Band) -> list[dict[Any, Any]]:
    lines: list[dict[Any, Any]] = []
    for step, group in finished.groupby("step"):
        numbers = seed_statistics(group["value"], title, band)
        line = {"row": row, "metric": title.name, "step": step, "time_s": group["time_s"].mean(), "status": "finished"}
        lines.append(line | numbers | {"value": numbers["mean"], "best": False})
    known = [line for line in lines if line["n"]]
    if known:  # of equal means the first one
        title.best(known, key=lambda line: line["value"])["best"] = True
    return lines


def _draw(
    data: pd.DataFrame,
    rows: Sequence[str],
    labels: Mapping[str, str],
    titles: Sequence[Column],
    is_time: bool,
    band: Band,
    title: str,
    question: GetFigure,
    rings: bool,
) -> Drawing:
    styles = {row: canvas.series_style(index) for index, row in enumerate(rows)}  # the same ones while a sweep goes on
    rows = list(dict.fromkeys(data["row"]))
    many = canvas.are_apart(len(rows), len(titles))
    with_bands = many or len(rows) <= MOST_BANDS
    texts = {row: _legend_text(data[data["row"] == row], labels[row]) for row in rows}
    names = [(metric, row) for metric in titles for row in (rows if many else [None])]
    drawing, axes = canvas.panels(max(1, len(names)), title=title, small=many)
    if data.empty:
        for panel in axes:
            canvas.say_empty(panel, "no learning curve")
        return drawing
    handles: dict[str, Any] = {}
    column, factor, x_label = _x_axis(data, is_time)
    for panel, (metric, own) in zip(axes, names, strict=False):
        shown = data[data["metric"] == metric.name]
        parts = ([labels[own]] if own else []) + ([metric.label] if own is None or len(titles) > 1 else [])
        canvas.panel_title(panel, parts)
        for row in rows:
            lines = shown[shown["row"] == row]
            if own in (None, row):
                style = canvas.series_style(0) if own else styles[row]
                drawn = lines if with_bands else lines.assign(low=math.nan, high=math.nan)
                handles.setdefault(row, _draw_row(panel, drawn, style, column, factor, rings))
            else:
                mean = lines[lines["status"] == "finished"]
                canvas.background(panel, mean[column] * factor, mean["value"])
        if shown.empty:
            canvas.say_empty(panel, "not logged")
            continue
        values = [*shown["value"], *shown["low"], *shown["high"]]
        canvas.metric_axis(
            panel, values, metric, log=False if question.log is None and metric.unit == "%" else question.log
        )
        canvas.fit_curves(panel, shown[column], shown["value"])
        canvas.parameter_axis(panel, [], None, log=question.log_x or False)
        panel.set_xlabel(x_label)
    for metric in titles if many else ():
        canvas.share_limits([panel for panel, (own, _) in zip(axes, names, strict=False) if own is metric])
    note = "single seeds"
    if (data["n"] > 1).any():
        note = f"mean; band: {band_text(band)}" if with_bands else "mean over seeds"
    note += "; ring: best mean" if rings else ""
    artists, legend = [handles[row] for row in rows], [texts[row] for row in rows]
    if many:
        canvas.label_edges(axes)
        found = data.loc[data["status"] == "finished"].groupby("row")["n"].max()
        counts = f"n = {found.min()}" + (f"–{found.max()}" if found.max() > found.min() else "")
        artists, legend = [artists[0], canvas.background(axes[0], [], [])], [counts, "the other rows"]
    canvas.legend(drawing, artists, legend, title=note)
    return drawing


def _x_axis(data: pd.DataFrame, is_time: bool) -> tuple[str, float, str]:
    """The column, the factor of its values, and the label of the x axis."""
    if not is_time:
        return "step", 1.0, "training step"
    longest_s = data["time_s"].max()
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if longest_s >= 3 * seconds:
            return "time_s", 1 / seconds, f"time since the run began ({unit})"
    return "time_s", 1.0, "time since the run began (s)"


def _draw_row(panel: Axes, lines: pd.DataFrame, style: dict[str, Any], column: str, factor: float, rings: bool) -> Any:
    mean = lines[lines["status"] == "finished"].dropna(subset=[column])
    x = mean[column].to_numpy() * factor
    often = max(1, len(mean) // 12)
    # Row 31 has a marker as row 1, so that both are found in the legend; lines of many points have one at each 12th.
    (handle,) = panel.plot(x, mean["value"], **style, markevery=often, markeredgecolor="white", markeredgewidth=0.4)
    banded = mean["low"].notna().to_numpy()
    if banded.any():
        panel.fill_between(
            x, mean["low"].astype(float), mean["high"].astype(float), where=banded, color=style["color"], alpha=0.18,
            linewidth=0,
        )  # fmt: skip
    for _, single in lines[lines["status"] != "finished"].dropna(subset=[column]).groupby("seed"):
        panel.plot(single[column] * factor, single["value"], color=style["color"], linestyle=":", linewidth=1)
    if rings and len(best := mean[mean["best"]]):
        panel.plot(
            best[column] * factor, best["value"], linestyle="none", marker="o", markersize=9, markerfacecolor="none",
            markeredgecolor=style["color"], clip_on=False,
        )  # fmt: skip
    return handle


def _legend_text(lines: pd.DataFrame, row: str) -> str:
    finished = int(lines.loc[lines["status"] == "finished", "n"].max()) if (lines["status"] == "finished").any() else 0
    others = lines.loc[lines["status"] != "finished", "seed"].nunique()
    dotted = f", {others} unfinished (dotted)" if others else ""
    return f"{row}, n = {finished}{dotted}"
