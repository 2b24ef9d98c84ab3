"""Effects of an ablation's parameters on a metric: the variance that each explains, and parallel coordinates.

`importance` shows η², the one-way effect sizes over the finished runs:

    η²(axis) = Σ_level n_level·(mean_level − mean)² / Σ_run (value − mean)²

`seeds` is the share of the variance within rows, which seeds alone cause. If every combination of labels has the same
number of runs, the shares of the axes, of their interactions and of seeds sum to 1. Otherwise shares of axes may
overlap, and interactions are not given. Axes that always change together are one factor. An axis with more than
MAX_LEVELS numbers, as of a random search, is cut into QUANTILES groups of equal size.

η² is biased upward by noise: with L levels and N runs, an axis without effect explains (L − 1)/(N − 1) on average; the
drawing marks it. Runs that a search suggested by earlier results are not a random sample of its space.

`parallel` has a line per row through the values of its axes, in the colour of its metric.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan, Row
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.figures.metrics import chosen_metrics, is_number, of_rows, selected_rows
from cope_sweep.read.tables.model import Column, varying_axes
from cope_sweep.read.tables.runs import Results, setting

MAX_LEVELS, QUANTILES = 8, 4
COLUMNS = {
    "metric": "str", "factor": "str", "levels": "Int64", "runs": "int64", "share": "float64", "chance": "float64",
}  # fmt: skip
LOG_FROM_RATIO = 8
MAX_TICKS = 9
INTERACTIONS, SEEDS = "interactions", "seeds"


def importance(results: Results, question: GetFigure) -> Figure:
    """The shares of variance of metrics (default: those of the table). Raises FigureError where nothing varies."""
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    titles = chosen_metrics(plan, runs, question.metric, (each.name for each in plan.ablation.content.metrics))
    factors = axis_levels(plan, runs, question.row)
    if factors.empty:
        raise FigureError(f"{plan.name} has no axis with several values, so no parameter can be important")
    found = [importance_frame(runs, factors, each.name) for each in titles]
    data = pd.concat(found, ignore_index=True).astype(COLUMNS)
    title = question.title or plan.ablation.content.title
    return Figure("importance", title, data, partial(_draw, data, titles, title))


def axis_levels(plan: Plan, runs: pd.DataFrame, rows: Sequence[str] = ()) -> pd.DataFrame:
    """The level of each axis (column: its short name) for each run; axes with one level are left out."""
    columns = {}
    of_row = {row.name: row for row in selected_rows(plan, rows)}
    for key, short in plan.axes.items():
        labels = runs[key].fillna("–")
        numbers = [setting(of_row[row], key) for row in runs["row"]]
        if labels.nunique() > MAX_LEVELS and all(is_number(value) for value in numbers):
            labels = pd.qcut(pd.Series(numbers, dtype="float64"), QUANTILES, duplicates="drop").astype("str")
        if labels.nunique() > 1:
            columns[short] = labels.reset_index(drop=True)
    return pd.DataFrame(columns)


def importance_frame(runs: pd.DataFrame, levels: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One line per factor: metric, factor, levels, runs, share (η²), and chance, the mean share without any effect.

    `share` is missing where the metric does not vary. The last lines are `interactions`, if the design is balanced, and
    `seeds`, if a row has several runs.
    """
    value = runs[metric].astype("float64")
    kept = np.isfinite(value.to_numpy())
    y, levels, rows = value[kept].to_numpy(), levels[kept].reset_index(drop=True), runs.loc[kept, "row"].to_numpy()
    factors: dict[tuple[int, ...], list[str]] = {}
    for name in levels:
        factors.setdefault(tuple(pd.factorize(levels[name])[0]), []).append(str(name))
    groups = {"+".join(names): np.array(codes, dtype=int) for codes, names in factors.items() if len(set(codes)) > 1}
    total = float(((y - y.mean()) ** 2).sum()) if len(y) else 0.0
    varies = total > 1e-24 * max(1.0, float((y**2).sum())) if len(y) else False
    lines: list[tuple[object, ...]] = []
    for name, codes in groups.items():
        count = int(codes.max()) + 1
        share = _between(y, codes) / total if varies else None
        lines.append((metric, name, count, len(y), share, (count - 1) / (len(y) - 1)))
    if varies and groups:
        row_codes = pd.factorize(rows)[0]
        of_rows = _between(y, row_codes) / total
        main = sum(_between(y, codes) / total for codes in groups.values())
        if len(groups) > 1 and _balanced(list(groups.values())):
            lines.append((metric, INTERACTIONS, None, len(y), max(0.0, of_rows - main), None))
        if row_codes.max() + 1 < len(y):
            lines.append((metric, SEEDS, None, len(y), max(0.0, 1 - of_rows), None))
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _between(y: np.ndarray, codes: np.ndarray) -> float:
    """Σ n_level · (mean_level − mean)²."""
    counts = np.bincount(codes)
    means = np.bincount(codes, weights=y - y.mean()) / counts
    return float((counts * means**2).sum())


def _balanced(codes: list[np.ndarray]) -> bool:
    """Whether each combination of levels has the same number of runs."""
    combinations, counts = np.unique(np.stack(codes), axis=1, return_counts=True)
    expected = np.prod([int(each.max()) + 1 for each in codes])
    return bool(combinations.shape[1] == expected and len(set(counts.tolist())) == 1)


def _draw(data: pd.DataFrame, titles: Sequence[Column], title: str) -> Drawing:
    factors = list(dict.fromkeys(data["factor"]))
    factors = [name for name in factors if name not in (INTERACTIONS, SEEDS)] + [
        name for name in (INTERACTIONS, SEEDS) if name in factors
    ]
    drawing, axes = canvas.panels(len(titles), title=title, height=max(1.4, 0.26 * len(factors) + 0.8))
    chance_line = None
    for panel, metric in zip(axes, titles, strict=True):
        shown = data[data["metric"] == metric.name]
        panel.set_title(canvas.shortened(metric.title), loc="left")
        if not shown["share"].notna().any():
            canvas.say_empty(panel, "the metric does not vary" if len(shown) else "no finished run")
            continue
        places = [factors.index(name) for name in shown["factor"]]
        colours = [canvas.GREY if name in (INTERACTIONS, SEEDS) else canvas.PALETTE[0] for name in shown["factor"]]
        panel.barh(places, 100 * shown["share"], height=0.62, color=colours)
        for place, share, chance in zip(places, shown["share"], shown["chance"].fillna(0), strict=True):
            panel.text(100 * max(share, chance) + 1.5, place, f"{100 * share:.0f} %", va="center", fontsize=7)
        known = shown["chance"].notna().to_numpy()
        chance_line = panel.vlines(
            100 * shown["chance"][known], np.array(places)[known] - 0.31, np.array(places)[known] + 0.31,
            color=canvas.PALETTE[1], linewidth=1.6,
        )  # fmt: skip
        panel.set_yticks(range(len(factors)), [canvas.shortened(name, 30) for name in factors])
        panel.set(xlim=(0, 116), ylim=(len(factors) - 0.5, -0.5), xlabel="share of variance, η² (%)")
        panel.set_xticks(range(0, 101, 25))
        panel.grid(visible=False, axis="y")
    if chance_line is not None:
        canvas.legend(drawing, [chance_line], ["mean share of a parameter without effect"], title="")
    return drawing


def parallel(results: Results, question: GetFigure) -> Figure:
    """The axes with several values, and one metric (default: the primary one). Raises FigureError without axes."""
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    if len(question.metric) > 1:
        raise FigureError("parallel coordinates show one metric; give --metric once")
    (metric,) = chosen_metrics(plan, runs, question.metric, [plan.ablation.content.primary_metric.name])
    rows = selected_rows(plan, question.row)
    keys = varying_axes(plan, rows)
    if not keys:
        raise FigureError(f"{plan.name} has no axis with several values, so there are no coordinates")
    data = parallel_frame(runs, rows, keys, metric.name)
    title = question.title or plan.ablation.content.title
    names = {key: plan.axes[key] for key in keys}
    draw = partial(_draw_parallel, data, names, metric, title, question.log)
    return Figure("parallel", title, data, draw)


def parallel_frame(runs: pd.DataFrame, rows: Sequence[Row], keys: Sequence[str], metric: str) -> pd.DataFrame:
    """One line per row with a finished run.

    row, n                  its name, and its number of finished runs
    <key>, <key>.place      the label of each axis, and its place from 0 to 1: numbers on a linear scale, or on a
                            logarithmic one if they differ by a factor of 8; other labels at equal distances
    <metric>                the mean over the n runs
    """
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


def _draw_parallel(
    data: pd.DataFrame, names: Mapping[str, str], metric: Column, title: str, log: bool | None
) -> Drawing:
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
