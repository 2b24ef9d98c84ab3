"""What makes the tasks of a report hard, and the errors of simple rules that do not solve them (`Task.shortcuts`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cope_sweep.config import RunSpec
from cope_sweep.read.numbers import metric_text, significant
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import Column, TableModel, TableRow, named_label
from cope_sweep.read.tables.rules import ERROR, LEAST_SEQUENCES, NEAR, SEQUENCES, STUCK_SHARE, rule_errors

SHORTCUTS_NOTE = (
    f"Errors of simple rules that do not solve the task, on the first {SEQUENCES} sequences of each test set (on fewer "
    f"if they are longer, but at least {LEAST_SEQUENCES}). A seed is stuck if its error is at "
    f"least {STUCK_SHARE} of the best rule's."
)
LIKE_RULES_NOTE = (
    f" Some rows score like a rule: most of their seeds have an error within {100 * NEAR:g} % of the rule's (median in "
    "parentheses):"
)


@dataclass(frozen=True)
class Shortcuts:
    """The errors of simple rules (`tables.rules`) on the tasks of a table, and the rows that score like a rule."""

    layout: Layout
    rows_like_rules: tuple[str, ...]
    """Sentences that name these rows."""


def shortcuts(model: TableModel) -> Shortcuts | None:
    """The errors of simple rules on a table's tasks; None if no column is a token error, or no task has rules."""
    tasks = _rows_by_task(model)
    columns = [
        column for column in model.columns if column.compared and any(rule_errors(run, column.name) for run, _ in tasks)
    ]
    lines = []
    rows_like_rules: list[str] = []
    for run, rows in tasks:
        errors = {column: rule_errors(run, column.name) for column in columns}
        for rule in dict.fromkeys(rule for errors_of_column in errors.values() for rule in errors_of_column):
            texts = (metric_text(column, errors[column].get(rule), column.decimals) for column in columns)
            lines.append((_common_name(rows, model), [rule, *texts]))
        rows_like_rules += _rows_like_rules(rows, errors)
    if not lines:
        return None
    headers = [ColumnHeader("rule", numeric=False), *(ColumnHeader(column.title) for column in columns)]
    note = SHORTCUTS_NOTE + (LIKE_RULES_NOTE if rows_like_rules else "")
    return Shortcuts(_layout_by_task(headers, lines, len(tasks), note), tuple(rows_like_rules))


def structure(model: TableModel) -> Layout | None:
    """What makes the tasks of a table hard, with a column per test set; None if no task describes it."""
    splits = [(column, _split(column)) for column in model.columns if column.compared]
    columns = [(column, split) for column, split in splits if split is not None]
    tasks = _rows_by_task(model)
    lines = []
    for run, rows in tasks:
        measures = [run.task.structure(split, SEQUENCES) for _, split in columns]
        names = measures[0] if measures else []
        lines += [
            (_common_name(rows, model), [name, *(significant(measure[name], 3) for measure in measures)])
            for name in names
        ]
    if not lines:
        return None
    headers = [ColumnHeader("structure", numeric=False), *(ColumnHeader(column.label) for column, _ in columns)]
    return _layout_by_task(headers, lines, len(tasks), f"Measured on the first {SEQUENCES} sequences of each test set.")


def _layout_by_task(
    headers: Sequence[ColumnHeader], lines: Iterable[tuple[str, Sequence[str]]], tasks: int, note: str
) -> Layout:
    """A table whose lines are (names of rows, texts); the names are a column only if there are several tasks."""
    if tasks == 1:
        return Layout(tuple(headers), tuple(tuple(map(TextCell, texts)) for _, texts in lines), note)
    rows = tuple(tuple(map(TextCell, (names, *texts))) for names, texts in lines)
    return Layout((ColumnHeader("rows", numeric=False), *headers), rows, note)


def _rows_by_task(model: TableModel) -> list[tuple[RunSpec, list[TableRow]]]:
    """The rows of each task, with one of its runs. Tasks that differ in training data alone share test sets."""
    rows_of: dict[str, tuple[RunSpec, list[TableRow]]] = {}
    for row in model.rows:
        run = row.runs[0][0]
        key = run.task.model_dump_json(exclude={"data_seed", "train_sequences"})
        rows_of.setdefault(key, (run, []))[1].append(row)
    return list(rows_of.values())


def _common_name(rows: Sequence[TableRow], model: TableModel) -> str:
    """The labels that these rows share and no other row of the table has; if there are none, the names of the rows."""
    common = set.intersection(*(set(row.labels.items()) for row in rows))
    if common and [row for row in model.rows if common <= set(row.labels.items())] == list(rows):
        return " · ".join(
            named_label(model.axes[key], label) for key, label in rows[0].labels.items() if (key, label) in common
        )
    return ", ".join(row.short for row in rows)


def _split(column: Column) -> str | None:
    """The test set of a column of token errors; None for other columns."""
    split, _, quantity = column.name.rpartition("/")
    return split if quantity == ERROR and "/" not in split else None


def _rows_like_rules(rows: Sequence[TableRow], errors: Mapping[Column, Mapping[str, float]]) -> Iterator[str]:
    """A sentence for each rule and column, naming the rows that score like the rule."""
    for column, error_by_rule in errors.items():
        rows_by_rule: dict[str, list[str]] = {}
        for row in rows:
            cell = row.metrics[column.name]
            near_seeds = {
                rule: sum(abs(value - error) <= NEAR * error for value in cell.values.values())
                for rule, error in error_by_rule.items()
                if error > 0  # one that makes no error says nothing of a row that makes none
            }
            closest = max(near_seeds, key=lambda rule: near_seeds[rule], default=None)
            if closest is not None and near_seeds[closest] > len(cell.values) / 2:
                rows_by_rule.setdefault(closest, []).append(f"{row.short} ({cell.number_text(cell.summary.median)})")
        for rule, names in rows_by_rule.items():
            error_text = f"{metric_text(column, error_by_rule[rule], column.decimals)} {column.unit}"
            yield f"{column.label} like “{rule}” ({error_text}): {', '.join(names)}"
