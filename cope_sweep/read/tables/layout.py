"""Which cells of a frame a table of texts shows, in which order, and the notes below: the table, its comparisons, runs.

Nothing is rounded here: a cell has its text (`model.MetricCell`). `render` gives the texts a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cope_sweep.frozen import OF_LEARNED, STEPS_UNTIL, learning_parts
from cope_sweep.read.numbers import integer, percent_range
from cope_sweep.read.tables.model import (
    PAPER,
    STUCK,
    Comparison,
    MetricCell,
    TableModel,
    TableRow,
    encoding_groups,
)
from cope_sweep.read.tables.rules import STUCK_SHARE


@dataclass(frozen=True)
class ColumnHeader:
    """The heading of a column."""

    text: str
    numeric: bool = True
    """Numeric columns are right-aligned."""


@dataclass(frozen=True)
class TextCell:
    """The text of a cell."""

    text: str
    best: bool = False
    stars: int = 0
    """`MetricCell.stars`."""


@dataclass(frozen=True)
class Layout:
    """The texts of a table: headings, rows of cells, and notes below."""

    headers: tuple[ColumnHeader, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    note: str = ""
    """Explains the numbers."""
    rules: tuple[str, ...] = ()
    """Rules of the comparisons."""
    warnings: tuple[str, ...] = ()
    """Reasons why rows may not be comparable."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences below the table, the warnings first."""
        return (*(f"Warning: {text}" for text in self.warnings), *([self.note] if self.note else []), *self.rules)


def layout(model: TableModel) -> Layout:
    """The texts of a table.

    Its columns are the axes; the number of parameters, if known and not a metric of the table; each metric, followed by
    the seeds that have learned the task and by the published values, if any row has them and the runs have the paper's
    size; and the progress of the runs, if some are missing.
    """
    published: set[str] = set()
    if not model.replaced:
        published = {
            column.name for column in model.columns if any(row.metrics[column.name].published for row in model.rows)
        }
    is_incomplete = any(not row.complete for row in model.rows)
    has_sizes = any(row.parameters is not None for row in model.rows)
    has_sizes = has_sizes and not any(column.exact for column in model.columns)
    headers = _label_headers(model)
    headers += [ColumnHeader("parameters")] * has_sizes
    for column in model.columns:
        headers.append(ColumnHeader(column.title))
        if column.learned is not None:
            headers.append(ColumnHeader(column.learned_title))
        if column.name in published:
            headers.append(ColumnHeader(f"{column.label}, published"))
    headers += [ColumnHeader("runs", numeric=False)] * is_incomplete
    rows = []
    for row in model.rows:
        cells = _label_cells(model, row)
        if has_sizes:
            cells.append(TextCell(integer(row.parameters)))
        for column in model.columns:
            metric = row.metrics[column.name]
            cells.append(TextCell(" ".join([metric.text, *metric.marks]), metric.best, metric.stars))
            if column.learned is not None:
                cells.append(TextCell(metric.learned_text))
            if column.name in published:
                cells.append(TextCell(metric.published_text))
        if is_incomplete:
            cells.append(TextCell(row.progress))
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), _note(model), warnings=model.warnings)


def comparison_layout(model: TableModel) -> Layout | None:
    """The texts of the comparisons, one line each; None without comparisons.

    With a row, only the first column that has comparisons is listed, which is the tested one; with the paper, all are.
    """
    comparisons: list[tuple[TableRow, MetricCell, Comparison]] = []
    for column in sorted(model.columns, key=lambda column: not column.primary):
        for row in model.rows:
            cell = row.metrics[column.name]
            if cell.comparison is not None:
                comparisons.append((row, cell, cell.comparison))
    if not comparisons:
        return None
    _, first_cell, first_comparison = comparisons[0]
    names: tuple[str, ...] = ("metric", "difference", "margin", "verdict")
    if first_comparison.against != PAPER:
        names = ("difference", "interval", "p", "verdict")
        comparisons = [entry for entry in comparisons if entry[1].column is first_cell.column]
    has_references = len({comparison.against for *_, comparison in comparisons}) > 1
    headers = _label_headers(model)
    headers += [ColumnHeader("against", numeric=False)] * has_references
    titles = {"interval": "95 % interval"}
    headers += [ColumnHeader(titles.get(name, name), numeric=name not in ("metric", "verdict")) for name in names]
    rows = []
    for row, cell, comparison in comparisons:
        cells = _label_cells(model, row)
        cells += [TextCell(comparison.against)] * has_references
        texts = {"metric": cell.column.label, **cell.comparison_texts, "verdict": comparison.verdict}
        cells += [TextCell(texts[name]) for name in names]
        rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), rules=model.rules)


def runs_layout(model: TableModel) -> Layout:
    """A line for each run: id, labels, seed, status and metrics; if a run has failed, the reason."""
    headers = [ColumnHeader("run", numeric=False), *_label_headers(model)]
    headers += [ColumnHeader("seed"), ColumnHeader("status", numeric=False)]
    headers += [ColumnHeader(column.title) for column in model.columns]
    has_messages = any(record.message for row in model.rows for _, record in row.runs)
    headers += [ColumnHeader("message", numeric=False)] * has_messages
    rows = []
    for row in model.rows:
        for run, record in row.runs:
            cells = [TextCell(run.run_id), *_label_cells(model, row), TextCell(str(run.seed)), TextCell(record.status)]
            for column in model.columns:
                metric = row.metrics[column.name]
                cells.append(TextCell(metric.number_text(metric.values.get(run.seed))))
            cells += [TextCell(record.message or "")] * has_messages
            rows.append(tuple(cells))
    return Layout(tuple(headers), tuple(rows), warnings=model.warnings)


def _label_headers(model: TableModel) -> list[ColumnHeader]:
    return [ColumnHeader(name, numeric=False) for name in model.axes.values() or ["row"]]


def _label_cells(model: TableModel, row: TableRow) -> list[TextCell]:
    return [TextCell(row.labels.get(key, "")) for key in model.axes] or [TextCell(row.row)]


def _note(model: TableModel) -> str:
    """Sentences that explain the numbers of the table."""
    cells = [(row, column, row.metrics[column.name]) for row in model.rows for column in model.columns]
    counts = {cell.summary.n for _, column, cell in cells if not column.exact} - {0}
    planned = sorted({row.seeds for row in model.rows})
    if counts == {1} or planned == [1]:
        sentences = ["One seed"]
    else:
        seeds = " or ".join(str(count) for count in planned if count > 1)
        sentences = [f"Mean ± standard deviation over {seeds} seeds"]
        if planned[0] == 1:
            sentences.append("Without ±: one seed")
    quantities = {column.quantity for column in model.columns if column.compared and column.unit == "%"}
    if len(quantities) == 1:
        sentences.append(f"Percentages: {quantities.pop()}")
    in_part = [(row, column, cell) for row, column, cell in cells if 0 < cell.summary.n < row.seeds]
    if any(learning_parts(column.name)[0] == OF_LEARNED for _, column, _ in in_part):
        sentences.append("(n=…): only n seeds have learned the task, or are finished")
    elif any(cell.summary.n < row.counts["finished"] for row, _, cell in in_part):
        sentences.append("(n=…): only n seeds are finished with a finite value")
    elif in_part:
        sentences.append("(n=…): only n seeds are finished")
    if lost := {(row.row, seed) for row, _, cell in cells for seed in cell.lost}:
        count_as = ", and k/n counts them as not learned"
        has_learned = any(column.learned is not None for _, column, cell in cells if cell.lost)
        sentences.append(lost_text(len(lost), sum(row.seeds for row in model.rows)) + count_as * has_learned)
    for column in model.columns:
        if learning_parts(column.name)[0] == STEPS_UNTIL:
            sentences.append(f"{column.label}: a seed that never gets there counts with all its steps")
    if model.stopped:
        were = "runs were" if model.stopped > 1 else "run was"
        sentences.append(f"{model.stopped} {were} stopped early and left out")
    if any(cell.best for _, _, cell in cells):
        has_encoding_groups = len(encoding_groups(model.rows)) > 1 and not model.marks_groups
        of_group = "Bold: best of its group" if model.marks_groups else "Bold: best"
        sentences.append("Bold: the best encoding, all else equal" if has_encoding_groups else of_group)
    if any(cell.mostly_stuck for _, _, cell in cells):
        sentences.append(f"{STUCK}: most seeds are stuck")
    example = next((cell for _, _, cell in cells if cell.stuck and not cell.mostly_stuck), None)
    if example is not None:
        k, n = len(example.stuck), example.summary.n
        sentences.append(f"{k}/{n}{STUCK}: {k} of {n} seeds {'are' if k > 1 else 'is'} stuck")
    if any(cell.stuck for _, _, cell in cells):
        sentences.append(f"Stuck: at least {STUCK_SHARE} of the errors of a rule that does not solve the task")
    with_learned = [cell for _, _, cell in cells if cell.learned and cell.learned.n]
    if with_learned:
        sentences.append(_learned_note(with_learned))
    sources = dict.fromkeys(cell.published.source for _, _, cell in cells if cell.published and cell.published.source)
    if sources and not model.replaced:
        sentences.append(f"Published: {', '.join(sources)}")
    return ". ".join(sentences) + "."


def lost_text(lost: int, planned: int) -> str:
    """What tables and claims say of runs that have lost a value (`MetricCell.lost`)."""
    return f"Failed or without a value: {lost} of {planned} runs; means leave them out"


def _learned_note(cells: Sequence[MetricCell]) -> str:
    """What `k/n` means, by an example: `2/2: both seeds reached In-dist. ≤ 1 % (… of the success rate: 34–100 %)`."""
    examples = [(cell.column, cell.learned) for cell in cells if cell.learned is not None]
    column, learned = next(((column, learned) for column, learned in examples if learned.k), examples[0])
    seeds = f"{learned.k or 'none'} of {learned.n} seeds"
    if learned.k == learned.n:
        seeds = {1: "the seed", 2: "both seeds"}.get(learned.n, f"all {learned.n} seeds")
    condition = f"{column.learned_title} {column.unit}".strip()
    note = (
        f"{learned.k}/{learned.n}: {seeds} reached {condition} (95 % Wilson interval of the success rate: "
        f"{percent_range(*learned.interval)})"
    )
    return f"{note}; stuck seeds do not count" if any(cell.stuck for cell in cells) else note
