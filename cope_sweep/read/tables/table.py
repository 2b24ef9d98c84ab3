"""The table that a question asks for: the frame (`model`) with what its options change, and its formats.

An option is a field of `GetTable`. It acts in `Table.model` if all formats have it, and otherwise in its format, in
`render`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich.console import Group

from cope_sweep.api.tables import GetTable, TableFormat, Verdict
from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.read.tables import render
from cope_sweep.read.tables.best import rank_rows
from cope_sweep.read.tables.comparisons import compared
from cope_sweep.read.tables.model import (
    PAPER,
    Comparison,
    MetricCell,
    TableModel,
    TableRow,
    table_model,
)
from cope_sweep.read.tables.results import Results, read_results
from cope_sweep.read.tables.row_names import find_axis
from cope_sweep.read.tables.stats import finite, with_ties
from cope_sweep.read.tables.verdicts import verdicts
from cope_sweep.store import QueryError, Store
from cope_sweep.terminal import SafeConsole

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Table:
    """The results of an ablation as a question wants them."""

    results: Results
    question: GetTable

    @staticmethod
    def of(results: Results, compare: str | None = None) -> Table:
        """A table without options, except what its rows are compared with."""
        # Not validated: a name here comes from a plan, and may be longer than what a question may send.
        return Table(results, GetTable.model_construct(name=results.plan.name, compare=compare))

    @property
    def compare(self) -> str | None:
        """What rows are compared with: see `comparisons.compared`; None: nothing."""
        return self.question.compare

    @cached_property
    def model(self) -> TableModel:
        """The frame of the table. Raises QueryError if there is nothing of this name to compare with or sort by."""
        model = self._compared
        if self.compare is None and self.results.plan.is_drawn:
            model = replace(model, answer=rank_rows(self.results).answer)
        if self.question.sort is not None:
            model = sorted_by(model, self.question.sort)
        # Last: comparisons are corrected for all rows, and not for those that are shown.
        return replace(model, rows=model.rows[: self.question.top])

    @cached_property
    def _compared(self) -> TableModel:
        """All rows in the plan's order, with their comparisons."""
        model = table_model(self.results.plan, self.results.records)
        if others := self.results.others:
            model = replace(model, warnings=(*model.warnings, f"{others}."))
        return model if self.compare is None else compared(model, self.compare)

    def check(self) -> None:
        """Raise the errors of `model` now, not only when a notebook shows the table."""
        self.model  # noqa: B018 - a cached property

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per row of the plan; `tables.frames.table_frame` describes the columns."""
        from cope_sweep.read.tables.frames import table_frame

        return table_frame(self.model, compared=self.compare is not None)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each row that is compared with another one. Raises QueryError for an invalid margin."""
        shown = {row.row for row in self.model.rows}
        found = verdicts(self.results, self._compared, self.question.margin)
        return [each for each in found if each.row in shown]

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
                "against": self.compare, "difference_rule": self.model.difference_rule.strip(),
                "rules": [rule.removeprefix(self.model.difference_rule) for rule in self.model.rules],
                "answer": self.model.answer,
                # Without the command, which names the store: a table is the same wherever its runs are.
                "verdicts": [each.model_dump(mode="json", exclude={"command"}) for each in self.verdicts],
            },
            "warnings": list(self.model.warnings),
            "rows": [_row_json(row) for row in self.model.rows],
        }  # fmt: skip

    def to_csv(self, *, runs: bool = False) -> str:
        """`frame` as CSV, or one line per run."""
        if not runs:
            return render.csv_text(self.frame)
        shown = [row.row for row in self.model.rows]
        return render.csv_text(self.results.frame[self.results.frame["row"].isin(shown)])

    def to_markdown(self) -> str:
        """GitHub-flavoured Markdown tables and their notes."""
        return render.markdown(self.model)

    def to_latex(self, **options: Any) -> str:
        """LaTeX `table` environments of the rows and of the comparisons; `render.latex` describes the options."""
        return render.latex(self.model, **options)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        plan = self.results.plan
        return f"<table of {plan.name}: {len(plan.rows)} rows, {len(plan.runs)} runs; print() shows it>"

    def _repr_markdown_(self) -> str:
        """Called by notebooks."""
        return self.to_markdown()

    def to_rich(self, *, runs: bool = False) -> Group:
        """Tables for terminals: the rows and their comparisons, or a line for each run."""
        return render.rich_runs(self.model) if runs else render.rich(self.model)


def table(plan: Plan, store: Store, *, compare: str | None = None) -> Table:
    """The table of `plan` from the runs in the store; `compare`: see `Table`. Raises StoreError."""
    return Table.of(read_results(plan, store), compare)


def sorted_by(model: TableModel, name: str) -> TableModel:
    """The table sorted by a metric (name or heading), by `parameters`, or by an axis.

    The best value comes first, and the smallest number of parameters or label. Rows without a value come last.

    Raises QueryError for a column that the table does not have.
    """
    key = find_axis(model.axes, name)
    column = next((column for column in model.columns if name in (column.name, column.label, column.title)), None)
    if column is None and key is None and name != "parameters":
        allowed = [*model.axes.values(), "parameters", *(column.name for column in model.columns)]
        raise QueryError(
            f"{model.ablation} has no column {name!r}{suggest(name, allowed)}",
            code="unknown_column",
            column=name,
            allowed=allowed,
        )

    means: dict[str, float] = {}
    if column is not None:
        known = {row.row: row.metrics[column.name].summary.mean for row in model.rows}
        known = {name: mean for name, mean in known.items() if not math.isnan(mean)}
        means = dict(zip(known, with_ties(list(known.values())), strict=True))

    def sort_key(row: TableRow) -> tuple[bool, float, str]:
        if column is not None:
            mean = means.get(row.row, math.nan)
            return math.isnan(mean), mean if column.goal == "min" else -mean, ""
        if key is None:
            return row.parameters is None, row.parameters or 0, ""
        label = row.labels.get(key, "")
        try:
            return not label, float(label), ""
        except ValueError:
            return not label, math.inf, label.casefold()

    return replace(model, rows=tuple(sorted(model.rows, key=sort_key)))


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
        "text": cell.text,
        "mean": finite(summary.mean),
        "std": finite(summary.std),
        "n": summary.n,
        "ci": None if low is None or high is None else [low, high],
        "ci_method": summary.method or None,
        "median": finite(summary.median),
        "range": None if summary.n == 0 else [summary.low, summary.high],
        "values": [
            {"run_id": run.run_id, "seed": run.seed, "value": cell.values[run.seed],
             "text": cell.number_text(cell.values[run.seed]), "stuck": run.seed in cell.stuck}
            for run, _ in row.runs
            if run.seed in cell.values
        ],
        "published": {
            "text": cell.published_text, "value": published.value, "std": published.std, "seeds": published.seeds,
            "source": published.source,
        } if published else None,
        "best": cell.best,
        "mostly_stuck": cell.mostly_stuck,
        "learned": None if cell.learned is None else {
            "k": cell.learned.k, "n": cell.learned.n,
            "interval": [end for end in cell.learned.interval if not math.isnan(end)] or None,
        },
        "comparison": _comparison_json(cell.comparison) | {"texts": cell.comparison_texts} if cell.comparison else None,
    }  # fmt: skip


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    fields = {
        name: finite(value) if isinstance(value, float) else value
        for name, value in asdict(comparison.difference).items()
    }
    return fields | {
        "n": list(comparison.difference.n),
        "against": comparison.against,
        "verdict": comparison.verdict,
        "p_adjusted": comparison.p_adjusted,
        "margin": comparison.margin,
    }


TERMINAL_WIDTH = 160
"""Width in characters of a table that is not printed to a terminal."""


@dataclass(frozen=True)
class Format:
    """A format of tables."""

    suffix: str
    """Ending of files: `.csv`."""
    render: Callable[[Table], bytes]
    """The table in this format."""
    render_runs: Callable[[Table], bytes] | None = None
    """One line for each run; None: this format cannot show single runs."""


def lists_runs(question: GetTable) -> bool:
    """Whether the table has a line for each run; json has every run anyway."""
    return question.runs and question.format not in (None, "json")


def check_options(question: GetTable) -> None:
    """Raises QueryError for options that the question's format does not have."""
    given = [name for name in render.LATEX_OPTIONS if getattr(question, name) != GetTable.model_fields[name].default]
    if given and question.format != "latex":
        raise QueryError(
            f"{', '.join(given)}: only for the format latex; choose it with `format`, or leave this out",
            code="option_of_latex",
            options=given,
        )
    if question.margin is not None and question.compare in (None, PAPER):
        raise QueryError(
            "margin: only where rows are compared with each other; name a row with `compare`, or leave this out",
            code="margin_without_compare",
            margin=question.margin,
        )
    if question.margin is not None and question.format not in (None, "json"):
        raise QueryError(
            "margin: for verdicts, which only the format json has; choose it, or leave this out",
            code="no_effect",
            option="margin",
        )
    if lists_runs(question):
        if FORMATS[question.format or "json"].render_runs is None:
            formats = " or ".join(name for name, table_format in FORMATS.items() if table_format.render_runs)
            raise QueryError(
                f"{question.format} cannot show single runs; choose the format {formats}, or json, which has every run",
                code="format_without_runs",
                format=question.format,
            )
        if question.sort is not None:
            raise QueryError(
                "sort orders rows, but single runs are listed in plan order; leave out either sort or runs",
                code="sorted_runs",
            )
        if question.compare is not None:
            raise QueryError(
                "compare: rows are compared, and not single runs; leave out either compare or runs",
                code="no_effect",
                option="compare",
            )


def table_file(table: Table) -> bytes:
    """The table, or a line for each run, in the format of its question (default: json). Raises QueryError."""
    question = table.question
    check_options(question)
    chosen = FORMATS[question.format or "json"]
    if question.runs and chosen.render_runs is not None:
        return chosen.render_runs(table)
    return chosen.render(table)


def _json(table: Table) -> bytes:
    # The json module encodes indented documents in Python: 4 s for 100,000 runs.
    return to_json(table.to_json(), indent=2, inf_nan_mode="null") + b"\n"


def _latex(table: Table) -> bytes:
    return table.to_latex(**{name: getattr(table.question, name) for name in render.LATEX_OPTIONS}).encode()


def _terminal(table: Table, *, runs: bool = False) -> bytes:
    console = SafeConsole(file=io.StringIO(), width=TERMINAL_WIDTH, record=True)
    console.print(table.to_rich(runs=runs))
    return console.export_text().encode()


FORMATS: Mapping[TableFormat, Format] = {
    "json": Format(".json", _json),
    "csv": Format(".csv", lambda table: table.to_csv().encode(), lambda table: table.to_csv(runs=True).encode()),
    "markdown": Format(".md", lambda table: table.to_markdown().encode()),
    "latex": Format(".tex", _latex),
    "terminal": Format(".txt", _terminal, lambda table: _terminal(table, runs=True)),
}
"""Name → format."""
