"""Final metrics against a parameter, against the length of the evaluation context or the place in it, and row by row.

The paper's Figure 2 is `values` (error against training data), and its Figure 3 is `contexts`. `summary` shows the rows
of the table as points with bars, beside the published values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.figures import GetFigure
from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Contexts, Optuna, RandomSearch, Values
from cope_sweep.config.explain import suggest
from cope_sweep.config.run import POSITION_PERPLEXITY
from cope_sweep.errors import FigureError
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.metrics import (
    Band,
    band_text,
    chosen_band,
    chosen_metrics,
    is_finite_number,
    is_log_metric,
    is_log_parameter,
    metric_columns,
    metric_title,
    of_rows,
    panel_key,
    seed_statistics,
    selected_rows,
)
from cope_sweep.read.numbers import significant
from cope_sweep.read.tables.model import Column, row_label, short_labels, varying_axes
from cope_sweep.read.tables.row_names import find_axis
from cope_sweep.read.tables.rules import rule_errors
from cope_sweep.read.tables.runs import FACT, Results, setting

COLUMNS = {
    "panel": "str", "metric": "str", "series": "str", "x": "float64", "x_label": "str", "n": "int64", "seeds": "int64",
    "mean": "float64", "std": "float64", "low": "float64", "high": "float64", "published": "float64",
}  # fmt: skip
SUMMARY_COLUMNS = {
    "row": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64", "std": "float64",
    "low": "float64", "high": "float64", "published": "float64", "published_std": "float64",
}  # fmt: skip
RULES: dict[str, tuple[str, Any]] = {
    "most_frequent": ("most frequent answer", (0, (1, 1.5))),
    "shortcut": ("best shortcut of the task", (0, (5, 2))),
}
"""Column of the summary → name in the legend, and dashes of the line."""
SEEDS_BELOW = 0.3
"""Distance between the dots of the seeds and the line of their row, in rows."""
MEASURED, PUBLISHED = 0, 1
"""Numbers of their colours in the style."""
TRAINING_CONTEXT = "task.tokens"
LENGTH = re.compile(r"(?P<metric>.+)@(?P<length>\d+)(?P<times>x?)")
"""A metric at another length: `test/perplexity@1024` (tokens), `in_dist/token_error@4x` (times the training length)."""


@dataclass(frozen=True)
class _Point:
    """A metric of a row, at a place on the x axis."""

    row: Row
    metric: Column
    column: str
    """The metric's column in the frame of runs."""
    panel: str = ""
    series: str = ""
    x: float = 0.0
    x_label: str = ""


def values(results: Results, question: GetFigure, declared: Values | None = None) -> Figure:
    """Metrics (default: the table's) against `question.x` (default: the first axis with numbers, or else the first).

    Against a fact, such as a cost, each row is a series of its own, because its place is measured. The rows of a search
    are not joined by a line, because neighbours differ in other parameters as well.
    """
    plan = results.plan
    rows = selected_rows(plan, question.row)
    runs = of_rows(results.frame, plan, question.row)
    key = _x_key(plan, question.x)
    table = (metric.name for metric in plan.ablation.content.metrics)
    titles = chosen_metrics(plan, runs, question.metric, table)
    places, labels = _places(plan, rows, runs, key)
    split = panel_key(plan, question.panels)
    is_fact = key.startswith(FACT)
    names = _series(plan, rows, {} if is_fact else places, {key, split, *_searched_keys(plan)})
    has_metric_titles = len(titles) > 1 or not split
    points = [
        _Point(row, title, title.name, _panel_title(row, split, title if has_metric_titles else None),
               names[row.name], places[row.name], labels[row.name])
        for title in titles
        for row in rows
        if row.name in places
    ]  # fmt: skip
    numeric = all(label == "" for label in labels.values())
    x_title = plan.axes.get(key, key)
    if is_fact and key not in plan.axes:
        x_title = key.removeprefix(FACT).replace("_", " ")
    log_x = declared.log_x if declared is not None else None
    if log_x is None:
        log_x = is_log_parameter(plan, key)
    return _figure("values", plan, runs, points, log=question.log, log_x=log_x, x_title=x_title, numeric=numeric)


def _searched_keys(plan: Plan) -> tuple[str, ...]:
    """The keys of the search space: rows that differ in them are points of one series."""
    search = plan.ablation.content.search
    return tuple(search.space) if isinstance(search, (RandomSearch, Optuna)) else ()


def _evaluations(row: Row, name: str) -> list[tuple[str, str]]:
    """(prefix of metrics, name of the line) of a row and of each of its evaluation variants."""
    return [("", name), *((f"{variant}/", f"{name}, {variant}") for variant in row.runs[0].evaluate.variants)]


def contexts(results: Results, question: GetFigure, _declared: Contexts | None = None) -> Figure:
    """A metric (default: the first one with lengths) against the length of the evaluated sequences, or a place in them.

    Lengths are tokens; for generated sequences, multiples of the training length (1 is the metric itself). A metric by
    place is drawn against the last place of each range of the context.
    """
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    columns_of_runs = metric_columns(runs, plan)
    matches = {name: match for name in columns_of_runs if (match := LENGTH.fullmatch(name))}
    if not matches:
        raise FigureError(
            f"{plan.name} has no metric at other lengths (test/perplexity@1024, in_dist/token_error@4x) or by place "
            f"({POSITION_PERPLEXITY}@64); see evaluate.contexts, evaluate.lengths and evaluate.positions",
            code="no_contexts",
            ablation=plan.name,
        )
    measures = sorted(dict.fromkeys(match["metric"] for match in matches.values()), key=_is_by_place)
    metrics = tuple(dict.fromkeys(name.partition("@")[0] for name in question.metric)) or (measures[0],)
    by_place = _is_by_place(metrics[0])
    allowed = [measure for measure in measures if _is_by_place(measure) == by_place]  # they share the axis of x
    for metric in metrics:
        if metric not in allowed:
            message = f"{plan.name} has no metric {metric}@…{suggest(metric, allowed)}"
            raise FigureError(message, code="unknown_metric", metric=metric, allowed=allowed)
    matches = {name: match for name, match in matches.items() if match["metric"] in allowed}
    multiples = any(match["times"] for match in matches.values())
    # A row of another task may have no lengths; its value at the trained length alone would be a panel with one point.
    rows = [row for row in selected_rows(plan, question.row) if not matches.keys().isdisjoint(row.runs[0].metrics)]
    split = panel_key(plan, question.panels)
    if split is None and TRAINING_CONTEXT in plan.axes:
        split = TRAINING_CONTEXT
    names = _series(plan, rows, {}, {split, None})
    points = []
    for metric in metrics:
        columns = [(name, int(match["length"])) for name, match in matches.items() if match["metric"] == metric]
        if multiples and metric in columns_of_runs:
            columns.insert(0, (metric, 1))
        at_length = metric_title(plan, columns[0][0])
        title = Column(metric, metric, at_length.unit, at_length.goal)
        panel_metric = title if len(metrics) > 1 or not split else None
        points += [
            _Point(row, title, prefix + column, _panel_title(row, split, panel_metric), name, float(length))
            for row in rows
            for prefix, name in _evaluations(row, names[row.name])
            for column, length in sorted(columns, key=lambda column_and_length: column_and_length[1])
            if prefix + column in columns_of_runs
        ]
    x_title, log = "evaluation context (tokens)", question.log
    if by_place:
        x_title = "place in the context (tokens)"
    elif multiples:
        x_title = "length of a test sequence (times the trained length)"
        log = log or False  # most errors are large, and a logarithmic axis would flatten them
    return _figure("contexts", plan, runs, points, log=log, log_x=None, x_title=x_title, numeric=True)


def _is_by_place(metric: str) -> bool:
    return metric.endswith(POSITION_PERPLEXITY)


def _x_key(plan: Plan, name: str | None) -> str:
    """The key on the x axis: an axis of the ablation, another value of the spec, or a fact. Raises FigureError."""
    if name is None:
        varying = varying_axes(plan, plan.rows)
        numeric = [
            key for key in varying if all(is_finite_number(setting(row, key)) for row in plan.rows if key in row.labels)
        ]
        if not varying:
            raise FigureError(
                f"{plan.name} has no axis with several values; name what to draw against with --x KEY",
                code="no_axis",
                ablation=plan.name,
            )
        return (numeric or varying)[0]
    key = find_axis(plan.axes, name) or name
    if key in plan.axes or key.startswith("facts.") or any(setting(row, key) is not None for row in plan.rows):
        return key
    raise FigureError(
        f"--x {name}: no run of {plan.name} has this key{suggest(name, list(plan.axes))}; "
        "give a key of a run (`train.lr`) or a fact (`facts.parameters`)",
        code="unknown_key",
        key=name,
        ablation=plan.name,
    )


def _panel_title(row: Row, key: str | None, metric: Column | None) -> str:
    parts = [metric.label] if metric else []
    if key:
        name = "training context" if key == TRAINING_CONTEXT else key.split(".")[-1]
        parts.append(f"{name} = {row.labels.get(key, '–')}")
    return " · ".join(parts)


def _places(plan: Plan, rows: Sequence[Row], runs: pd.DataFrame, key: str) -> tuple[dict[str, float], dict[str, str]]:
    """Row → place on the x axis, and row → label there (empty if places are numbers); only rows with a value."""
    if key in runs.columns and key not in plan.axes:
        means = runs.dropna(subset=[key]).groupby("row")[key].mean()
        places = {str(row): float(value) for row, value in means.items()}
        return places, dict.fromkeys(places, "")
    settings = {row.name: setting(row, key) for row in rows}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings and all(is_finite_number(value) for value in settings.values()):
        return {name: float(value) for name, value in settings.items()}, dict.fromkeys(settings, "")
    labels = {row.name: row.labels.get(key, str(settings.get(row.name, ""))) for row in rows}
    labels = {name: label for name, label in labels.items() if label}
    order = {label: float(index) for index, label in enumerate(dict.fromkeys(labels.values()))}
    return {name: order[label] for name, label in labels.items()}, labels


def _series(plan: Plan, rows: Sequence[Row], places: dict[str, float], used: set[str | None]) -> dict[str, str]:
    """Row → its labels on the axes that neither x nor the panels show, without axes whose labels follow from x."""
    keys = [key for key in varying_axes(plan, rows) if key not in used and not _determined(rows, key, places)]
    return {row.name: row_label(plan, row, keys) for row in rows}


def _determined(rows: Sequence[Row], key: str, places: dict[str, float]) -> bool:
    """Whether the label on an axis follows from x, because the two axes vary together."""
    labels: dict[float, set[str | None]] = {}
    for row in rows:
        if row.name in places:
            labels.setdefault(places[row.name], set()).add(row.labels.get(key))
    return len(labels) > 1 and all(len(labels_at_x) == 1 for labels_at_x in labels.values())


def _figure(
    kind: str,
    plan: Plan,
    runs: pd.DataFrame,
    points: list[_Point],
    *,
    log: bool | None,
    log_x: bool | None,
    x_title: str,
    numeric: bool,
) -> Figure:
    band = chosen_band(runs, is_log=is_log_metric(runs, {point.column for point in points}, log))
    data = result_frame(runs, points, band, COLUMNS)
    in_order = data.sort_values(["panel", "series", "x"], kind="stable", key=_by_appearance)
    data = in_order.reset_index(drop=True)
    titles = {point.metric.name: point.metric for point in points}
    series = list(dict.fromkeys(point.series for point in points))
    draw = partial(_draw, data, series, titles, band, log, log_x, x_title, numeric, not plan.is_drawn)
    return Figure(kind, plan.ablation.content.title, data, draw)


def _by_appearance(column: pd.Series[Any]) -> pd.Series[Any]:
    """A sort key: x by its value, names by their first appearance."""
    return column if column.name == "x" else pd.Series(pd.factorize(column)[0], column.index)


def result_frame(runs: pd.DataFrame, points: Sequence[_Point], band: Band, columns: Mapping[str, str]) -> pd.DataFrame:
    """One line per point with a finished run or a published value, with some of these columns:

    row, panel, metric, series
    x, x_label                  the place on the x axis; its name, if it is not a number
    n, seeds                    number of finished runs with a value, and of planned runs
    mean, std                   over the n runs
    low, high                   the band; missing for n < 2
    published, published_std    the paper's numbers
    """
    lines = []
    of_row = dict(list(runs.groupby("row", sort=False)))
    for point in points:
        numbers = seed_statistics(of_row[point.row.name][point.column].astype("float64"), point.metric, band)
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


def _draw(
    data: pd.DataFrame,
    series: Sequence[str],
    titles: dict[str, Column],
    band: Band,
    log: bool | None,
    log_x: bool | None,
    x_title: str,
    numeric: bool,
    is_joined: bool,
    title: str,
    size: canvas.Size | None,
) -> Drawing:
    drawn_series = [name for name in series if name in set(data["series"])]
    places = data[data["x_label"] == ""].groupby(["panel", "series"])["x"].nunique()
    panel_names = list(dict.fromkeys(data["panel"]))
    own_panels = canvas.has_own_panels(len(drawn_series), len(panel_names)) and bool((places > 1).any())
    contents = [(name, own) for name in panel_names for own in (drawn_series if own_panels else [None])]
    drawing, axes = canvas.panels(max(1, len(contents)), title=title, size=size, small=own_panels)
    if data.empty:
        canvas.say_empty(axes[0])
        return drawing
    handles: dict[str, Any] = {}
    metric_of_panel = dict(zip(data["panel"], data["metric"], strict=True))
    for panel, (panel_name, own_series) in zip(axes, contents, strict=True):
        of_panel = data[data["panel"] == panel_name]
        metric = titles[metric_of_panel[panel_name]]
        title_parts = [own_series] if own_series else []
        if own_series is None or len(metric_of_panel) > 1:
            title_parts.append(panel_name)
        canvas.panel_title(panel, title_parts)
        for index, name in enumerate(series):  # all of them, so that styles stay the same while a sweep goes on
            lines = of_panel[of_panel["series"] == name]
            if own_series in (None, name) and len(lines):
                style = canvas.series_style(0 if own_series else index)
                handles[name] = _draw_series(panel, lines, style if is_joined else style | {"linestyle": "none"})
            elif len(lines) and is_joined:
                canvas.background(panel, lines["x"], lines["mean"])
        of_metric = data[data["metric"] == metric.name]  # panels of one metric share its scale
        values = [*of_metric["mean"], *of_metric["low"], *of_metric["high"], *of_metric["published"]]
        canvas.metric_axis(panel, values, metric, log=log)
        by_place = of_panel.drop_duplicates("x").sort_values("x")
        labels = None if numeric else by_place["x_label"].tolist()
        canvas.parameter_axis(panel, by_place["x"].tolist(), labels, log=log_x)
        panel.set_xlabel(canvas.shortened(x_title))
    for metric_name in dict.fromkeys(metric_of_panel.values()):
        canvas.share_limits(
            [panel for panel, (name, _) in zip(axes, contents, strict=True) if metric_of_panel[name] == metric_name]
        )
    note = f"mean; bars: {band_text(band)}" if (data["n"] > 1).any() else "single seeds"
    if own_panels:
        canvas.label_edges(axes)
        artists = [handles[drawn_series[0]], canvas.background(axes[0], [], [])]
        texts = [_count_text(data), "the other rows"]
    else:
        artists = [handles[name] for name in drawn_series]
        counts = [_count_text(data[data["series"] == name]) for name in drawn_series]
        texts = [f"{name}, {count}" if name else count for name, count in zip(drawn_series, counts, strict=True)]
        if len(counts) > 1 and len(set(counts)) == 1:
            texts, note = drawn_series, f"{counts[0]}; {note}"
    if data["published"].notna().any():
        artists.append(axes[0].plot([], [], "ko", markersize=8, markerfacecolor="none")[0])
        texts.append("published (hollow)")
    canvas.legend(drawing, artists, texts, title=note)
    return drawing


def _draw_series(panel: Axes, lines: pd.DataFrame, style: dict[str, Any]) -> Any:
    measured, published = lines[lines["n"] > 0], lines[lines["published"].notna()]
    if (lines["x_label"] != "").any():  # nothing is between two names
        style = style | {"linestyle": "none"}
    (handle,) = panel.plot(measured["x"], measured["mean"], **style)
    with_band = measured[measured["low"].notna()]
    panel.vlines(with_band["x"], with_band["low"], with_band["high"], color=style["color"], linewidth=1)
    panel.plot(
        published["x"], published["published"], color=style["color"], marker=style["marker"], markersize=8,
        linestyle="none", markerfacecolor="none",
    )  # fmt: skip
    return handle


def _count_text(lines: pd.DataFrame) -> str:
    """The numbers of finished seeds: `n = 3`, `n = 1–3 of 3`."""
    low, high, seeds = lines["n"].min(), lines["n"].max(), lines["seeds"].max()
    text = f"n = {low}" if low == high else f"n = {low}–{high}"
    return text if low == seeds else f"{text} of {seeds}"


def summary(results: Results, question: GetFigure) -> Figure:
    """Final metrics (default: those by which the table compares rows) of every row, with dots for the seeds.

    Lines show the error of the most frequent answer and the smallest error of the task's other rules (`tables.rules`),
    if it has any. Panels of percentages of the same quantity share an axis.
    """
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    compared = (metric.name for metric in plan.ablation.content.metrics if metric.compared)
    titles = chosen_metrics(plan, runs, question.metric, compared)
    band = chosen_band(runs, is_log=is_log_metric(runs, (title.name for title in titles), question.log))
    points = [_Point(row, title, title.name) for row in selected_rows(plan, question.row) for title in titles]
    data = _with_rules(result_frame(runs, points, band, SUMMARY_COLUMNS), plan)
    draw = partial(_draw_summary, data, runs, titles, short_labels(plan, plan.rows), band, question.log)
    return Figure("summary", plan.ablation.content.title, data, draw)


def _with_rules(data: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """The frame with two more columns; a value is missing if there is no such rule, or it makes no error:

    most_frequent, shortcut     the error of the most frequent answer, and the smallest error of the task's other rules
    """
    runs = {row.name: row.runs[0] for row in plan.rows}
    errors_of_lines = [
        [*rule_errors(runs[row], metric).values()] for row, metric in zip(data["row"], data["metric"], strict=True)
    ]
    most_frequent = [errors[0] if errors and errors[0] > 0 else math.nan for errors in errors_of_lines]
    shortcut = [min((error for error in errors[1:] if error > 0), default=math.nan) for errors in errors_of_lines]
    return data.assign(most_frequent=most_frequent, shortcut=shortcut).astype(dict.fromkeys(RULES, "float64"))


def _draw_rules(panel: Axes, data: pd.DataFrame, rows: Sequence[str]) -> dict[str, Any]:
    """Draw a line at the error of each rule, across the rows of its task. Returns an artist for each kind of rule."""
    artists = {}
    for name, (_, dashes) in RULES.items():
        for error in sorted(set(data[name].dropna())):
            y = np.array(sorted(rows.index(row) for row in data.loc[data[name] == error, "row"]))
            for part in np.split(y, np.flatnonzero(np.diff(y) > 1) + 1):  # neighbouring rows share a line
                artists[name] = panel.vlines(
                    error, part[0] - 0.5, part[-1] + 0.5, color=canvas.GREY, linestyle=dashes, linewidth=1.2
                )
    return artists


def _draw_summary(
    data: pd.DataFrame,
    runs: pd.DataFrame,
    titles: Sequence[Column],
    labels: Mapping[str, str],
    band: Band,
    log: bool | None,
    title: str,
    size: canvas.Size | None,
) -> Drawing:
    rows = list(dict.fromkeys(data["row"]))
    height = max(1.4, 0.22 * len(rows) + 0.7)
    drawing, axes = canvas.panels(max(1, len(titles)), title=title, size=size, height=height)
    if data.empty:
        canvas.say_empty(axes[0])
        for panel in axes[1:]:
            panel.remove()
        return drawing
    columns = canvas.columns_of(axes[0])
    counts = {row: _count_text(data[data["row"] == row].nlargest(1, "n")) for row in rows}
    has_one_count = len(set(counts.values())) == 1 and len(rows) > 1
    rule_lines: dict[str, Any] = {}
    texts = [canvas.shortened(labels[row], 60) + ("" if has_one_count else f"  {counts[row]}") for row in rows]
    for index, (panel, metric) in enumerate(zip(axes, titles, strict=True)):
        points = data[data["metric"] == metric.name]
        seeds = runs.loc[runs["row"].isin(rows) & runs[metric.name].notna(), ["row", metric.name]]
        far_row = canvas.flattening({row: _values_of_row(points, seeds, row) for row in rows}, metric)
        far_points = points[points["row"] == far_row]
        points, seeds = points[points["row"] != far_row], seeds[seeds["row"] != far_row]
        _draw_points(panel, points, [rows.index(row) for row in points["row"]])
        panel.plot(
            seeds[metric.name], [rows.index(row) + SEEDS_BELOW for row in seeds["row"]],
            "o", color=canvas.colour(MEASURED), alpha=0.5, markersize=2.4, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
        rule_lines |= _draw_rules(panel, points, rows)
        on_axis = [metric]
        if metric.unit == "%":
            on_axis = [title for title in titles if title.quantity_title == metric.quantity_title]
        axis_data = data[data["metric"].isin(title.name for title in on_axis) & (data["row"] != far_row)]
        axis_runs = runs.loc[runs["row"].isin(axis_data["row"]), [title.name for title in on_axis]]
        values = [*axis_data["mean"], *axis_data["low"], *axis_data["high"], *axis_data["published"]]
        values += [*axis_runs.to_numpy(dtype="float64").ravel()]
        values += [*(axis_data["published"] - axis_data["published_std"]).clip(lower=0)]
        is_log = canvas.is_logarithmic(values, log)
        values += [*axis_data["most_frequent"], *axis_data["shortcut"]]
        canvas.metric_axis(panel, values, metric, log=is_log, which="x")
        panel.set_title(canvas.shortened(metric.label), loc="left")
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_yticks(range(len(rows)), texts if index % columns == 0 else [""] * len(rows))
        for mean in far_points["mean"]:  # at the edge, with its value, so that the others can be told apart
            is_right, text = mean > points["mean"].mean(), canvas.number(float(significant(mean)))
            panel.text(
                float(is_right), rows.index(str(far_row)), f"{text} →" if is_right else f"← {text}",
                transform=panel.get_yaxis_transform(), ha="right" if is_right else "left", va="center",
                fontsize=canvas.points(7), color=canvas.colour(MEASURED),
            )  # fmt: skip
    note = "single seeds"
    if (data["n"] > 1).any():
        seed_count = counts[rows[0]].removeprefix("n = ") if has_one_count else "n"
        note = f"mean of {seed_count} seeds; small dots: seeds; bars: {band_text(band)}"
    handles = [axes[0].plot([], [], "o", color=canvas.colour(MEASURED))[0]]
    names = ["measured"]
    if data["published"].notna().any():
        handles.append(axes[0].plot([], [], "D", color=canvas.colour(PUBLISHED), markerfacecolor="none")[0])
        names.append("published ± std" if data["published_std"].notna().any() else "published")
    handles += rule_lines.values()
    names += [RULES[name][0] for name in rule_lines]
    canvas.legend(drawing, handles, names, title=note)
    return drawing


def _draw_points(panel: Axes, lines: pd.DataFrame, places: Sequence[int]) -> None:
    """Draw measured points a little above the line of their row, and published ones a little below it."""
    y = np.asarray(places, dtype=float)
    has_both = lines["published"].notna().to_numpy() & (lines["n"] > 0).to_numpy()
    shift = np.where(has_both, 0.13, 0.0)
    panel.hlines(y - shift, lines["low"], lines["high"], color=canvas.colour(MEASURED), linewidth=1.6)
    panel.plot(lines["mean"], y - shift, "o", color=canvas.colour(MEASURED), markersize=4.5, clip_on=False)
    low, high = lines["published"] - lines["published_std"], lines["published"] + lines["published_std"]
    panel.hlines(y + shift, low.clip(lower=0), high, color=canvas.colour(PUBLISHED), linewidth=0.8)
    panel.plot(
        lines["published"],
        y + shift,
        "D",
        color=canvas.colour(PUBLISHED),
        markersize=4.5,
        markerfacecolor="white",
        clip_on=False,
    )


def _values_of_row(points: pd.DataFrame, seeds: pd.DataFrame, row: str) -> list[float]:
    """All values of a row that are drawn."""
    lines = points.loc[points["row"] == row, ["mean", "low", "high", "published"]]
    return [*lines.to_numpy().ravel(), *seeds.loc[seeds["row"] == row].iloc[:, 1]]
