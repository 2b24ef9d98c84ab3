"""How much of a metric's variance over the finished runs each axis explains: η², the one-way effect size.

    η²(axis) = Σ_run (mean of the run's level − mean)² / Σ_run (value − mean)²

`seeds` is the share within rows, where only seeds differ. If every combination of levels has the same number of runs,
the shares of axes, of their interactions and of seeds sum to 1; otherwise, shares of axes may overlap, and interactions
are left out. Axes that always change together have the same share. An axis with more than MAX_LEVELS numbers, or an
axis of a search space with more than QUANTILES, is cut into QUANTILES groups of equal size. Noise biases η² upwards:
with L levels and N runs, an axis without effect explains (L − 1)/(N − 1) on average, which the drawing marks. Runs that
a search chose by earlier results are not a random sample of its space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.questions import GetFigure
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.figures.metrics import chosen_metrics, is_finite_number, is_log_parameter, of_rows, selected_rows
from cope_sweep.read.tables.model import Column
from cope_sweep.read.tables.runs import Results, setting

MAX_LEVELS, QUANTILES = 8, 4
COLUMNS = {"metric": "str", "factor": "str", "runs": "int64", "share": "float64", "chance": "float64"}
ABSENT = "–"
"""The level of rows that do not have an axis."""
INTERACTIONS, SEEDS = "interactions", "seeds"


def importance(results: Results, question: GetFigure) -> Figure:
    """The shares of each metric's variance (default: the table's metrics). Raises FigureError if no axis varies."""
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    table_metrics = (metric.name for metric in plan.ablation.content.metrics)
    titles = chosen_metrics(plan, runs, question.metric, table_metrics)
    levels = axis_levels(results, runs, question.row)
    if levels.empty:
        raise FigureError(
            f"{plan.name} has no axis with several values, so no parameter can be important",
            code="no_axis",
            ablation=plan.name,
        )
    data = pd.concat([importance_frame(runs, levels, title.name) for title in titles], ignore_index=True)
    title = question.title or plan.ablation.content.title
    return Figure("importance", title, data, partial(_draw, data, titles, title))


def axis_levels(results: Results, runs: pd.DataFrame, rows: Sequence[str] = ()) -> pd.DataFrame:
    """The level of each run on each axis (column: its short name), without axes with a single level."""
    row_by_name = {row.name: row for row in selected_rows(results.plan, rows)}
    columns = {}
    for key, short in results.plan.axes.items():
        levels = runs[key].fillna(ABSENT)
        values = [setting(row_by_name[name], key) for name in runs["row"]]
        most = MAX_LEVELS if is_log_parameter(results.plan, key) is None else QUANTILES
        if levels.nunique() > most and all(value is None or is_finite_number(value) for value in values):
            cut = pd.qcut(pd.Series(values, dtype="float64"), QUANTILES, duplicates="drop")
            levels = cut.astype("str").where(cut.notna(), ABSENT)
        if levels.nunique() > 1:
            columns[short] = levels
    return pd.DataFrame(columns)


def importance_frame(runs: pd.DataFrame, levels: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One line per factor: metric, factor, number of runs, share (η²), and chance, its mean without any effect.

    Shares are missing if the metric does not vary. The last lines are `interactions` and `seeds`, if they are known.
    """
    values = runs[metric].astype("float64").replace([math.inf, -math.inf], math.nan).dropna()
    variance = float(values.var(ddof=0))
    varies = variance > 1e-24 * max(1.0, float((values**2).mean()))  # by more than rounding
    levels, rows = levels.loc[values.index], runs.loc[values.index, "row"]

    def share(groups: pd.Series) -> float:
        if not varies:
            return math.nan
        return float(values.groupby(groups).transform("mean").var(ddof=0)) / variance

    counts = {name: count for name, count in levels.nunique().items() if count > 1}
    shares = {str(name): share(levels[name]) for name in counts}
    chance = {str(name): (count - 1) / (len(values) - 1) for name, count in counts.items()}
    runs_of_levels = levels[list(counts)].value_counts() if counts else pd.Series()
    is_balanced = len(runs_of_levels) == pd.Series(counts).prod() and runs_of_levels.nunique() == 1
    if len(counts) > 1 and is_balanced and varies:
        shares[INTERACTIONS] = max(0.0, share(rows) - sum(shares.values()))
    if counts and rows.duplicated().any() and varies:
        shares[SEEDS] = 1 - share(rows)
    lines = [(metric, name, len(values), explained, chance.get(name)) for name, explained in shares.items()]
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _draw(data: pd.DataFrame, titles: Sequence[Column], title: str) -> Drawing:
    factors = sorted(dict.fromkeys(data["factor"]), key=[INTERACTIONS, SEEDS].__contains__)
    drawing, axes = canvas.panels(len(titles), title=title, height=max(1.4, 0.26 * len(factors) + 0.8))
    mark = None
    for panel, metric in zip(axes, titles, strict=True):
        of_metric = data[data["metric"] == metric.name].set_index("factor")
        panel.set_title(canvas.shortened(metric.title), loc="left")
        if not of_metric["share"].notna().any():
            canvas.say_empty(panel, "the metric does not vary" if len(of_metric) else "no finished run")
            continue
        places = [factors.index(name) for name in of_metric.index]
        colours = of_metric["chance"].notna().map({True: canvas.PALETTE[0], False: canvas.GREY})  # True: an axis
        panel.barh(places, 100 * of_metric["share"], 0.62, color=colours)
        for place, share, chance in zip(places, of_metric["share"], of_metric["chance"].fillna(0), strict=True):
            panel.text(100 * max(share, chance) + 1.5, place, f"{100 * share:.0f} %", va="center", fontsize=7)
        (mark,) = panel.plot(100 * of_metric["chance"], places, "|", color=canvas.PALETTE[1], markersize=10)
        panel.set_yticks(range(len(factors)), [canvas.shortened(name, 30) for name in factors])
        panel.set(xlim=(0, 116), ylim=(len(factors) - 0.5, -0.5), xlabel="share of variance, η² (%)")
        panel.set_xticks(range(0, 101, 25))
        panel.grid(visible=False, axis="y")
    if mark is not None:
        canvas.legend(drawing, [mark], ["mean share of a parameter without effect"], title="")
    return drawing
