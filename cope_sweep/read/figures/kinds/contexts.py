"""A metric against the length of the evaluation context or the place in it, as in the paper's Figure 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cope_sweep.errors import FigureError
from cope_sweep.figures import FIGURES
from cope_sweep.frozen import MetricName
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Row
    from cope_sweep.config.checks import Planned
    from cope_sweep.read.tables.results import Results

LENGTH = re.compile(r"(?P<metric>.+)@(?P<length>\d+)(?P<times>x?)")
"""A metric at another length: `test/perplexity@1024` (tokens), `in_dist/token_error@4x` (times the training length)."""


@FIGURES.register
class Contexts(FigureKind):
    """A metric against the length of the evaluated sequences, or the place in them: a line for each row.

    Lengths are lengths of windows over a text (`evaluate.contexts`), or multiples of the trained length
    (`evaluate.lengths`). Perplexity by place needs `evaluate.positions`. Errors by place or distance are metrics of
    some tasks: `in_dist/position_error`, `in_dist/distance_error`.

    Each variant of the evaluation (`evaluate.variants`) has its own line.
    """

    SHOWS = "a metric against the length of the evaluation context, or perplexity against the place in it"
    ORDER = 40
    TAKES = ("metric", "panels", "row", "log")

    kind: Literal["contexts"] = "contexts"
    metric: MetricName = Field(
        description="Without context or place: `validation/perplexity`, `validation/position_perplexity`."
    )
    panels: str | None = Field(default=None, description="An axis key: a panel for each of its values.")

    def axes(self) -> Mapping[str, str]:
        return {} if self.panels is None else {"panels": self.panels}

    def check(self, planned: Planned) -> None:
        """Also asks that a run is evaluated at other lengths or, for a metric by place, that all are by place."""
        if _range_title(self.metric):
            self._check_places(planned)
        elif any(run.evaluate.contexts or run.evaluate.lengths for run in planned.runs):
            planned.check_metrics([(("metric",), self.metric)])
        else:
            message = "a figure of contexts needs evaluate.contexts or evaluate.lengths, and no row has any"
            raise planned.error((), message, "no_contexts")
        super().check(planned)

    def _check_places(self, planned: Planned) -> None:
        from cope_sweep.config.run import POSITION_PERPLEXITY

        for run in planned.runs:
            if run.evaluate.positions is None and self.metric.endswith(POSITION_PERPLEXITY):
                message = f"a figure of {self.metric} needs evaluate.positions, and a row has none"
                raise planned.error((), message, "no_positions")
            bases = {name.partition("@")[0] for name in run.metrics if "@" in name}
            if self.metric not in bases:
                bases = {base for base in bases if _range_title(base)}
                raise planned.no_metric(("metric",), [run], self.metric, sorted(bases))

    def question_fields(self) -> dict[str, Any]:
        return {"metric": [self.metric], "panels": self.panels}

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """By default, of the first metric with lengths.

        Lengths are tokens; for generated sequences, multiples of the training length (1 is the metric itself). A metric
        by place is drawn against the last place of each range of the context.
        """
        from cope_sweep.config.explain import suggest
        from cope_sweep.config.run import POSITION_PERPLEXITY
        from cope_sweep.read.figures.metrics import (
            Point,
            in_words,
            metric_columns,
            metric_title,
            of_rows,
            panel_key,
            selected_rows,
        )
        from cope_sweep.read.figures.series import TRAINING_CONTEXT, SeriesData, panel_title, series_names

        plan = results.plan
        runs = of_rows(results.frame, plan, question.row)
        columns_of_runs = metric_columns(runs, plan)
        matches = {name: match for name in columns_of_runs if (match := LENGTH.fullmatch(name))}
        if not matches:
            raise FigureError(
                f"{plan.name} has no metric at other lengths (test/perplexity@1024, in_dist/token_error@4x) or by "
                f"place ({POSITION_PERPLEXITY}@64); see evaluate.contexts, evaluate.lengths and evaluate.positions",
                code="no_contexts",
                ablation=plan.name,
            )
        measures = sorted(dict.fromkeys(match["metric"] for match in matches.values()), key=_is_by_range)
        metrics = tuple(dict.fromkeys(name.partition("@")[0] for name in question.metric)) or (measures[0],)
        range_title = _range_title(metrics[0])
        allowed = [measure for measure in measures if _range_title(measure) == range_title]  # they share the axis of x
        for metric in metrics:
            if metric not in allowed:
                message = f"{plan.name} has no metric {metric}@…{suggest(metric, allowed)}"
                raise FigureError(message, code="unknown_metric", metric=metric, allowed=allowed)
        matches = {name: match for name, match in matches.items() if match["metric"] in allowed}
        multiples = any(match["times"] for match in matches.values())
        # A row of another task may have no lengths; its value at the trained length alone would be a panel with one
        # point.
        rows = [row for row in selected_rows(plan, question.row) if not matches.keys().isdisjoint(row.runs[0].metrics)]
        split = panel_key(plan, question.panels)
        if split is None and TRAINING_CONTEXT in plan.axes:
            split = TRAINING_CONTEXT
        names = series_names(plan, rows, {}, {split, None})
        points = []
        for metric in metrics:
            columns = [(name, int(match["length"])) for name, match in matches.items() if match["metric"] == metric]
            if multiples and metric in columns_of_runs:
                columns.insert(0, (metric, 1))
            # The label of the table may name the length: `1 ×`.
            title = metric_title(plan, columns[0][0]).model_copy(update={"name": metric, "label": in_words(metric)})
            panel_metric = title if len(metrics) > 1 or not split else None
            points += [
                Point(row, title, prefix + column, panel_title(row, split, panel_metric), name, float(length))
                for row in rows
                for prefix, name in _evaluations(row, names[row.name])
                for column, length in sorted(columns, key=lambda column_and_length: column_and_length[1])
                if prefix + column in columns_of_runs
            ]
        x_title, log = "evaluation context (tokens)", question.log
        if range_title:
            x_title = range_title
        elif multiples:
            x_title = "length of a test sequence (times the trained length)"
            log = log or False  # most errors are large, and a logarithmic axis would flatten them
        return SeriesData.of_points(plan, runs, points, x_title=x_title, log=log)


def _evaluations(row: Row, name: str) -> list[tuple[str, str]]:
    """(prefix of metrics, name of the line) of a row and of each of its evaluation variants."""
    return [("", name), *((f"{variant}/", f"{name}, {variant}") for variant in row.runs[0].evaluate.variants)]


def _range_title(metric: str) -> str | None:
    """What the number after `@` is, if it is the end of a range; None if it is a length."""
    from cope_sweep.config.run import BY_PLACE

    return BY_PLACE.get(metric.rpartition("/")[2])


def _is_by_range(metric: str) -> bool:
    return _range_title(metric) is not None
