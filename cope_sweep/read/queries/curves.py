"""Learning curves. Only these queries read a file of every requested run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from cachetools import LRUCache

from cope_sweep.api.ablations import CurvePage, GetCurves, RowCurves, Series
from cope_sweep.api.runs import CurvesOfRuns, RunCurve
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.frozen import metric_value
from cope_sweep.read.queries.runs import readable
from cope_sweep.read.tables.stats import finite
from cope_sweep.store import QueryError, RunFolder, RunRecord, Store
from cope_sweep.store.curve import TIME_KEY

POINTS_PER_CURVE = 200
"""Approximate number of points of one learning curve of an ablation."""
MAX_RUNS = 5_000
"""Maximum number of runs whose curves are read for one answer: takes about 5 s if no curve is cached."""
MAX_CACHED_POINTS = 2_000_000
"""Maximum number of points in memory, 16 bytes each."""
LAST_ROWS = 10
"""The metrics in this many rows at the end of a curve are listed: the last step and the last evaluation."""

MAX_NAMES = 50
"""Maximum number of metrics that an error message names."""

LoggedRow = dict[str, float]


PointT = TypeVar("PointT", bound=tuple[object, ...])


@dataclass(frozen=True)
class ThinnedCurve:
    """A metric of a run, with fewer points."""

    steps: array[int]
    values: array[float]
    """NaN if the logged value is not finite."""
    logged: tuple[str, ...]

    @property
    def points(self) -> list[tuple[int, float | None]]:
        return [(step, finite(value)) for step, value in zip(self.steps, self.values, strict=True)]


class CurveCache:
    """Thinned curves in memory. Only runs that have changed are read again. Thread-safe."""

    def __init__(self) -> None:
        # The key and the names take about as much memory as ten points.
        self._curves: LRUCache[tuple[str, int, str], ThinnedCurve] = LRUCache(
            MAX_CACHED_POINTS, lambda curve: 10 + len(curve.steps)
        )
        self._lock = Lock()

    def of_run(self, folder: RunFolder, revision: int, metric: str) -> ThinnedCurve:
        """A metric of a run at a revision of the index. Without points if the curve is unreadable."""
        key = folder.run_id, revision, metric
        with self._lock:
            cached = self._curves.get(key)
        if cached is not None:
            return cached
        curve = readable(folder.curve) or []
        measured = ((int(point["step"]), metric_value(point, metric)) for point in curve)
        points = thin([(step, value) for step, value in measured if value is not None], POINTS_PER_CURVE)
        steps, values = array("q", [step for step, _ in points]), array("d", [value for _, value in points])
        thinned = ThinnedCurve(steps, values, tuple(_logged(curve)))
        with self._lock:
            self._curves[key] = thinned
        return thinned


def plan_curves(plan: Plan, store: Store, question: GetCurves, cache: CurveCache | None = None) -> CurvePage:
    """A metric of every run of some rows, reduced to about POINTS_PER_CURVE points each.

    A run with an unreadable curve has no points. A page also ends after MAX_RUNS runs that have started. Raises
    QueryError for a metric that no run has logged.
    """
    cache = cache or CurveCache()
    metric = question.metric or plan.ablation.content.measured_metric.name
    logged: dict[str, None] = {column.name: None for column in plan.ablation.content.metrics}
    requested = plan.rows[question.offset : question.offset + question.limit]
    records = store.index.records((run.run_id for row in requested for run in row.runs), values=False)
    rows: list[RowCurves] = []
    started = 0
    for row in requested:
        started_of_row = sum(run.run_id in records for run in row.runs)
        if rows and started_of_row and started + started_of_row > MAX_RUNS:
            break
        started += started_of_row
        series = []
        for run in row.runs:
            record = (records.get(run.run_id) or RunRecord(run_id=run.run_id)).as_counted()
            points: list[tuple[int, float | None]] = []
            if run.run_id in records:
                curve = cache.of_run(store.run(run.run_id), record.revision, metric)
                logged |= dict.fromkeys(curve.logged)
                points = curve.points
            series.append(Series(run_id=run.run_id, seed=run.seed, status=record.status, points=points))
        rows.append(RowCurves(row=row.name, series=series))
    following = question.offset + len(rows)
    is_whole = question.offset == 0 and following == len(plan.rows)
    if is_whole and metric not in logged and not any(series.points for row in rows for series in row.series):
        raise _unknown_metric(metric, list(logged), plan.name)
    following_page = following if following < len(plan.rows) else None
    return CurvePage(metric=metric, metrics=list(logged), rows=rows, total=len(plan.rows), next=following_page)


def curves_of_runs(folders: Sequence[RunFolder], metric: str, points: int | None) -> CurvesOfRuns:
    """A metric of several runs, each reduced to at most `points` points; None: all points.

    A run with an unreadable curve has no points. Raises QueryError for a metric that none of the runs has logged, and
    that is not computed from such metrics.
    """
    logged: dict[str, None] = {}
    series = []
    for folder in folders:
        curve = readable(partial(folder.curve, times=True)) or []
        logged |= dict.fromkeys(key for point in curve for key in point if key not in ("step", TIME_KEY))
        started_ms = (readable(partial(getattr, folder, "spec")) or {}).get("created_ms")
        all_points = [
            (int(point["step"]), _seconds(point.get(TIME_KEY), started_ms), finite(value))
            for point in curve
            if (value := metric_value(point, metric)) is not None
        ]
        kept = all_points if points is None else downsample(all_points, points)
        series.append(RunCurve(run_id=folder.run_id, points=kept))
    if logged and not any(each.points for each in series):
        raise _unknown_metric(metric, list(logged), "these runs")
    return CurvesOfRuns(metric=metric, series=series)


def run_rows(folder: RunFolder, metrics: Sequence[str], points: int | None) -> list[LoggedRow]:
    """The logged rows of a run, by step, that contain one of the metrics (none: all rows), at most `points` of them.

    If rows are left out, the smallest and largest values of the first metric are kept. Raises DamagedError, and
    QueryError for an unknown metric.
    """
    rows = folder.curve()
    logged = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    for name in metrics:
        if name not in logged and logged:
            raise _unknown_metric(name, logged, f"run {folder.run_id}")
    if metrics:
        rows = [
            {key: value for key, value in row.items() if key == "step" or key in metrics}
            for row in rows
            if any(name in row for name in metrics)
        ]
    if points is None or len(rows) <= points:
        return rows
    metric = metrics[0] if metrics else logged[0]
    selected = downsample([(index, None, row.get(metric)) for index, row in enumerate(rows)], points)
    return [rows[index] for index, *_ in selected]


def thin(points: list[PointT], maximum: int) -> list[PointT]:
    """Every 2ⁿ-th point, and the last one. Curves of different lengths keep common steps, needed for their mean."""
    stride = 1
    while len(points) > maximum * stride:
        stride *= 2
    thinned = points[::stride]
    if points and thinned[-1] != points[-1]:
        thinned.append(points[-1])
    return thinned


def downsample(points: Sequence[PointT], maximum: int) -> list[PointT]:
    """At most `maximum` (≥ 4) points, so that a spike of a single step stays visible.

    The last item of a point is its value. The first and last points are kept. The others are divided into buckets of
    equal size, and each bucket keeps the points with its smallest and largest value.
    """
    if len(points) <= maximum:
        return list(points)
    buckets = (maximum - 2) // 2
    inner = len(points) - 2
    selected = {0, len(points) - 1}
    for bucket in range(buckets):
        indices = range(1 + inner * bucket // buckets, 1 + inner * (bucket + 1) // buckets)
        with_value = [index for index in indices if _is_number(points[index][-1])] or list(indices)[:1]
        selected.add(min(with_value, key=lambda index: _sort_key(points[index][-1])))
        selected.add(max(with_value, key=lambda index: _sort_key(points[index][-1])))
    return [points[index] for index in sorted(selected)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not math.isnan(value)


def _sort_key(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _seconds(time_ms: float | None, started_ms: Any) -> float | None:
    if time_ms is None or not _is_number(started_ms):
        return None
    seconds: float = max(0.0, time_ms - started_ms) / 1000
    return seconds


def _logged(curve: Sequence[LoggedRow]) -> dict[str, None]:
    return dict.fromkeys(key for point in curve[-LAST_ROWS:] for key in point if key != "step")


def _unknown_metric(metric: str, logged: Sequence[str], owner: str) -> QueryError:
    message = f"{owner}: no metric {metric[:80]!r}{suggest(metric[:80], logged[:MAX_NAMES])}"
    return QueryError(message, code="unknown_metric", metric=metric[:80], allowed=list(logged[:MAX_NAMES]))
