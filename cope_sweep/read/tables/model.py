"""The one frame of a table: rows and columns of cells. A cell has its numbers, their text, its marks and its runs.

Every format renders this frame and nothing else, so a number in a cell has the same text everywhere: terminal,
Markdown and LaTeX choose and order its cells (`layout`), CSV has the numbers, JSON numbers and texts, and the page
draws what the JSON says. `comparisons` adds the comparisons of its cells, with another row or with the paper.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.config.ablation import Metric
from cope_sweep.config.keys import is_field
from cope_sweep.config.points import Labelled, agreeing_rows
from cope_sweep.frozen import OF_LEARNED, SHARE_LEARNED, STEPS_UNTIL, is_reported, learning_parts, metric_parts
from cope_sweep.read.numbers import (
    MAX_DECIMALS,
    MISSING,
    decimal_places,
    decimals_for,
    metric_text,
    p_text,
    percent_range,
)
from cope_sweep.read.tables.rules import has_learned, least_rule_error, stuck_from
from cope_sweep.read.tables.stats import (
    SIGNIFICANT_P,
    Bounds,
    Difference,
    Proportion,
    Summary,
    bounds_of,
    paired_rows,
    summarise,
    two_rows,
    with_ties,
)
from cope_sweep.store import STATUSES, RunRecord, Status

COMPARED_FACTS = {"data": "data fingerprint", "tokenizer": "tokenizer", "precision": "precision"}
"""Fact in which finished runs of a table must agree → its name in a warning."""
MOST_IN_COMMON = 0.5
"""With at most this share of the runs of two rows on the same hardware, a warning says so."""
LISTED_ROWS = 3
"""The most rows that a warning or an answer lists by name."""
POSITION = "model.position"
"""The axis of encodings."""
TASK = "task"
"""The axis of tasks."""
PAPER = "paper"
"""What `Comparison.against` says if a cell is compared with its published value."""
LEARNING_QUANTITIES = {STEPS_UNTIL: "steps until it is learned", SHARE_LEARNED: "seeds that learned"}
"""Prefix of a metric → what it measures, whatever metric follows it."""
STUCK = "†"
"""Follows a mean if most seeds are stuck; after their number if some are: `2/7†`."""
LOST: tuple[Status, ...] = ("finished", "failed")
"""The statuses of runs that have lost a value that they lack. A run that was stopped early was left out on purpose."""
STARS = (SIGNIFICANT_P, 0.01, 0.001)
"""Largest p for one star, two and three."""


class Column(Metric):
    """A metric of an ablation file, as tables and figures name it and print its values."""

    label: str
    primary: bool = False
    """Whether rows are tested by it. A table has one primary column; the others are descriptive."""

    @property
    def quantity(self) -> str:
        """The measure without the test set: `token error`, `seeds that learned`."""
        prefix, _ = learning_parts(self.name)
        if prefix in LEARNING_QUANTITIES:
            return LEARNING_QUANTITIES[prefix]
        return self.name.rpartition("/")[2].partition("@")[0].replace("_", " ")

    @property
    def quantity_title(self) -> str:
        """The measure with its unit: `token error (%)`."""
        return f"{self.quantity} ({self.unit})" if self.unit else self.quantity

    @property
    def best(self) -> Callable[..., Any]:
        """The function that chooses the best of some values."""
        return min if self.goal == "min" else max

    @property
    def learned_title(self) -> str:
        """The condition for a learned task: `In-dist. ≤ 1`."""
        return f"{self.label} {'≤' if self.goal == 'min' else '≥'} {(self.learned or 0.0) * self.scale:g}"

    @property
    def exact(self) -> bool:
        """Whether the value follows from the configuration alone, so that it is the same for all seeds."""
        return self.name == "facts.parameters"

    @property
    def bounds(self) -> Bounds:
        """The range of its values."""
        bounds = bounds_of(self.name, self.unit)
        return replace(bounds, high=bounds.high / self.scale)  # the unit belongs to what is printed


@dataclass(frozen=True)
class PublishedValue:
    """A published number."""

    value: float
    std: float | None
    source: str
    seeds: int | None = None
    """Number of runs behind the standard deviation; None: the source does not say."""

    @property
    def assumed_runs(self) -> int:
        """Number of runs that a comparison assumes: 1 without a standard deviation, at least 2 with one."""
        return 1 if self.std is None else self.seeds or 2


@dataclass(frozen=True)
class Comparison:
    """The comparison of a cell with the same metric of another row, or with its published value."""

    against: str
    """The name of the other row, or `paper`."""
    difference: Difference
    """This row minus the other."""
    verdict: str
    """`comparisons` has the rules."""
    p_adjusted: float | None = None
    """p after Holm's correction; None: this comparison was not tested."""
    margin: float | None = None
    """The largest difference that agrees with the paper."""


@dataclass(frozen=True)
class MetricCell:
    """A metric of a row: the statistics of the finished runs, the published value, and the texts of both.

    Our numbers in a cell have the same number of digits after the decimal point: those of the metric, or more if the
    published value or a small mean needs them.
    """

    column: Column
    seeds: int
    """The number of runs of the row, finished or not."""
    summary: Summary
    published: PublishedValue | None = None
    best: bool = False
    """Whether this is the best mean of its group (`encoding_groups`), among the rows whose seeds are all finished."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Seed → value, of the finished runs that have one."""
    lost: tuple[int, ...] = ()
    """Seeds whose runs have ended without the value: they failed, or it was not finite or is missing."""
    stuck: tuple[int, ...] = ()
    """Seeds that are stuck at the best simple rule (`tables.rules`)."""
    rule_error: float | None = None
    """The error of the best simple rule; None: the task has no rule, or no run is finished."""
    comparison: Comparison | None = None

    @cached_property
    def decimals(self) -> int:
        """Digits after the decimal point."""
        return decimals_for(self.summary.mean * self.column.scale, self._published_decimals)

    @cached_property
    def _published_decimals(self) -> int:
        """Those of the source, but at least the metric's: 16.9 beside our 17.03 is 16.90."""
        if self.published is None:
            return self.column.decimals
        numbers = [value for value in (self.published.value, self.published.std) if value is not None]
        printed = [decimal_places(value, self.column.scale) for value in numbers]
        return min(max(self.column.decimals, *printed), MAX_DECIMALS)

    def number_text(self, value: float | None, *, signed: bool = False) -> str:
        """A value of the metric with the digits of this cell; `–` without one."""
        return metric_text(self.column, value, self.decimals, signed=signed)

    @property
    def mean_text(self) -> str:
        """The mean over seeds, alone."""
        return self.number_text(self.summary.mean)

    @property
    def text(self) -> str:
        """The mean and the standard deviation over seeds: `3.40 ± 4.72`."""
        mean, std = self.mean_text, self.summary.std
        return mean if math.isnan(std) or self.column.exact else f"{mean} ± {self.number_text(std)}"

    @property
    def marks(self) -> tuple[str, ...]:
        """What follows the text: the number of seeds if some are missing, and a sign if seeds are stuck."""
        if self.summary.n == 0:
            return ()
        missing = () if self.summary.n == self.seeds else (f"(n={self.summary.n})",)
        if not self.stuck:
            return missing
        return (*missing, STUCK if self.mostly_stuck else f"{len(self.stuck)}/{self.summary.n}{STUCK}")

    @property
    def mostly_stuck(self) -> bool:
        """Whether more than half of the seeds are stuck."""
        return len(self.stuck) > self.summary.n / 2

    @property
    def stars(self) -> int:
        """How many of `STARS` the p of the comparison does not exceed; 0 without a test."""
        p = None if self.comparison is None else self.comparison.p_adjusted
        return 0 if p is None else sum(p <= bound for bound in STARS)

    @property
    def learned_seeds(self) -> tuple[int, ...]:
        """The seeds that have learned the task and are not stuck; none if the column has no `learned`."""
        limit = stuck_from(self.rule_error)
        return tuple(seed for seed, value in self.values.items() if has_learned(self.column, value, limit))

    @cached_property
    def learned(self) -> Proportion | None:
        """The share of seeds that have learned the task, of those that have ended; None: the column has no `learned`.

        A run that diverged has not learned it: without `lost`, an encoding that often diverges would learn every time.
        """
        if self.column.learned is None:
            return None
        return Proportion(len(self.learned_seeds), len(self.values) + len(self.lost))

    @property
    def learned_text(self) -> str:
        """The seeds that have learned the task, and the interval of their share: `3/5 (23–88 %)`."""
        if self.learned is None or not self.learned.n:
            return MISSING
        return f"{self.learned.k}/{self.learned.n} ({percent_range(*self.learned.interval)})"

    @property
    def published_text(self) -> str:
        """The published value with the digits of its source: `14.4 ± 3.0`."""
        if self.published is None:
            return MISSING
        parts = [value for value in (self.published.value, self.published.std) if value is not None]
        return " ± ".join(metric_text(self.column, value, self._published_decimals) for value in parts)

    @property
    def comparison_texts(self) -> Mapping[str, str]:
        """The numbers of the comparison as texts: difference, interval, p and margin; `–` for those that it lacks."""
        if self.comparison is None:
            return {}
        test, p, margin = self.comparison.difference, self.comparison.p_adjusted, self.comparison.margin
        ends = f"[{self.number_text(test.ci_low)}, {self.number_text(test.ci_high)}]"
        return {
            "difference": self.number_text(test.difference, signed=True),
            "interval": MISSING if math.isnan(test.ci_low) else ends,
            "p": MISSING if p is None else p_text(p),
            "margin": MISSING if margin is None else f"± {self.number_text(margin)}",
        }


@dataclass(frozen=True)
class TableRow:
    """A row of the plan with its results."""

    row: str
    """The row's name."""
    short: str
    """Its labels on the axes in which the rows of the table differ, for texts."""
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

    def without_value(self, column: str) -> Mapping[str, Status]:
        """The runs that are not finished, or have lost their value in this column: run id → status."""
        lost = self.metrics[column].lost
        return {
            run.run_id: record.status for run, record in self.runs if record.status != "finished" or run.seed in lost
        }

    @cached_property
    def parameters(self) -> int | None:
        """The number of parameters of the model; None before a run is finished."""
        for _, record in self.runs:
            parameters = record.facts.get("parameters")
            if record.status == "finished" and parameters is not None:
                return int(parameters)
        return None

    @property
    def progress(self) -> str:
        """`2/2`, or `1/2: 1 failed`."""
        text = f"{self.counts['finished']}/{self.seeds}"
        unfinished = [f"{count} {status}" for status, count in self.counts.items() if count and status != "finished"]
        return f"{text}: {', '.join(unfinished)}" if unfinished else text


CellKey = tuple[str, str]
"""Names of a row and a column."""


@dataclass(frozen=True)
class ClaimedPair:
    """A pair of cells that a claim of the ablation compares."""

    claim: int
    """Its index in the file."""
    better: CellKey
    than: CellKey
    is_by_margin: bool = False
    """The claim is judged by intervals and a margin, and not by p."""


@dataclass(frozen=True)
class TableModel:
    """The rows of an ablation, with their results."""

    ablation: str
    title: str
    axes: Mapping[str, str]
    """Axis key → short name."""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    replaced: tuple[str, ...] = ()
    """Keys that a scale or `--set` has changed, so that these runs are not the published ones."""
    warnings: tuple[str, ...] = ()
    """Reasons why the rows are not comparable."""
    rules: tuple[str, ...] = ()
    """Rules of the comparisons, for a note below them."""
    difference_rule: str = ""
    """The beginning of a rule that explains differences and their intervals; empty if no rule does."""
    answer: str = ""
    """The result of the comparisons in a sentence."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Name of a row → the row that it is compared with, also where one of them has no values yet."""
    family_sizes: Mapping[str, int] = field(default_factory=dict)
    """The same → the number of comparisons that the p of this one is corrected for, by the primary metric."""
    paired: bool = False
    """Whether runs of the same seed are compared in pairs."""
    claimed: tuple[ClaimedPair, ...] = ()
    """The pairs of cells that claims compare, claim by claim: of rows with the same labels on the other axes."""
    group: str | None = None
    """The axis by which rows are grouped, which is then the first one; None without groups."""
    marks_groups: bool = False
    """Whether the best means of these groups are marked, instead of those of `encoding_groups`."""

    @property
    def primary(self) -> Column:
        """The column by which rows are tested."""
        return next(column for column in self.columns if column.primary)

    def difference(self, cell: MetricCell, other: MetricCell) -> Difference:
        """The difference of two cells of a column, with its test."""
        compare = paired_rows if self.paired else two_rows
        return compare(cell.values, other.values)

    @cached_property
    def stopped(self) -> int:
        """The number of runs that a scheduler stopped early, which no mean includes."""
        return sum(row.counts["stopped"] for row in self.rows)


def table_model(plan: Plan, records: Mapping[str, RunRecord]) -> TableModel:
    """The table of `plan`; `records` maps its run ids to their records."""
    content = plan.ablation.content
    columns = tuple(column_of(metric, primary=metric is content.primary_metric) for metric in content.metrics)
    short = short_labels(plan, plan.rows)
    rows = [_table_row(row, short[row.name], records, columns) for row in plan.rows]
    marked_rows = {row.row: row for group in encoding_groups(rows) for row in mark_best(group, columns)}
    runs = [(row.row, run, record) for row in rows for run, record in row.runs]
    return TableModel(
        ablation=plan.name,
        title=content.title,
        axes=plan.axes,
        columns=columns,
        rows=tuple(marked_rows[row.row] for row in rows),
        replaced=plan.ablation.replaced,
        warnings=(*_warnings_of_choices(plan), *differences(runs), *hardware_of_rows(runs)),
        paired=content.paired,
        claimed=tuple(_claimed_pairs(plan)),
    )


def _claimed_pairs(plan: Plan) -> Iterator[ClaimedPair]:
    content = plan.ablation.content
    for index, claim in enumerate(content.claims):
        column, than_column = claim.columns(content.primary_metric.name)
        better = [row for row in plan.rows if index in row.better]
        than = [row for row in plan.rows if index in row.than]
        for row, other in agreeing_rows(better, than, claim.differing_axes):
            yield ClaimedPair(index, (row.name, column), (other.name, than_column), claim.says != "better")


def encoding_groups(rows: Sequence[TableRow]) -> Collection[list[TableRow]]:
    """The rows in groups that differ in their encoding alone; one group if no rows differ in it, nor in their task.

    Errors of different tasks, or of one and of three variables, cannot be compared.
    """
    if not varying_axes((POSITION, TASK), rows):
        return [list(rows)]
    groups: dict[object, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(other_labels(row), []).append(row)
    return groups.values()


def other_labels(row: TableRow) -> tuple[tuple[str, str], ...]:
    """The labels of a row's task and training: (axis key, label), without its encoding and the fields of encodings."""
    return tuple((key, label) for key, label in row.labels.items() if key != POSITION and not is_field(key))


def varying_axes(axes: Iterable[str], rows: Sequence[Labelled]) -> list[str]:
    """Those of these axes on which the rows differ."""
    return [key for key in axes if len({row.labels.get(key) for row in rows}) > 1]


def row_label(axes: Mapping[str, str], row: Labelled, keys: Iterable[str]) -> str:
    """A row's labels on some axes (key → short name); a number follows the name of its axis: `Absolute · heads 4`."""
    return " · ".join(named_label(axes[key], row.labels[key]) for key in keys if key in row.labels)


def named_label(axis: str, label: str) -> str:
    """The label; a number follows the name of its axis: `heads 4`."""
    return f"{axis} {label}" if label[:1].isdecimal() else label


def short_labels(plan: Plan, rows: Sequence[Row]) -> dict[str, str]:
    """Name of a row → its labels on the axes on which these rows differ; its name if these labels are not unique."""
    keys = varying_axes(plan.axes, rows)
    labels = {row.name: row_label(plan.axes, row, keys) for row in rows}
    counts = Counter(labels.values())
    return {name: label if label and counts[label] == 1 else name for name, label in labels.items()}


def column_of(metric: Metric, *, primary: bool = False) -> Column:
    """A metric of an ablation file as a column."""
    return Column(**dict(metric) | {"label": metric.label or metric.name, "primary": primary})


def _warnings_of_choices(plan: Plan) -> Iterable[str]:
    """A sentence for each search or schedule that has chosen runs by a metric of the table."""
    for key, metric in plan.reported_choices:
        yield (
            f"The {key} chose runs by {metric}, which this table reports, so the numbers look better than they are; "
            "set `evaluate.validation: true` to choose by a validation set"
        )


def _table_row(row: Row, short: str, records: Mapping[str, RunRecord], columns: Iterable[Column]) -> TableRow:
    runs = tuple((run, records[run.run_id]) for run in row.runs)
    cells = {column.name: metric_cell(row, runs, column) for column in columns}
    return TableRow(row.name, short, row.labels, runs, cells)


def metric_cell(row: Row, runs: Collection[tuple[RunSpec, RunRecord]], column: Column) -> MetricCell:
    """A metric of a row, from its runs and their records."""
    values: dict[int, float] = {}
    for run, record in runs:
        value = record.value(column.name) if record.status == "finished" else None
        if value is not None and not math.isnan(value):
            values[run.seed] = float(value)
    rule_error = least_rule_error(row.runs[0], column) if values else None
    stuck = tuple(seed for seed, value in values.items() if value >= stuck_from(rule_error))
    return MetricCell(
        column,
        len(row.runs),
        summarise(values.values(), column.bounds),
        _published_value(row, column.name),
        values=values,
        lost=_lost_seeds(runs, column, values),
        stuck=stuck,
        rule_error=rule_error,
    )


def _lost_seeds(
    runs: Iterable[tuple[RunSpec, RunRecord]], column: Column, values: Mapping[int, float]
) -> tuple[int, ...]:
    """See `MetricCell.lost`: none in a column that the row does not have.

    Where no run has a value, the task may not measure it, or an encoding has no position for so many tokens.
    """
    prefix, of = learning_parts(column.name)
    parts = metric_parts(of) or (of,)

    def was_not_finite(record: RunRecord) -> bool:
        left_out = str(record.facts.get("contexts_left_out", "")).split("; ")
        is_named = any(text.startswith(f"{part} is ") for text in left_out for part in parts)
        return is_named or record.value(column.name) is not None  # a value that is no number

    ended = [each for each in runs if each[0].seed not in values and each[1].status in LOST]
    if not ended or not is_reported(column.name, ended[0][0].metrics):
        return ()
    is_measured = bool(values) and prefix != OF_LEARNED  # which only some of its runs have
    return tuple(
        run.seed for run, record in ended if record.status == "failed" or is_measured or was_not_finite(record)
    )


def _published_value(row: Row, metric: str) -> PublishedValue | None:
    published = row.published
    if published is None or metric not in published.values:
        return None
    return PublishedValue(published.values[metric], published.std.get(metric), published.source, published.seeds)


def mark_best(rows: list[TableRow], columns: Iterable[Column]) -> list[TableRow]:
    """Mark the best mean of each metric, if at least two rows have a value from every seed.

    A row whose seeds are mostly stuck is never marked. Nor is one in a column of seeds that have learned the task, of
    which the better row may have fewer.
    """
    for column in columns:
        if learning_parts(column.name)[0] == OF_LEARNED:
            continue
        complete = [row for row in rows if row.metrics[column.name].summary.n == row.seeds]
        if not column.compared or len(complete) < 2:
            continue
        means = with_ties([row.metrics[column.name].summary.mean for row in complete])
        best_rows = {row.row for row, mean in zip(complete, means, strict=True) if mean == column.best(means)}
        for index, row in enumerate(rows):
            cell = row.metrics[column.name]
            if row.row in best_rows and not cell.mostly_stuck:
                rows[index] = replace(row, metrics={**row.metrics, column.name: replace(cell, best=True)})
    return rows


def differences(runs: Iterable[tuple[str, RunSpec, RunRecord]]) -> tuple[str, ...]:
    """One sentence for each fact that finished runs of a table should share, but do not: `COMPARED_FACTS`.

    Data are compared among runs of the same task. Runs without the fact are left out.

    Args:
        runs: (name of the row, run, its record).
    """
    rows_by_value: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row, run, record in runs:
        for fact in COMPARED_FACTS:
            value = record.facts.get(fact)
            if record.status == "finished" and value is not None:
                task = repr(run.task) if fact == "data" else ""
                names = rows_by_value.setdefault((fact, task), {}).setdefault(str(value), [])
                if row not in names:
                    names.append(row)
    return tuple(
        f"Rows differ in {COMPARED_FACTS[fact]}, so they are not comparable: "
        + "; ".join(f"{value} ({first_rows(names)})" for value, names in names_by_value.items())
        for (fact, _), names_by_value in rows_by_value.items()
        if len(names_by_value) > 1
    )


def hardware_of_rows(runs: Iterable[tuple[str, RunSpec, RunRecord]]) -> tuple[str, ...]:
    """A sentence, if hardware or the version of torch follows the row: of two rows, half of the runs differ in it.

    Runs without the facts are left out. For `runs`, see `differences`.
    """
    by_row: dict[str, Counter[str]] = {}
    for row, _, record in runs:
        facts = record.facts
        if record.status == "finished" and facts.get("device") is not None:
            parts = [str(facts["device"])]
            if facts.get("torch") is not None:
                # `+cu132` names the build, which a CPU does not use.
                parts.append(f"torch {str(facts['torch']).partition('+')[0]}")
            if facts.get("compile"):
                parts.append("compiled")
            by_row.setdefault(row, Counter())[", ".join(parts)] += 1
    kinds = {tuple(sorted(counts.items())): counts for counts in by_row.values()}  # few, of however many rows
    pairs = itertools.combinations(kinds.values(), 2)
    if not any(_share_in_common(one, other) <= MOST_IN_COMMON for one, other in pairs):
        return ()
    rows_by_hardware: dict[str, list[str]] = {}
    for row, counts in by_row.items():
        n = counts.total()
        texts = [text if count == n else f"{count} of {n} on {text}" for text, count in sorted(counts.items())]
        rows_by_hardware.setdefault(" and ".join(texts), []).append(row)
    listed = "; ".join(f"{text} ({first_rows(names)})" for text, names in rows_by_hardware.items())
    return (f"Hardware follows the row, so that a difference may come from it: {listed}",)


def _share_in_common(one: Counter[str], other: Counter[str]) -> float:
    """The share of the runs of two rows that have the same hardware: 1 for equal distributions, 0 for disjoint ones."""
    return sum(min(count / one.total(), other[text] / other.total()) for text, count in one.items())


def first_rows(names: Sequence[str]) -> str:
    """The first names, and the number of the others: `A, B, C and 2 more`."""
    listed = ", ".join(names[:LISTED_ROWS])
    return listed if len(names) <= LISTED_ROWS else f"{listed} and {len(names) - LISTED_ROWS} more"
