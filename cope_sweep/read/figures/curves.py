"""Learning curves: metrics by training step or by time, one line per row, with bands over its finished seeds.

Means and bands are of finished runs. The curve of a run that is not finished is drawn beside them, dotted, and counted
in the legend. `convergence` also marks where each row's mean has its best value, as in the paper's Figure 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cope_sweep.config import Plan, Row
from cope_sweep.config.explain import suggest
from cope_sweep.read.figures.figure import DEFAULTS, Band, Figure, FigureError, Options
from cope_sweep.read.figures.metrics import (
    band_text,
    chosen_band,
    metric_title,
    seed_statistics,
    selected_rows,
)
from cope_sweep.read.tables.model import Column
from cope_sweep.store import Store
from cope_sweep.store.artifacts import TIME_KEY
from cope_sweep.store.errors import DamagedError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

X = Literal["step", "time"]
TRAIN_LOSS = "train/loss"
COLUMNS = {
    "row": "str", "metric": "str", "step": "int64", "time_s": "float64", "n": "int64", "value": "float64",
    "low": "float64", "high": "float64", "seed": "Int64", "status": "str", "best": "bool",
}  # fmt: skip


def curves(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    """Learning curves. Default metrics: the training loss, and the table's metrics that were logged while training."""
    return _figure("curves", plan, store, options, default=(TRAIN_LOSS, *_table_metrics(plan)))


def convergence(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    """The table's metrics by step, with a ring at the step of each row's best mean."""
    return _figure("convergence", plan, store, options, default=_table_metrics(plan))


def _figure(kind: str, plan: Plan, store: Store, options: Options, default: tuple[str, ...]) -> Figure:
    x = options.x or "step"
    if x not in ("step", "time"):
        raise FigureError(f"--x {x}: {kind} is drawn by step or by time")
    points = read_points(plan, store, options.rows)
    logged = list(dict.fromkeys(points["metric"]))
    metrics = options.metrics or _evaluated_often(points, default)
    for metric in options.metrics:
        if logged and metric not in logged:
            raise FigureError(f"no run of {plan.name} has logged {metric!r}{suggest(metric, logged)}")
    titles = [metric_title(plan, metric) for metric in dict.fromkeys(metrics)]
    band = chosen_band(options.band, points)
    rows = [row.name for row in selected_rows(plan, options.rows)]
    data = curve_frame(points, rows, titles, band)
    title = options.title or plan.ablation.content.title
    draw = partial(
        _draw, data, rows, titles, "time" if x == "time" else "step", band, title, options, kind == "convergence"
    )
    return Figure(kind, title, data, draw)


def _table_metrics(plan: Plan) -> tuple[str, ...]:
    return tuple(metric.name for metric in plan.ablation.content.metrics)


def _evaluated_often(points: pd.DataFrame, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that were logged at two steps or more; where none was, those that were logged; else all."""
    steps = points.groupby("metric")["step"].nunique()
    often = tuple(name for name in names if steps.get(name, 0) > 1)
    return often or tuple(name for name in names if name in steps.index) or names


def read_points(plan: Plan, store: Store, rows: Sequence[str] = ()) -> pd.DataFrame:
    """The logged values of started runs: row, seed, status, step, time_s, metric, value.

    `time_s` is the time since the run was first begun; pauses of a run that was interrupted are part of it. It is
    missing where the curve has no times. A curve that cannot be read is left out.
    """
    import pandas as pd

    selected = selected_rows(plan, rows)
    statuses = store.index.statuses(run.run_id for row in selected for run in row.runs)
    lines = [line for row in selected for line in _row_points(row, statuses, store)]
    columns = {"row": "str", "seed": "int64", "status": "str", "step": "int64", "time_s": "float64", "metric": "str",
               "value": "float64"}  # fmt: skip
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


def _row_points(row: Row, statuses: Any, store: Store) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for run in row.runs:
        status = statuses.get(run.run_id, "pending")
        folder = store.run(run.run_id)
        try:
            points = folder.curve(times=True) if status != "pending" else []
            begun_ms = (folder.spec or {}).get("created_ms") if points else None
        except DamagedError:
            continue
        for point in points:
            time_ms = point.pop(TIME_KEY, None)
            time_s = None if time_ms is None or begun_ms is None else max(0.0, time_ms - begun_ms) / 1000
            step = int(point.pop("step"))
            lines += [
                (row.name, run.seed, status, step, time_s, metric, float(value)) for metric, value in point.items()
            ]
    return lines


def curve_frame(points: pd.DataFrame, rows: Sequence[str], titles: Sequence[Column], band: Band) -> pd.DataFrame:
    """One line per row, metric and step: statistics of the finished seeds; then those of each unfinished seed.

    row, metric, step
    time_s              mean over the seeds
    n, value            number of finished seeds with a value at this step, and their mean
    low, high           the band; missing for n < 2
    seed, status        of one unfinished run (n = 1, no band); missing, and `finished`, for statistics
    best                whether this is the first step with the best mean of the row
    """
    import pandas as pd

    lines: list[dict[Any, Any]] = []
    by_curve = dict(list(points.groupby(["row", "metric"], sort=False)))
    for row in rows:
        for title in titles:
            group = by_curve.get((row, title.name))
            if group is None:
                continue
            is_finished = group["status"] == "finished"
            lines += _mean_lines(row, title, group[is_finished], band)
            singles = group[~is_finished].sort_values(["seed", "step"], kind="stable")
            lines += singles.assign(n=1, best=False).to_dict("records")
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _mean_lines(row: str, title: Column, finished: pd.DataFrame, band: Band) -> list[dict[Any, Any]]:
    lines: list[dict[Any, Any]] = []
    for step, group in finished.groupby("step"):
        numbers = seed_statistics(group["value"], title, band)
        line = {"row": row, "metric": title.name, "step": step, "time_s": group["time_s"].mean(), "status": "finished"}
        lines.append(line | numbers | {"value": numbers["mean"], "best": False})
    known = [line for line in lines if line["n"]]
    if known:  # of equal means the first one
        title.best(known, key=lambda line: line["value"])["best"] = True
    return lines


def _draw(
    data: pd.DataFrame,
    rows: Sequence[str],
    titles: Sequence[Column],
    x: X,
    band: Band,
    title: str,
    options: Options,
    rings: bool,
) -> Drawing:
    from cope_sweep.read.figures import canvas

    styles = {row: canvas.series_style(index) for index, row in enumerate(rows)}  # the same ones while a sweep goes on
    rows = list(dict.fromkeys(data["row"]))
    drawing, axes = canvas.panels(max(1, len(titles)), title=title)
    handles: dict[str, Any] = {}
    column, factor, x_label = _x_axis(data, x)
    for panel, metric in zip(axes, titles, strict=False):
        shown = data[data["metric"] == metric.name]
        panel.set_title(canvas.shortened(metric.label), loc="left")
        for row in rows:
            handle = _draw_row(panel, shown[shown["row"] == row], styles[row], column, factor, rings)
            handles.setdefault(row, handle)
        if shown.empty:
            canvas.say_empty(panel, "not logged")
            continue
        values = [*shown["value"], *shown["low"], *shown["high"]]
        canvas.metric_axis(panel, values, metric, log=options.log or False)
        canvas.parameter_axis(panel, [], None, log=options.log_x or False)
        panel.set_xlabel(x_label)
    if data.empty:
        for panel in axes:
            canvas.say_empty(panel, "no learning curve")
        return drawing
    labels = [_legend_text(data[data["row"] == row], row) for row in rows]
    note = f"mean; band: {band_text(band)}" if (data["n"] > 1).any() else "single seeds"
    canvas.legend(drawing, [handles[row] for row in rows], labels, title=note + ("; ring: best mean" if rings else ""))
    return drawing


def _x_axis(data: pd.DataFrame, x: X) -> tuple[str, float, str]:
    """The column, the factor of its values, and the label of the x axis."""
    if x == "step":
        return "step", 1.0, "training step"
    longest_s = data["time_s"].max()
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if longest_s >= 3 * seconds:
            return "time_s", 1 / seconds, f"time since the run began ({unit})"
    return "time_s", 1.0, "time since the run began (s)"


def _draw_row(panel: Axes, lines: pd.DataFrame, style: dict[str, Any], column: str, factor: float, rings: bool) -> Any:
    mean = lines[lines["status"] == "finished"].dropna(subset=[column])
    x = mean[column].to_numpy() * factor
    often = max(1, len(mean) // 12)
    # Row 31 has a marker as row 1, so that both are found in the legend; lines of many points have one at each 12th.
    (handle,) = panel.plot(x, mean["value"], **style, markevery=often, markeredgecolor="white", markeredgewidth=0.4)
    banded = mean["low"].notna().to_numpy()
    if banded.any():
        panel.fill_between(
            x, mean["low"].astype(float), mean["high"].astype(float), where=banded, color=style["color"], alpha=0.18,
            linewidth=0,
        )  # fmt: skip
    for _, single in lines[lines["status"] != "finished"].dropna(subset=[column]).groupby("seed"):
        panel.plot(single[column] * factor, single["value"], color=style["color"], linestyle=":", linewidth=1)
    if rings and len(best := mean[mean["best"]]):
        panel.plot(
            best[column] * factor, best["value"], linestyle="none", marker="o", markersize=9, markerfacecolor="none",
            markeredgecolor=style["color"], clip_on=False,
        )  # fmt: skip
    return handle


def _legend_text(lines: pd.DataFrame, row: str) -> str:
    finished = int(lines.loc[lines["status"] == "finished", "n"].max()) if (lines["status"] == "finished").any() else 0
    others = lines.loc[lines["status"] != "finished", "seed"].nunique()
    dotted = f", {others} unfinished (dotted)" if others else ""
    return f"{row}, n = {finished}{dotted}"
