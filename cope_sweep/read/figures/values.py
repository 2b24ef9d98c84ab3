"""Final metrics: against a parameter that varies, against the length of the evaluation context, and of each row.

The paper's Figure 2 is `values` (error against training data), its Figure 3 is `contexts`. `summary` has the rows of
the table as points with bars, beside the published values.
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

from cope_sweep.api.formats import Band
from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Optuna, RandomSearch
from cope_sweep.config.explain import suggest
from cope_sweep.config.run import POSITION_PERPLEXITY
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.kinds import FigureError
from cope_sweep.read.figures.metrics import (
    band_text,
    chosen_band,
    chosen_metrics,
    is_log_metric,
    is_log_parameter,
    is_number,
    metric_columns,
    metric_title,
    of_rows,
    panel_key,
    seed_statistics,
    selected_rows,
)
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
"""Column of the summary → its name in the legend, and the dashes of its line."""
SEEDS_BELOW = 0.3
"""Distance of the dots of the seeds from the line of their row, in rows."""
MEASURED, PUBLISHED = "#0072B2", "#D55E00"
TRAINING_CONTEXT = "task.tokens"
LENGTH = re.compile(r"(?P<metric>.+)@(?P<length>\d+)(?P<times>x?)")
"""A metric at another length: `test/perplexity@1024` (tokens), `in_dist/token_error@4x` (times the trained length)."""


@dataclass(frozen=True)
class _Point:
    """A row and a metric at one place of the x axis."""

    row: Row
    metric: Column
    column: str
    """A column of the frame of runs."""
    panel: str = ""
    series: str = ""
    x: float = 0.0
    x_label: str = ""


def values(results: Results, question: GetFigure) -> Figure:
    """Metrics (default: the table's) against `question.x` (default: the first axis with numbers, or else the first).

    Against a fact, such as a cost, each row is a series of its own: its place is measured. The rows of a search are
    points, which no line joins: neighbours differ in the other parameters, too.
    """
    plan = results.plan
    rows = selected_rows(plan, question.row)
    runs = of_rows(results.frame, plan, question.row)
    key = _x_key(plan, question.x)
    table = (metric.name for metric in plan.ablation.content.metrics)
    titles = chosen_metrics(plan, runs, question.metric, table)
    places, labels = _places(plan, rows, runs, key)
    split = panel_key(plan, question.panels)
    drawn = _searched_keys(plan)
    names = _series(plan, rows, {} if key.startswith(FACT) else places, {key, split, *drawn})
    several = len(titles) > 1
    points = [
        _Point(row, title, title.name, _panel_title(row, split, title if several or not split else None),
               names[row.name], places[row.name], labels[row.name])
        for title in titles
        for row in rows
        if row.name in places
    ]  # fmt: skip
    numeric = all(label == "" for label in labels.values())
    x_title = plan.axes.get(key, key.removeprefix(FACT).replace("_", " ") if key.startswith(FACT) else key)
    if question.log_x is None:
        question = question.model_copy(update={"log_x": is_log_parameter(plan, key)})
    return _figure("values", plan, runs, points, question, x_title=x_title, numeric=numeric)


def _searched_keys(plan: Plan) -> tuple[str, ...]:
    """The keys of the search space: rows that differ in them are points of one series."""
    search = plan.ablation.content.search
    return tuple(search.space) if isinstance(search, (RandomSearch, Optuna)) else ()


def _evaluations(row: Row, name: str) -> list[tuple[str, str]]:
    """Prefix of its metrics' names and name of its line, for the row itself and for each variant."""
    return [("", name), *((f"{variant}/", f"{name}, {variant}") for variant in row.runs[0].evaluate.variants)]


def contexts(results: Results, question: GetFigure) -> Figure:
    """A metric at several lengths against the length (default: the first such metric of the table).

    The lengths are tokens, or, where sequences are generated, times the trained length, at which the metric itself is.
    """
    found = _metrics_at_lengths(results, question, of_places=False)
    if not found:
        raise FigureError(
            f"no metric of {results.plan.name} is of another length (test/perplexity@1024, in_dist/token_error@4x); "
            "see evaluate.contexts and evaluate.lengths",
            code="no_contexts",
            ablation=results.plan.name,
        )
    multiples = any(match["times"] for match in found.values())
    if multiples and question.log is None:  # errors of 0 to 100 %: most are large, and a logarithm would flatten them
        question = question.model_copy(update={"log": False})
    x_title = "length of a test sequence (times the trained length)" if multiples else "evaluation context (tokens)"
    return _against_length("contexts", results, question, found, x_title=x_title, multiples=multiples)


def positions(results: Results, question: GetFigure) -> Figure:
    """Perplexity by the place in the context (default: the first such metric), at the last place of each stretch."""
    found = _metrics_at_lengths(results, question, of_places=True)
    if not found:
        raise FigureError(
            f"no metric of {results.plan.name} is by place ({POSITION_PERPLEXITY}@64); see evaluate.positions",
            code="no_positions",
            ablation=results.plan.name,
        )
    return _against_length("positions", results, question, found, x_title="place in the context (tokens)")


def _metrics_at_lengths(results: Results, question: GetFigure, *, of_places: bool) -> dict[str, re.Match[str]]:
    """The metrics of the runs that are of a place in the context, or of a length; and how their names are read."""
    columns = metric_columns(of_rows(results.frame, results.plan, question.row), results.plan)
    found = {name: match for name in columns if (match := LENGTH.fullmatch(name))}
    return {name: match for name, match in found.items() if match["metric"].endswith(POSITION_PERPLEXITY) == of_places}


def _against_length(
    kind: str,
    results: Results,
    question: GetFigure,
    found: Mapping[str, re.Match[str]],
    *,
    x_title: str,
    multiples: bool = False,
) -> Figure:
    """The figure of metrics (default: the first of `found`) against what follows the `@` of their names."""
    plan = results.plan
    rows = selected_rows(plan, question.row)
    runs = of_rows(results.frame, plan, question.row)
    columns_of_runs = metric_columns(runs, plan)
    known = list(dict.fromkeys(match["metric"] for match in found.values()))
    wanted = tuple(name.partition("@")[0] for name in question.metric) or known[:1]
    for name in wanted:
        if name not in known:
            message = f"{plan.name} has no metric {name}@…{suggest(name, known)}"
            raise FigureError(message, code="unknown_metric", metric=name, allowed=known)
    split = panel_key(plan, question.panels) or (TRAINING_CONTEXT if TRAINING_CONTEXT in plan.axes else None)
    names = _series(plan, rows, {}, {split, None})
    points = []
    for base in dict.fromkeys(wanted):
        columns = [(name, int(match["length"])) for name, match in found.items() if match["metric"] == base]
        if multiples and base in columns_of_runs:
            columns.insert(0, (base, 1))
        title = metric_title(plan, columns[0][0])
        title = Column(base, base, title.unit, title.goal)
        shown = title if len(set(wanted)) > 1 or not split else None
        points += [
            _Point(row, title, prefix + column, _panel_title(row, split, shown), name, float(length))
            for row in rows
            for prefix, name in _evaluations(row, names[row.name])
            for column, length in sorted(columns, key=lambda each: each[1])
            if prefix + column in columns_of_runs
        ]
    return _figure(kind, plan, runs, points, question, x_title=x_title, numeric=True)


def _x_key(plan: Plan, name: str | None) -> str:
    """The key that the x axis shows: of an axis, of another value of the spec, or a fact. Raises FigureError."""
    if name is None:
        several = varying_axes(plan, plan.rows)
        numeric = [
            key for key in several if all(is_number(setting(row, key)) for row in plan.rows if key in row.labels)
        ]
        if not several:
            raise FigureError(
                f"{plan.name} has no axis with several values; name what to draw against with --x KEY",
                code="no_axis",
                ablation=plan.name,
            )
        return (numeric or several)[0]
    key = find_axis(plan.axes, name) or name
    if key in plan.axes or key.startswith("facts.") or any(setting(row, key) is not None for row in plan.rows):
        return key
    raise FigureError(
        f"--x {name}: no run of {plan.name} has this key{suggest(name, list(plan.axes))}; "
        "any key of a run (`train.lr`) and any fact (`facts.parameters`) will do",
        code="unknown_key",
        key=name,
        ablation=plan.name,
    )


def _panel_title(row: Row, key: str | None, metric: Column | None) -> str:
    name = "training context" if key == TRAINING_CONTEXT else (key or "").split(".")[-1]
    parts = [f"{name} = {row.labels.get(key, '–')}"] if key else []
    return " · ".join([*([metric.label] if metric else []), *parts])


def _places(plan: Plan, rows: Sequence[Row], runs: pd.DataFrame, key: str) -> tuple[dict[str, float], dict[str, str]]:
    """Row → its place on the x axis, and the label there, empty if places are numbers; only rows with a value."""
    if key in runs.columns and key not in plan.axes:
        found = runs.dropna(subset=[key]).groupby("row")[key].mean()
        places = {str(row): float(value) for row, value in found.items()}
        return places, dict.fromkeys(places, "")
    given = {row.name: setting(row, key) for row in rows}
    given = {name: value for name, value in given.items() if value is not None}
    if given and all(is_number(value) for value in given.values()):
        return {name: float(value) for name, value in given.items()}, dict.fromkeys(given, "")
    labels = {row.name: row.labels.get(key, str(given.get(row.name, ""))) for row in rows}
    labels = {name: label for name, label in labels.items() if label}
    order = {label: float(index) for index, label in enumerate(dict.fromkeys(labels.values()))}
    return {name: order[label] for name, label in labels.items()}, labels


def _series(plan: Plan, rows: Sequence[Row], places: dict[str, float], used: set[str | None]) -> dict[str, str]:
    """Row → the labels of the axes that neither x nor the panels show. Axes that x determines are left out."""
    keys = [key for key in varying_axes(plan, rows) if key not in used and not _determined(rows, key, places)]
    return {row.name: row_label(plan, row, keys) for row in rows}


def _determined(rows: Sequence[Row], key: str, places: dict[str, float]) -> bool:
    """Whether the label of an axis follows from x, as those of axes that are zipped with it."""
    labels: dict[float, set[str | None]] = {}
    for row in rows:
        if row.name in places:
            labels.setdefault(places[row.name], set()).add(row.labels.get(key))
    return len(labels) > 1 and all(len(each) == 1 for each in labels.values())


def _figure(
    kind: str, plan: Plan, runs: pd.DataFrame, points: list[_Point], question: GetFigure, *, x_title: str, numeric: bool
) -> Figure:
    drawn_columns = {point.column for point in points}
    band = chosen_band(question.band, runs, is_log=is_log_metric(runs, drawn_columns, question.log))
    data = result_frame(runs, points, band, COLUMNS)
    in_order = data.sort_values(["panel", "series", "x"], kind="stable", key=_by_appearance)
    data = in_order.reset_index(drop=True)
    title = question.title or plan.ablation.content.title
    titles = {point.metric.name: point.metric for point in points}
    series = list(dict.fromkeys(point.series for point in points))
    return Figure(
        kind,
        title,
        data,
        partial(_draw, data, series, titles, band, title, question, x_title, numeric, not plan.is_drawn),
    )


def _by_appearance(column: pd.Series[Any]) -> pd.Series[Any]:
    """The sort key of a column: names by their first appearance, numbers by their value."""
    return column if column.name == "x" else pd.Series(pd.factorize(column)[0], column.index)


def result_frame(runs: pd.DataFrame, points: Sequence[_Point], band: Band, columns: Mapping[str, str]) -> pd.DataFrame:
    """One line per point at which a run is finished or a value is published, with some of these columns:

    row, panel, metric, series
    x, x_label                  the place on the x axis; its name, if it is no number
    n, seeds                    number of finished runs with a value, and of planned ones
    mean, std                   over the n runs
    low, high                   the band; missing for n < 2
    published, published_std    the paper's numbers
    """
    lines = []
    of_row = dict(list(runs.groupby("row", sort=False)))
    for point in points:
        numbers = seed_statistics(of_row[point.row.name][point.column].astype("float64"), point.metric, band)
        known = point.row.published
        published = known.values.get(point.column) if known else None
        if numbers["n"] or published is not None:
            lines.append({
                "row": point.row.name, "panel": point.panel, "metric": point.metric.name, "series": point.series,
                "x": point.x, "x_label": point.x_label, "seeds": len(point.row.runs), "published": published,
                "published_std": known.std.get(point.column) if known else None, **numbers,
            })  # fmt: skip
    return pd.DataFrame(lines, columns=list(columns)).astype(columns)


def _draw(
    data: pd.DataFrame,
    series: Sequence[str],
    titles: dict[str, Column],
    band: Band,
    title: str,
    question: GetFigure,
    x_title: str,
    numeric: bool,
    is_joined: bool,
) -> Drawing:
    known = [each for each in series if each in set(data["series"])]
    places_of = data[data["x_label"] == ""].groupby(["panel", "series"])["x"].nunique()
    by_name = list(dict.fromkeys(data["panel"]))
    many = canvas.are_apart(len(known), len(by_name)) and bool((places_of > 1).any())
    names = [(name, each) for name in by_name for each in (known if many else [None])]
    drawing, axes = canvas.panels(max(1, len(names)), title=title, small=many)
    if data.empty:
        canvas.say_empty(axes[0])
        return drawing
    handles: dict[str, Any] = {}
    of_panel = dict(zip(data["panel"], data["metric"], strict=True))
    for panel, (name, own) in zip(axes, names, strict=True):
        shown = data[data["panel"] == name]
        metric = titles[of_panel[name]]
        parts = ([own] if own else []) + ([name] if own is None or len(of_panel) > 1 else [])
        canvas.panel_title(panel, parts)
        for index, each in enumerate(series):  # styles stay the same while a sweep goes on
            lines = shown[shown["series"] == each]
            if own in (None, each) and len(lines):
                style = canvas.series_style(0 if own else index)
                handles[each] = _draw_series(panel, lines, style if is_joined else style | {"linestyle": "none"})
            elif len(lines) and is_joined:
                canvas.background(panel, lines["x"], lines["mean"])
        same = data[data["metric"] == metric.name]  # panels of one metric share its scale
        drawn = [*same["mean"], *same["low"], *same["high"], *same["published"]]
        canvas.metric_axis(panel, drawn, metric, log=question.log)
        places = shown.drop_duplicates("x").sort_values("x")
        canvas.parameter_axis(
            panel, places["x"].tolist(), None if numeric else places["x_label"].tolist(), log=question.log_x
        )
        panel.set_xlabel(canvas.shortened(x_title))
    for metric_name in dict.fromkeys(of_panel.values()):
        canvas.share_limits(
            [panel for panel, (name, _) in zip(axes, names, strict=True) if of_panel[name] == metric_name]
        )
    note = f"mean; bars: {band_text(band)}" if (data["n"] > 1).any() else "single seeds"
    if many:
        canvas.label_edges(axes)
        artists, texts = [handles[known[0]], canvas.background(axes[0], [], [])], [_count_text(data), "the other rows"]
    else:
        artists = [handles[each] for each in known]
        texts = [", ".join(filter(None, (each, _count_text(data[data["series"] == each])))) for each in known]
    if data["published"].notna().any():
        artists.append(axes[0].plot([], [], "ko", markersize=8, markerfacecolor="none")[0])
        texts.append("published (hollow)")
    canvas.legend(drawing, artists, texts, title=note)
    return drawing


def _draw_series(panel: Axes, lines: pd.DataFrame, style: dict[str, Any]) -> Any:
    measured, known = lines[lines["n"] > 0], lines[lines["published"].notna()]
    if (lines["x_label"] != "").any():  # names are not on a scale: nothing is between them
        style = style | {"linestyle": "none"}
    (handle,) = panel.plot(measured["x"], measured["mean"], **style)
    banded = measured[measured["low"].notna()]
    panel.vlines(banded["x"], banded["low"], banded["high"], color=style["color"], linewidth=1)
    panel.plot(
        known["x"], known["published"], color=style["color"], marker=style["marker"], markersize=8, linestyle="none",
        markerfacecolor="none",
    )  # fmt: skip
    return handle


def _count_text(lines: pd.DataFrame) -> str:
    """`n = 3`, `n = 1–3 of 3`."""
    low, high, seeds = lines["n"].min(), lines["n"].max(), lines["seeds"].max()
    text = f"n = {low}" if low == high else f"n = {low}–{high}"
    return text if low == seeds else f"{text} of {seeds}"


def summary(results: Results, question: GetFigure) -> Figure:
    """Final metrics (default: those of the table by which rows are compared) of every row, with those of each seed.

    Where errors are of a task with rules that do not solve it (`tables.rules`), lines show the error of the most
    frequent answer, and the least error of the other rules. Panels of percentages of the same quantity share an axis.
    """
    plan = results.plan
    runs = of_rows(results.frame, plan, question.row)
    compared = (metric.name for metric in plan.ablation.content.metrics if metric.compared)
    titles = chosen_metrics(plan, runs, question.metric, compared)
    band = chosen_band(question.band, runs, is_log=is_log_metric(runs, (each.name for each in titles), question.log))
    points = [_Point(row, title, title.name) for row in selected_rows(plan, question.row) for title in titles]
    data = _with_rules(result_frame(runs, points, band, SUMMARY_COLUMNS), plan)
    title = question.title or plan.ablation.content.title
    labels = short_labels(plan, plan.rows)
    return Figure("summary", title, data, partial(_draw_summary, data, runs, titles, labels, band, title, question.log))


def _with_rules(data: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Two further columns, missing where there is no such rule, or where it makes no error:

    most_frequent, shortcut     the error of the most frequent answer, and the least error of the task's other rules
    """
    runs = {row.name: row.runs[0] for row in plan.rows}
    found = [
        [*rule_errors(runs[row], metric).values()] for row, metric in zip(data["row"], data["metric"], strict=True)
    ]
    most_frequent = [errors[0] if errors and errors[0] > 0 else math.nan for errors in found]
    shortcut = [min((error for error in errors[1:] if error > 0), default=math.nan) for errors in found]
    return data.assign(most_frequent=most_frequent, shortcut=shortcut).astype(dict.fromkeys(RULES, "float64"))


def _draw_rules(panel: Axes, shown: pd.DataFrame, rows: Sequence[str]) -> dict[str, Any]:
    """A line at the error of each rule, over the rows of its task. Returns an artist for each kind of rule."""
    found = {}
    for name, (_, dashes) in RULES.items():
        for error in sorted(set(shown[name].dropna())):
            y = np.array(sorted(rows.index(row) for row in shown.loc[shown[name] == error, "row"]))
            for part in np.split(y, np.flatnonzero(np.diff(y) > 1) + 1):  # neighbours have one line
                found[name] = panel.vlines(
                    error, part[0] - 0.5, part[-1] + 0.5, color=canvas.GREY, linestyle=dashes, linewidth=1.2
                )
    return found


def _draw_summary(
    data: pd.DataFrame,
    runs: pd.DataFrame,
    titles: Sequence[Column],
    labels: Mapping[str, str],
    band: Band,
    title: str,
    log: bool | None,
) -> Drawing:
    rows = list(dict.fromkeys(data["row"]))
    drawing, axes = canvas.panels(max(1, len(titles)), title=title, height=max(1.4, 0.22 * len(rows) + 0.7))
    if data.empty:
        canvas.say_empty(axes[0])
        for panel in axes[1:]:
            panel.remove()
        return drawing
    columns = 2 if len(titles) == 4 else 3
    counts = {row: _count_text(data[data["row"] == row].nlargest(1, "n")) for row in rows}
    is_same = len(set(counts.values())) == 1 and len(rows) > 1
    rule_lines: dict[str, Any] = {}
    texts = [canvas.shortened(labels[row], 60) + ("" if is_same else f"  {counts[row]}") for row in rows]
    for index, (panel, metric) in enumerate(zip(axes, titles, strict=True)):
        shown = data[data["metric"] == metric.name]
        seeds = runs.loc[runs["row"].isin(rows) & runs[metric.name].notna(), ["row", metric.name]]
        beyond = canvas.flattening({row: _drawn(shown, seeds, row) for row in rows}, metric)
        far, shown, seeds = shown[shown["row"] == beyond], shown[shown["row"] != beyond], seeds[seeds["row"] != beyond]
        _draw_points(panel, shown, [rows.index(row) for row in shown["row"]])
        panel.plot(
            seeds[metric.name], [rows.index(row) + SEEDS_BELOW for row in seeds["row"]],
            "o", color=MEASURED, alpha=0.5, markersize=2.4, markeredgewidth=0, clip_on=False,
        )  # fmt: skip
        rule_lines |= _draw_rules(panel, shown, rows)
        alike = (
            [each for each in titles if each.quantity_title == metric.quantity_title]
            if metric.unit == "%"
            else [metric]
        )
        same = data[data["metric"].isin(each.name for each in alike) & (data["row"] != beyond)]
        of_seeds = runs.loc[runs["row"].isin(same["row"]), [each.name for each in alike]].to_numpy(dtype="float64")
        values = [*same["mean"], *same["low"], *same["high"], *same["published"], *of_seeds.ravel()]
        values += [*(same["published"] - same["published_std"]).clip(lower=0)]
        is_log = canvas.is_logarithmic(values, log)
        values += [*same["most_frequent"], *same["shortcut"]]
        canvas.metric_axis(panel, values, metric, log=is_log, which="x")
        panel.set_title(canvas.shortened(metric.label), loc="left")
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_yticks(range(len(rows)), texts if index % columns == 0 else [""] * len(rows))
        for mean in far["mean"]:  # at the edge, with its value, so that the others can be told apart
            is_right, text = mean > shown["mean"].mean(), canvas.number(float(f"{mean:.4g}"))
            panel.text(
                float(is_right), rows.index(str(beyond)), f"{text} →" if is_right else f"← {text}",
                transform=panel.get_yaxis_transform(), ha="right" if is_right else "left", va="center", fontsize=7,
                color=MEASURED,
            )  # fmt: skip
    seeds_text = f"{counts[rows[0]].removeprefix('n = ')} seeds" if is_same else "n seeds"
    note = (
        f"mean of {seeds_text}; small dots: seeds; bars: {band_text(band)}" if (data["n"] > 1).any() else "single seeds"
    )
    handles = [axes[0].plot([], [], "o", color=MEASURED)[0]]
    names = ["measured"]
    if data["published"].notna().any():
        handles.append(axes[0].plot([], [], "D", color=PUBLISHED, markerfacecolor="none")[0])
        names.append("published" + (" ± std" if data["published_std"].notna().any() else ""))
    handles += rule_lines.values()
    names += [RULES[name][0] for name in rule_lines]
    canvas.legend(drawing, handles, names, title=note)
    return drawing


def _draw_points(panel: Axes, lines: pd.DataFrame, places: Sequence[int]) -> None:
    """Measured points a little above the line of their row, published ones a little below it."""
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


def _drawn(shown: pd.DataFrame, seeds: pd.DataFrame, row: str) -> list[float]:
    """All values that are drawn of a row."""
    lines = shown.loc[shown["row"] == row, ["mean", "low", "high", "published"]]
    return [*lines.to_numpy().ravel(), *seeds.loc[seeds["row"] == row].iloc[:, 1]]
