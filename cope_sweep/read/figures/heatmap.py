"""Many rows and columns: each cell shows its value as a number and a colour, and rows are sorted by mean rank."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as Drawing

from cope_sweep.api.figures import GetFigure
from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Heatmap
from cope_sweep.read.figures import canvas
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.metrics import chosen_metrics, metric_title, of_rows, panel_key, selected_rows
from cope_sweep.read.numbers import MISSING, fixed, significant
from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.model import Column, column_of, named_label, row_label, varying_axes
from cope_sweep.read.tables.runs import Results

COLUMNS = {
    "row": "str", "group": "str", "column": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64",
    "std": "float64", "grey": "bool", "rank": "float64", "mean_rank": "float64",
}  # fmt: skip
Groups = dict[str, dict[str, str]]
"""Group of columns → metric → title of its column."""

POINT = 1 / 72
CELL_HEIGHT, GROUP_GAP, LINE, RANK_WIDTH = 15 * POINT, 7 * POINT, 10 * POINT, 40 * POINT
"""Inches. LINE is the height of a line in the title of a column."""
ALL_CELLS, LEAST_CELL, GREATEST_CELL = 6.3, 0.5, 0.9
"""Inches: the width of all cells together, and the limits of the width of one cell."""
FONT_SIZE = 8
"""Points. The sizes of texts are fixed, as those of cells are; a drawing of another size is scaled as a whole."""
CHARACTER = 0.068
"""Width of a character in the name of a row, in inches."""
GREY, GREY_TEXT = "#d4d7db", "#4a4f55"
COLOURS = "RdYlBu"
"""From the worst value (red) to the best (blue)."""


def heatmap(results: Results, question: GetFigure, declared: Heatmap | None = None) -> Figure:
    """Final metrics of every row; without a declaration, the table's metrics for each label of the axis `panels`."""
    plan = results.plan
    rows = selected_rows(plan, question.row)
    runs = of_rows(results.frame, plan, question.row)
    panels = panel_key(plan, question.panels)
    compared = (metric.name for metric in plan.ablation.content.metrics if metric.compared)
    titles = {column.name: column for column in chosen_metrics(plan, runs, question.metric, compared)}
    groups: Groups
    if declared is not None:
        groups = declared.columns
    else:
        labels = list(dict.fromkeys(row.labels.get(panels, "") for row in rows)) if panels else [""]
        groups = {label: {name: column.label for name, column in titles.items()} for label in labels}
    data = heatmap_frame(plan, rows, runs, panels, groups)
    options = declared or Heatmap(columns=groups)
    names = {group: named_label(plan.axes[panels], group) if panels and group else group for group in groups}
    note = _note(data, options, _learning_metric(plan))
    return Figure("heatmap", plan.ablation.content.title, data, partial(_draw, data, titles, names, options, note))


def heatmap_frame(
    plan: Plan, rows: Sequence[Row], runs: pd.DataFrame, panels: str | None, groups: Groups
) -> pd.DataFrame:
    """One line per cell with a finished run, sorted by mean rank:

    row              labels on all axes except `panels`
    group, column, metric
    n, seeds         number of finished runs with a value, and of planned ones
    mean, std        over the n runs
    grey             whether most of the row's seeds have not learned the task; not in the column that says so
    rank             among the means of the column, from 1 (best); equal means share the mean of their ranks
    mean_rank        the mean of the row's ranks
    """
    keys = [key for key in varying_axes(plan, rows) if key != panels]
    of_row = dict(list(runs.groupby("row", sort=False)))
    learning_metric = _learning_metric(plan)
    learning = learning_metric.name if learning_metric else None
    lines = []
    for group, columns in groups.items():
        members = [row for row in rows if panels is None or row.labels.get(panels, "") == group]
        names = {row.name: row_label(plan, row, keys) or row.name for row in members}
        counts = Counter(names.values())
        for row in members:
            name = names[row.name] if counts[names[row.name]] == 1 else row.name
            finished = of_row[row.name]
            is_unlearned = learning_metric is not None and _is_mostly_unlearned(finished, learning_metric)
            for metric, title in columns.items():
                summary = summarise(finished[metric].astype("float64") if metric in finished else [])
                if summary.n:
                    lines.append({
                        "row": name, "group": group, "column": title, "metric": metric, "n": summary.n,
                        "seeds": len(row.runs), "mean": summary.mean, "std": summary.std,
                        "grey": is_unlearned and metric != learning,
                    })  # fmt: skip
    data = pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)
    for _, cells in data.groupby(["group", "metric"], sort=False):
        is_ascending = metric_title(plan, cells["metric"].iloc[0]).goal == "min"
        data.loc[cells.index, "rank"] = cells["mean"].rank(ascending=is_ascending)
    data["mean_rank"] = data.groupby("row")["rank"].transform("mean")
    # Sort by rows first: the cells of a row that is not in all groups may come late.
    data["_first"] = pd.factorize(data["row"])[0]
    in_order = data.sort_values(["mean_rank", "_first"], kind="stable")
    return in_order.drop(columns="_first").reset_index(drop=True)


def _learning_metric(plan: Plan) -> Column | None:
    """The first metric of the table that says which value means that a task is learned (`learned`)."""
    return next((column_of(metric) for metric in plan.ablation.content.metrics if metric.learned is not None), None)


def _is_mostly_unlearned(runs: pd.DataFrame, metric: Column) -> bool:
    """Whether most of a row's runs have not learned the task, by the metric's `learned`."""
    values = runs[metric.name].dropna().astype("float64").tolist()
    return sum(not metric.is_learned(value) for value in values) > len(values) / 2


def _draw(
    data: pd.DataFrame,
    titles: Mapping[str, Column],
    names: Mapping[str, str],
    options: Heatmap,
    note: str,
    title: str,
    size: canvas.Size | None,
) -> Drawing:
    if data.empty:
        drawing, (panel,) = canvas.panels(1, title=title, size=size)
        canvas.say_empty(panel)
        return drawing
    rows = list(dict.fromkeys(data["row"]))
    columns = [
        (group, metric, text)
        for group, titles_of_group in options.columns.items()
        for metric, text in titles_of_group.items()
        if ((data["group"] == group) & (data["metric"] == metric)).any()
    ]
    headings = [textwrap.wrap(canvas.shortened(text, 40), 9) for _, _, text in columns]
    labels = [canvas.shortened(row) for row in rows]
    cell = _points(min(max(ALL_CELLS / len(columns), LEAST_CELL), GREATEST_CELL))
    breaks = [index for index in range(1, len(columns)) if columns[index][0] != columns[index - 1][0]]
    lefts = [index * cell + GROUP_GAP * sum(start <= index for start in breaks) for index in range(len(columns))]
    left = _points(0.15 + CHARACTER * max(map(len, labels)))
    width = max(left + lefts[-1] + cell + RANK_WIDTH, 3.0)
    title_lines = textwrap.wrap(canvas.shortened(title, 200), max(20, int(11 * width)))
    note_lines = [
        line for text in (note, options.caption) for line in textwrap.wrap(canvas.printable(text), int(17 * width))
    ]
    has_group_names = any(names.values())
    top = _points(0.2 + 0.2 * len(title_lines) + LINE * max(map(len, headings)) + 0.22 * has_group_names)
    height = top + CELL_HEIGHT * len(rows) + _points(0.2 + 0.16 * len(note_lines))

    drawing = Drawing(figsize=(width, height))
    axes = drawing.add_axes((0, 0, 1, 1))  # x: inches from the first cell; y: inches below the first row
    axes.set(xlim=(-left, width - left), ylim=(height - top, -top))
    axes.axis("off")
    axes.text(0.12 - left, 0.1 - top, "\n".join(title_lines), fontsize=10, va="top")
    axes.text(0.12 - left, CELL_HEIGHT * len(rows) + 0.1, "\n".join(note_lines), fontsize=7.5, va="top")
    for index, label in enumerate(labels):
        axes.text(-0.08, CELL_HEIGHT * (index + 0.5) - POINT, label, ha="right", va="center", fontsize=FONT_SIZE)
    rank = lefts[-1] + cell + RANK_WIDTH / 2
    middles = [*(x + cell / 2 for x in lefts), rank]
    for x, lines in zip(middles, [*headings, ["mean", "rank"]], strict=True):
        for above, text in enumerate(reversed(lines)):  # one text per line, so that baselines agree
            axes.text(x, -0.06 - LINE * above, text, ha="center", va="baseline", fontsize=7.5)
    for start, end in zip([0, *breaks], [*breaks, len(columns)], strict=True):
        text = canvas.shortened(names[columns[start][0]], max(8, int((end - start) * cell / CHARACTER)))
        middle, y = (lefts[start] + lefts[end - 1] + cell) / 2, -0.14 - LINE * max(map(len, headings))
        axes.text(middle, y, text, ha="center", va="baseline", fontsize=8.5, fontweight="bold")
    for row, mean_rank in data.drop_duplicates("row").set_index("row")["mean_rank"].items():
        y = CELL_HEIGHT * (rows.index(str(row)) + 0.5) - POINT
        axes.text(rank, y, fixed(mean_rank, 1), ha="center", va="center", fontsize=FONT_SIZE)
    _draw_cells(axes, data, rows, columns, lefts, cell, titles, options)
    return drawing


def _points(inches: float) -> float:
    """The length rounded to whole points: short numbers make an SVG smaller."""
    return round(inches / POINT) * POINT


def _draw_cells(
    axes: Axes,
    data: pd.DataFrame,
    rows: Sequence[str],
    columns: Sequence[tuple[str, str, str]],
    lefts: Sequence[float],
    cell: float,
    titles: Mapping[str, Column],
    options: Heatmap,
) -> None:
    colours = mpl.colormaps[COLOURS]
    corners, fills = [], []
    for (group, metric, _), x in zip(columns, lefts, strict=True):
        cells = data[(data["group"] == group) & (data["metric"] == metric)]
        means = dict(zip(cells["row"], cells["mean"], strict=True))
        grey_rows = set(cells.loc[cells["grey"], "row"])
        column = titles[metric]
        decimals = column.decimals if options.decimals is None else options.decimals
        low, high = _limits(data if options.colours == "all" else cells, column)
        for index, row in enumerate(rows):
            y, text, colour = CELL_HEIGHT * index, MISSING, canvas.GREY
            if row in means:
                mean = means[row]
                fill, colour = GREY, GREY_TEXT
                if row not in grey_rows:
                    share = (mean - low) / (high - low) if high > low else 0.0
                    fill = mpl.colors.to_hex(colours(0.08 + 0.84 * (1 - share if column.goal == "min" else share)))
                    colour = _text_colour(fill)
                x_end, y_end = x + cell - 2 * POINT, y + CELL_HEIGHT - 2 * POINT
                corners.append([(x, y), (x_end, y), (x_end, y_end), (x, y_end)])
                fills.append(fill)
                text = _number(mean * column.scale, decimals)
            axes.text(
                x + cell / 2 - POINT,
                y + CELL_HEIGHT / 2 - POINT,
                text,
                ha="center",
                va="center",
                color=colour,
                fontsize=7.5,
            )
    axes.add_collection(PolyCollection(corners, facecolors=fills, linewidths=0, clip_on=False))


def _limits(cells: pd.DataFrame, column: Column) -> tuple[float, float]:
    """The ends of a colour scale; a scale of percentages starts at 0."""
    low, high = float(cells["mean"].min()), float(cells["mean"].max())
    return (min(low, 0.0) if column.bounds.kind == "both" else low), high


def _number(value: float, decimals: int) -> str:
    """The text of a value: `0` is exact, `0.0` is rounded."""
    if value == 0:
        return "0"
    return fixed(value, decimals) if abs(value) < 1e5 else canvas.number(float(significant(value, 3)))


def _text_colour(fill: str) -> Literal["white", "black"]:
    red, green, blue = mpl.colors.to_rgb(fill)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"


def _title_of(rule: Column, options: Heatmap) -> str:
    """The title of a column in the figure or, if it has none there, in the table."""
    return next((columns[rule.name] for columns in options.columns.values() if rule.name in columns), rule.label)


def _note(data: pd.DataFrame, options: Heatmap, rule: Column | None) -> str:
    if data.empty:
        return ""
    low, high = data["n"].min(), data["n"].max()
    seeds = f"{low}" if low == high else f"{low} to {high}"
    number = f"{seeds} seed{'s' if high > 1 else ''}"
    scale = " of each column" if options.colours == "column" else ""
    parts = [f"Mean of {number}, coloured from best (blue) to worst (red){scale}."]
    if rule is not None and data["grey"].any():
        text = f"{(rule.learned or 0.0) * rule.scale:g}{' %' if rule.unit == '%' else ''}"
        worse = "more" if rule.goal == "min" else "less"
        limit = f"{worse} than {text} {_title_of(rule, options)}"
        parts.append(f"Grey: most seeds have not learned the task itself ({limit}).")
    return " ".join(parts)
