"""Parallel coordinates: a line per row through the values of its axes, in the colour of its metric."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cope_sweep.config import Plan, Row
from cope_sweep.read.figures.base import Figure, FigureError
from cope_sweep.read.figures.kinds import DEFAULTS, Options
from cope_sweep.read.figures.runs import (
    MetricTitle,
    check_metrics,
    final_values,
    is_number,
    metric_columns,
    metric_title,
    selected_rows,
    setting,
)
from cope_sweep.store import Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

LOG_FROM_RATIO = 8
MAX_TICKS = 9


def parallel(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    """The axes with several values, and one metric (default: the primary one). Raises FigureError without axes."""
    runs = final_values(plan, store, options.rows)
    if len(options.metrics) > 1:
        raise FigureError("parallel coordinates show one metric; give --metric once")
    (metric,) = check_metrics(plan, options.metrics, metric_columns(runs, plan)) or (
        plan.ablation.content.primary_metric.name,
    )
    rows = selected_rows(plan, options.rows)
    keys = [key for key in plan.axes if len({row.labels.get(key) for row in rows}) > 1]
    if not keys:
        raise FigureError(f"{plan.name} has no axis with several values, so there are no coordinates")
    data = parallel_frame(runs, rows, keys, metric)
    title = options.title or plan.ablation.content.title
    names = {key: plan.axes[key] for key in keys}
    draw = partial(_draw, data, names, metric_title(plan, metric), title, options.log)
    return Figure("parallel", title, data, draw)


def parallel_frame(runs: pd.DataFrame, rows: Sequence[Row], keys: Sequence[str], metric: str) -> pd.DataFrame:
    """One line per row with a finished run.

    row, n                  its name, and its number of finished runs
    <key>, <key>.place      the label of each axis, and its place from 0 to 1: numbers on a linear scale, or on a
                            logarithmic one if they differ by a factor of 8; other labels at equal distances
    <metric>                the mean over the n runs
    """
    import pandas as pd

    finite = runs[np.isfinite(runs[metric].astype("float64"))]
    found: dict[str, list[float]] = {str(row): list(group) for row, group in finite.groupby("row")[metric]}
    shown = [row for row in rows if row.name in found]
    columns: dict[str, object] = {
        "row": pd.Series([row.name for row in shown], dtype="str"),
        "n": pd.Series([len(found[row.name]) for row in shown], dtype="int64"),
    }
    for key in keys:
        places = coordinate(rows, key)
        columns[key] = pd.Series([row.labels.get(key, "–") for row in shown], dtype="str")
        columns[f"{key}.place"] = pd.Series([places[row.name] for row in shown], dtype="float64")
    columns[metric] = pd.Series([statistics.fmean(found[row.name]) for row in shown], dtype="float64")
    return pd.DataFrame(columns)


def coordinate(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Row → the place of its value on one axis, 0 … 1."""
    values = [setting(row, key) if key in row.labels else None for row in rows]
    if all(is_number(value) for value in values):
        numbers = np.array(values, dtype=np.float64)
        low, high = numbers.min(), numbers.max()
        if low > 0 and high >= LOG_FROM_RATIO * low:
            numbers, low, high = np.log(numbers), np.log(low), np.log(high)
        span = high - low
        return {row.name: float((each - low) / span) if span else 0.5 for row, each in zip(rows, numbers, strict=True)}
    labels = list(dict.fromkeys(row.labels.get(key, "–") for row in rows))
    last = max(1, len(labels) - 1)
    return {row.name: labels.index(row.labels.get(key, "–")) / last for row in rows}


def _draw(data: pd.DataFrame, names: Mapping[str, str], metric: MetricTitle, title: str, log: bool | None) -> Drawing:
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable

    from cope_sweep.read.figures import canvas

    drawing, (panel,) = canvas.panels(1, title=title, height=3.0, width=1.6 + 1.3 * (len(names) + 1))
    panel.grid(visible=False)
    panel.spines[["left", "bottom"]].set_visible(False)
    if data.empty:
        canvas.say_empty(panel)
        return drawing
    values = data[metric.name].to_numpy()
    low, high = float(values.min()), float(values.max())
    is_log = low > 0 and high >= 100 * low if log is None else log and low > 0
    scale = mpl.colors.LogNorm if is_log else mpl.colors.Normalize
    norm = scale(low, high if high > low else low + 1e-9)
    # Dark is good, so that the best rows stand out on white.
    colours = mpl.colormaps["cividis" if metric.goal == "min" else "cividis_r"]
    order = np.argsort(-values if metric.goal == "min" else values, kind="stable")  # the best rows on top
    places = np.stack([*(data[f"{key}.place"].to_numpy() for key in names), norm(values).filled(0)])
    for rank, line in enumerate(order):
        best = rank == len(order) - 1
        panel.plot(
            places[:, line], color=colours(float(norm(values[line]))), linewidth=2.4 if best else 1.1, marker="o",
            markersize=4 if best else 2.5, alpha=1.0 if best else 0.75, clip_on=False,
        )  # fmt: skip
    for index, key in enumerate(names):
        _axis(panel, index, data[key], data[f"{key}.place"])
    panel.axvline(len(names), color=canvas.GREY, linewidth=0.8, zorder=0)
    panel.set(xlim=(-0.25, len(names) + 0.1), ylim=(-0.04, 1.04), yticks=[])
    texts = [*names.values(), metric.label]
    panel.set_xticks(range(len(names) + 1), [canvas.shortened(text, 24) for text in texts], fontweight="bold")
    panel.tick_params(length=0)
    bar = drawing.colorbar(ScalarMappable(norm, colours), ax=panel, pad=0.02, aspect=30)
    bar.ax.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(canvas.number))
    bar.ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    bar.set_label(canvas.printable(metric.quantity) + ", mean over seeds")
    return drawing


def _axis(panel: Axes, index: int, labels: pd.Series[str], places: pd.Series[float]) -> None:
    """A vertical axis with the labels of its values, as many as there is room for."""
    from cope_sweep.read.figures import canvas

    panel.axvline(index, color=canvas.GREY, linewidth=0.8, zorder=0)
    known = dict(sorted(zip(places, labels, strict=True)))
    last = -1.0
    for place, label in known.items():
        if place - last < 1 / MAX_TICKS - 1e-9 and last >= 0:
            continue
        last = place
        panel.text(
            index - 0.03, place, canvas.shortened(label, 20), ha="right", va="center", fontsize=7,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )  # fmt: skip
