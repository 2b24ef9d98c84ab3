"""The errors of a task's shortcuts (`Task.shortcuts`) beside those of the rows: does a model solve the task?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cope_sweep.config import RunSpec
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell, decimals_of
from cope_sweep.read.tables.table_model import Column, TableModel, TableRow

ERROR = "token_error"
SEQUENCES = 4096
"""Of each test set."""
NEAR = 0.15
"""A seed errs as a rule does where the errors differ by at most this share of the rule's."""
NOTE = (
    f"Errors of simple rules that do not solve the task, on the first {SEQUENCES} sequences of each test set. A row "
    f"scores like a rule where most of its seeds have an error within {100 * NEAR:g} % of the rule's."
)


@dataclass(frozen=True)
class Shortcuts:
    """The shortcuts of the tasks of a table, and the rows that score like one."""

    layout: Layout
    alike: tuple[str, ...]
    """Sentences such as `Absolute scores like "all increments" (16.0 %) in In-dist.`"""


def shortcuts(model: TableModel) -> Shortcuts | None:
    """The shortcuts of a table's tasks; None where no column is a token error or no task has any."""
    columns = {column: split for column in model.columns if (split := _split(column)) is not None and column.compared}
    by_task: dict[str, tuple[RunSpec, list[TableRow]]] = {}
    for row in model.rows:
        run = row.runs[0][0]
        key = run.task.model_dump_json(exclude={"data_seed", "train_sequences"})
        by_task.setdefault(key, (run, []))[1].append(row)
    lines, alike = [], []
    for run, rows in by_task.values():
        errors = {column: run.task.shortcut_errors(split, SEQUENCES) for column, split in columns.items()}
        rules = list(dict.fromkeys(rule for found in errors.values() for rule in found))
        names = ", ".join(row.row for row in rows)
        for rule in rules:
            cells = [TextCell(f"{errors[column][rule]:.{column.decimals}f}") for column in columns]
            lines.append((*([TextCell(names)] * (len(by_task) > 1)), TextCell(rule), *cells))
        alike += [text for row in rows for text in _alike(row, errors)]
    if not lines:
        return None
    headers = [*([ColumnHeader("rows", numeric=False)] * (len(by_task) > 1)), ColumnHeader("rule", numeric=False)]
    headers += [ColumnHeader(column.title) for column in columns]
    return Shortcuts(Layout(tuple(headers), tuple(lines), NOTE), tuple(alike))


def _split(column: Column) -> str | None:
    """The test set of a column of token errors."""
    split, _, quantity = column.name.rpartition("/")
    return split if quantity == ERROR and "/" not in split else None


def _alike(row: TableRow, errors: dict[Column, dict[str, float]]) -> Iterator[str]:
    for column, found in errors.items():
        cell = row.metrics[column.name]
        near = {
            rule: sum(abs(value - error) <= NEAR * error for value in cell.values.values())
            for rule, error in found.items()
        }
        rule = max(near, key=lambda rule: near[rule], default=None)
        if rule is not None and near[rule] > len(cell.values) / 2:
            digits = decimals_of(column, cell)
            median, error = f"{cell.summary.median:.{digits}f}", f"{found[rule]:.{digits}f}"
            yield f"{row.row} scores like “{rule}” in {column.label}: median {median}, the rule {error} {column.unit}."
