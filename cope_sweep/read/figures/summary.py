"""The rows of an ablation's table as points with bars, beside the published values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cope_sweep.config import Plan
from cope_sweep.read.figures.base import Figure
from cope_sweep.read.figures.kinds import DEFAULTS, Band, Options
from cope_sweep.read.figures.runs import (
    MetricTitle,
    band_text,
    check_metrics,
    chosen_band,
    final_values,
    metric_columns,
    metric_title,
    seed_statistics,
    selected_rows,
)
from cope_sweep.store import Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

COLUMNS = {
    "row": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64", "std": "float64",
    "low": "float64", "high": "float64", "published": "float64", "published_std": "float64",
}  # fmt: skip
SEEDS_BELOW = 0.3
"""Distance of the dots of the seeds from the line of their row, in rows."""
MEASURED, PUBLISHED = "#0072B2", "#D55E00"


def summary(plan: Plan, store: Store, options: Options = DEFAULTS) -> Figure:
    """Final metrics (default: those of the table by which rows are compared) of every row, with those of each seed."""
    runs = final_values(plan, store, options.rows)
    metrics = check_metrics(plan, options.metrics, metric_columns(runs, plan)) or tuple(
        metric.name for metric in plan.ablation.content.metrics if metric.compared
    )
    titles = [metric_title(plan, name) for name in metrics]
    counts = runs[runs["status"] == "finished"].groupby("row").size()
    band = chosen_band(options.band, counts)
    data = summary_frame(plan, runs, titles, band, options.rows)
    title = options.title or plan.ablation.content.title
    return Figure("summary", title, data, partial(_draw, data, runs, titles, band, title, options.log))


def summary_frame(
    plan: Plan, runs: pd.DataFrame, titles: Sequence[MetricTitle], band: Band, rows: Sequence[str] = ()
) -> pd.DataFrame:
    """One line per row and metric, if a run of the row is finished or a value is published.

    row, metric
    n, seeds                    number of finished runs with a value, and of planned ones
    mean, std                   over the n runs
    low, high                   the band; missing for n < 2
    published, published_std    the paper's numbers
    """
    import pandas as pd

    of_row = dict(list(runs.groupby("row", sort=False)))
    lines = []
    for row in selected_rows(plan, rows):
        for title in titles:
            numbers = seed_statistics(of_row[row.name][title.name].astype("float64"), title, band)
            known = row.published.values.get(title.name) if row.published else None
            known_std = row.published.std.get(title.name) if row.published else None
            if numbers["n"] or known is not None:
                lines.append(
                    (row.name, title.name, numbers["n"], len(row.runs), numbers["mean"], numbers["std"], numbers["low"],
                     numbers["high"], known, known_std)
                )  # fmt: skip
    return pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)


def _draw(
    data: pd.DataFrame,
    runs: pd.DataFrame,
    titles: Sequence[MetricTitle],
    band: Band,
    title: str,
    log: bool | None,
) -> Drawing:
    from cope_sweep.read.figures import canvas
    from cope_sweep.read.figures.scales import metric_axis

    rows = list(dict.fromkeys(data["row"]))
    drawing, axes = canvas.panels(max(1, len(titles)), title=title, height=max(1.4, 0.22 * len(rows) + 0.7))
    if data.empty:
        canvas.say_empty(axes[0])
        for panel in axes[1:]:
            panel.remove()
        return drawing
    columns = 2 if len(titles) == 4 else 3
    for index, (panel, metric) in enumerate(zip(axes, titles, strict=True)):
        shown = data[data["metric"] == metric.name]
        _draw_points(panel, shown, [rows.index(row) for row in shown["row"]])
        seeds = runs.loc[runs["row"].isin(rows) & runs[metric.name].notna(), ["row", metric.name]]
        panel.plot(
            seeds[metric.name], [rows.index(row) + SEEDS_BELOW for row in seeds["row"]],
            ".", color=MEASURED, alpha=0.45, markersize=3.5, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
        values = [*shown["mean"], *shown["low"], *shown["high"], *shown["published"]]
        values += [*seeds[metric.name]]
        values += [*(shown["published"] - shown["published_std"]).clip(lower=0)]
        metric_axis(panel, values, metric.quantity, log=log, percent=metric.unit == "%", which="x")
        panel.set_title(canvas.shortened(metric.label), loc="left")
        panel.set_ylim(len(rows) - 0.5, -0.5)
        texts = [_row_text(data[data["row"] == row], row) for row in rows] if index % columns == 0 else [""] * len(rows)
        panel.set_yticks(range(len(rows)), [canvas.shortened(text, 40) for text in texts])
    note = (
        f"mean of n finished seeds; small dots: seeds; bars: {band_text(band)}"
        if (data["n"] > 1).any()
        else "single seeds"
    )
    handles = [axes[0].plot([], [], "o", color=MEASURED)[0]]
    labels = ["measured"]
    if data["published"].notna().any():
        handles.append(axes[0].plot([], [], "D", color=PUBLISHED, markerfacecolor="none")[0])
        labels.append("published" + (" ± std" if data["published_std"].notna().any() else ""))
    canvas.legend(drawing, handles, labels, title=note)
    return drawing


def _draw_points(panel: Axes, lines: pd.DataFrame, places: Sequence[int]) -> None:
    """Measured points a little above the line of their row, published ones a little below it."""
    import numpy as np

    y = np.asarray(places, dtype=float)
    both = lines["published"].notna().to_numpy() & (lines["n"] > 0).to_numpy()
    shift = np.where(both, 0.13, 0.0)
    panel.hlines(y - shift, lines["low"], lines["high"], color=MEASURED, linewidth=1.6)
    panel.plot(lines["mean"], y - shift, "o", color=MEASURED, markersize=4.5, clip_on=False)
    low, high = lines["published"] - lines["published_std"], lines["published"] + lines["published_std"]
    panel.hlines(y + shift, low.clip(lower=0), high, color=PUBLISHED, linewidth=0.8)
    panel.plot(
        lines["published"], y + shift, "D", color=PUBLISHED, markersize=4.5, markerfacecolor="white", clip_on=False
    )


def _row_text(lines: pd.DataFrame, row: str) -> str:
    n, seeds = int(lines["n"].max()), int(lines["seeds"].max())
    return f"{row}  n = {n}" + (f" of {seeds}" if n < seeds else "")
