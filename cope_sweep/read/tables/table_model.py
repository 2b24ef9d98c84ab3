"""The content of a table as plain values, from which every output format is rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.read.tables.provenance import differences
from cope_sweep.read.tables.significance import Difference
from cope_sweep.read.tables.stats import Bounds, Share, Summary, bounds_of, stuck, summarise
from cope_sweep.store import RunRecord, Status

STATUSES: tuple[Status, ...] = ("finished", "stopped", "failed", "damaged", "running", "interrupted", "pending")

LEAST_RUNS = 2
"""The smallest number of runs that has a standard deviation."""


@dataclass(frozen=True)
class Column:
    """A metric of the table."""

    name: str
    label: str
    title: str
    """The label with its unit."""
    goal: Literal["min", "max"]
    unit: str
    decimals: int
    scale: float = 1.0
    """Factor of printed values; the unit is that of the product."""
    compared: bool = True
    """Whether rows are compared by it; else no value is the best, stuck or tested."""
    primary: bool = False
    """Whether rows are tested by it: one column of a table is, and the others are descriptive."""
    learned: float | None = None
    """A run whose value is at least as good as this one has learned the task."""

    @property
    def exact(self) -> bool:
        """Whether the value follows from the row's configuration, so that seeds do not change it."""
        return self.name == "facts.parameters"

    @property
    def bounds(self) -> Bounds:
        """The range of its values."""
        return bounds_of(self.name, self.unit)


@dataclass(frozen=True)
class PublishedValue:
    """A published number."""

    value: float
    std: float | None
    source: str
    seeds: int | None = None
    """Number of runs behind the standard deviation; None: the source does not say."""

    @property
    def runs(self) -> int:
        """Number of runs that a comparison assumes: 1 without a standard deviation, at least 2 with one."""
        return 1 if self.std is None else self.seeds or LEAST_RUNS


@dataclass(frozen=True)
class Comparison:
    """A cell beside the same metric of another row, or beside its published value."""

    against: str
    """The name of the other row, or `paper`."""
    difference: Difference
    """This row minus the other."""
    verdict: str
    """See the rules in `results.compare`."""
    p_adjusted: float | None = None
    """p with Holm's correction for all comparisons of the primary metric; None: this is not one of them."""
    margin: float | None = None
    """Differences up to this one agree with the paper."""


@dataclass(frozen=True)
class MetricCell:
    """A metric of a row: the statistics of the finished runs, and the published value."""

    summary: Summary
    published: PublishedValue | None = None
    best: bool = False
    """Whether this is the best mean among the rows whose seeds are all finished."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Seed → value, of the finished runs that have one."""
    stuck: tuple[int, ...] = ()
    """Seeds that are far worse than the others: `stats.stuck`."""
    learned: Share | None = None
    """The seeds that have learned the task; None: the file does not say from which value on."""
    comparison: Comparison | None = None


@dataclass(frozen=True)
class TableRow:
    """A row of the plan with its results."""

    row: str
    """The row's name."""
    labels: Mapping[str, str]
    """Axis key → label."""
    runs: tuple[tuple[RunSpec, RunRecord], ...]
    """All runs with their records, finished or not, in the order of the seeds."""
    metrics: Mapping[str, MetricCell]

    @property
    def seeds(self) -> int:
        """The number of runs, finished or not."""
        return len(self.runs)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Status → number of runs, for every status."""
        counted = Counter(record.status for _, record in self.runs)
        return {status: counted[status] for status in STATUSES}

    @property
    def complete(self) -> bool:
        """Whether every run is finished."""
        return self.counts["finished"] == self.seeds

    @cached_property
    def parameters(self) -> int | None:
        """The number of parameters of the model; None before a run is finished."""
        known = (record.facts.get("parameters") for _, record in self.runs if record.status == "finished")
        return next((int(parameters) for parameters in known if parameters is not None), None)

    @property
    def progress(self) -> str:
        """`2/2`, or `1/2: 1 failed`."""
        others = [f"{n} {status}" for status, n in self.counts.items() if n and status != "finished"]
        return f"{self.counts['finished']}/{self.seeds}" + (f": {', '.join(others)}" if others else "")


@dataclass(frozen=True)
class TableModel:
    """An ablation's table."""

    ablation: str
    title: str
    axes: Mapping[str, str]
    """Axis key → short name."""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    replaced: tuple[str, ...] = ()
    """Keys by which these runs differ from the published ones: of a scale, or of `--set`."""
    warnings: tuple[str, ...] = ()
    """Reasons why the rows are not comparable."""
    rules: tuple[str, ...] = ()
    """How the comparisons were made."""
    answer: str = ""
    """What they say, in a sentence."""

    @property
    def primary(self) -> Column:
        """The column that rows are tested by."""
        return next(column for column in self.columns if column.primary)

    @cached_property
    def stopped(self) -> int:
        """The number of runs that a scheduler stopped early. They are in no mean."""
        return sum(row.counts["stopped"] for row in self.rows)


def table_model(plan: Plan, records: Mapping[str, RunRecord]) -> TableModel:
    """The table of `plan`; `records` maps its run ids to their records."""
    content = plan.ablation.content
    columns = tuple(
        Column(
            metric.name,
            metric.label or metric.name,
            metric.title,
            metric.goal,
            metric.unit,
            metric.decimals,
            metric.scale,
            metric.compared,
            metric is content.primary_metric,
            metric.learned,
        )
        for metric in content.metrics
    )
    rows = [_table_row(row, records, columns) for row in plan.rows]
    return TableModel(
        plan.name, content.title, plan.axes, columns, tuple(_mark_best(rows, columns)), plan.ablation.replaced,
        (*_chosen_by(plan), *differences((row.row, run, record) for row in rows for run, record in row.runs)),
    )  # fmt: skip


def _chosen_by(plan: Plan) -> Iterable[str]:
    """A sentence where a search or schedule has chosen by a metric that the table reports."""
    for key, metric in plan.reported_choices:
        yield (
            f"The {key} chose runs by {metric}, which this table reports, so that it looks better than it is; with "
            "`evaluate.validation: true` it goes by a validation set"
        )


def _table_row(row: Row, records: Mapping[str, RunRecord], columns: Iterable[Column]) -> TableRow:
    runs = tuple((run, records[run.run_id]) for run in row.runs)
    finished = [(run.seed, record) for run, record in runs if record.status == "finished"]
    cells = {}
    for column in columns:
        found = {seed: record.value(column.name) for seed, record in finished}
        values = {seed: float(value) for seed, value in found.items() if value is not None and value == value}  # no NaN
        far = stuck(list(values.values()), column.goal, column.bounds) if column.compared else [False] * len(values)
        cells[column.name] = MetricCell(
            summarise(values.values(), column.bounds),
            _published_value(row, column.name),
            values=values,
            stuck=tuple(seed for seed, is_far in zip(values, far, strict=True) if is_far),
            learned=_learned(column, values.values()),
        )
    return TableRow(row.name, row.labels, runs, cells)


def _learned(column: Column, values: Iterable[float]) -> Share | None:
    """The values that are at least as good as the one from which on the task is learned."""
    if column.learned is None:
        return None
    are = [value <= column.learned if column.goal == "min" else value >= column.learned for value in values]
    return Share(sum(are), len(are))


def _published_value(row: Row, metric: str) -> PublishedValue | None:
    published = row.published
    if published is None or metric not in published.values:
        return None
    return PublishedValue(published.values[metric], published.std.get(metric), published.source, published.seeds)


def _mark_best(rows: list[TableRow], columns: Iterable[Column]) -> list[TableRow]:
    """Mark the best mean of each metric, if at least two rows have a value from every seed."""
    for column in columns:
        if not column.compared:
            continue
        means = {
            index: row.metrics[column.name].summary.mean
            for index, row in enumerate(rows)
            if row.metrics[column.name].summary.n == row.seeds
        }
        if len(means) < 2:
            continue
        best = (min if column.goal == "min" else max)(means.values())
        for index, mean in means.items():
            if mean == best:
                row = rows[index]
                cell = replace(row.metrics[column.name], best=True)
                rows[index] = replace(row, metrics={**row.metrics, column.name: cell})
    return rows
