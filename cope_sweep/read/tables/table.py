"""The table of an ablation: its rows over seeds, beside the published numbers. Computed first, rendered afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan
from cope_sweep.read.tables import render
from cope_sweep.read.tables.compare import compared
from cope_sweep.read.tables.csv_text import csv_text
from cope_sweep.read.tables.frame import frame_of_records, read_runs
from cope_sweep.read.tables.table_model import STATUSES, Comparison, MetricCell, TableModel, TableRow, table_model
from cope_sweep.store import RunRecord, Store

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group


@dataclass(frozen=True, repr=False)
class Table:
    """The results of an ablation, and their output formats."""

    plan: Plan
    records: Mapping[str, RunRecord]
    """Run id → record, for every run of the plan."""

    compare: str | None = None
    """Reference of the comparison: the name of a row, or `paper`."""

    @cached_property
    def model(self) -> TableModel:
        """The content of the table. Raises UserError if it cannot be compared with `compare`."""
        model = table_model(self.plan, self.records)
        return model if self.compare is None else compared(model, self.compare)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One line per run: `results.frame`."""
        return frame_of_records(self.plan, self.records)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per row of the plan, with the columns

        row, <axis key>, …                                      its name, and the labels of its axes
        seeds                                                   the number of its runs, finished or not
        finished, stopped, failed, damaged, running, interrupted, pending    the number of runs with this status
        parameters                                              of the model; missing before a run is finished
        <metric>.mean, .std, .n, .ci_low, .ci_high              over the n finished seeds; `results.stats`
        <metric>.median, .low, .high, .stuck                    least and greatest value, number of stuck seeds
        <metric>.published, .published_std                      the paper's numbers, if it has them
        <metric>.best                                           whether it is the best mean of the complete rows
        <metric>.learned                                        the number of seeds that learned the task
        <metric>.difference, .difference_low, .difference_high, .p, .smallest_p, .p_adjusted, .effect, .detectable,
        <metric>.verdict                                        of a comparison, if there is one: `results.compare`
        """
        import pandas as pd

        rows = self.model.rows
        columns: dict[str, pd.Series[Any]] = {"row": pd.Series([row.row for row in rows], dtype="str")}
        for key in self.model.axes:
            columns[key] = pd.Series([row.labels.get(key) for row in rows], dtype="str")
        columns["seeds"] = pd.Series([row.seeds for row in rows], dtype="int64")
        for status in STATUSES:
            columns[status] = pd.Series([row.counts[status] for row in rows], dtype="int64")
        columns["parameters"] = pd.Series([row.parameters for row in rows], dtype="Int64")
        for column in self.model.columns:
            cells = [row.metrics[column.name] for row in rows]
            for part in ("mean", "std"):
                columns[f"{column.name}.{part}"] = _floats([getattr(cell.summary, part) for cell in cells])
            columns[f"{column.name}.n"] = pd.Series([cell.summary.n for cell in cells], dtype="int64")
            for part in ("ci_low", "ci_high", "median", "low", "high"):
                columns[f"{column.name}.{part}"] = _floats([getattr(cell.summary, part) for cell in cells])
            columns[f"{column.name}.stuck"] = pd.Series([len(cell.stuck) for cell in cells], dtype="int64")
            if column.learned is not None:
                learned = [cell.learned.k if cell.learned else None for cell in cells]
                columns[f"{column.name}.learned"] = pd.Series(learned, dtype="Int64")
            published = [cell.published for cell in cells]
            columns[f"{column.name}.published"] = _floats([each.value if each else None for each in published])
            columns[f"{column.name}.published_std"] = _floats([each.std if each else None for each in published])
            columns[f"{column.name}.best"] = pd.Series([cell.best for cell in cells], dtype="bool")
            if self.compare is not None:
                columns |= _comparison_columns(column.name, [cell.comparison for cell in cells])
        return pd.DataFrame(columns)

    @property
    def complete(self) -> bool:
        """Whether every run is finished."""
        return all(row.complete for row in self.model.rows)

    def to_json(self) -> dict[str, Any]:
        """The table as plain JSON types; missing values are null."""
        return {
            "ablation": self.model.ablation,
            "title": self.model.title,
            "axes": dict(self.model.axes),
            "metrics": [
                {"name": c.name, "label": c.label, "title": c.title, "goal": c.goal, "unit": c.unit,
                 "decimals": c.decimals, "scale": c.scale, "compared": c.compared, "primary": c.primary,
                 "learned": c.learned}
                for c in self.model.columns
            ],
            "complete": self.complete,
            "stopped": self.model.stopped,
            "scaled": list(self.model.replaced),
            "compared": None if self.compare is None else {
                "against": self.compare, "rules": list(self.model.rules), "answer": self.model.answer,
            },
            "warnings": list(self.model.warnings),
            "rows": [_row_json(row) for row in self.model.rows],
        }  # fmt: skip

    def to_csv(self, *, runs: bool = False) -> str:
        """`frame` as CSV, or one line per run."""
        return csv_text(self.runs if runs else self.frame)

    def to_parquet(self, *, runs: bool = False) -> bytes:
        """`frame`, or one line per run, as a Parquet file."""
        content: bytes = (self.runs if runs else self.frame).to_parquet(None, engine="pyarrow", index=False)
        return content

    def to_markdown(self) -> str:
        """GitHub-flavoured Markdown tables and their notes."""
        return render.markdown(self.model)

    def to_latex(self) -> str:
        """A LaTeX `table` environment; it needs the package booktabs."""
        return render.latex(self.model)

    def to_html(self, *, runs_url: str | None = None, anchors: str = "") -> str:
        """HTML `<table>` elements: rows, comparisons, runs; all text is escaped. Arguments: see `render.html`."""
        return render.html(self.model, runs_url=runs_url, anchors=anchors)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        return f"<table of {self.plan.name}: {len(self.plan.rows)} rows, {len(self.plan.runs)} runs; print() shows it>"

    def _repr_html_(self) -> str:
        """How notebooks show the table."""
        return self.to_html()

    def to_rich(self) -> Group:
        """Tables for terminals."""
        return render.rich(self.model)


def table(plan: Plan, store: Store, *, compare: str | None = None) -> Table:
    """The table of `plan` from the runs in the store, finished or not; `compare`: see `Table`. Raises StoreError."""
    return Table(plan, read_runs(plan, store), compare)


def _row_json(row: TableRow) -> dict[str, Any]:
    return {
        "row": row.row,
        "labels": dict(row.labels),
        "seeds": row.seeds,
        "counts": dict(row.counts),
        "parameters": row.parameters,
        "metrics": {name: _cell_json(cell, row) for name, cell in row.metrics.items()},
        "runs": [
            {"run_id": run.run_id, "seed": run.seed, "status": record.status, "message": record.message}
            for run, record in row.runs
        ],
    }


def _cell_json(cell: MetricCell, row: TableRow) -> dict[str, Any]:
    summary, published = cell.summary, cell.published
    low, high = _number(summary.ci_low), _number(summary.ci_high)
    return {
        "mean": _number(summary.mean),
        "std": _number(summary.std),
        "n": summary.n,
        "ci": None if low is None or high is None else [low, high],
        "ci_method": summary.method or None,
        "median": _number(summary.median),
        "range": None if summary.n == 0 else [summary.low, summary.high],
        "values": [
            {"run_id": run.run_id, "seed": run.seed, "value": cell.values[run.seed], "stuck": run.seed in cell.stuck}
            for run, _ in row.runs
            if run.seed in cell.values
        ],
        "published": {
            "value": published.value, "std": published.std, "seeds": published.seeds, "source": published.source,
        } if published else None,
        "best": cell.best,
        "learned": None if cell.learned is None else {
            "k": cell.learned.k, "n": cell.learned.n,
            "interval": [end for end in cell.learned.interval if not math.isnan(end)] or None,
        },
        "comparison": _comparison_json(cell.comparison) if cell.comparison else None,
    }  # fmt: skip


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    found = {
        name: _number(value) if isinstance(value, float) else value
        for name, value in asdict(comparison.difference).items()
    }
    return found | {
        "n": list(comparison.difference.n),
        "against": comparison.against,
        "verdict": comparison.verdict,
        "p_adjusted": comparison.p_adjusted,
        "margin": comparison.margin,
    }


def _comparison_columns(metric: str, comparisons: list[Comparison | None]) -> dict[str, pd.Series[Any]]:
    import pandas as pd

    names = {"difference": "difference", "difference_low": "ci_low", "difference_high": "ci_high", "p": "p",
             "smallest_p": "smallest_p", "effect": "effect", "detectable": "detectable"}  # fmt: skip
    columns: dict[str, pd.Series[Any]] = {
        f"{metric}.{name}": _floats([getattr(each.difference, field) if each else None for each in comparisons])
        for name, field in names.items()
    }
    columns[f"{metric}.p_adjusted"] = _floats([each.p_adjusted if each else None for each in comparisons])
    columns[f"{metric}.verdict"] = pd.Series([each.verdict if each else None for each in comparisons], dtype="str")
    return columns


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _floats(values: list[float | None]) -> pd.Series[float]:
    import pandas as pd

    return pd.Series(values, dtype="float64")
