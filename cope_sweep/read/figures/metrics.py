"""Input of the figures of an ablation: selected rows, titles of metrics, final values, and statistics over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from cope_sweep.api.formats import Band
from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Optuna, RandomSearch
from cope_sweep.config.explain import suggest
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.model import Column, column_of
from cope_sweep.read.tables.row_names import find_axis, find_rows

LEAST_FOR_INTERVAL = 5
"""Of fewer seeds the t interval is wider than their range: 2.5 standard deviations to either side for 3 of them."""


def metric_title(plan: Plan, name: str) -> Column:
    """A metric as a column. One that is no column of the table has the unit and goal of the same quantity there."""
    metrics = plan.ablation.content.metrics
    for metric in metrics:
        if metric.name == name:
            return column_of(metric)
    for metric in metrics:
        if metric.name.rpartition("/")[2] == name.rpartition("/")[2]:
            return Column(name, name, metric.unit, metric.goal)
    return Column(name, name, "%" if name.endswith("_error") else "", "min")


def selected_rows(plan: Plan, names: Sequence[str]) -> tuple[Row, ...]:
    """The rows with these names (`tables.row_names`), in the plan's order; all for none.

    Raises FigureError for a name that no row has.
    """
    found: set[str] = set()
    for name in names:
        rows = find_rows(plan, name)
        if not rows:
            known = [row.name for row in plan.rows]
            raise FigureError(
                f"{plan.name} has no row {name!r}{suggest(name, known)}", code="unknown_row", row=name, allowed=known
            )
        found |= {row.name for row in rows}
    return tuple(row for row in plan.rows if not names or row.name in found)


def chosen_metrics(plan: Plan, runs: pd.DataFrame, names: Sequence[str], default: Iterable[str]) -> list[Column]:
    """The metrics with these names, each once, or the default ones. Raises FigureError for one that no run has."""
    known = metric_columns(runs, plan)
    for name in names:
        if name not in known:
            raise FigureError(
                f"no finished run of {plan.name} has the metric {name!r}{suggest(name, known)}",
                code="unknown_metric",
                metric=name,
                allowed=list(known),
            )
    return [metric_title(plan, name) for name in dict.fromkeys(names or default)]


def of_rows(runs: pd.DataFrame, plan: Plan, rows: Sequence[str]) -> pd.DataFrame:
    """The lines of the selected rows of a frame of `Results`. Raises FigureError."""
    names = {row.name for row in selected_rows(plan, rows)}
    return runs[runs["row"].isin(names)].reset_index(drop=True)


def metric_columns(runs: pd.DataFrame, plan: Plan) -> list[str]:
    """The columns of `Results.frame` that are metrics or numeric facts."""
    left_out = {"run_id", "status", "row", "seed", "message", *plan.axes}
    return [name for name in runs.columns if name not in left_out and runs[name].dtype.kind in "fiu"]


def seed_statistics(values: Iterable[float], metric: Column, band: Band) -> dict[str, float]:
    """n, mean, std, low and high of the finite values; NaN where n is too small.

    `low` and `high` are the least and the greatest value (`band` = range), or else the 95 % interval of the mean, which
    stays inside the metric's range (`tables.stats`).
    """
    data = [float(value) for value in values if math.isfinite(value)]
    found = summarise(data, metric.bounds)
    low, high = found.ci_low, found.ci_high
    if band == "range":
        low, high = (min(data), max(data)) if len(data) > 1 else (math.nan, math.nan)
    return {"n": found.n, "mean": found.mean, "std": found.std, "low": low, "high": high}


def chosen_band(band: Band, runs: pd.DataFrame, *, is_log: bool = False) -> Band:
    """`auto`: the interval of the mean, unless the range of the seeds says more.

    It does where a row has several finished seeds but fewer than LEAST_FOR_INTERVAL, and where the metric's axis is
    logarithmic (`is_log`). There, of the errors 0, 0, 0, 0 and 0.013, an interval that stays above 0 is far from four
    of five seeds: the logit t interval is 0.0002 to 0.04.

    `runs` has the columns row, seed and status.
    """
    if band != "auto":
        return band
    seeds = runs[runs["status"] == "finished"].groupby("row")["seed"].nunique()
    return "range" if is_log or seeds.between(2, LEAST_FOR_INTERVAL - 1).any() else "interval"


def is_log_metric(runs: pd.DataFrame, names: Iterable[str], log: bool | None) -> bool:
    """Whether the final values of one of these metrics are drawn on a logarithmic axis."""
    return any(canvas.is_logarithmic(runs[name].to_numpy(dtype="float64"), log) for name in names)


def band_text(band: Band) -> str:
    """The band in words, for a legend."""
    return "min–max over seeds" if band == "range" else "95 % interval of the mean"


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_log_parameter(plan: Plan, key: str) -> bool | None:
    """Whether an axis is logarithmic in the search space of a plan; None where it is no number of the space."""
    search = plan.ablation.content.search
    found = search.space.get(key) if isinstance(search, (RandomSearch, Optuna)) else None
    return None if found is None or found.choice is not None else found.is_log


def panel_key(plan: Plan, name: str | None) -> str | None:
    """The key of the axis that has panels; None for none. Raises FigureError where the plan does not have it."""
    key = None if name is None else find_axis(plan.axes, name)
    if key is None and name is not None:
        axes = list(plan.axes)
        message = f"--panels {name}: {plan.name} has no such axis{suggest(name, axes)}"
        raise FigureError(message, code="unknown_axis", axis=name, allowed=axes)
    return key
