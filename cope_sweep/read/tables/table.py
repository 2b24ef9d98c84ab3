"""The table of an ablation: its rows over seeds, beside the published numbers. Computed first, rendered afterwards."""

from __future__ import annotations

import importlib.metadata
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich.console import Console, Group

from cope_sweep.config import Plan
from cope_sweep.read.tables import render
from cope_sweep.read.tables.best import tuning
from cope_sweep.read.tables.model import Comparison, MetricCell, TableModel, TableRow, compared, table_model
from cope_sweep.read.tables.runs import Results, read_results
from cope_sweep.read.tables.stats import finite
from cope_sweep.store import QueryError, Store

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Table:
    """The results of an ablation, and their output formats."""

    results: Results
    compare: str | None = None
    """Reference of the comparison: the name of a row, or `paper`."""

    @cached_property
    def model(self) -> TableModel:
        """The content of the table. Raises UserError if it cannot be compared with `compare`."""
        model = table_model(self.results.plan, self.results.records)
        if self.compare is not None:
            return compared(model, self.compare)
        if self.results.plan.is_drawn:
            return replace(model, answer=tuning(self.results).answer)
        return model

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per row of the plan; `tables.frames.table_frame` describes the columns."""
        from cope_sweep.read.tables.frames import table_frame

        return table_frame(self.model, compared=self.compare is not None)

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
        return render.csv_text(self.results.frame if runs else self.frame)

    def to_parquet(self, *, runs: bool = False) -> bytes:
        """`frame`, or one line per run, as a Parquet file."""
        content: bytes = (self.results.frame if runs else self.frame).to_parquet(None, engine="pyarrow", index=False)
        return content

    def to_markdown(self) -> str:
        """GitHub-flavoured Markdown tables and their notes."""
        return render.markdown(self.model)

    def to_latex(self, *, stars: bool = False) -> str:
        """A LaTeX `table` environment; it needs the package booktabs. With `stars` in place of the comparisons."""
        return render.latex(self.model, stars=stars)

    def to_html(self, *, runs_url: str | None = None, anchors: str = "") -> str:
        """HTML `<table>` elements: rows, comparisons, runs; all text is escaped. Arguments: see `render.html`."""
        return render.html(self.model, runs_url=runs_url, anchors=anchors)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        plan = self.results.plan
        return f"<table of {plan.name}: {len(plan.rows)} rows, {len(plan.runs)} runs; print() shows it>"

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return self.to_html()

    def to_rich(self) -> Group:
        """Tables for terminals."""
        return render.rich(self.model)


def table(plan: Plan, store: Store, *, compare: str | None = None) -> Table:
    """The table of `plan` from the runs in the store, finished or not; `compare`: see `Table`. Raises StoreError."""
    return Table(read_results(plan, store), compare)


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
    low, high = finite(summary.ci_low), finite(summary.ci_high)
    return {
        "mean": finite(summary.mean),
        "std": finite(summary.std),
        "n": summary.n,
        "ci": None if low is None or high is None else [low, high],
        "ci_method": summary.method or None,
        "median": finite(summary.median),
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
        name: finite(value) if isinstance(value, float) else value
        for name, value in asdict(comparison.difference).items()
    }
    return found | {
        "n": list(comparison.difference.n),
        "against": comparison.against,
        "verdict": comparison.verdict,
        "p_adjusted": comparison.p_adjusted,
        "margin": comparison.margin,
    }


ENTRY_POINTS = "cope_sweep.formats"
TERMINAL_WIDTH = 160
"""Columns of a terminal's table where there is no terminal."""


@dataclass(frozen=True)
class Format:
    """A format of tables."""

    name: str
    media_type: str
    suffix: str
    """Ending of files: `.csv`."""
    render: Callable[[Table, str | None], bytes]
    """The table in this format. The second argument is the URL of a list of runs, or None: see `render.html`."""
    render_runs: Callable[[Table], bytes] | None = None
    """One line for each run; None: this format cannot show single runs."""
    binary: bool = False
    """Whether it is not text."""

    def file(self, table: Table, *, runs: bool = False, runs_url: str | None = None) -> bytes:
        """The table; with `runs`, one line for each run. Raises QueryError where this format has no such lines."""
        if not runs or self.name == "json":  # which always holds every run
            return self.render(table, runs_url)
        if self.render_runs is None:
            able = " or ".join(each.name for each in formats().values() if each.render_runs)
            raise QueryError(
                f"{self.name} has no lines for single runs: choose the format {able}; json holds every run"
            )
        return self.render_runs(table)


@cache
def formats() -> Mapping[str, Format]:
    """Name → format: JSON first, then the others of this package, then those of installed packages.

    Raises QueryError where an installed one cannot be used.
    """
    found = {each.name: each for each in BUILT_IN}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry_point.load()
        except Exception as error:
            raise QueryError(
                f"the entry point {entry_point.name!r} ({entry_point.value}) of the group {ENTRY_POINTS} cannot be "
                f"loaded: {type(error).__name__}: {error}; correct or uninstall its package"
            ) from error
        if not isinstance(loaded, Format) or loaded.name in found:
            raise QueryError(
                f"the entry point {entry_point.name!r} ({entry_point.value}) of the group {ENTRY_POINTS} is no Format "
                "with a name of its own; correct or uninstall its package"
            )
        found[loaded.name] = loaded
    return found


def find_format(name: str) -> Format:
    """The format with a name. Raises QueryError with the names of all."""
    if name not in formats():
        raise QueryError(f"no format {name!r}; the formats are: {', '.join(formats())}")
    return formats()[name]


def _json(table: Table, runs_url: str | None) -> bytes:
    # The json module encodes indented documents in Python: 4 s for 100,000 runs.
    return to_json(table.to_json(), indent=2, inf_nan_mode="null") + b"\n"


def _terminal(table: Table, runs_url: str | None) -> bytes:
    console = Console(file=io.StringIO(), width=TERMINAL_WIDTH, record=True)
    console.print(table.to_rich())
    return console.export_text().encode()


BUILT_IN = (
    Format("json", "application/json", ".json", _json),
    Format(
        "csv", "text/csv", ".csv", lambda table, _: table.to_csv().encode(),
        lambda table: table.to_csv(runs=True).encode(),
    ),
    Format("markdown", "text/markdown", ".md", lambda table, _: table.to_markdown().encode()),
    Format("latex", "application/x-tex", ".tex", lambda table, _: table.to_latex().encode()),
    Format(
        "latex_stars", "application/x-tex; stars=1", ".stars.tex",
        lambda table, _: table.to_latex(stars=True).encode(),
    ),
    Format("html", "text/html", ".html", lambda table, runs_url: table.to_html(runs_url=runs_url).encode()),
    Format(
        "parquet", "application/vnd.apache.parquet", ".parquet", lambda table, _: table.to_parquet(),
        lambda table: table.to_parquet(runs=True), binary=True,
    ),
    Format("terminal", "text/plain", ".txt", _terminal),
)  # fmt: skip
