"""Learning curves: the only queries that read a file of each run that was asked for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from cachetools import LRUCache

from cope_sweep.api.answers import Curves, CurvesOfRuns, RowCurves, RunCurve, Series
from cope_sweep.api.questions import GetCurves
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.read.queries.runs import readable
from cope_sweep.read.tables.stats import finite
from cope_sweep.store import QueryError, RunFolder, RunRecord, Store
from cope_sweep.store.curve import TIME_KEY

MAX_POINTS = 200
"""Points of one learning curve of an ablation."""
MAX_RUNS = 5_000
"""Begun runs of an ablation whose curves are read for one answer: about 5 s, if none is known."""
MAX_KNOWN_POINTS = 2_000_000
"""Points of curves in memory, of 16 bytes each."""
LAST_ROWS = 10
"""Rows at a curve's end whose metrics are listed: those of the last step and the evaluation before it."""

MAX_NAMES = 50
"""Metrics that a message names."""

Row = dict[str, float]


Point = TypeVar("Point", bound=tuple[object, ...])


@dataclass(frozen=True)
class _Known:
    """A metric of a run at a revision, thinned."""

    steps: array[int]
    values: array[float]
    """NaN: not finite."""
    logged: tuple[str, ...]

    @property
    def points(self) -> list[tuple[int, float | None]]:
        return [(step, finite(value)) for step, value in zip(self.steps, self.values, strict=True)]


class KnownCurves:
    """The thinned curves that were read: after a change of the store, only the runs that have changed are read again.

    It is thread-safe.
    """

    def __init__(self) -> None:
        # The key and the names take about as much as ten points.
        self._known: LRUCache[tuple[str, int, str], _Known] = LRUCache(
            MAX_KNOWN_POINTS, lambda each: 10 + len(each.steps)
        )
        self._lock = Lock()

    def of_run(self, folder: RunFolder, revision: int, metric: str) -> _Known:
        """A metric of a run, as the index knew the run at this revision. None of a curve that cannot be read."""
        key = folder.run_id, revision, metric
        with self._lock:
            if (known := self._known.get(key)) is not None:
                return known
        curve = readable(folder.curve) or []
        points = thin([(int(point["step"]), point[metric]) for point in curve if metric in point], MAX_POINTS)
        steps, values = array("q", [step for step, _ in points]), array("d", [value for _, value in points])
        found = _Known(steps, values, tuple(_logged(curve)))
        with self._lock:
            self._known[key] = found
        return found


def plan_curves(plan: Plan, store: Store, question: GetCurves, known: KnownCurves | None = None) -> Curves:
    """A metric of every run of some rows, reduced to about MAX_POINTS points each.

    A run whose curve cannot be read has no points. A page ends where it has MAX_RUNS begun runs. Raises QueryError for
    a metric that no run has logged.
    """
    known = known or KnownCurves()
    metric = question.metric or plan.ablation.content.primary_metric.name
    logged: dict[str, None] = {each.name: None for each in plan.ablation.content.metrics}
    asked = plan.rows[question.offset : question.offset + question.limit]
    records = store.index.records((run.run_id for row in asked for run in row.runs), values=False)
    rows: list[RowCurves] = []
    begun = 0
    for row in asked:
        own = sum(run.run_id in records for run in row.runs)
        if rows and own and begun + own > MAX_RUNS:
            break
        begun += own
        series = []
        for run in row.runs:
            record = records.get(run.run_id) or RunRecord(run_id=run.run_id)
            curve = known.of_run(store.run(run.run_id), record.revision, metric) if run.run_id in records else None
            if curve is not None:
                logged |= dict.fromkeys(curve.logged)
            points = [] if curve is None else curve.points
            series.append(Series(run_id=run.run_id, seed=run.seed, status=record.status, points=points))
        rows.append(RowCurves(row=row.name, series=series))
    following = question.offset + len(rows)
    is_whole = question.offset == 0 and following == len(plan.rows)
    if is_whole and metric not in logged and not any(series.points for row in rows for series in row.series):
        raise _unknown(metric, list(logged), plan.name)
    following_page = following if following < len(plan.rows) else None
    return Curves(metric=metric, metrics=list(logged), rows=rows, total=len(plan.rows), next=following_page)


def curves_of_runs(folders: Sequence[RunFolder], metric: str, points: int | None) -> CurvesOfRuns:
    """A metric of several runs, each reduced to at most `points` points; None: all.

    A run whose curve cannot be read has no points. Raises QueryError for a metric that none of them has logged.
    """
    logged: dict[str, None] = {}
    series = []
    for folder in folders:
        curve = readable(partial(folder.curve, times=True)) or []
        logged |= dict.fromkeys(key for point in curve for key in point if key not in ("step", TIME_KEY))
        begun_ms = (readable(partial(getattr, folder, "spec")) or {}).get("created_ms")
        found = [
            (int(point["step"]), _seconds(point.get(TIME_KEY), begun_ms), finite(point[metric]))
            for point in curve
            if metric in point
        ]
        series.append(RunCurve(run_id=folder.run_id, points=found if points is None else downsample(found, points)))
    if metric not in logged and logged:
        raise _unknown(metric, list(logged), "these runs")
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
            raise _unknown(name, logged, f"run {folder.run_id}")
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


def _seconds(time_ms: float | None, begun_ms: Any) -> float | None:
    known = time_ms is not None and _is_number(begun_ms)
    return max(0.0, time_ms - begun_ms) / 1000 if known else None


def _logged(curve: Sequence[Row]) -> dict[str, None]:
    return dict.fromkeys(key for point in curve[-LAST_ROWS:] for key in point if key != "step")


def _unknown(metric: str, logged: Sequence[str], owner: str) -> QueryError:
    message = f"{owner}: no metric {metric[:80]!r}{suggest(metric[:80], logged[:MAX_NAMES])}"
    return QueryError(message, code="unknown_metric", metric=metric[:80], allowed=list(logged[:MAX_NAMES]))
