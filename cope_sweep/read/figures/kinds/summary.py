"""Final metrics row by row: a dot for each seed and a mark at their median, beside the published values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cope_sweep.figures import FIGURES
from cope_sweep.read.figures.base import FigureData, FigureKind
from cope_sweep.read.numbers import significant

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Plan
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.results import Results

COLUMNS = {
    "row": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64", "std": "float64",
    "median": "float64", "low": "float64", "high": "float64", "published": "float64", "published_std": "float64",
}  # fmt: skip
RULES: dict[str, tuple[str, Any]] = {
    "most_frequent": ("most frequent answer", (0, (1, 1.5))),
    "shortcut": ("best shortcut of the task", (0, (5, 2))),
}
"""Column of the summary → name in the legend, and dashes of the line."""
PUBLISHED_BELOW = 0.26
"""Distance between the published value and the dots of its row, in rows."""
NAMES_SHARE = 0.4
"""The most of a given width that the names of rows take; longer ones have several lines."""
JITTER = (0.0, -0.1, 0.1, -0.05, 0.05)
"""Distances between dots of neighbouring seeds and the line of their row, in rows: equal values stay apart."""
SEED_STYLE: dict[str, Any] = {"alpha": 0.55, "markersize": 3.4, "markeredgewidth": 0}
MEDIAN_STYLE: dict[str, Any] = {"markersize": 11, "markeredgewidth": 1.8}
MEASURED, PUBLISHED = 0, 1
"""Numbers of their colours in the style."""


@FIGURES.register
class Summary(FigureKind):
    """Final metrics of every row, by default those by which the table compares rows: a dot for each seed.

    A mark shows their median: the mean of errors that are either near 0 or large is where no seed is. If the ablation
    is `paired`, a line joins the runs of each seed, whose differences are tested.

    Lines show the error of the most frequent answer and the smallest error of the task's other rules (`tables.rules`),
    if it has any. Panels of percentages of the same quantity share an axis.
    """

    SHOWS = "every row of the table with a dot for each seed and their median, beside the published value"
    ORDER = 10
    IN_FILES = False
    OFFERED = "always"

    kind: Literal["summary"] = "summary"

    def data(self, results: Results, question: GetFigure) -> FigureData:
        from cope_sweep.read.figures.metrics import (
            Point,
            chosen_metrics,
            of_rows,
            result_frame,
            selected_rows,
        )
        from cope_sweep.read.tables.model import short_labels

        plan = results.plan
        runs = of_rows(results.frame, plan, question.row)
        titles = chosen_metrics(plan, runs, question.metric)
        points = [Point(row, title, title.name) for row in selected_rows(plan, question.row) for title in titles]
        return SummaryData(
            frame=_with_rules(result_frame(runs, points, COLUMNS), plan), runs=runs, titles=titles,
            labels=short_labels(plan, plan.rows), log=question.log, paired=plan.ablation.content.paired,
        )  # fmt: skip


def _with_rules(data: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """The frame with two more columns; a value is missing if there is no such rule, or it makes no error:

    most_frequent, shortcut     the error of the most frequent answer, and the smallest error of the task's other rules
    """
    from cope_sweep.read.tables.rules import rule_errors

    runs = {row.name: row.runs[0] for row in plan.rows}
    runs_of_lines = [runs[row] for row in data["row"]]
    errors_of_lines = [
        {rule: error for rule, error in rule_errors(run, metric).items() if error > 0}
        for run, metric in zip(runs_of_lines, data["metric"], strict=True)
    ]
    most_frequent = [
        errors.pop(run.task.MOST_FREQUENT, math.nan) for run, errors in zip(runs_of_lines, errors_of_lines, strict=True)
    ]
    shortcut = [min(errors.values(), default=math.nan) for errors in errors_of_lines]
    return data.assign(most_frequent=most_frequent, shortcut=shortcut).astype(dict.fromkeys(RULES, "float64"))


def _draw_rules(panel: Axes, data: pd.DataFrame, rows: Sequence[str]) -> dict[str, Any]:
    """Draw a line at the error of each rule, across the rows of its task. Returns an artist for each kind of rule."""
    import numpy as np

    from cope_sweep.read.figures import canvas

    artists = {}
    for name, (_, dashes) in RULES.items():
        for error in sorted(set(data[name].dropna())):
            y = np.array(sorted(rows.index(row) for row in data.loc[data[name] == error, "row"]))
            for part in np.split(y, np.flatnonzero(np.diff(y) > 1) + 1):  # neighbouring rows share a line
                artists[name] = panel.vlines(
                    error, part[0] - 0.5, part[-1] + 0.5, color=canvas.GREY, linestyle=dashes, linewidth=1.2
                )
    return artists


@dataclass(frozen=True, kw_only=True)
class SummaryData(FigureData):
    """The points of `result_frame`, and the runs behind them."""

    runs: pd.DataFrame
    titles: Sequence[Column]
    """The metrics: one panel each."""
    labels: Mapping[str, str]
    """Row → its label."""
    log: bool | None
    paired: bool
    """Whether runs of the same seed are compared in pairs."""

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas
        from cope_sweep.read.figures.metrics import count_text

        data, runs = self.frame, self.runs
        rows = list(dict.fromkeys(data["row"]))
        counts = {row: count_text(data[data["row"] == row].nlargest(1, "n")) for row in rows}
        has_one_count = len(set(counts.values())) == 1 and len(rows) > 1
        texts = [canvas.shortened(self.labels[row], 60) + ("" if has_one_count else f"  {counts[row]}") for row in rows]
        if size is not None:
            texts = canvas.wrapped(texts, NAMES_SHARE * size[0])
        lines = max(1 + text.count("\n") for text in texts)
        height = max(1.4, (0.09 + 0.13 * lines) * len(rows) + 0.7)
        drawing, axes = canvas.panels(len(self.titles), title=title, size=size, height=height)
        columns = canvas.columns_of(axes[0])
        rule_lines: dict[str, Any] = {}
        for index, (panel, metric) in enumerate(zip(axes, self.titles, strict=True)):
            points = data[data["metric"] == metric.name]
            seeds = runs.loc[runs["row"].isin(rows) & runs[metric.name].notna(), ["row", "seed", metric.name]]
            far_row = canvas.flattening({row: _values_of_row(points, seeds, row) for row in rows}, metric)
            far_points = points[points["row"] == far_row]
            points, seeds = points[points["row"] != far_row], seeds[seeds["row"] != far_row]
            if self.paired:
                _draw_pairs(panel, seeds, rows, metric.name)
            _draw_rows(panel, points, seeds, rows, metric.name)
            rule_lines |= _draw_rules(panel, points, rows)
            on_axis = [metric]
            if metric.unit == "%":
                on_axis = [title for title in self.titles if title.quantity_title == metric.quantity_title]
            axis_data = data[data["metric"].isin(title.name for title in on_axis) & (data["row"] != far_row)]
            axis_runs = runs.loc[runs["row"].isin(axis_data["row"]), [title.name for title in on_axis]]
            values = [*axis_data["low"], *axis_data["high"], *axis_data["published"]]
            values += [*axis_runs.to_numpy(dtype="float64").ravel()]
            values += [*(axis_data["published"] - axis_data["published_std"]).clip(lower=0)]
            is_log = canvas.is_logarithmic(values, self.log)
            values += [*axis_data["most_frequent"], *axis_data["shortcut"]]
            canvas.metric_axis(panel, values, metric, log=is_log, which="x")
            panel.set_title(canvas.shortened(metric.label), loc="left")
            panel.set_ylim(len(rows) - 0.5, -0.5)
            panel.set_yticks(range(len(rows)), texts if index % columns == 0 else [""] * len(rows))
            for median in far_points["median"]:  # at the edge, with its value, so that the others can be told apart
                is_right = median > points["median"].mean()
                text = canvas.number(float(significant(median * metric.scale)))
                panel.text(
                    float(is_right), rows.index(str(far_row)), f"{text} →" if is_right else f"← {text}",
                    transform=panel.get_yaxis_transform(), ha="right" if is_right else "left", va="center",
                    fontsize=canvas.points(7), color=canvas.colour(MEASURED),
                )  # fmt: skip
        note = "single seeds"
        if (data["n"] > 1).any():
            note = f"{counts[rows[0]].removeprefix('n = ')} seeds" if has_one_count else ""
        handles: list[Any] = [axes[0].plot([], [], "o", color=canvas.colour(MEASURED), **SEED_STYLE)[0]]
        names = ["seed"]
        if (data["n"] > 1).any():
            handles.append(axes[0].plot([], [], "|", color=canvas.colour(MEASURED), **MEDIAN_STYLE)[0])
            names.append("median")
        if self.paired:
            handles.append(canvas.background(axes[0], [], []))
            names.append("the same seed")
        if data["published"].notna().any():
            handles.append(axes[0].plot([], [], "D", color=canvas.colour(PUBLISHED), markerfacecolor="none")[0])
            names.append("published ± std" if data["published_std"].notna().any() else "published")
        handles += rule_lines.values()
        names += [RULES[name][0] for name in rule_lines]
        canvas.legend(drawing, handles, names, title=note)
        return drawing


def _draw_pairs(panel: Axes, seeds: pd.DataFrame, rows: Sequence[str], metric: str) -> None:
    """Draw a line through the runs of each seed."""
    from cope_sweep.read.figures import canvas

    for _, of_seed in seeds.groupby("seed"):
        in_order = of_seed.assign(y=of_seed["row"].map(rows.index)).sort_values("y")
        canvas.background(panel, in_order[metric], in_order["y"])


def _draw_rows(panel: Axes, lines: pd.DataFrame, seeds: pd.DataFrame, rows: Sequence[str], metric: str) -> None:
    """Draw the seeds of each row with their median and, a little below, the published value."""
    import numpy as np

    from cope_sweep.read.figures import canvas

    numbers = seeds.groupby("row").cumcount()
    y = [rows.index(row) + JITTER[number % len(JITTER)] for row, number in zip(seeds["row"], numbers, strict=True)]
    panel.plot(seeds[metric], y, "o", color=canvas.colour(MEASURED), clip_on=False, **SEED_STYLE)
    y_of_rows = np.array([rows.index(row) for row in lines["row"]], dtype=float)
    several = (lines["n"] > 1).to_numpy()
    # What is empty is not drawn: without clipping, it would be laid out as a mark at the corner of the drawing.
    if several.any():
        panel.plot(
            lines["median"][several], y_of_rows[several], "|", color=canvas.colour(MEASURED), clip_on=False,
            **MEDIAN_STYLE,
        )  # fmt: skip
    if lines["published"].isna().all():
        return
    y_of_rows += np.where((lines["n"] > 0).to_numpy(), PUBLISHED_BELOW, 0.0)
    low, high = lines["published"] - lines["published_std"], lines["published"] + lines["published_std"]
    panel.hlines(y_of_rows, low.clip(lower=0), high, color=canvas.colour(PUBLISHED), linewidth=0.8)
    panel.plot(
        lines["published"],
        y_of_rows,
        "D",
        color=canvas.colour(PUBLISHED),
        markersize=4,
        markerfacecolor="white",
        clip_on=False,
    )


def _values_of_row(points: pd.DataFrame, seeds: pd.DataFrame, row: str) -> list[float]:
    """All values of a row that are drawn."""
    lines = points.loc[points["row"] == row, ["median", "low", "high", "published"]]
    return [*lines.to_numpy().ravel(), *seeds.loc[seeds["row"] == row].iloc[:, -1]]
