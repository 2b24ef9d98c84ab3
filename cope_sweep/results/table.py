"""The table of an ablation: its rows over seeds, beside the published numbers. Computed as a frame, then drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cope_sweep.plan import Plan, Row
from cope_sweep.record import Ledger
from cope_sweep.results import draw
from cope_sweep.results.frame import frame
from cope_sweep.results.sheet import Column, Line, Measured, Sheet, Stated
from cope_sweep.results.stats import summarise

if TYPE_CHECKING:
    from rich.table import Table as RichTable

STATUSES = ("finished", "failed", "running", "interrupted", "pending")


@dataclass(frozen=True)
class Table:
    """An ablation's results: what they are (`sheet`), every run of them (`runs`), and ways to draw them."""

    sheet: Sheet
    runs: pd.DataFrame
    """`results.frame`: one line per run."""

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per row of the plan, with the columns

        row, <axis key>, …                                      its name, and the labels of its axes
        seeds                                                   how many runs it has when it is complete
        finished, failed, running, interrupted, pending         how many of them stand where
        parameters                                              of the model; missing before a run is finished
        <metric>.mean, .std, .n, .ci_low, .ci_high              over the n finished seeds; 95 % Student interval
        <metric>.published, .published_std                      the paper's, where it has them
        <metric>.best                                           best mean of the rows that are complete
        """
        lines = self.sheet.lines
        columns: dict[str, pd.Series[Any]] = {"row": pd.Series([line.row for line in lines], dtype="str")}
        for key in self.sheet.axes:
            columns[key] = pd.Series([line.labels.get(key) for line in lines], dtype="str")
        columns["seeds"] = pd.Series([line.seeds for line in lines], dtype="int64")
        for status in STATUSES:
            columns[status] = pd.Series([line.counts[status] for line in lines], dtype="int64")
        columns["parameters"] = pd.Series([line.parameters for line in lines], dtype="Int64")
        for column in self.sheet.columns:
            cells = [line.metrics[column.name] for line in lines]
            for part in ("mean", "std"):
                columns[f"{column.name}.{part}"] = _floats([getattr(cell.summary, part) for cell in cells])
            columns[f"{column.name}.n"] = pd.Series([cell.summary.n for cell in cells], dtype="int64")
            for part in ("ci_low", "ci_high"):
                columns[f"{column.name}.{part}"] = _floats([getattr(cell.summary, part) for cell in cells])
            stated = [cell.published for cell in cells]
            columns[f"{column.name}.published"] = _floats([each.value if each else None for each in stated])
            columns[f"{column.name}.published_std"] = _floats([each.std if each else None for each in stated])
            columns[f"{column.name}.best"] = pd.Series([cell.best for cell in cells], dtype="bool")
        return pd.DataFrame(columns)

    @property
    def complete(self) -> bool:
        """Whether every run is finished."""
        return all(line.complete for line in self.sheet.lines)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: null for what is not there."""
        return {
            "ablation": self.sheet.ablation,
            "title": self.sheet.title,
            "axes": dict(self.sheet.axes),
            "metrics": [
                {"name": c.name, "label": c.label, "title": c.title, "goal": c.goal, "unit": c.unit,
                 "decimals": c.decimals}
                for c in self.sheet.columns
            ],
            "complete": self.complete,
            "rows": [self._row_json(line) for line in self.sheet.lines],
        }  # fmt: skip

    def _row_json(self, line: Line) -> dict[str, Any]:
        runs = self.runs.set_index("run_id", drop=False).loc[list(line.run_ids)]
        return {
            "row": line.row,
            "labels": dict(line.labels),
            "seeds": line.seeds,
            "counts": dict(line.counts),
            "parameters": line.parameters,
            "metrics": {name: _measured_json(cell) for name, cell in line.metrics.items()},
            "runs": [
                {"run_id": run_id, "seed": int(seed), "status": status, "message": message}
                for run_id, seed, status, message in zip(
                    runs["run_id"].tolist(),
                    runs["seed"].tolist(),
                    runs["status"].tolist(),
                    runs["message"].astype(object).where(runs["message"].notna(), None).tolist(),
                    strict=True,
                )
            ],
        }

    def to_csv(self, *, runs: bool = False) -> str:
        """The aggregated frame, or every run."""
        return (self.runs if runs else self.frame).to_csv(index=False, lineterminator="\n")

    def to_parquet(self, path: Path, *, runs: bool = False) -> None:
        """The aggregated frame, or every run, in a file. Raises OSError where it cannot be written."""
        (self.runs if runs else self.frame).to_parquet(path, engine="pyarrow", index=False)

    def to_markdown(self) -> str:
        return draw.markdown(self.sheet)

    def to_latex(self) -> str:
        """A `table` float; it needs the package booktabs."""
        return draw.latex(self.sheet)

    def to_html(self) -> str:
        """A `<table>` element, escaped."""
        return draw.html(self.sheet)

    def to_rich(self) -> RichTable:
        """For a terminal."""
        return draw.rich(self.sheet)


def table(plan: Plan, ledger: Ledger) -> Table:
    """The table of `plan`, as far as the ledger fills it. Raises StoreError."""
    return table_of(plan, frame(plan, ledger))


def table_of(plan: Plan, runs: pd.DataFrame) -> Table:
    """The table of `plan` from a frame of its runs: the ledger's or MLflow's."""
    columns = tuple(
        Column(metric.name, metric.label or metric.name, metric.title, metric.goal, metric.unit, metric.decimals)
        for metric in plan.ablation.content.metrics
    )
    by_id = runs.set_index("run_id")
    lines = [_line(row, by_id.loc[[run.run_id for run in row.runs]], columns) for row in plan.rows]
    content = plan.ablation.content
    sheet = Sheet(plan.name, content.title, plan.axes, columns, tuple(_with_best(lines, columns)))
    return Table(sheet, runs)


def _line(row: Row, runs: pd.DataFrame, columns: tuple[Column, ...]) -> Line:
    counted = runs["status"].value_counts()
    finished = runs[runs["status"] == "finished"]
    sizes: list[int] = finished["facts.parameters"].dropna().tolist() if "facts.parameters" in finished else []
    return Line(
        row=row.name,
        labels=row.labels,
        run_ids=tuple(run.run_id for run in row.runs),
        counts={status: int(counted.get(status, 0)) for status in STATUSES},
        parameters=int(sizes[0]) if sizes else None,
        metrics={
            c.name: Measured(summarise(finished[c.name].dropna().tolist()), _published(row, c.name)) for c in columns
        },
    )


def _published(row: Row, metric: str) -> Stated | None:
    published = row.published
    if published is None or metric not in published.values:
        return None
    return Stated(published.values[metric], published.std.get(metric), published.source)


def _with_best(lines: list[Line], columns: tuple[Column, ...]) -> list[Line]:
    """Mark the best mean of each metric, where two rows at least have all their seeds."""
    for column in columns:
        means = [
            (line.metrics[column.name].summary.mean, index)
            for index, line in enumerate(lines)
            if line.metrics[column.name].summary.n == line.seeds
        ]
        if len(means) < 2:
            continue
        best = (min if column.goal == "min" else max)(mean for mean, _ in means)
        for mean, index in means:
            if mean == best:
                cells = dict(lines[index].metrics)
                cells[column.name] = replace(cells[column.name], best=True)
                lines[index] = replace(lines[index], metrics=cells)
    return lines


def _floats(values: list[float | None]) -> pd.Series[float]:
    return pd.Series(values, dtype="float64")


def _measured_json(cell: Measured) -> dict[str, Any]:
    summary, stated = cell.summary, cell.published
    low, high = _number(summary.ci_low), _number(summary.ci_high)
    return {
        "mean": _number(summary.mean),
        "std": _number(summary.std),
        "n": summary.n,
        "ci": None if low is None or high is None else [low, high],
        "published": {"value": stated.value, "std": stated.std, "source": stated.source} if stated else None,
        "best": cell.best,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
