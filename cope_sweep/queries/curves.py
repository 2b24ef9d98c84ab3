"""Learning curves of the runs of a plan: the only query that reads a file of each run that was asked for."""

from __future__ import annotations

from cope_sweep.plan import Plan
from cope_sweep.queries.answers import Curves, RowCurves, Series
from cope_sweep.store import Store
from cope_sweep.store.errors import DamagedError

MAX_POINTS = 200
"""Points of one learning curve."""
LAST_ROWS = 10
"""Rows at a curve's end whose metrics are listed: those of the last step and the evaluation before it."""


def plan_curves(plan: Plan, store: Store, metric: str | None) -> Curves:
    """A metric (None: the first of the table) of every run, reduced to about MAX_POINTS points each.

    A run whose curve cannot be read has no points.
    """
    metric = metric or plan.ablation.content.metrics[0].name
    logged: dict[str, None] = {each.name: None for each in plan.ablation.content.metrics}
    statuses = store.index.statuses(run.run_id for run in plan.runs)
    rows = []
    for row in plan.rows:
        series = []
        for run in row.runs:
            status = statuses.get(run.run_id, "pending")
            curve = _curve(store, run.run_id) if status != "pending" else []
            for point in curve[-LAST_ROWS:]:
                logged |= dict.fromkeys(key for key in point if key != "step")
            points = [(int(point["step"]), point[metric]) for point in curve if metric in point]
            series.append(Series(run_id=run.run_id, seed=run.seed, status=status, points=thin(points, MAX_POINTS)))
        rows.append(RowCurves(row=row.name, series=series))
    return Curves(metric=metric, metrics=list(logged), rows=rows)


def _curve(store: Store, run_id: str) -> list[dict[str, float]]:
    try:
        return store.run(run_id).curve()
    except DamagedError:
        return []


def thin(points: list[tuple[int, float]], maximum: int) -> list[tuple[int, float]]:
    """Every 2ⁿ-th point, and the last one. Curves of different lengths keep common steps, which their mean needs."""
    stride = 1
    while len(points) > maximum * stride:
        stride *= 2
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
