"""What figures of an ablation share: selected rows, titles of metrics, final values, and statistics over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Optuna, RandomSearch
from cope_sweep.config.explain import suggest
from cope_sweep.config.run import FACT_METRICS
from cope_sweep.errors import FigureError
from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.model import Column, column_of
from cope_sweep.read.tables.row_names import find_axis, rows_named
from cope_sweep.store import QueryError

Band = Literal["interval", "range"]
"""What a band or a bar over seeds shows: the 95 % interval of the mean, or the smallest and the largest value."""
LEAST_FOR_INTERVAL = 5
"""With fewer seeds, the t interval is wider than their range: ± 2.5 standard deviations for 3 seeds."""


def metric_title(plan: Plan, name: str) -> Column:
    """A metric as a column; one that the table does not have takes unit, scale and goal from a column of its quantity.

    The label of such a metric, or of one without a label, is its key in words: `in dist · token error at 4x`.
    """
    metrics = plan.ablation.content.metrics
    for metric in metrics:
        if metric.name == name:
            return column_of(metric).model_copy(update={"label": metric.label or in_words(name)})
    for metric in metrics:
        if metric.name.rpartition("/")[2] == name.rpartition("/")[2]:
            return column_of(metric).model_copy(update={"name": name, "label": in_words(name), "learned": None})
    return Column(name=name, label=in_words(name), unit="%" if name.partition("@")[0].endswith("_error") else "")


def in_words(name: str) -> str:
    """The key of a metric for readers: `in distribution: token error at 4x`."""
    return name.replace("in_dist", "in distribution").replace("_", " ").replace("/", ": ").replace("@", " at ")


def selected_rows(plan: Plan, names: Sequence[str]) -> tuple[Row, ...]:
    """The rows with these names (`tables.row_names`), in the plan's order; all rows without names.

    Raises QueryError for a name that no row has.
    """
    selected = {row.name for row in plan.rows}.intersection(names)
    for name in [name for name in names if name not in selected]:
        selected |= {row.name for row in rows_named(plan, name, QueryError)}
    return tuple(row for row in plan.rows if not names or row.name in selected)


def chosen_metrics(plan: Plan, runs: pd.DataFrame, names: Sequence[str], default: Iterable[str] = ()) -> list[Column]:
    """The metrics with these names, without duplicates; without names, the default ones (none: those of the table that
    rows are compared by).

    Raises FigureError for a metric that no finished run has yet, QueryError for one that none will have.
    """
    default = default or [metric.name for metric in plan.ablation.content.metrics if metric.compared]
    found = metric_columns(runs, plan)
    for name in names:
        if name not in found:
            planned = planned_metrics(plan)
            allowed = list(dict.fromkeys([*found, *planned]))
            message = f"no finished run of {plan.name} has the metric {name!r}{suggest(name, allowed)}"
            error = FigureError if name in planned else QueryError
            raise error(message, code="unknown_metric", metric=name, allowed=allowed)
    return [metric_title(plan, name) for name in dict.fromkeys(names or default)]


def planned_metrics(plan: Plan) -> list[str]:
    """The metrics and numeric facts that finished runs of a plan will have, and the columns of its table."""
    of_rows = (name for row in plan.rows for run in row.runs[:1] for name in run.metrics)
    return list(dict.fromkeys([*(metric.name for metric in plan.ablation.content.metrics), *of_rows, *FACT_METRICS]))


def of_rows(runs: pd.DataFrame, plan: Plan, rows: Sequence[str]) -> pd.DataFrame:
    """The lines of a frame of `Results` that belong to the selected rows. Raises QueryError."""
    names = {row.name for row in selected_rows(plan, rows)}
    return runs[runs["row"].isin(names)].reset_index(drop=True)


def metric_columns(runs: pd.DataFrame, plan: Plan) -> list[str]:
    """The columns of `Results.frame` that are numbers: metrics, facts, and settings that are no axes."""
    left_out = {"run_id", "status", "row", "seed", "message", *plan.axes}
    return [name for name in runs.columns if name not in left_out and runs[name].dtype.kind in "fiu"]


def seed_statistics(values: Iterable[float], metric: Column, band: Band) -> dict[str, float]:
    """n, mean, std, median, low and high of the finite values; NaN if n is too small.

    `low` and `high` are the smallest and the largest value if `band` is range, otherwise the 95 % interval of the mean,
    which stays inside the metric's range (`tables.stats`).
    """
    summary = summarise((value for value in values if math.isfinite(value)), metric.bounds)
    low, high = summary.ci_low, summary.ci_high
    if band == "range":
        low, high = (summary.low, summary.high) if summary.n > 1 else (math.nan, math.nan)
    return {
        "n": summary.n, "mean": summary.mean, "std": summary.std, "median": summary.median, "low": low, "high": high,
    }  # fmt: skip


def chosen_band(runs: pd.DataFrame) -> Band:
    """The kind of a band: the interval of the mean, unless a row has several finished seeds but too few for one.

    `runs` has the columns row, seed and status.
    """
    seeds = runs[runs["status"] == "finished"].groupby("row")["seed"].nunique()
    return "range" if seeds.between(2, LEAST_FOR_INTERVAL - 1).any() else "interval"


def band_text(band: Band) -> str:
    """What a legend calls a band."""
    return "min–max over seeds" if band == "range" else "95 % interval of the mean"


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_log_parameter(plan: Plan, key: str) -> bool | None:
    """Whether a key is logarithmic in the search space of a plan; None if it is not a number of the space."""
    search = plan.ablation.content.search
    if not isinstance(search, (RandomSearch, Optuna)) or key not in search.space:
        return None
    distribution = search.space[key]
    return None if distribution.choice is not None else distribution.is_log


def panel_key(plan: Plan, name: str | None) -> str | None:
    """The key of the axis that panels show; None without a name. Raises QueryError for an unknown axis."""
    if name is None:
        return None
    key = find_axis(plan.axes, name)
    if key is None:
        axes = list(plan.axes)
        message = f"--panels {name}: {plan.name} has no such axis{suggest(name, axes)}"
        raise QueryError(message, code="unknown_axis", axis=name, allowed=axes)
    return key


@dataclass(frozen=True)
class Point:
    """A metric of a row, at a place on the x axis."""

    row: Row
    metric: Column
    column: str
    """The metric's column in the frame of runs."""
    panel: str = ""
    series: str = ""
    x: float = 0.0
    x_label: str = ""


def result_frame(runs: pd.DataFrame, points: Sequence[Point], columns: Mapping[str, str]) -> pd.DataFrame:
    """One line per point with a finished run or a published value, with some of these columns:

    row, panel, metric, series
    x, x_label                  the place on the x axis; its name, if it is not a number
    n, seeds                    number of finished runs with a value, and of planned runs
    mean, std, median           over the n runs
    low, high                   the smallest and the largest value; missing for n < 2
    published, published_std    the paper's numbers
    """
    lines = []
    of_row = dict(list(runs.groupby("row", sort=False)))
    for point in points:
        numbers = seed_statistics(of_row[point.row.name][point.column].astype("float64"), point.metric, "range")
        published = published_std = None
        if point.row.published is not None:
            published = point.row.published.values.get(point.column)
            published_std = point.row.published.std.get(point.column)
        if numbers["n"] or published is not None:
            lines.append({
                "row": point.row.name, "panel": point.panel, "metric": point.metric.name, "series": point.series,
                "x": point.x, "x_label": point.x_label, "seeds": len(point.row.runs), "published": published,
                "published_std": published_std, **numbers,
            })  # fmt: skip
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


def seed_frame(runs: pd.DataFrame, points: Sequence[Point]) -> pd.DataFrame:
    """One line per finite value of a finished run at a point: panel, metric, series, x, value."""
    of_row = dict(list(runs.groupby("row", sort=False)))
    lines = [
        {"panel": point.panel, "metric": point.metric.name, "series": point.series, "x": point.x, "value": value}
        for point in points
        for value in of_row[point.row.name][point.column].astype("float64")
        if math.isfinite(value)
    ]
    columns = {"panel": "str", "metric": "str", "series": "str", "x": "float64", "value": "float64"}
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


def count_text(lines: pd.DataFrame) -> str:
    """The numbers of finished seeds: `n = 3`, `n = 1–3 of 3`."""
    low, high, seeds = lines["n"].min(), lines["n"].max(), lines["seeds"].max()
    text = f"n = {low}" if low == high else f"n = {low}–{high}"
    return text if low == seeds else f"{text} of {seeds}"
