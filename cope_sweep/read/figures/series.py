"""What figures of final metrics against x share: a frame of points, and its drawing as medians with a dot per seed.

Errors of tasks that a seed either learns or does not are near 0 or large, so that a mean, with a bar for its interval,
is where no seed is. A line joins medians, and each seed is a dot. Series with the same places on the x axis stand side
by side there (`SPREAD`), so that none hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from cope_sweep.config import Plan, Row
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.base import FigureData
from cope_sweep.read.figures.metrics import (
    Point,
    count_text,
    result_frame,
    seed_frame,
)
from cope_sweep.read.tables.model import Column, row_label, varying_axes

COLUMNS = {
    "panel": "str", "metric": "str", "series": "str", "x": "float64", "x_label": "str", "n": "int64", "seeds": "int64",
    "mean": "float64", "std": "float64", "median": "float64", "low": "float64", "high": "float64",
    "published": "float64",
}  # fmt: skip
TRAINING_CONTEXT = "task.tokens"
SPREAD, MOST_SPREAD = 0.08, 0.5
"""Distance between two series with the same places on the x axis, and between the first and the last of them, as shares
of the room between two places."""


def panel_title(row: Row, key: str | None, metric: Column | None) -> str:
    """The title of the panel with a row: the metric, and the row's label on the axis that panels show."""
    parts = [metric.label] if metric else []
    if key:
        parts.append(panel_label(key, row.labels))
    return " · ".join(parts)


def panel_label(key: str, labels: Mapping[str, str]) -> str:
    """The label on the axis that panels show; a number follows the name of its axis: `training context = 64`."""
    label = labels.get(key, "–")
    name = "training context" if key == TRAINING_CONTEXT else key.split(".")[-1].replace("_", " ")
    return f"{name} = {label}" if label[:1].isdecimal() else label


def series_names(plan: Plan, rows: Sequence[Row], places: Mapping[str, float], used: set[str | None]) -> dict[str, str]:
    """Row → its labels on the axes that neither x nor the panels show, without axes whose labels follow from x."""
    keys = [key for key in varying_axes(plan.axes, rows) if key not in used and not _follows_from_x(rows, key, places)]
    return {row.name: row_label(plan.axes, row, keys) for row in rows}


def _follows_from_x(rows: Sequence[Row], key: str, places: Mapping[str, float]) -> bool:
    """Whether there is one label on an axis at each x: exclusions may leave only such rows."""
    labels = {(places[row.name], row.labels.get(key)) for row in rows if row.name in places}
    return 1 < len(labels) == len({x for x, _ in labels})


@dataclass(frozen=True, kw_only=True)
class SeriesData(FigureData):
    """The points of `result_frame`, sorted: a line for each series."""

    series: Sequence[str]
    """The names of all series, also of those without a point yet."""
    titles: Mapping[str, Column]
    """Metric → its column."""
    seeds: pd.DataFrame
    """The values of the seeds: `seed_frame`."""
    log: bool | None
    log_x: bool | None
    x_title: str
    has_numbers: bool
    """Whether x is a number; otherwise places have names."""
    is_joined: bool
    """Whether a line joins the points of a series."""

    @classmethod
    def of_points(
        cls,
        plan: Plan,
        runs: pd.DataFrame,
        points: Sequence[Point],
        *,
        x_title: str,
        log: bool | None,
        log_x: bool | None = None,
        has_numbers: bool = True,
    ) -> SeriesData:
        """The points with the statistics of their runs. Rows of a search are not joined: they differ in other keys."""
        data = result_frame(runs, points, COLUMNS)
        in_order = data.sort_values(["panel", "series", "x"], kind="stable", key=_by_appearance)
        return cls(
            frame=in_order.reset_index(drop=True), series=list(dict.fromkeys(point.series for point in points)),
            titles={point.metric.name: point.metric for point in points}, seeds=seed_frame(runs, points),
            log=log, log_x=log_x, x_title=x_title, has_numbers=has_numbers, is_joined=not plan.is_drawn,
        )  # fmt: skip

    def draw(self, title: str, size: canvas.Size | None) -> Drawing:
        data = self.frame
        drawn_series = [name for name in self.series if name in set(data["series"])]
        places = data[data["x_label"] == ""].groupby(["panel", "series"])["x"].nunique()
        panel_names = list(dict.fromkeys(data["panel"]))
        own_panels = canvas.has_own_panels(len(drawn_series), len(panel_names)) and bool((places > 1).any())
        contents = [(name, own) for name in panel_names for own in (drawn_series if own_panels else [None])]
        panels_of_metric = len(set(data.loc[data["metric"] == data["metric"].iloc[0], "panel"]))
        group = len(drawn_series) if own_panels else panels_of_metric
        drawing, axes = canvas.panels(len(contents), title=title, size=size, small=own_panels, group=group)
        handles: dict[str, Any] = {}
        metric_of_panel = dict(zip(data["panel"], data["metric"], strict=True))
        for panel, (panel_name, own_series) in zip(axes, contents, strict=True):
            of_panel = data[data["panel"] == panel_name]
            metric = self.titles[metric_of_panel[panel_name]]
            title_parts = [own_series] if own_series else []
            if own_series is None or len(metric_of_panel) > 1:
                title_parts.append(panel_name)
            canvas.panel_title(panel, title_parts)
            of_metric = data[data["metric"] == metric.name]  # panels of one metric share its scale
            values = [*of_metric["median"], *of_metric["low"], *of_metric["high"], *of_metric["published"]]
            canvas.metric_axis(panel, values, metric, log=self.log)
            by_place = of_panel.drop_duplicates("x").sort_values("x")
            labels = None if self.has_numbers else by_place["x_label"].tolist()
            canvas.parameter_axis(panel, by_place["x"].tolist(), labels, log=self.log_x)
            beside = self._places(panel, of_panel, drawn_series if own_series is None else [own_series])
            # All series, also those without a point yet: styles stay the same while a sweep goes on.
            for index, name in enumerate(self.series):
                lines = of_panel[of_panel["series"] == name]
                if own_series in (None, name) and len(lines):
                    style = canvas.series_style(0 if own_series else index)
                    style = style if self.is_joined else style | {"linestyle": "none"}
                    seeds = self.seeds[(self.seeds["panel"] == panel_name) & (self.seeds["series"] == name)]
                    handles[name] = _draw_series(panel, lines, seeds, beside[name], style)
                elif len(lines) and self.is_joined:
                    canvas.background(panel, lines["x"], lines["median"])
            panel.set_xlabel(canvas.shortened(self.x_title))
        for metric_name in dict.fromkeys(metric_of_panel.values()):
            canvas.share_limits(
                [panel for panel, (name, _) in zip(axes, contents, strict=True) if metric_of_panel[name] == metric_name]
            )
        note = "median; small dots: seeds" if (data["n"] > 1).any() else "single seeds"
        if own_panels:
            canvas.label_edges(axes)
            artists = [handles[drawn_series[0]], canvas.background(axes[0], [], [])]
            texts = [count_text(data), "the other rows"]
        else:
            artists = [handles[name] for name in drawn_series]
            counts = [count_text(data[data["series"] == name]) for name in drawn_series]
            texts = [f"{name}, {count}" if name else count for name, count in zip(drawn_series, counts, strict=True)]
            if len(counts) > 1 and len(set(counts)) == 1:
                texts, note = drawn_series, f"{counts[0]}; {note}"
        if data["published"].notna().any():
            artists.append(axes[0].plot([], [], "ko", markersize=8, markerfacecolor="none")[0])
            texts.append("published (hollow)")
        canvas.legend(drawing, artists, texts, title=note)
        return drawing

    def _places(self, panel: Axes, data: pd.DataFrame, series: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
        """Series → a function of x: where its points are drawn, beside those of other series with the same x."""
        x = np.unique(data["x"])
        shared = data.groupby("x")["series"].nunique()
        if len(series) < 2 or shared.max() < 2:
            return {name: lambda places: places for name in series}
        is_log = panel.get_xscale() == "log"
        places = np.log(x) if is_log else x
        room = float(np.diff(places).min()) if len(places) > 1 else 1.0
        spread = min(SPREAD * (len(series) - 1), MOST_SPREAD) * room
        offsets = spread * (np.arange(len(series)) / (len(series) - 1) - 0.5)

        def moved(offset: float) -> Callable[[Any], Any]:
            return lambda places: places * np.exp(offset) if is_log else places + offset

        return {name: moved(float(offset)) for name, offset in zip(series, offsets, strict=True)}


def _by_appearance(column: pd.Series[Any]) -> pd.Series[Any]:
    """A sort key: x by its value, names by their first appearance."""
    return column if column.name == "x" else pd.Series(pd.factorize(column)[0], column.index)


def _draw_series(
    panel: Axes, lines: pd.DataFrame, seeds: pd.DataFrame, place: Callable[[Any], Any], style: dict[str, Any]
) -> Any:
    measured, published = lines[lines["n"] > 0], lines[lines["published"].notna()]
    if (lines["x_label"] != "").any():  # nothing is between two names
        style = style | {"linestyle": "none"}
    if (lines["n"] > 1).any():
        panel.plot(
            place(seeds["x"]), seeds["value"], "o", color=style["color"], alpha=0.4, markersize=2.2, markeredgewidth=0,
        )  # fmt: skip
    (handle,) = panel.plot(place(measured["x"]), measured["median"], **style)
    panel.plot(
        place(published["x"]), published["published"], color=style["color"], marker=style["marker"], markersize=8,
        linestyle="none", markerfacecolor="none",
    )  # fmt: skip
    return handle
