"""How much of a metric's variance over the finished runs each parameter explains: η², the one-way effect sizes.

    η²(axis) = Σ_level n_level·(mean_level − mean)² / Σ_run (value − mean)²

`seeds` is the share of the variance within rows, which seeds alone cause. If every combination of labels has the same
number of runs, the shares of the axes, of their interactions and of seeds sum to 1. Otherwise shares of axes may
overlap, and interactions are not given. Axes that always change together are one factor. An axis with more than
MAX_LEVELS numbers, as of a random search, is cut into QUANTILES groups of equal size.

η² is biased upward by noise: with L levels and N runs, an axis without effect explains (L − 1)/(N − 1) on average; the
drawing marks it. Runs that a search suggested by earlier results are not a random sample of its space.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cope_sweep.config import Plan
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
    from matplotlib.figure import Figure as Drawing

MAX_LEVELS, QUANTILES = 8, 4
COLUMNS = {
    "metric": "str", "factor": "str", "levels": "Int64", "runs": "int64", "share": "float64", "chance": "float64",
}  # fmt: skip
INTERACTIONS, SEEDS = "interactions", "seeds"


def importance(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    """The shares of variance of metrics (default: those of the table). Raises FigureError where nothing varies."""
    runs = final_values(plan, store, options.rows)
    metrics = check_metrics(plan, options.metrics, metric_columns(runs, plan)) or tuple(
        metric.name for metric in plan.ablation.content.metrics
    )
    factors = axis_levels(plan, runs, options.rows)
    if factors.empty:
        raise FigureError(f"{plan.name} has no axis with several values, so no parameter can be important")
    titles = [metric_title(plan, name) for name in metrics]
    found = [importance_frame(runs, factors, name) for name in metrics]
    import pandas as pd

    data = pd.concat(found, ignore_index=True).astype(COLUMNS)
    title = options.title or plan.ablation.content.title
    return Figure("importance", title, data, partial(_draw, data, titles, title))


def axis_levels(plan: Plan, runs: pd.DataFrame, rows: Sequence[str] = ()) -> pd.DataFrame:
    """The level of each axis (column: its short name) for each run; axes with one level are left out."""
    import pandas as pd

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
    import pandas as pd

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


def _draw(data: pd.DataFrame, titles: Sequence[MetricTitle], title: str) -> Drawing:
    from cope_sweep.read.figures import canvas

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
