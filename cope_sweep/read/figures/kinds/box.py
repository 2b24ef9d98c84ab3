"""The spread of final metrics over seeds: a box for each row, with a dot for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cope_sweep.figures import FIGURES, Metrics
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config.checks import Planned
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.tables.model import Column
    from cope_sweep.read.tables.results import Results


@FIGURES.register
class Box(FigureKind):
    """Metrics at the end of training: a box over the seeds of each row, and a dot for each run."""

    SHOWS = "the spread of final metrics over seeds: a box for each row"

    kind: Literal["box"] = "box"
    metrics: Metrics = Field(description="One panel for each metric.")

    def check(self, planned: Planned) -> None:
        names = [(("metrics", number), name) for number, name in enumerate(self.metrics)]
        planned.check_metrics(names, at_lengths=True)
        super().check(planned)

    def question_fields(self) -> dict[str, Any]:
        return {"metric": list(self.metrics)}

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """By default, of the metrics that rows are compared by. Columns: row, metric, seed, value."""
        import pandas as pd

        from cope_sweep.read.figures.metrics import chosen_metrics, of_rows
        from cope_sweep.read.tables.model import short_labels

        plan = results.plan
        runs = of_rows(results.frame, plan, question.row)
        titles = chosen_metrics(plan, runs, question.metric)
        finished = runs[runs["status"] == "finished"]
        parts = [
            pd.DataFrame({
                "row": finished["row"], "metric": title.name, "seed": finished["seed"], "value": finished[title.name],
            })
            for title in titles
        ]  # fmt: skip
        frame = pd.concat(parts, ignore_index=True).dropna(subset=["value"])
        return BoxData(frame=frame, titles=titles, labels=short_labels(plan, plan.rows), log=question.log)


@dataclass(frozen=True, kw_only=True)
class BoxData(FigureData):
    titles: Sequence[Column]
    labels: Mapping[str, str]
    log: bool | None

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas

        rows = list(dict.fromkeys(self.frame["row"]))
        drawing, axes = canvas.panels(len(self.titles), title=title, size=size)
        for panel, metric in zip(axes, self.titles, strict=True):
            of_metric = self.frame[self.frame["metric"] == metric.name]
            values = [of_metric.loc[of_metric["row"] == row, "value"].tolist() for row in rows]
            panel.boxplot(values, positions=range(len(rows)), showfliers=False, medianprops={"color": canvas.colour(0)})
            for index, of_row in enumerate(values):
                panel.plot([index] * len(of_row), of_row, "o", color=canvas.colour(0), alpha=0.5, markersize=3)
            canvas.metric_axis(panel, of_metric["value"].tolist(), metric, log=self.log)
            canvas.parameter_axis(panel, range(len(rows)), [self.labels[row] for row in rows], log=None)
            canvas.panel_title(panel, [metric.label])
        return drawing
