"""Final metrics against a parameter that varies, as in the paper's Figure 2: error against training data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cope_sweep.errors import FigureError
from cope_sweep.figures import FIGURES, Metrics
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    import pandas as pd

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Plan, Row
    from cope_sweep.config.checks import Planned
    from cope_sweep.read.tables.results import Results


@FIGURES.register
class Values(FigureKind):
    """Metrics at the end of training against an axis of the ablation, with a line for each combination of the others.

    Against a fact of the runs, such as a cost, each row is a point.
    """

    SHOWS = "final metrics against a parameter, with a dot for each seed"
    ORDER = 30
    OFFERED = "axes"
    TAKES = ("metric", "x", "panels", "row", "log")

    kind: Literal["values"] = "values"
    x: str = Field(description="The key of the axis, or a fact: `task.train_sequences`, `facts.tokens_per_s`.")
    metrics: Metrics = Field(description="One panel for each metric.")
    panels: str | None = Field(default=None, description="An axis key: a panel for each metric and value of the axis.")
    log_x: bool | None = Field(
        default=None, description="Whether the axis of `x` is logarithmic; null: if its values ask for it."
    )

    def axes(self) -> Mapping[str, str]:
        from cope_sweep.config.run import FACT_METRICS

        named = {"x": None if self.x in FACT_METRICS else self.x, "panels": self.panels}
        return {key: axis for key, axis in named.items() if axis is not None}

    def check(self, planned: Planned) -> None:
        names = [(("metrics", number), name) for number, name in enumerate(self.metrics)]
        planned.check_metrics(names, at_lengths=True)
        super().check(planned)

    def question_fields(self) -> dict[str, Any]:
        return {"metric": list(self.metrics), "x": self.x, "panels": self.panels}

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """By default, of the table's metrics against the first axis with numbers, or else the first.

        Against a fact, such as a cost, each row is a series of its own, because its place is measured.
        """
        from cope_sweep.read.figures.metrics import (
            Point,
            chosen_metrics,
            is_log_parameter,
            of_rows,
            panel_key,
            selected_rows,
        )
        from cope_sweep.read.figures.series import SeriesData, panel_title, series_names
        from cope_sweep.store.results_file import FACT

        plan = results.plan
        rows = selected_rows(plan, question.row)
        runs = of_rows(results.frame, plan, question.row)
        key = _x_key(plan, question.x)
        table = [metric.name for metric in plan.ablation.content.metrics]
        titles = chosen_metrics(plan, runs, question.metric, table)
        places, labels = _places(plan, rows, runs, key)
        split = panel_key(plan, question.panels)
        is_fact = key.startswith(FACT)
        names = series_names(plan, rows, {} if is_fact else places, {key, split, *_searched_keys(plan)})
        has_metric_titles = len(titles) > 1 or not split
        points = [
            Point(row, title, title.name, panel_title(row, split, title if has_metric_titles else None),
                  names[row.name], places[row.name], labels[row.name])
            for title in titles
            for row in rows
            if row.name in places
        ]  # fmt: skip
        has_numbers = all(label == "" for label in labels.values())
        x_title = plan.axes.get(key, key.removeprefix(FACT)).replace("_", " ").replace("train ", "training ")
        x_title = x_title.replace("p max", "p_max")  # as the paper writes it
        return SeriesData.of_points(
            plan, runs, points, x_title=x_title, log=question.log, has_numbers=has_numbers,
            log_x=is_log_parameter(plan, key) if self.log_x is None else self.log_x,
        )  # fmt: skip


def _searched_keys(plan: Plan) -> tuple[str, ...]:
    """The keys of the search space: rows that differ in them are points of one series."""
    from cope_sweep.config.ablation import Optuna, RandomSearch

    search = plan.ablation.content.search
    return tuple(search.space) if isinstance(search, (RandomSearch, Optuna)) else ()


def _x_key(plan: Plan, name: str | None) -> str:
    """The key on the x axis: an axis, another value of the spec, or a fact. Raises QueryError, FigureError."""
    from cope_sweep.config.explain import suggest
    from cope_sweep.config.run import FACT_METRICS
    from cope_sweep.read.figures.metrics import is_finite_number
    from cope_sweep.read.tables.model import varying_axes
    from cope_sweep.read.tables.results import setting
    from cope_sweep.read.tables.row_names import find_axis
    from cope_sweep.store import QueryError

    if name is None:
        varying = varying_axes(plan.axes, plan.rows)
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
    if key in plan.axes or key in FACT_METRICS or any(setting(row, key) is not None for row in plan.rows):
        return key
    allowed = [*plan.axes, *FACT_METRICS]
    raise QueryError(
        f"--x {name}: no run of {plan.name} has this key, or a number as this fact{suggest(name, allowed)}; any key of "
        "a run is accepted (`train.lr`)",
        code="unknown_key",
        key=name,
        allowed=allowed,
        ablation=plan.name,
    )


def _places(plan: Plan, rows: Sequence[Row], runs: pd.DataFrame, key: str) -> tuple[dict[str, float], dict[str, str]]:
    """Row → place on the x axis, and row → label there (empty if places are numbers); only rows with a value."""
    from cope_sweep.read.figures.metrics import is_finite_number, metric_columns
    from cope_sweep.read.tables.results import setting

    if key in metric_columns(runs, plan):
        means = runs.dropna(subset=[key]).groupby("row")[key].mean()
        places = {str(row): float(value) for row, value in means.items()}
        return places, dict.fromkeys(places, "")
    settings = {row.name: setting(row, key) for row in rows}
    # On an axis of the ablation, null is a value like others; `full` and null have no place among numbers.
    settings = {row.name: settings[row.name] for row in rows if key in row.labels or settings[row.name] is not None}
    if settings and all(is_finite_number(value) for value in settings.values()):
        return {name: float(value) for name, value in settings.items()}, dict.fromkeys(settings, "")
    labels = {row.name: row.labels.get(key, str(settings.get(row.name, ""))) for row in rows}
    labels = {name: label for name, label in labels.items() if label}
    by_number = sorted(dict.fromkeys(labels.values()), key=_number)  # `p_max: [full, 4, 8]`: full is the last
    order = {label: float(index) for index, label in enumerate(by_number)}
    return {name: order[label] for name, label in labels.items()}, labels


def _number(label: str) -> float:
    """The number that a label is; infinity if it is none, so that names stay in their order, after the numbers."""
    try:
        return float(label)
    except ValueError:
        return math.inf
