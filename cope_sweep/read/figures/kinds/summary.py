"""Final metrics row by row: the rows of the table as points with bars, beside the published values."""

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
    from cope_sweep.read.figures.metrics import Band
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.runs import Results

COLUMNS = {
    "row": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64", "std": "float64",
    "low": "float64", "high": "float64", "published": "float64", "published_std": "float64",
}  # fmt: skip
RULES: dict[str, tuple[str, Any]] = {
    "most_frequent": ("most frequent answer", (0, (1, 1.5))),
    "shortcut": ("best shortcut of the task", (0, (5, 2))),
}
"""Column of the summary → name in the legend, and dashes of the line."""
SEEDS_BELOW = 0.3
"""Distance between the dots of the seeds and the line of their row, in rows."""
MEASURED, PUBLISHED = 0, 1
"""Numbers of their colours in the style."""


@FIGURES.register
class Summary(FigureKind):
    """Final metrics (by default those by which the table compares rows) of every row, with dots for the seeds.

    Lines show the error of the most frequent answer and the smallest error of the task's other rules (`tables.rules`),
    if it has any. Panels of percentages of the same quantity share an axis.
    """

    SHOWS = "final metrics of each row beside the published values"
    HELP = "every row of the table as a point with its interval, beside the published value"
    ORDER = 10
    IN_FILES = False
    OFFERED = "always"

    kind: Literal["summary"] = "summary"

    def data(self, results: Results, question: GetFigure) -> FigureData:
        from cope_sweep.read.figures.metrics import (
            Point,
            chosen_band,
            chosen_metrics,
            is_log_metric,
            of_rows,
            result_frame,
            selected_rows,
        )
        from cope_sweep.read.tables.model import short_labels

        plan = results.plan
        runs = of_rows(results.frame, plan, question.row)
        compared = (metric.name for metric in plan.ablation.content.metrics if metric.compared)
        titles = chosen_metrics(plan, runs, question.metric, compared)
        band = chosen_band(runs, is_log=is_log_metric(runs, (title.name for title in titles), question.log))
        points = [Point(row, title, title.name) for row in selected_rows(plan, question.row) for title in titles]
        return SummaryData(
            frame=_with_rules(result_frame(runs, points, band, COLUMNS), plan), runs=runs, titles=titles,
            labels=short_labels(plan, plan.rows), band=band, log=question.log,
        )  # fmt: skip


def _with_rules(data: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """The frame with two more columns; a value is missing if there is no such rule, or it makes no error:

    most_frequent, shortcut     the error of the most frequent answer, and the smallest error of the task's other rules
    """
    from cope_sweep.read.tables.rules import rule_errors

    runs = {row.name: row.runs[0] for row in plan.rows}
    errors_of_lines = [
        [*rule_errors(runs[row], metric).values()] for row, metric in zip(data["row"], data["metric"], strict=True)
    ]
    most_frequent = [errors[0] if errors and errors[0] > 0 else math.nan for errors in errors_of_lines]
    shortcut = [min((error for error in errors[1:] if error > 0), default=math.nan) for errors in errors_of_lines]
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
    band: Band
    log: bool | None

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas
        from cope_sweep.read.figures.metrics import band_text, count_text

        data, runs = self.frame, self.runs
        rows = list(dict.fromkeys(data["row"]))
        height = max(1.4, 0.22 * len(rows) + 0.7)
        drawing, axes = canvas.panels(max(1, len(self.titles)), title=title, size=size, height=height)
        if data.empty:
            canvas.say_empty(axes[0])
            for panel in axes[1:]:
                panel.remove()
            return drawing
        columns = canvas.columns_of(axes[0])
        counts = {row: count_text(data[data["row"] == row].nlargest(1, "n")) for row in rows}
        has_one_count = len(set(counts.values())) == 1 and len(rows) > 1
        rule_lines: dict[str, Any] = {}
        texts = [canvas.shortened(self.labels[row], 60) + ("" if has_one_count else f"  {counts[row]}") for row in rows]
        for index, (panel, metric) in enumerate(zip(axes, self.titles, strict=True)):
            points = data[data["metric"] == metric.name]
            seeds = runs.loc[runs["row"].isin(rows) & runs[metric.name].notna(), ["row", metric.name]]
            far_row = canvas.flattening({row: _values_of_row(points, seeds, row) for row in rows}, metric)
            far_points = points[points["row"] == far_row]
            points, seeds = points[points["row"] != far_row], seeds[seeds["row"] != far_row]
            _draw_points(panel, points, [rows.index(row) for row in points["row"]])
            panel.plot(
                seeds[metric.name], [rows.index(row) + SEEDS_BELOW for row in seeds["row"]],
                "o", color=canvas.colour(MEASURED), alpha=0.5, markersize=2.4, markeredgewidth=0, clip_on=False,
            )  # fmt: skip
            rule_lines |= _draw_rules(panel, points, rows)
            on_axis = [metric]
            if metric.unit == "%":
                on_axis = [title for title in self.titles if title.quantity_title == metric.quantity_title]
            axis_data = data[data["metric"].isin(title.name for title in on_axis) & (data["row"] != far_row)]
            axis_runs = runs.loc[runs["row"].isin(axis_data["row"]), [title.name for title in on_axis]]
            values = [*axis_data["mean"], *axis_data["low"], *axis_data["high"], *axis_data["published"]]
            values += [*axis_runs.to_numpy(dtype="float64").ravel()]
            values += [*(axis_data["published"] - axis_data["published_std"]).clip(lower=0)]
            is_log = canvas.is_logarithmic(values, self.log)
            values += [*axis_data["most_frequent"], *axis_data["shortcut"]]
            canvas.metric_axis(panel, values, metric, log=is_log, which="x")
            panel.set_title(canvas.shortened(metric.label), loc="left")
            panel.set_ylim(len(rows) - 0.5, -0.5)
            panel.set_yticks(range(len(rows)), texts if index % columns == 0 else [""] * len(rows))
            for mean in far_points["mean"]:  # at the edge, with its value, so that the others can be told apart
                is_right, text = mean > points["mean"].mean(), canvas.number(float(significant(mean)))
                panel.text(
                    float(is_right), rows.index(str(far_row)), f"{text} →" if is_right else f"← {text}",
                    transform=panel.get_yaxis_transform(), ha="right" if is_right else "left", va="center",
                    fontsize=canvas.points(7), color=canvas.colour(MEASURED),
                )  # fmt: skip
        note = "single seeds"
        if (data["n"] > 1).any():
            seed_count = counts[rows[0]].removeprefix("n = ") if has_one_count else "n"
            note = f"mean of {seed_count} seeds; small dots: seeds; bars: {band_text(self.band)}"
        handles = [axes[0].plot([], [], "o", color=canvas.colour(MEASURED))[0]]
        names = ["measured"]
        if data["published"].notna().any():
            handles.append(axes[0].plot([], [], "D", color=canvas.colour(PUBLISHED), markerfacecolor="none")[0])
            names.append("published ± std" if data["published_std"].notna().any() else "published")
        handles += rule_lines.values()
        names += [RULES[name][0] for name in rule_lines]
        canvas.legend(drawing, handles, names, title=note)
        return drawing


def _draw_points(panel: Axes, lines: pd.DataFrame, places: Sequence[int]) -> None:
    """Draw measured points a little above the line of their row, and published ones a little below it."""
    import numpy as np

    from cope_sweep.read.figures import canvas

    y = np.asarray(places, dtype=float)
    has_both = lines["published"].notna().to_numpy() & (lines["n"] > 0).to_numpy()
    shift = np.where(has_both, 0.13, 0.0)
    panel.hlines(y - shift, lines["low"], lines["high"], color=canvas.colour(MEASURED), linewidth=1.6)
    panel.plot(lines["mean"], y - shift, "o", color=canvas.colour(MEASURED), markersize=4.5, clip_on=False)
    low, high = lines["published"] - lines["published_std"], lines["published"] + lines["published_std"]
    panel.hlines(y + shift, low.clip(lower=0), high, color=canvas.colour(PUBLISHED), linewidth=0.8)
    panel.plot(
        lines["published"],
        y + shift,
        "D",
        color=canvas.colour(PUBLISHED),
        markersize=4.5,
        markerfacecolor="white",
        clip_on=False,
    )


def _values_of_row(points: pd.DataFrame, seeds: pd.DataFrame, row: str) -> list[float]:
    """All values of a row that are drawn."""
    lines = points.loc[points["row"] == row, ["mean", "low", "high", "published"]]
    return [*lines.to_numpy().ravel(), *seeds.loc[seeds["row"] == row].iloc[:, 1]]
