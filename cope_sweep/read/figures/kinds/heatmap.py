"""Many rows and columns: each cell shows its value as a number and a colour, and rows are sorted by mean rank."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from cope_sweep.figures import FIGURES
from cope_sweep.frozen import MetricName
from cope_sweep.read.figures.base import FigureData, FigureKind
from cope_sweep.read.numbers import MISSING, fixed, significant

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Plan, Row
    from cope_sweep.config.checks import Planned
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.results import Results

COLUMNS = {
    "row": "str", "group": "str", "column": "str", "metric": "str", "n": "int64", "seeds": "int64", "mean": "float64",
    "std": "float64", "learned": "float64", "grey": "bool", "rank": "float64", "mean_rank": "float64",
}  # fmt: skip
Groups = dict[str, dict[str, str]]
"""Group of columns → metric → title of its column."""

POINT = 1 / 72
CELL_HEIGHT, GROUP_GAP, LINE, GROUP_LINE, RANK_WIDTH = 15 * POINT, 7 * POINT, 10 * POINT, 11 * POINT, 40 * POINT
"""Inches. LINE is the height of a line in the title of a column, GROUP_LINE of one in the name of a group."""
ALL_CELLS, LEAST_CELL, GREATEST_CELL = 6.3, 0.5, 0.9
"""Inches: the width of all cells together, and the limits of the width of one cell."""
FONT_SIZE = 8
"""Points. The sizes of texts are fixed, as those of cells are; a drawing of another size is scaled as a whole."""
CHARACTER, BOLD_CHARACTER = 0.068, 0.08
"""Width of a character in the name of a row, and of a group, in inches."""
GREY, GREY_TEXT = "#d4d7db", "#4a4f55"
COLOURS = "RdYlBu"
"""From the worst value (red) to the best (blue)."""


@FIGURES.register
class Heatmap(FigureKind):
    """The values of many rows in many columns, as numbers and colours, sorted by the mean of the rank in each column.

    Only columns that all rows have count in it.

    The first metric with `learned` says whether a seed has learned the task. Its cells show how many have, and are
    ranked by that share. Where most seeds of a row have not, its cells of other metrics are grey.
    """

    SHOWS = "many rows and columns as numbers and colours, sorted by mean rank"
    ORDER = 50
    OFFERED = "axes"
    TAKES = ("metric", "panels", "row")

    kind: Literal["heatmap"] = "heatmap"
    panels: str | None = Field(default=None, description="An axis key: each of its values gets its own columns.")
    columns: Annotated[dict[str, Annotated[dict[MetricName, str], Field(min_length=1)]], Field(min_length=1)] = Field(
        description="Label of the axis `panels` (or, without it, any heading) → metrics, with the titles of their "
        "columns."
    )
    colours: Literal["column", "all"] = Field(
        default="column", description="What a colour scale is for: each column by itself, or all columns together."
    )
    decimals: Annotated[int, Field(ge=0, le=6)] | None = Field(
        default=None, description="Digits after the decimal point; null: as for the metric."
    )
    caption: str = Field(default="", description="Below the figure.")

    @classmethod
    def undeclared(cls) -> FigureKind:
        return cls.model_construct(columns={})

    def axes(self) -> Mapping[str, str]:
        return {} if self.panels is None else {"panels": self.panels}

    def check(self, planned: Planned) -> None:
        """Also refuses columns of a value that the axis does not have, or of a metric that no run has."""
        from cope_sweep.config.explain import suggest
        from cope_sweep.frozen import is_reported

        labels = planned.labels(self.panels)
        metrics = list(dict.fromkeys(name for run in planned.runs for name in run.metrics))
        for group, columns in self.columns.items():
            if labels and group not in labels:
                message = f"{self.panels} has no value {group!r}" + suggest(group, labels)
                raise planned.error(("columns", group), message, "unknown_value", value=group, allowed=labels)
            for name in columns:
                if not any(is_reported(name, run.metrics) for run in planned.runs):
                    raise planned.no_metric(("columns", group, name), planned.runs, name, metrics)
        super().check(planned)

    def question_fields(self) -> dict[str, Any]:
        metrics = dict.fromkeys(name for columns in self.columns.values() for name in columns)
        return {"metric": list(metrics), "panels": self.panels}

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """Without `columns`, those of the table's metrics for each label of the axis `panels`."""
        from cope_sweep.read.figures.metrics import chosen_metrics, of_rows, panel_key, selected_rows
        from cope_sweep.read.tables.model import named_label

        plan = results.plan
        rows = selected_rows(plan, question.row)
        runs = of_rows(results.frame, plan, question.row)
        panels = panel_key(plan, question.panels)
        titles = {column.name: column for column in chosen_metrics(plan, runs, question.metric)}
        groups: Groups = self.columns
        if not groups:
            labels = list(dict.fromkeys(row.labels.get(panels, "") for row in rows)) if panels else [""]
            groups = {label: {name: column.label for name, column in titles.items()} for label in labels}
        # A number alone says little (`dim 8`); `8 tokens` speaks for itself.
        names = {
            group: named_label(plan.axes[panels], group) if panels and group and " " not in group else group
            for group in groups
        }
        return HeatmapData(
            frame=heatmap_frame(results, rows, runs, panels, groups), groups=groups, names=names, titles=titles,
            learning=_learning_column(plan), colours=self.colours, decimals=self.decimals, caption=self.caption,
        )  # fmt: skip


def heatmap_frame(
    results: Results, rows: Sequence[Row], runs: pd.DataFrame, panels: str | None, groups: Groups
) -> pd.DataFrame:
    """One line per cell with a finished run, sorted by mean rank:

    row              labels on all axes except `panels`
    group, column, metric
    n, seeds         number of finished runs with a value, and of planned ones; where `learned` is, n has lost ones too
    mean, std        over the n runs
    learned          the number of seeds that have learned the task; only in the column that says so
    grey             whether most of the row's seeds have not learned the task; not in the column that says so
    rank             among the means of the column, or its shares of seeds that have learned the task, from 1 (best);
                     equal ones share the mean of their ranks; NaN in a column that some of the rows lack
    mean_rank        the mean of the row's ranks; NaN if no column has all rows
    """
    import pandas as pd

    from cope_sweep.read.figures.metrics import metric_title
    from cope_sweep.read.tables import summarise
    from cope_sweep.read.tables.model import metric_cell, row_label, varying_axes
    from cope_sweep.read.tables.stats import with_ties

    plan = results.plan
    keys = [key for key in varying_axes(plan.axes, rows) if key != panels]
    of_row = dict(list(runs.groupby("row", sort=False)))
    learning_column = _learning_column(plan)
    learning = learning_column.name if learning_column else None
    lines = []
    for group, columns in groups.items():
        members = [row for row in rows if panels is None or row.labels.get(panels, "") == group]
        names = {row.name: row_label(plan.axes, row, keys) or row.name for row in members}
        counts = Counter(names.values())
        for row in members:
            name = names[row.name] if counts[names[row.name]] == 1 else row.name
            finished = of_row[row.name]
            learned = None
            if learning_column is not None:
                of_runs = [(run, results.records[run.run_id]) for run in row.runs]
                learned = metric_cell(row, of_runs, learning_column).learned
            for metric, title in columns.items():
                summary = summarise(finished[metric].astype("float64") if metric in finished else [])
                if summary.n:
                    counted = learned if metric == learning else None
                    lines.append({
                        "row": name, "group": group, "column": title, "metric": metric,
                        "n": summary.n if counted is None else counted.n, "seeds": len(row.runs),
                        "mean": summary.mean, "std": summary.std,
                        "learned": math.nan if counted is None else counted.k,
                        "grey": learned is not None and counted is None and 2 * learned.k < learned.n,
                    })  # fmt: skip
    data = pd.DataFrame(lines, columns=list(COLUMNS)).astype(COLUMNS)
    for _, cells in data.groupby(["group", "metric"], sort=False):
        if len(cells) < data["row"].nunique():
            continue  # a mean of ranks compares rows by the same columns
        is_ascending = metric_title(plan, cells["metric"].iloc[0]).goal == "min"
        compared = pd.Series(with_ties(cells["mean"].tolist()), index=cells.index)
        if cells["metric"].iloc[0] == learning:
            is_ascending, compared = False, cells["learned"] / cells["n"]
        data.loc[cells.index, "rank"] = compared.rank(ascending=is_ascending)
    data["mean_rank"] = data.groupby("row")["rank"].transform("mean")
    # Sort by rows first: the cells of a row that is not in all groups may come late.
    data["_first"] = pd.factorize(data["row"])[0]
    in_order = data.sort_values(["mean_rank", "_first"], kind="stable")
    return in_order.drop(columns="_first").reset_index(drop=True)


def _learning_column(plan: Plan) -> Column | None:
    from cope_sweep.read.tables.model import column_of
    from cope_sweep.read.tables.rules import learning_metric

    return learning_metric(map(column_of, plan.ablation.content.metrics))


@dataclass(frozen=True, kw_only=True)
class HeatmapData(FigureData):
    """The cells of `heatmap_frame`."""

    groups: Groups
    names: Mapping[str, str]
    """Group → its name above its columns; may be empty."""
    titles: Mapping[str, Column]
    """Metric → its column in the table."""
    learning: Column | None
    """The metric that says whether a task is learned."""
    colours: Literal["column", "all"]
    decimals: int | None
    caption: str

    def draw(self, title: str, size: Size | None) -> Drawing:
        from matplotlib.figure import Figure as Drawing

        from cope_sweep.read.figures import canvas

        data = self.frame
        rows = list(dict.fromkeys(data["row"]))
        columns = [
            (group, metric, text)
            for group, titles_of_group in self.groups.items()
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
        notes = [canvas.printable(text) for text in (self._note(), self.caption)]
        note_lines = [line for text in notes for line in textwrap.wrap(text, int(17 * width))]
        groups = list(zip([0, *breaks], [*breaks, len(columns)], strict=True))
        group_lines = [
            textwrap.wrap(
                canvas.shortened(self.names[columns[start][0]], 80),
                max(8, int((end - start) * cell / BOLD_CHARACTER)),
                break_long_words=False,
            )
            for start, end in groups
        ]
        heading_height = LINE * max(map(len, headings))
        group_height = 0.22 + GROUP_LINE * (max(map(len, group_lines)) - 1) if any(group_lines) else 0.0
        top = _points(0.2 + 0.2 * len(title_lines) + heading_height + group_height)
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
        for (start, end), lines in zip(groups, group_lines, strict=True):
            middle = (lefts[start] + lefts[end - 1] + cell) / 2
            for above, text in enumerate(reversed(lines)):
                y = -0.14 - heading_height - GROUP_LINE * above
                axes.text(middle, y, text, ha="center", va="baseline", fontsize=8.5, fontweight="bold")
        for row, mean_rank in data.drop_duplicates("row").set_index("row")["mean_rank"].items():
            y = CELL_HEIGHT * (rows.index(str(row)) + 0.5) - POINT
            text = MISSING if math.isnan(mean_rank) else fixed(mean_rank, 1)
            axes.text(rank, y, text, ha="center", va="center", fontsize=FONT_SIZE)
        self._draw_cells(axes, rows, columns, lefts, cell)
        return drawing

    def _draw_cells(
        self,
        axes: Axes,
        rows: Sequence[str],
        columns: Sequence[tuple[str, str, str]],
        lefts: Sequence[float],
        cell: float,
    ) -> None:
        import matplotlib as mpl
        from matplotlib.collections import PolyCollection

        from cope_sweep.read.figures import canvas

        data, colours = self.frame, mpl.colormaps[COLOURS]
        corners, fills = [], []
        for (group, metric, _), x in zip(columns, lefts, strict=True):
            cells = data[(data["group"] == group) & (data["metric"] == metric)]
            means = dict(zip(cells["row"], cells["mean"], strict=True))
            learned = {
                row: (k, n) for row, k, n in zip(cells["row"], cells["learned"], cells["n"], strict=True) if k >= 0
            }
            grey_rows = set(cells.loc[cells["grey"], "row"])
            column = self.titles[metric]
            decimals = column.decimals if self.decimals is None else self.decimals
            others = data[data["learned"].isna()]  # shares have a scale of their own, from 0 to 1
            low, high = _limits(others if self.colours == "all" and len(others) else cells, column)
            for index, row in enumerate(rows):
                y, text, colour = CELL_HEIGHT * index, MISSING, canvas.GREY
                if row in means:
                    mean = means[row]
                    fill, colour = GREY, GREY_TEXT
                    if row not in grey_rows:
                        # If all cells are equal, they are the best, unless all are 0 where more is better.
                        equal = float(column.goal == "max" and high > 0)
                        share = (mean - low) / (high - low) if high > low else equal
                        good = 1 - share if column.goal == "min" else share
                        if row in learned:
                            good = learned[row][0] / learned[row][1]
                        fill = mpl.colors.to_hex(colours(0.08 + 0.84 * good))
                        colour = _text_colour(fill)
                    x_end, y_end = x + cell - 2 * POINT, y + CELL_HEIGHT - 2 * POINT
                    corners.append([(x, y), (x_end, y), (x_end, y_end), (x, y_end)])
                    fills.append(fill)
                    text = _number(mean * column.scale, decimals)
                    if row in learned:
                        text = "{:.0f}/{:.0f}".format(*learned[row])
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

    def _note(self) -> str:
        data, rule = self.frame, self.learning
        if data.empty:
            return ""
        low, high = data["n"].min(), data["n"].max()
        seeds = f"{low}" if low == high else f"{low} to {high}"
        number = f"{seeds} seed{'s' if high > 1 else ''}"
        scale = " of each column" if self.colours == "column" else ""
        parts = [f"Mean of {number}, coloured from best (blue) to worst (red){scale}."]
        if rule is not None:
            text = f"{(rule.learned or 0.0) * rule.scale:g}{' %' if rule.unit == '%' else ''}"
            if data["learned"].notna().any():
                least = "at most" if rule.goal == "min" else "at least"
                # The title of its column in the figure or, if it has none there, in the table.
                titles = [columns[rule.name] for columns in self.groups.values() if rule.name in columns]
                name = titles[0] if titles else rule.label
                parts.append(f"k/n ({name}): seeds that have learned the task, with {least} {text}.")
            if data["grey"].any():
                parts.append("Grey: most seeds have not; these cells count in the mean rank, too.")
        if data["rank"].isna().any():
            parts.append("Mean rank: in the columns that all rows have.")
        return " ".join(parts)


def _points(inches: float) -> float:
    """The length rounded to whole points: short numbers make an SVG smaller."""
    return round(inches / POINT) * POINT


def _limits(cells: pd.DataFrame, column: Column) -> tuple[float, float]:
    """The ends of a colour scale; a scale of percentages starts at 0."""
    low, high = float(cells["mean"].min()), float(cells["mean"].max())
    return (min(low, 0.0) if column.bounds.kind == "both" else low), high


def _number(value: float, decimals: int) -> str:
    """The text of a value: `0` is exact, `0.0` is rounded."""
    from cope_sweep.read.figures import canvas

    if value == 0:
        return "0"
    return fixed(value, decimals) if abs(value) < 1e5 else canvas.number(float(significant(value, 3)))


def _text_colour(fill: str) -> Literal["white", "black"]:
    import matplotlib as mpl

    red, green, blue = mpl.colors.to_rgb(fill)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"
