"""Learning curves: metrics by training step or by time, one line per row, with bands over its finished seeds.

Means and bands include finished runs only. The curves of other runs are dotted, and the legend counts them.
With `best`, a figure also marks the best mean of each row, as the paper's Figure 5 does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cope_sweep.errors import FigureError
from cope_sweep.figures import FIGURES, Metrics
from cope_sweep.frozen import metric_parts, metric_value
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config.checks import Planned
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.figures.metrics import Band
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.results import Results

TRAIN_LOSS = "train/loss"
MOST_BANDS = 5
"""With more rows in a panel, no bands are drawn, because they would cover one another."""
COLUMNS = {
    "row": "str", "metric": "str", "step": "int64", "time_s": "float64", "n": "int64", "value": "float64",
    "low": "float64", "high": "float64", "seed": "Int64", "status": "str", "best": "bool",
}  # fmt: skip


@FIGURES.register
class Curves(FigureKind):
    """Metrics against the training step: a line for each row, of few rows with bands over seeds."""

    SHOWS = "learning curves: metrics by step or time, mean over seeds, with bands of a few rows"
    ORDER = 20
    OFFERED = "always"
    TAKES = ("metric", "x", "row", "log")

    kind: Literal["curves"] = "curves"
    metrics: Metrics = Field(description="One panel for each metric.")
    log: bool = Field(default=False, description="Whether the axis of the metrics is logarithmic.")
    best: bool = Field(default=False, description="Whether a ring marks the step at which the mean of a row is best.")

    def check(self, planned: Planned) -> None:
        # Rates are logged, and no metrics of a result.
        rates = set.intersection(*(set(run.train.learning_rates) for run in planned.runs))
        named = [(("metrics", number), name) for number, name in enumerate(self.metrics) if name not in rates]
        planned.check_metrics(named)
        super().check(planned)

    def question_fields(self) -> dict[str, Any]:
        return {"metric": list(self.metrics), "log": self.log}

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """By default, of the training loss and of the table's metrics that were logged in training."""
        from cope_sweep.config.explain import suggest
        from cope_sweep.read.figures.metrics import chosen_band, metric_title, of_rows, planned_metrics, selected_rows
        from cope_sweep.read.tables.model import short_labels
        from cope_sweep.store import QueryError

        plan = results.plan
        x = question.x or "step"
        if x not in ("step", "time"):
            raise QueryError(
                f"--x {x}: curves are drawn by step or by time", code="unknown_key", key=x, allowed=["step", "time"]
            )
        default = (TRAIN_LOSS, *(metric.name for metric in plan.ablation.content.metrics))
        points = with_means(of_rows(results.curves, plan, question.row), (*question.metric, *default))
        logged = list(dict.fromkeys(points["metric"]))
        metrics = question.metric or _evaluated_often(points, default)
        for metric in question.metric:
            if logged and metric not in logged:
                message = f"no run of {plan.name} has logged {metric!r}{suggest(metric, logged)}"
                error = FigureError if metric in planned_metrics(plan) else QueryError
                raise error(message, code="unknown_metric", metric=metric, allowed=logged)
        titles = [metric_title(plan, metric) for metric in dict.fromkeys(metrics)]
        band = chosen_band(points)
        rows = [row.name for row in selected_rows(plan, question.row)]
        return CurvesData(
            frame=curve_frame(points, rows, titles, band), rows=rows, labels=short_labels(plan, plan.rows),
            titles=titles, band=band, is_time=x == "time", log=question.log, has_rings=self.best,
        )  # fmt: skip


def _evaluated_often(points: pd.DataFrame, names: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics that a run has logged at two or more steps; if there are none, those logged once; else all."""
    steps = points.groupby(["metric", "run_id"])["step"].nunique().groupby("metric").max()
    often = tuple(name for name in names if steps.get(name, 0) > 1)
    return often or tuple(name for name in names if name in steps.index) or names


def with_means(points: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """The points, and those of computed metrics (`frozen.metric_parts`) at the steps where all parts were logged."""
    import pandas as pd

    frames, place = [points], ["row", "run_id", "step"]
    for name in dict.fromkeys(names):
        parts = metric_parts(name)
        of_parts = points[points["metric"].isin(parts)]
        if of_parts["metric"].nunique() == len(parts) > 1:
            values = of_parts.pivot_table(index=place, columns="metric", values="value", aggfunc="last").dropna()
            lines_of_values: list[dict[Any, Any]] = values.to_dict("records")
            means = pd.Series([metric_value(line, name) for line in lines_of_values], values.index, "float64")
            lines = of_parts.drop_duplicates(place).drop(columns=["metric", "value"]).set_index(place)
            frames.append(lines.join(means.rename("value"), how="inner").reset_index().assign(metric=name))
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else points


def curve_frame(points: pd.DataFrame, rows: Sequence[str], titles: Sequence[Column], band: Band) -> pd.DataFrame:
    """One line per row, metric and step with statistics of the finished seeds; then one for each unfinished seed.

    row, metric, step
    time_s              mean over the seeds
    n, value            number of finished seeds with a value at this step, and their mean
    low, high           the band; missing for n < 2
    seed, status        of an unfinished run (n = 1, no band); for statistics, missing and `finished`
    best                whether this is the first step with the best mean of the row
    """
    import pandas as pd

    lines: list[dict[Any, Any]] = []
    by_curve = dict(list(points.groupby(["row", "metric"], sort=False)))
    for row in rows:
        for title in titles:
            curve_points = by_curve.get((row, title.name))
            if curve_points is None:
                continue
            is_finished = curve_points["status"] == "finished"
            lines += _mean_lines(row, title, curve_points[is_finished], band)
            unfinished = curve_points[~is_finished].sort_values(["seed", "step"], kind="stable")
            lines += unfinished.assign(n=1, best=False).to_dict("records")
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _mean_lines(row: str, title: Column, finished: pd.DataFrame, band: Band) -> list[dict[Any, Any]]:
    from cope_sweep.read.figures.metrics import seed_statistics

    lines: list[dict[Any, Any]] = []
    for step, points in finished.groupby("step"):
        numbers = seed_statistics(points["value"], title, band)
        line = {"row": row, "metric": title.name, "step": step, "time_s": points["time_s"].mean(), "status": "finished"}
        lines.append(line | numbers | {"value": numbers["mean"], "best": False})
    with_value = [line for line in lines if line["n"]]
    if with_value:  # of equal means, the first
        title.best(with_value, key=lambda line: line["value"])["best"] = True
    return lines


@dataclass(frozen=True, kw_only=True)
class CurvesData(FigureData):
    """The curves of `curve_frame`."""

    EMPTY = "no learning curve"

    rows: Sequence[str]
    labels: Mapping[str, str]
    titles: Sequence[Column]
    """The metrics: one panel each."""
    band: Band
    is_time: bool
    """Whether x is the time, not the step."""
    log: bool | None
    has_rings: bool

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas
        from cope_sweep.read.figures.metrics import band_text

        data, titles, labels, log = self.frame, self.titles, self.labels, self.log
        # Of all rows, so that styles stay the same while a sweep goes on.
        styles = {row: canvas.series_style(index) for index, row in enumerate(self.rows)}
        rows = list(dict.fromkeys(data["row"]))
        row_panels = canvas.has_own_panels(len(rows), len(titles))
        with_bands = row_panels or len(rows) <= MOST_BANDS
        texts = {row: _legend_text(data[data["row"] == row], labels[row]) for row in rows}
        contents = [(metric, row) for metric in titles for row in (rows if row_panels else [None])]
        drawing, axes = canvas.panels(len(contents), title=title, size=size, small=row_panels)
        handles: dict[str, Any] = {}
        column, factor, x_label = _x_axis(data, self.is_time)
        for panel, (metric, panel_row) in zip(axes, contents, strict=False):
            of_metric = data[data["metric"] == metric.name]
            title_parts = [labels[panel_row]] if panel_row else []
            if panel_row is None or len(titles) > 1:
                title_parts.append(metric.label)
            canvas.panel_title(panel, title_parts)
            for row in rows:
                lines = of_metric[of_metric["row"] == row]
                if panel_row in (None, row):
                    style = canvas.series_style(0) if panel_row else styles[row]
                    drawn = lines if with_bands else lines.assign(low=math.nan, high=math.nan)
                    handles.setdefault(row, _draw_row(panel, drawn, style, column, factor, self.has_rings))
                else:
                    mean = lines[lines["status"] == "finished"]
                    canvas.background(panel, mean[column] * factor, mean["value"])
            if of_metric.empty:
                canvas.say_empty(panel, "not logged")
                continue
            values = [*of_metric["value"], *of_metric["low"], *of_metric["high"]]
            canvas.metric_axis(panel, values, metric, log=False if log is None and metric.unit == "%" else log)
            canvas.fit_curves(panel, of_metric[column], of_metric["value"])
            canvas.parameter_axis(panel, [], None, log=False)
            panel.set_xlabel(x_label)
        for metric in titles if row_panels else ():
            panels = [panel for panel, (panel_metric, _) in zip(axes, contents, strict=False) if panel_metric is metric]
            canvas.share_limits(panels)
        note = "single seeds"
        if (data["n"] > 1).any():
            note = f"mean; band: {band_text(self.band)}" if with_bands else "mean over seeds"
        if self.has_rings:
            note += "; ring: best mean"
        artists, legend = [handles[row] for row in rows], [texts[row] for row in rows]
        if row_panels:
            canvas.label_edges(axes)
            counts = data.loc[data["status"] == "finished"].groupby("row")["n"].max()
            count_text = f"n = {counts.min()}"
            if counts.max() > counts.min():
                count_text += f"–{counts.max()}"
            artists, legend = [artists[0], canvas.background(axes[0], [], [])], [count_text, "the other rows"]
        canvas.legend(drawing, artists, legend, title=note)
        return drawing


def _x_axis(data: pd.DataFrame, is_time: bool) -> tuple[str, float, str]:
    """The column, the factor of its values, and the label of the x axis."""
    if not is_time:
        return "step", 1.0, "training step"
    longest_s = data["time_s"].max()
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if longest_s >= 3 * seconds:
            return "time_s", 1 / seconds, f"time since the run began ({unit})"
    return "time_s", 1.0, "time since the run began (s)"


def _draw_row(
    panel: Axes, lines: pd.DataFrame, style: dict[str, Any], column: str, factor: float, has_rings: bool
) -> Any:
    mean = lines[lines["status"] == "finished"].dropna(subset=[column])
    x = mean[column].to_numpy() * factor
    marker_distance = max(1, len(mean) // 12)  # about 12 markers a line
    (handle,) = panel.plot(
        x, mean["value"], **style, markevery=marker_distance, markeredgecolor="white", markeredgewidth=0.4
    )
    has_band = mean["low"].notna().to_numpy()
    if has_band.any():
        panel.fill_between(
            x, mean["low"].astype(float), mean["high"].astype(float), where=has_band, color=style["color"], alpha=0.18,
            linewidth=0,
        )  # fmt: skip
    for _, unfinished in lines[lines["status"] != "finished"].dropna(subset=[column]).groupby("seed"):
        panel.plot(unfinished[column] * factor, unfinished["value"], color=style["color"], linestyle=":", linewidth=1)
    best = mean[mean["best"]]
    if has_rings and len(best):
        panel.plot(
            best[column] * factor, best["value"], linestyle="none", marker="o", markersize=9, markerfacecolor="none",
            markeredgecolor=style["color"], clip_on=False,
        )  # fmt: skip
    return handle


def _legend_text(lines: pd.DataFrame, row: str) -> str:
    counts = lines.loc[lines["status"] == "finished", "n"]
    text = f"{row}, n = {0 if counts.empty else int(counts.max())}"
    unfinished = lines.loc[lines["status"] != "finished", "seed"].nunique()
    return f"{text}, {unfinished} unfinished (dotted)" if unfinished else text
