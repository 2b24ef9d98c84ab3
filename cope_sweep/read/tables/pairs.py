"""One test of each pair of rows that claims compare.

A pair has one p in a document: claims and comparisons (`tables.claims`, `tables.comparisons`) both take it from here.
It is corrected by Holm's method for the pairs that all claims of the ablation compare on the same column and task,
which are rows with the same labels on all axes except the encoding. Pairs that only claims with a margin compare are
corrected apart: such claims are judged by intervals, and p only tells whether they are wrong. Pairs with too few
finished runs for a test count with p = 1, so that a verdict does not fall when they are trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cope_sweep.read.tables.model import CellKey, MetricCell, TableModel, TableRow, other_labels
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Difference, holm
from cope_sweep.store import Status

BY_MARGIN_RULE = "Pairs that are only called equivalent or not worse are corrected among themselves."
"""Follows the rule of correction where claims of both kinds compare rows."""


@dataclass(frozen=True)
class PairTest:
    """The test of a cell against another one."""

    difference: Difference
    """The cell minus the other."""
    p: float
    """After Holm's correction; NaN if there are too few values for a test."""
    smallest_p: float
    """The smallest p possible with this number of runs, after the same correction."""
    compared: int = 1
    """The number of pairs that p is corrected for."""

    @property
    def is_testable(self) -> bool:
        """Whether some data of this number of runs would differ significantly."""
        return self.smallest_p <= SIGNIFICANT_P

    @property
    def is_significant(self) -> bool:
        """Whether the cells differ significantly."""
        return self.p <= SIGNIFICANT_P


def claim_tests(model: TableModel) -> Mapping[tuple[CellKey, CellKey], PairTest]:
    """The tests of all pairs that claims of a table compare, in both directions; none for pairs without values."""
    rows = {row.row: row for row in model.rows}
    tests: dict[tuple[CellKey, CellKey], PairTest] = {}
    for family in claim_families(model):
        differences = [_difference(model, *(_cell(rows, key) for key in pair)) for pair in family]
        for (key, other_key), test in zip(family, corrected(differences), strict=True):
            if test is not None:
                tests[key, other_key] = test
                tests[other_key, key] = replace(test, difference=test.difference.reversed())
    return tests


def corrected(differences: Sequence[Difference | None]) -> list[PairTest | None]:
    """The tests of a family of pairs, corrected for all of them; None for those that have no values yet."""
    values = [Difference(math.nan) if each is None else each for each in differences]
    p_values = holm([1.0 if math.isnan(each.p) else each.p for each in values])
    smallest = holm([1.0 if math.isnan(each.smallest_p) else each.smallest_p for each in values])
    return [
        None if each is None else PairTest(each, math.nan if math.isnan(each.p) else p, smallest_p, len(differences))
        for each, p, smallest_p in zip(differences, p_values, smallest, strict=True)
    ]


def claim_families(model: TableModel) -> Collection[Sequence[tuple[CellKey, CellKey]]]:
    """The pairs of cells that claims compare, each once; those that are corrected together in one sequence."""
    rows = {row.row: row for row in model.rows}
    families: dict[tuple[bool, str, tuple[tuple[str, str], ...]], list[tuple[CellKey, CellKey]]] = {}
    seen: set[frozenset[CellKey]] = set()
    for claimed in sorted(model.claimed, key=lambda each: each.is_by_margin):
        pair = (claimed.better, claimed.than)
        if frozenset(pair) not in seen:  # another claim may say the opposite
            seen.add(frozenset(pair))
            (row, column), (other, _) = pair
            task = _shared_labels(rows[row], rows[other])
            families.setdefault((claimed.is_by_margin, column, task), []).append(pair)
    return families.values()


def _cell(rows: Mapping[str, TableRow], key: CellKey) -> MetricCell:
    return rows[key[0]].metrics[key[1]]


def _difference(model: TableModel, cell: MetricCell, other: MetricCell) -> Difference | None:
    if not (cell.values and other.values):
        return None
    difference = model.difference(cell, other)
    return difference if all(difference.n) else None  # rows in pairs need not share a finished seed


def _shared_labels(row: TableRow, other: TableRow) -> tuple[tuple[str, str], ...]:
    """The labels of the task of a pair, whichever row comes first."""
    labels = set(other_labels(other))
    return tuple(label for label in other_labels(row) if label in labels)


def runs_without_values(*cells: tuple[TableRow, str]) -> dict[str, Status]:
    """The planned runs that are not finished, or have lost their value, of some cells (row, column): run id → status.

    While a pair has such runs, it has too few seeds for a verdict: those that diverge are often the worst of their row,
    and whoever looks while seeds arrive, and stops when p is small, finds differences where there are none.
    """
    return {run_id: status for row, column in cells for run_id, status in row.without_value(column).items()}


def is_better(difference: Difference, goal: str) -> bool:
    """Whether the first of two cells is better."""
    return (difference.difference < 0) == (goal == "min")


def gain(difference: Difference, goal: str) -> tuple[float, float, float]:
    """The difference and the ends of its interval, positive where the first cell is better; NaN without an interval."""
    values = difference.difference, difference.ci_low, difference.ci_high
    return values if goal == "max" else (-values[0], -values[2], -values[1])


def has_interval(difference: Difference) -> bool:
    """Whether the interval is bounded: with few seeds, no data reject any difference."""
    return not math.isnan(difference.ci_low)
