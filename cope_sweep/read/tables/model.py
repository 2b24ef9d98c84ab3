"""The content of a table as plain values, from which every output format is rendered, and comparisons of its cells.

With a row, or with the rows that have one label of an axis, rows are tested by the primary metric alone: an exact test
of `stats`, its p corrected by Holm's method for all rows that are compared with the same one. A row is `better` or
`worse` where the corrected p is at most 5 %, else there is `no significant difference`. Where no data could bring the
corrected p so low, because there are too few seeds for so many rows, and for all other metrics, a comparison is
`descriptive`: a difference without a verdict.

With the paper, at its scale, a cell

    agrees        if the 90 % interval of the difference lies within ± the margin (two one-sided tests at 5 %)
    differs       if it does not, and the 95 % interval of the difference excludes 0
    inconclusive  otherwise: more seeds are needed

The paper gives no values of single runs to permute, so this interval is Welch's, from our mean and standard deviation
over n runs, and from the published ones, over the number of seeds that the paper names; half a unit of the last
published digit is uncertain as well. If the paper gives a standard deviation and no number of seeds, 2 are assumed, the
least possible: the interval is then the widest. The margin is `MARGIN_STDS` published standard deviations, but at least
one unit of the last digit. A value without a standard deviation is one run, and nothing says how such runs vary, so its
difference is descriptive: a rank test of one run against n needs n ≥ 19, and any other test a distribution. So is that
of a row of fewer than `LEAST_RUNS` finished runs.

A number of parameters is the same for all seeds. It agrees within one unit of the last published digit, else differs.

Runs at another scale than the paper's have other values. There, only the order of the rows is compared: each row with
the one that is best in the paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.config.ablation import Metric
from cope_sweep.config.explain import suggest
from cope_sweep.config.keys import is_field
from cope_sweep.read.tables.row_names import find_axis, named_rows
from cope_sweep.read.tables.rules import are_most, best_rule, stuck_from
from cope_sweep.read.tables.stats import (
    TELLS,
    Bounds,
    Difference,
    Proportion,
    Summary,
    bounds_of,
    holm,
    paired_rows,
    summarise,
    t_quantile,
    t_tail,
    two_rows,
)
from cope_sweep.store import QueryError, RunRecord, Status

STATUSES: tuple[Status, ...] = ("finished", "stopped", "failed", "damaged", "running", "interrupted", "pending")

LEAST_RUNS = 3
"""The smallest number of our runs that is tested against published ones."""
COMPARED = {"data": "data fingerprint", "tokenizer": "tokenizer", "precision": "precision"}
"""Fact of a finished run → what a warning calls it."""
SHOWN_ROWS = 3
"""Rows that a warning names for each value, and an answer where they were not tested."""

PAPER = "paper"
POSITION, METHOD = "model.position", "cope"
"""The axis and the encoding of the default reference."""
MARGIN_STDS = 2.0

ROW_RULE = "Difference of {metric}: row minus {row}, with its 95 % interval, which holds for one comparison alone. "
TESTS = {
    False: "permutation test",
    True: "test of sign flips of the differences between runs of the same seed, which share weights and data",
}
"""Whether runs are paired → the exact test."""
TEST_RULE = (
    "Exact {test}; p is corrected for {tests} (Holm). With {runs} it is at least {floor}; up to 0.05 {means}, else "
    "there is no significant difference. "
)
DESCRIPTIVE_RULE = (
    "With {runs} and {tests} the corrected p of an exact {test} is at least {floor}, so no difference can be "
    "significant: the table is descriptive. "
)
OTHERS_RULE = "The other metrics are descriptive."
MEANS = "the row is better or worse", "the order is the same or opposite"
PAPER_RULE = (
    "Compared with the paper: agrees, if the 90 % interval of the difference (Welch, from the published standard "
    f"deviation and number of seeds) is within ± {MARGIN_STDS:g} published standard deviations (at least one unit of "
    "the last digit); else differs, if the 95 % interval excludes 0; else this n is inconclusive. Not corrected for "
    "the number of cells."
)
UNKNOWN_RULE = "The paper does not say how many seeds are behind {sources}; 2 are assumed, the least possible."
SINGLE_RULE = (
    "A published value without a standard deviation is one run, and nothing says how such runs vary: its difference is "
    "descriptive."
)
FEW_RULE = f"Rows of fewer than {LEAST_RUNS} finished runs are descriptive."
EXACT_RULE = "The number of parameters agrees within one unit of the last published digit."
ORDER_RULE = (
    "These runs are not of the paper's size ({keys} differ), so their values cannot agree with it. Compared is the "
    "order by {metric}: each row with the one that is best in the paper. "
)
SHOWN_KEYS = 3
DESCRIPTIVE, SAME = "descriptive", "no significant difference"
PHRASES = {
    "better": "{are} better than {against}",
    "worse": "{are} worse than {against}",
    "same order": "{are} worse than {against}, as in the paper",
    "opposite order": "{are} better than {against}, unlike in the paper",
    SAME: "{do} not differ significantly from {against}",
    DESCRIPTIVE: "{were} not tested against {against}: too few seeds",
}
"""Verdict → what an answer says of rows."""
PAPER_PHRASES = {
    "agrees": ("agrees with ours", "agree with ours"),
    "differs": ("differs from ours", "differ from ours"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    DESCRIPTIVE: ("was not tested", "were not tested"),
}


@dataclass(frozen=True)
class Column:
    """A metric, as tables and figures name it and print its values."""

    name: str
    label: str
    unit: str
    goal: Literal["min", "max"]
    decimals: int = 2
    scale: float = 1.0
    """Factor by which values are multiplied before printing; the unit belongs to the product."""
    compared: bool = True
    """Whether rows are compared by it; else no value is the best, stuck or tested."""
    primary: bool = False
    """Whether rows are tested by it: one column of a table is, and the others are descriptive."""
    learned: float | None = None
    """A run whose value is at least as good as this one has learned the task."""

    @property
    def title(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def quantity(self) -> str:
        """Name of the measure, without the test set, with its unit: `token error (%)`."""
        text = self.name.rpartition("/")[2].partition("@")[0].replace("_", " ")
        return f"{text} ({self.unit})" if self.unit else text

    @property
    def best(self) -> Callable[..., Any]:
        """The function that chooses the best of some values."""
        return min if self.goal == "min" else max

    def is_learned(self, value: Any) -> Any:
        """Whether a run with this value has learned the task; for a pandas series, element by element."""
        return value <= self.learned if self.goal == "min" else value >= self.learned

    @property
    def learned_title(self) -> str:
        """From which value on the task is learned: `In-dist. ≤ 1`."""
        return f"{self.label} {'≤' if self.goal == 'min' else '≥'} {(self.learned or 0.0) * self.scale:g}"

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
        return 1 if self.std is None else self.seeds or 2


@dataclass(frozen=True)
class Comparison:
    """A cell beside the same metric of another row, or beside its published value."""

    against: str
    """The name of the other row, or `paper`."""
    difference: Difference
    """This row minus the other."""
    verdict: str
    """See the rules in the module."""
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
    """Whether this is the best mean among the rows of its group whose seeds are all finished: see `encoding_groups`."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Seed → value, of the finished runs that have one."""
    stuck: tuple[int, ...] = ()
    """Seeds that do no better than the best simple rule: `tables.rules`."""
    learned: Proportion | None = None
    """The seeds that have learned the task; None: the file does not say from which value on. A stuck one has not."""
    rule_error: float | None = None
    """The error of the best simple rule; None: the task has none, or no run is finished."""
    comparison: Comparison | None = None


@dataclass(frozen=True)
class TableRow:
    """A row of the plan with its results."""

    row: str
    """The row's name."""
    short: str
    """Its labels of the axes in which the rows of the table differ, for texts."""
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
    """Rules of the comparisons."""
    difference_rule: str = ""
    """The first words of a rule, which explain differences and their intervals; empty where the rules have none."""
    answer: str = ""
    """Their result in a sentence."""
    paired: bool = False
    """Whether runs of the same seed are compared in pairs."""
    group: str | None = None
    """The axis, the first one, by which rows are together; None: they are not."""

    @property
    def primary(self) -> Column:
        """The column that rows are tested by."""
        return next(column for column in self.columns if column.primary)

    def difference(self, cell: MetricCell, other: MetricCell) -> Difference:
        """The difference of two cells of a column, with its test."""
        return (paired_rows if self.paired else two_rows)(cell.values, other.values)

    @cached_property
    def stopped(self) -> int:
        """The number of runs that a scheduler stopped early. They are in no mean."""
        return sum(row.counts["stopped"] for row in self.rows)


def table_model(plan: Plan, records: Mapping[str, RunRecord]) -> TableModel:
    """The table of `plan`; `records` maps its run ids to their records."""
    content = plan.ablation.content
    columns = tuple(column_of(metric, primary=metric is content.primary_metric) for metric in content.metrics)
    short = short_labels(plan, plan.rows)
    rows = [_table_row(row, short[row.name], records, columns) for row in plan.rows]
    marked = {row.row: row for group in encoding_groups(rows) for row in _mark_best(group, columns)}
    return TableModel(
        plan.name, content.title, plan.axes, columns, tuple(marked[row.row] for row in rows), plan.ablation.replaced,
        (*_chosen_by(plan), *differences((row.row, run, record) for row in rows for run, record in row.runs)),
        paired=content.paired,
    )  # fmt: skip


def encoding_groups(rows: Sequence[TableRow]) -> Collection[list[TableRow]]:
    """Rows that differ in their encoding alone; all rows, where none differ in it.

    Errors of different tasks, or of one and of three variables, cannot be compared.
    """
    if len({row.labels.get(POSITION) for row in rows}) < 2:
        return [list(rows)]
    groups: dict[object, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(other_labels(row), []).append(row)
    return groups.values()


def other_labels(row: TableRow) -> tuple[tuple[str, str], ...]:
    """Axis key and label of a row, without its encoding and the fields of encodings: its task and its training."""
    return tuple((key, label) for key, label in row.labels.items() if key != POSITION and not is_field(key))


def varying_axes(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """The keys of the axes in which these rows differ."""
    return [key for key in plan.axes if len({row.labels.get(key) for row in rows}) > 1]


def row_label(plan: Plan, row: Row, keys: Iterable[str]) -> str:
    """The labels of some axes; a number has the name of its axis: `Absolute · heads 4`."""
    return " · ".join(named_label(plan.axes[key], row.labels[key]) for key in keys if key in row.labels)


def named_label(axis: str, label: str) -> str:
    """The label; a number with the name of its axis."""
    return f"{axis} {label}" if label[:1].isdecimal() else label


def short_labels(plan: Plan, rows: Sequence[Row]) -> dict[str, str]:
    """Name of a row → its labels of the axes in which these rows differ; its name, where another row has them too."""
    keys = varying_axes(plan, rows)
    labels = {row.name: row_label(plan, row, keys) for row in rows}
    counts = Counter(labels.values())
    return {name: label if label and counts[label] == 1 else name for name, label in labels.items()}


def column_of(metric: Metric, *, primary: bool = False) -> Column:
    """A metric of an ablation file as a column."""
    return Column(**metric.model_dump() | {"label": metric.label or metric.name, "primary": primary})


def _chosen_by(plan: Plan) -> Iterable[str]:
    """A sentence where a search or schedule has chosen by a metric that the table reports."""
    for key, metric in plan.reported_choices:
        yield (
            f"The {key} chose runs by {metric}, which this table reports, so that it looks better than it is; with "
            "`evaluate.validation: true` it goes by a validation set"
        )


def _table_row(row: Row, short: str, records: Mapping[str, RunRecord], columns: Iterable[Column]) -> TableRow:
    runs = tuple((run, records[run.run_id]) for run in row.runs)
    finished = [(run.seed, record) for run, record in runs if record.status == "finished"]
    cells = {}
    for column in columns:
        found = {seed: record.value(column.name) for seed, record in finished}
        values = {seed: float(value) for seed, value in found.items() if value is not None and value == value}  # no NaN
        rule = best_rule(row.runs[0], column.name) if values and column.compared else None
        rule_error = rule[1] if rule else None
        stuck = tuple(seed for seed, value in values.items() if value >= stuck_from(rule_error))
        learned = None
        if column.learned is not None:
            learned = Proportion(
                sum(column.is_learned(values[seed]) for seed in values.keys() - set(stuck)), len(values)
            )
        cells[column.name] = MetricCell(
            summarise(values.values(), column.bounds),
            _published_value(row, column.name),
            values=values,
            stuck=stuck,
            learned=learned,
            rule_error=rule_error,
        )
    return TableRow(row.name, short, row.labels, runs, cells)


def _published_value(row: Row, metric: str) -> PublishedValue | None:
    published = row.published
    if published is None or metric not in published.values:
        return None
    return PublishedValue(published.values[metric], published.std.get(metric), published.source, published.seeds)


def _mark_best(rows: list[TableRow], columns: Iterable[Column]) -> list[TableRow]:
    """Mark the best mean of each metric, if at least two rows have a value from every seed.

    None is the best where most of its seeds are stuck.
    """
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
        best = column.best(means.values())
        for index, mean in means.items():
            row = rows[index]
            stuck = row.metrics[column.name].stuck
            if mean == best and not are_most(stuck, row.seeds):
                cell = replace(row.metrics[column.name], best=True)
                rows[index] = replace(row, metrics={**row.metrics, column.name: cell})
    return rows


def sorted_by(model: TableModel, name: str) -> TableModel:
    """The table with its rows in another order: by a metric (name or heading), by `parameters`, or by an axis.

    The best value comes first; of parameters and labels the least. Rows without a value come last. Raises QueryError.
    """
    key = find_axis(model.axes, name)
    column = next((each for each in model.columns if name in (each.name, each.label, each.title)), None)
    if column is None and key is None and name != "parameters":
        known = [each.name for each in model.columns]
        raise QueryError(
            f"{model.ablation} has no column {name!r}{suggest(name, [*known, *model.axes])}; its columns are: "
            f"{', '.join([*model.axes.values(), 'parameters', *known])}",
            code="unknown_column",
            column=name,
            allowed=[*model.axes.values(), "parameters", *known],
        )

    def place(row: TableRow) -> tuple[bool, float, str]:
        if column is not None:
            mean = row.metrics[column.name].summary.mean
            return math.isnan(mean), mean if column.goal == "min" else -mean, ""
        if key is None:
            return row.parameters is None, row.parameters or 0, ""
        label = row.labels.get(key, "")
        try:
            return not label, float(label), ""
        except ValueError:
            return not label, math.inf, label.casefold()

    return replace(model, rows=tuple(sorted(model.rows, key=place)))


def grouped(model: TableModel, name: str | None = None) -> TableModel:
    """The table with its rows together by their label of an axis, which comes first; each group has its best means.

    Without a name the axis is the first in which rows differ. Where they differ in one axis only, the table stays as it
    is. Raises QueryError for an unknown axis.
    """
    varying = [key for key in model.axes if len({row.labels.get(key) for row in model.rows}) > 1]
    key = find_axis(model.axes, name) if name else next(iter(varying), None)
    if name and key is None:
        axes = list(model.axes.values())
        message = f"{model.ablation} has no axis {name!r}{suggest(name, axes)}"
        raise QueryError(message, code="unknown_axis", axis=name, allowed=axes)
    if key is None or len(varying) < 2:
        return model
    groups: dict[str, list[TableRow]] = {}
    for row in model.rows:
        plain = {metric: replace(cell, best=False) for metric, cell in row.metrics.items()}
        groups.setdefault(row.labels.get(key, ""), []).append(replace(row, metrics=plain))
    rows = [row for members in groups.values() for row in _mark_best(members, model.columns)]
    return replace(model, rows=tuple(rows), axes={key: model.axes[key], **model.axes}, group=key)


def differences(runs: Iterable[tuple[str, RunSpec, RunRecord]]) -> tuple[str, ...]:
    """One sentence for each fact in which finished runs of a table differ; `runs` has their rows' names.

    The data of runs whose tasks differ may differ. Runs that lack a fact are not compared: older versions did not
    record all of them.
    """
    rows: dict[tuple[str, object], dict[str, dict[str, None]]] = {}
    for row, run, record in runs:
        if record.status != "finished":
            continue
        for fact in COMPARED:
            value = record.facts.get(fact)
            if value is not None:
                task = repr(run.task) if fact == "data" else None
                rows.setdefault((fact, task), {}).setdefault(str(value), {})[row] = None
    return tuple(
        f"Rows differ in {COMPARED[fact]}, so they are not comparable: "
        + "; ".join(f"{value} ({first_rows(list(names))})" for value, names in by_value.items())
        for (fact, _), by_value in rows.items()
        if len(by_value) > 1
    )


def first_rows(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:SHOWN_ROWS])
    return shown if len(names) <= SHOWN_ROWS else f"{shown} and {len(names) - SHOWN_ROWS} more"


def compared(model: TableModel, against: str) -> TableModel:
    """The table with the comparisons of its cells: with a row, by its name (`row_names`); with the paper; or, for
    `AXIS=LABEL`, each row with the one that has this label of the axis and the same labels of the other axes that both
    rows have.

    Raises QueryError if there is no such row, or there are no published numbers.
    """
    rows = {row.row: row for row in model.rows}
    if against in rows:
        return _with_row(model, rows[against])
    if against == PAPER:
        if not any(cell.published for row in model.rows for cell in row.metrics.values()):
            raise QueryError(
                f"{model.ablation} has no published numbers; compare with one of its rows: --compare ROW",
                code="nothing_published",
                ablation=model.ablation,
            )
        return _order(model) if model.replaced else _with_paper(model)
    axis, sign, label = (part.strip() for part in against.partition("="))
    key = find_axis(model.axes, axis) if sign else None
    labels = list(dict.fromkeys(row.labels[key] for row in model.rows if key in row.labels)) if key else []
    if key and label in labels:
        return _with_label(model, key, label)
    named = named_rows(against, {name: row.labels for name, row in rows.items()}, model.axes)
    if len(named) == 1:
        return _with_row(model, rows[named[0]])
    if named:
        raise QueryError(
            f"{against!r} names several rows of {model.ablation}: {', '.join(named)}; write one in full",
            code="ambiguous_row",
            row=against,
            rows=named,
        )
    if key:
        message = f"the axis {key} of {model.ablation} has no label {label!r}{suggest(label, labels)}"
        raise QueryError(message, code="unknown_value", axis=key, value=label, allowed=labels)
    if sign:
        message = f"{model.ablation} has no axis {axis!r}{suggest(axis, list(model.axes))}"
        raise QueryError(message, code="unknown_axis", axis=axis, allowed=list(model.axes))
    names = list(rows)
    hint = suggest(against, names) or f"; its rows are: {', '.join(names)}"
    raise QueryError(
        f"{model.ablation} has no row {against!r}{hint}; AXIS=LABEL compares with a label of one of its axes "
        f"({', '.join(model.axes.values()) or 'none'}), `{PAPER}` with the published numbers",
        code="unknown_row",
        row=against,
        allowed=names,
    )


def reference(plan: Plan) -> str | None:
    """The default reference of a report's rows, as `tables.Table` takes it.

    The paper, where it has numbers for a row and the runs are of its size. Else the first row with CoPE, or the first
    row; of a table with several axes, each row is compared with the one that has this encoding and the same values of
    the other axes. None for one row, and for a random search, whose rows are draws to choose from.
    """
    if plan.is_drawn:
        return None
    if any(row.published for row in plan.rows) and not plan.ablation.replaced:
        return PAPER
    if len(plan.rows) < 2:
        return None
    chosen = next((row for row in plan.rows if _uses_cope(row.runs[0].model.position)), plan.rows[0])
    if POSITION not in chosen.labels or len({row.labels.get(POSITION) for row in plan.rows}) == 1:
        return chosen.name
    return f"{POSITION}={chosen.labels[POSITION]}"


def _uses_cope(encodings: object) -> bool:
    return isinstance(encodings, (list, tuple)) and any(each.kind == METHOD for each in encodings)


def _with_row(model: TableModel, other: TableRow) -> TableModel:
    """Each row with one of them."""
    return _with_rows(model, {row.row: other for row in model.rows if row is not other}, other.row)


def _with_label(model: TableModel, key: str, label: str) -> TableModel:
    """Each row with the row that has another label of one axis."""
    references = [row for row in model.rows if row.labels.get(key) == label]
    pairs = {}
    for row in model.rows:
        fitting = [each for each in references if same_labels(row, each, {key})]
        if row.labels.get(key) != label and len(fitting) == 1:
            pairs[row.row] = fitting[0]
    same = " and the same values of the other axes" if len(references) > 1 else ""
    return _with_rows(model, pairs, label, f"the row with {model.axes[key]} = {label}{same}")


def same_labels(row: TableRow, other: TableRow, except_keys: Collection[str]) -> bool:
    """Whether two rows have the same labels of all axes that both have, but these."""
    shared = (row.labels.keys() & other.labels.keys()) - set(except_keys)
    return all(row.labels[key] == other.labels[key] for key in shared)


def _with_rows(model: TableModel, others: Mapping[str, TableRow], label: str, text: str = "") -> TableModel:
    """Each row with another one, by the row's name; `label` and `text` name the others."""

    def compare(row: TableRow, column: Column) -> Comparison | None:
        if row.row not in others or not column.compared:
            return None
        cell, other = row.metrics[column.name], others[row.row].metrics[column.name]
        return Comparison(label, model.difference(cell, other), "") if cell.values and other.values else None

    found = _tested(model, model.primary, compare, others, ("better", "worse"), MEANS[0])
    difference = ROW_RULE.format(metric=model.primary.label, row=text or label)
    return replace(found, rules=(*model.rules, difference + found.rules[-1]), difference_rule=difference)


def _order(model: TableModel) -> TableModel:
    """Each cell with a published value, compared with the row that is best in the paper."""
    best = {column.name: _published_best(model, column) if column.compared else None for column in model.columns}

    def compare(row: TableRow, column: Column) -> Comparison | None:
        cell, other = row.metrics[column.name], best[column.name]
        if other is None or cell.published is None or row is other or not cell.values:
            return None
        with_cell = other.metrics[column.name]
        if with_cell.published is None or cell.published.value == with_cell.published.value:
            return None
        return Comparison(other.row, model.difference(cell, with_cell), "")

    published = [c for c in model.columns if any(row.metrics[c.name].published for row in model.rows)]
    column = model.primary if model.primary in published else next((c for c in published if c.compared), model.primary)
    others = {row.row: best[column.name] for row in model.rows}
    found = _tested(model, column, compare, others, ("opposite order", "same order"), MEANS[1])
    keys = ", ".join(model.replaced[:SHOWN_KEYS]) + (", …" if len(model.replaced) > SHOWN_KEYS else "")
    rule = ORDER_RULE.format(keys=keys, metric=column.label) + found.rules[-1]
    return replace(found, rules=(*model.rules, rule))


def _published_best(model: TableModel, column: Column) -> TableRow | None:
    rows = [(row.metrics[column.name].published, row) for row in model.rows]
    published = [(each.value, row) for each, row in rows if each is not None]
    best: TableRow | None = column.best(published, key=lambda pair: pair[0])[1] if published else None
    return best


def _tested(
    model: TableModel,
    column: Column,
    compare: Callable[[TableRow, Column], Comparison | None],
    others: Mapping[str, TableRow | None],
    words: tuple[str, str],
    means: str,
) -> TableModel:
    """The table with its comparisons. One column is tested: it has corrected p and verdicts. The last rule explains it.

    Args:
        model: The table.
        column: The column that is tested.
        compare: The comparison of a cell; None: there is none.
        others: Name of a row → the row that its cells are compared with.
        words: Verdict of a row that is better, and of one that is worse.
        means: What a p up to 0.05 means.
    """
    places = [(row, each) for row in model.rows for each in model.columns]
    found = {(row.row, at.name): each for row, at in places if (each := compare(row, at)) is not None}
    tested = {key: each for key, each in found.items() if key[1] == column.name}
    families: dict[str | None, list[tuple[str, str]]] = {}
    for key in tested:
        other = others[key[0]]
        families.setdefault(other.row if other else None, []).append(key)
    comparisons = {key: replace(each, verdict=DESCRIPTIVE) for key, each in found.items()}
    numbers, floors = set(), []
    for keys in families.values():
        differences = [tested[key].difference for key in keys]
        corrected = holm([each.p for each in differences])
        for key, p, floor in zip(keys, corrected, holm([each.smallest_p for each in differences]), strict=True):
            if math.isnan(p):
                continue
            lower, verdict = tested[key].difference.difference < 0, DESCRIPTIVE
            if floor <= TELLS:
                is_better = lower == (column.goal == "min")
                verdict = words[0] if is_better else words[1]
                if p > TELLS:
                    verdict = SAME
            comparisons[key] = replace(tested[key], p_adjusted=p, verdict=verdict)
            numbers.add(sum(not math.isnan(each) for each in corrected))
            floors.append(floor)
    rule = "Too few runs are finished for a test. "
    if floors:
        sizes = sorted({n for each in tested.values() for n in each.difference.n if min(each.difference.n) > 1})
        text = TEST_RULE if min(floors) <= TELLS else DESCRIPTIVE_RULE
        tests = f"{' or '.join(map(str, sorted(numbers)))} comparison{'s' * (max(numbers) > 1)}"
        rule = text.format(
            runs=f"{' or '.join(map(str, sizes))} {'pairs of runs' if model.paired else 'runs a row'}",
            tests=tests + " with the same row" * (len(families) > 1),
            test=TESTS[model.paired], floor=p_text(min(floors)), means=means,
        )  # fmt: skip
    has_others = any(each.compared and each is not column for each in model.columns)
    filled = _filled(model, comparisons, rule + (OTHERS_RULE if has_others else ""))
    return replace(filled, answer=_answer(filled, column))


def p_text(p: float) -> str:
    """`0.042`, or `0.0004` where three digits would be 0."""
    return f"{p:.3f}" if p >= 0.0995 / 100 else f"{p:.1g}"


def _answer(model: TableModel, column: Column) -> str:
    """The verdicts of a column in a sentence: which rows are better or worse than which, and which do not differ."""
    found = [(row.short, each) for row in model.rows if (each := row.metrics[column.name].comparison) is not None]
    if not found:
        return ""
    short = {row.row: row.short for row in model.rows}
    parts = []
    for verdict, others in _by_verdict(found).items():
        for against, rows in others.items():
            many = verdict == DESCRIPTIVE and len(rows) > SHOWN_ROWS
            listed = f"{len(rows)} rows" if many else _listed([row for row, _ in rows])
            p = [e.p_adjusted for _, e in rows if e.p_adjusted is not None]
            are, were, do = ("is", "was", "does") if len(rows) == 1 else ("are", "were", "do")
            phrase = PHRASES[verdict].format(are=are, were=were, do=do, against=short.get(against, against))
            text = f"{listed} {phrase}"
            if verdict != DESCRIPTIVE and p:
                sign, bound = ("≥", min(p)) if verdict == SAME else ("≤", max(p))
                text += f" (p {sign if p_text(min(p)) != p_text(max(p)) else '='} {p_text(bound)})"
            parts.append(text)
    return f"By {column.title}: {'; '.join(parts)}."


def _by_verdict(found: Iterable[tuple[str, Comparison]]) -> dict[str, dict[str, list[tuple[str, Comparison]]]]:
    """Verdict → the row of the comparison → the rows that were compared with it, in the order of `PHRASES`."""
    grouped: dict[str, dict[str, list[tuple[str, Comparison]]]] = {verdict: {} for verdict in PHRASES}
    for row, each in found:
        grouped[each.verdict].setdefault(each.against, []).append((row, each))
    return grouped


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _with_paper(model: TableModel) -> TableModel:
    pairs = [
        (row, column, cell.summary, cell.published)
        for row in model.rows
        for column in model.columns
        if (cell := row.metrics[column.name]).published is not None and cell.summary.n > 0
    ]
    comparisons = {
        (row.row, column.name): with_published(summary, published, scale=column.scale, exact=column.exact)
        for row, column, summary, published in pairs
        if published is not None
    }
    rule = " ".join(_paper_rules([(c, s, p) for _, c, s, p in pairs if p is not None]))
    counts = Counter(each.verdict for each in comparisons.values())
    texts = [f"{n} {words[n > 1]}" for verdict, words in PAPER_PHRASES.items() if (n := counts[verdict])]
    answer = f"Of {len(comparisons)} published numbers, {_listed(texts)}." if texts else ""
    return replace(_filled(model, comparisons, rule), answer=answer)


def _paper_rules(compared_cells: Sequence[tuple[Column, Summary, PublishedValue]]) -> Iterable[str]:
    """The rule of verdicts, and what is assumed about the published values that were compared."""
    varying = [(ours, published) for column, ours, published in compared_cells if not column.exact]
    tested = [published for ours, published in varying if _is_tested(ours, published)]
    if tested:
        yield PAPER_RULE
    unknown = [published.source for published in tested if published.seeds is None]
    if unknown:
        sources = " and ".join(dict.fromkeys(source for source in unknown if source)) or "the published values"
        yield UNKNOWN_RULE.format(sources=sources)
    if any(published.std is None for _, published in varying):
        yield SINGLE_RULE
    if any(published.std is not None and ours.n < LEAST_RUNS for ours, published in varying):
        yield FEW_RULE
    if len(varying) < len(compared_cells):
        yield EXACT_RULE


def _is_tested(ours: Summary, published: PublishedValue) -> bool:
    return published.std is not None and ours.n >= LEAST_RUNS


def _filled(model: TableModel, comparisons: dict[tuple[str, str], Comparison], rule: str) -> TableModel:
    def cells(row: TableRow) -> Iterable[tuple[str, MetricCell]]:
        for name, cell in row.metrics.items():
            yield name, replace(cell, comparison=comparisons.get((row.row, name)))

    rows = tuple(replace(row, metrics=dict(cells(row))) for row in model.rows)
    return replace(model, rows=rows, rules=(*model.rules, rule))


def with_published(ours: Summary, published: PublishedValue, *, scale: float = 1.0, exact: bool = False) -> Comparison:
    """Our mean beside a published one; see the module for the rule.

    `scale` is the factor with which the published value was printed; `exact` values do not vary with the seed.
    """
    unit = 10.0 ** -places(published.value, scale) / scale
    n, difference = (ours.n, published.runs), ours.mean - published.value
    if exact:
        verdict = "agrees" if abs(difference) <= unit * (1 + 1e-9) else "differs"
        return Comparison(PAPER, Difference(difference, n=n), verdict, margin=unit)
    theirs = published.std
    if theirs is None or not _is_tested(ours, published):
        return Comparison(PAPER, Difference(difference, n=n), DESCRIPTIVE)
    margin = max(MARGIN_STDS * theirs, unit)
    # Welch–Satterthwaite. The error of rounding is uniform over a unit of the last digit: its variance is unit² / 12.
    parts = [(ours.std**2 / ours.n, ours.n - 1), (theirs**2 / published.runs, published.runs - 1)]
    variance = unit**2 / 12 + sum(part for part, _ in parts)
    spread = sum(part**2 / dof for part, dof in parts)
    error, dof = math.sqrt(variance), min(variance**2 / spread, 1e6) if spread else 1e6
    t95, t90 = (t_quantile(probability, dof) * error for probability in (0.975, 0.95))
    test = Difference(difference, difference - t95, difference + t95, t_tail(difference / error, dof), n=n)
    agrees = abs(difference) + t90 <= margin * (1 + 1e-9)
    verdict = "differs" if abs(difference) > t95 else "inconclusive"
    if agrees:
        verdict = "agrees"
    return Comparison(PAPER, test, verdict, margin=margin)


def places(value: float, scale: float = 1.0) -> int:
    """Digits after the decimal point of a published number as it was printed, `scale` times its value.

    1 for 16.9 and 100.0, 3 for 0.004; with a scale of 1e-6, 1 for 124400000.
    """
    if scale != 1.0:
        # Decimal numbers: in binary ones, 124400000 times 1e-6 is 124.39999999999999.
        exponent = (Decimal(repr(value)) * Decimal(repr(scale))).normalize().as_tuple().exponent
        return max(0, -int(exponent))
    mantissa, _, power = repr(float(value)).partition("e")
    return max(0, len(mantissa.partition(".")[2]) - int(power or 0))
