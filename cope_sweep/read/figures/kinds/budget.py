"""The course of a search: the value of each row, and the best value so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cope_sweep.figures import FIGURES
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Plan
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.tables.best import Group
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.results import Results

COLUMNS = {
    "panel": "str", "metric": "str", "series": "str", "row": "str", "x": "int64", "n": "int64", "value": "float64",
    "best": "float64",
}  # fmt: skip


@FIGURES.register
class Budget(FigureKind):
    """The value of each row of a search and the best so far, in the order of the search.

    A random search has a line for each point of its grid. If points differ on several axes, the labels of the axis with
    the fewest have a panel each. Many lines are grey, with one for the best and the median of all: a table has their
    numbers.
    """

    SHOWS = "the history of a search: the value of each row, and the best so far"
    ORDER = 60
    IN_FILES = False
    OFFERED = "search"
    TAKES = ("metric", "panels", "row", "log")

    kind: Literal["budget"] = "budget"

    @classmethod
    def drawn_lines(cls, plan: Plan, rows: int) -> int:
        """One for all draws of a row."""
        from cope_sweep.config.ablation import RandomSearch

        search = plan.ablation.content.search
        return rows // search.samples if isinstance(search, RandomSearch) else 1

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """By default, of the metric of `cope-sweep best`. Raises QueryError, also for an ablation without a search."""
        import pandas as pd

        from cope_sweep.read.figures.metrics import chosen_metrics, metric_title, panel_key, selected_rows
        from cope_sweep.read.tables.best import rank_rows
        from cope_sweep.store import QueryError

        plan = results.plan
        if not plan.is_drawn:
            raise QueryError(
                f"{plan.name} trains every row of its grid, which has no order; its best rows: cope-sweep best "
                f"{plan.ablation.cli_args}",
                code="not_a_search",
                ablation=plan.name,
            )
        chosen = chosen_metrics(plan, results.frame, question.metric) if question.metric else []
        ranking = rank_rows(results, *(column.name for column in chosen[:1]))
        column = metric_title(plan, ranking.metric)
        split = panel_key(plan, question.panels)
        if len(ranking.groups) > 1:
            groups, series, split = _grid_groups(plan, ranking.groups, question.row, split)
        elif split is not None:
            raise QueryError(
                f"--panels {question.panels}: all rows of {plan.name} are one search, so its figure `budget` is one "
                "panel; leave it out",
                code="no_panels",
                ablation=plan.name,
            )
        else:
            (group,) = ranking.groups
            selected = {row.name for row in selected_rows(plan, question.row)}
            candidates = tuple(candidate for candidate in group.candidates if candidate.row.name in selected)
            groups = (replace(group, candidates=candidates),)
            series = {group.name: "best so far"}
        data = pd.DataFrame(
            [line for group in groups for line in _history(plan, group, split, column, series[group.name])],
            columns=list(COLUMNS),
        ).astype(COLUMNS)
        return BudgetData(
            frame=data, series=list(dict.fromkeys(series.values())), column=column, log=question.log,
            x_title="number of draws" if plan.search is None else "number of suggested rows",
        )  # fmt: skip


def _grid_groups(
    plan: Plan, groups: Sequence[Group], rows: Sequence[str], split: str | None
) -> tuple[tuple[Group, ...], dict[str, str], str | None]:
    """The selected groups, the name of each group's line, and the axis that has panels."""
    from cope_sweep.config.explain import suggest
    from cope_sweep.store import QueryError

    names = [group.name for group in groups]
    for row in rows:
        if row not in names:
            message = f"{plan.name} has no row {row!r}{suggest(row, names)}"
            raise QueryError(message, code="unknown_row", row=row, allowed=names)
    labels = {key: {group.labels.get(key) for group in groups} for key in plan.axes}
    varying = [key for key, values in labels.items() if len(values) > 1]
    shared = [key for key in varying if None not in labels[key]]  # every group has a label on these axes
    if split is None and len(varying) > 1 and shared:
        split = min(shared, key=lambda key: len(labels[key]))
    series = {}
    for group in groups:
        own_labels = [label for key, label in group.labels.items() if key in varying and key != split]
        series[group.name] = " · ".join(own_labels) or group.name
    return tuple(group for group in groups if group.name in (rows or names)), series, split


def _history(plan: Plan, group: Group, split: str | None, column: Column, series: str) -> list[dict[str, Any]]:
    from cope_sweep.read.figures.series import panel_label

    panel = panel_label(split, group.labels) if split else ""
    best: float | None = None
    lines = []
    for number, candidate in enumerate(group.candidates, start=1):
        if candidate.score is not None:
            best = candidate.score if best is None else column.best(best, candidate.score)
        if best is not None:
            lines.append({
                "panel": panel, "metric": column.name, "series": series, "row": candidate.row.name, "x": number,
                "n": len(candidate.scores), "value": candidate.score, "best": best,
            })  # fmt: skip
    return lines


@dataclass(frozen=True, kw_only=True)
class BudgetData(FigureData):
    """The lines of `_history`."""

    series: Sequence[str]
    column: Column
    log: bool | None
    x_title: str

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas

        data = self.frame
        drawn_series = [name for name in self.series if name in set(data["series"])]
        panel_names = list(dict.fromkeys(data["panel"]))
        own_panels = canvas.has_own_panels(len(drawn_series), len(panel_names))
        # Dots and colours of more lines could not be told apart.
        is_crowded = not own_panels and len(drawn_series) > canvas.FEW_LINES
        has_dots = not is_crowded
        contents = [(name, own) for name in panel_names for own in (drawn_series if own_panels else [None])]
        drawing, axes = canvas.panels(len(contents), title=title, size=size, small=own_panels)
        handles: dict[str, Any] = {}
        for panel, (panel_name, own_series) in zip(axes, contents, strict=True):
            of_panel = data[data["panel"] == panel_name]
            canvas.panel_title(panel, [part for part in (own_series, panel_name) if part])
            for index, name in enumerate(self.series):
                lines = of_panel[of_panel["series"] == name]
                if is_crowded and len(lines):
                    canvas.background(panel, lines["x"], lines["best"], drawstyle="steps-post")
                elif own_series in (None, name) and len(lines):
                    style = canvas.series_style(0 if own_series else index) | {"marker": ""}
                    if has_dots:
                        panel.plot(lines["x"], lines["value"], "o", color=style["color"], alpha=0.35, markersize=3)
                    (handles[name],) = panel.plot(lines["x"], lines["best"], drawstyle="steps-post", **style)
                elif len(lines):
                    canvas.background(panel, lines["x"], lines["best"])
            if is_crowded:
                best = self.column.best.__name__
                for index, (name, statistic) in enumerate({"best of all": best, "median of all": "median"}.items()):
                    line = of_panel.groupby("x")["best"].agg(statistic)
                    style = canvas.series_style(index) | {"marker": "", "linewidth": 2.0}
                    (handles[name],) = panel.plot(line.index, line, drawstyle="steps-post", **style)
            canvas.metric_axis(panel, data["value"].tolist(), self.column, log=self.log)  # panels share a scale
            canvas.parameter_axis(panel, sorted(set(of_panel["x"])), None, log=False)
            panel.set_xlabel(self.x_title)
        canvas.share_limits(axes)
        if is_crowded:
            artists = [*handles.values(), canvas.background(axes[0], [], [])]
            canvas.legend(drawing, artists, [*handles, f"each of {len(drawn_series)} rows"], title="best value so far")
            return drawing
        artists, texts = [handles[name] for name in drawn_series], drawn_series
        if own_panels:
            canvas.label_edges(axes)
            artists, texts = [artists[0], canvas.background(axes[0], [], [])], ["best so far", "the other rows"]
        if has_dots:
            artists.append(axes[0].plot([], [], "o", color=canvas.GREY, markersize=3)[0])
            texts = [*texts, "each row" if len(drawn_series) == 1 else "each draw"]
        canvas.legend(drawing, artists, texts)
        return drawing
