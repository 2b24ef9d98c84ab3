"""Learning curves: the only queries that read a file of each run that was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from cope_sweep.plan import Plan
from cope_sweep.queries.answers import Curves, CurvesOfRuns, RowCurves, RunCurve, Series
from cope_sweep.spec.explain import suggest
from cope_sweep.store import QueryError, RunFolder, Store
from cope_sweep.store.curve import TIME_KEY
from cope_sweep.store.errors import DamagedError

MAX_POINTS = 200
"""Points of one learning curve of an ablation."""
MAX_RUNS = 5_000
"""Begun runs of an ablation whose curves are read for one answer: about 5 s."""
LAST_ROWS = 10
"""Rows at a curve's end whose metrics are listed: those of the last step and the evaluation before it."""

MAX_NAMES = 50
"""Metrics that a message names."""

Row = dict[str, float]
Point = TypeVar("Point", bound=tuple[object, ...])


def plan_curves(plan: Plan, store: Store, metric: str | None) -> Curves:
    """A metric (None: the first of the table) of every run, reduced to about MAX_POINTS points each.

    A run whose curve cannot be read has no points. Raises QueryError for a metric that no run has logged, and for too
    many runs.
    """
    metric = metric or plan.ablation.content.metrics[0].name
    logged: dict[str, None] = {each.name: None for each in plan.ablation.content.metrics}
    statuses = store.index.statuses(run.run_id for run in plan.runs)
    if len(statuses) > MAX_RUNS:
        raise QueryError(
            f"{len(statuses):,} runs of {plan.name} were begun, and one answer has the curves of at most {MAX_RUNS:,}; "
            "choose runs: /api/v1/curves?run=ID&run=ID&metric=NAME"
        )
    rows = []
    for row in plan.rows:
        series = []
        for run in row.runs:
            status = statuses.get(run.run_id, "pending")
            curve = _curve(store.run(run.run_id)) if status != "pending" else []
            logged |= _logged(curve)
            points = [(int(point["step"]), _finite(point[metric])) for point in curve if metric in point]
            series.append(Series(run_id=run.run_id, seed=run.seed, status=status, points=thin(points, MAX_POINTS)))
        rows.append(RowCurves(row=row.name, series=series))
    if metric not in logged and not any(series.points for row in rows for series in row.series):
        raise QueryError(_unknown(metric, list(logged), plan.name))
    return Curves(metric=metric, metrics=list(logged), rows=rows)


def curves_of_runs(folders: Sequence[RunFolder], metric: str, points: int | None) -> CurvesOfRuns:
    """A metric of several runs, each reduced to at most `points` points; None: all.

    A run whose curve cannot be read has no points. Raises QueryError for a metric that none of them has logged.
    """
    logged: dict[str, None] = {}
    series = []
    for folder in folders:
        curve = _curve(folder, times=True)
        logged |= dict.fromkeys(key for point in curve for key in point if key not in ("step", TIME_KEY))
        begun_ms = _begun_ms(folder)
        found = [
            (int(point["step"]), _seconds(point.get(TIME_KEY), begun_ms), _finite(point[metric]))
            for point in curve
            if metric in point
        ]
        series.append(RunCurve(run_id=folder.run_id, points=found if points is None else downsample(found, points)))
    if metric not in logged and logged:
        raise QueryError(_unknown(metric, list(logged), "these runs"))
    return CurvesOfRuns(metric=metric, series=series)


def run_rows(folder: RunFolder, metrics: Sequence[str], points: int | None) -> list[Row]:
    """The logged rows of a run by step: all, or those with one of the metrics, and of these at most `points`.

    Where there are more, those are kept that hold the least and the greatest value of the first metric, or of the first
    that the run has logged. Raises DamagedError, and QueryError for an unknown metric.
    """
    rows = folder.curve()
    logged = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    for name in metrics:
        if name not in logged and logged:
            raise QueryError(_unknown(name, logged, f"run {folder.run_id}"))
    if metrics:
        rows = [
            {key: value for key, value in row.items() if key == "step" or key in metrics}
            for row in rows
            if any(name in row for name in metrics)
        ]
    if points is None or len(rows) <= points:
        return rows
    shown = metrics[0] if metrics else logged[0]
    kept = downsample([(index, None, row.get(shown)) for index, row in enumerate(rows)], points)
    return [rows[index] for index, *_ in kept]


def thin(points: list[Point], maximum: int) -> list[Point]:
    """Every 2ⁿ-th point, and the last one. Curves of different lengths keep common steps, which their mean needs."""
    stride = 1
    while len(points) > maximum * stride:
        stride *= 2
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def downsample(points: Sequence[Point], maximum: int) -> list[Point]:
    """At most `maximum` (≥ 4) points, whose last items are values: first, last, and least and greatest of each bucket.

    So a spike of a single step stays visible. The points between the first and the last are divided into buckets of
    equal numbers of points.
    """
    if len(points) <= maximum:
        return list(points)
    buckets = (maximum - 2) // 2
    inner = len(points) - 2
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        indices = range(1 + inner * bucket // buckets, 1 + inner * (bucket + 1) // buckets)
        known = [index for index in indices if _is_number(points[index][-1])] or list(indices)[:1]
        kept |= {min(known, key=lambda i: _order(points[i][-1])), max(known, key=lambda i: _order(points[i][-1]))}
    return [points[index] for index in sorted(kept)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not math.isnan(value)


def _order(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _curve(folder: RunFolder, *, times: bool = False) -> list[Row]:
    try:
        return folder.curve(times=times)
    except DamagedError:
        return []


def _begun_ms(folder: RunFolder) -> float | None:
    try:
        begun_ms = (folder.spec or {}).get("created_ms")
    except DamagedError:
        return None
    return begun_ms if _is_number(begun_ms) else None


def _seconds(time_ms: float | None, begun_ms: float | None) -> float | None:
    return None if time_ms is None or begun_ms is None else max(0.0, time_ms - begun_ms) / 1000


def _finite(value: float) -> float | None:
    """Null stands for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def _logged(curve: Sequence[Row]) -> dict[str, None]:
    return dict.fromkeys(key for point in curve[-LAST_ROWS:] for key in point if key != "step")


def _unknown(metric: str, logged: Sequence[str], owner: str) -> str:
    return f"{owner}: no metric {metric[:80]!r}{suggest(metric[:80], logged[:MAX_NAMES])}"
