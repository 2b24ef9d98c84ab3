"""Differences between two runs, or between two groups of runs: values of their specs, facts, and metrics.

Groups are compared like rows of a table that are not paired by seed (`tables.stats`). Two sweeps are compared row by
row; only rows with the same name are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cope_sweep.api.runs import ChangedValue, MetricChange, MetricTest, RunsDiff
from cope_sweep.read.numbers import significant
from cope_sweep.read.queries.unknown import no_run, no_sweep
from cope_sweep.read.tables.stats import Difference, finite, holm, mean_of, two_rows
from cope_sweep.records import SWEEP_ID, Value
from cope_sweep.store import QueryError, RunRecord, Store

COMPARED_FACTS = (
    "parameters",
    "data",
    "data_source",
    "tokenizer",
    "precision",
    "device",
    "torch",
    "python",
    "wall_s",
    "tokens_per_s",
)
"""A comparison shows these facts of finished runs if they differ."""
TESTED = ("difference", "ci_low", "ci_high", "p", "smallest_p")
"""Fields of a `Difference` that an answer contains."""


@dataclass(frozen=True)
class Member:
    """A run, the values of its spec, and its row in a sweep (or its id if the run itself was named)."""

    record: RunRecord
    row: str
    spec: Mapping[str, Value]


def store_difference(store: Store, left: str, right: str) -> RunsDiff:
    """The difference of two runs or two sweeps.

    Raises NotFoundError for an unknown id, QueryError for a run and a sweep, StoreError.
    """
    sides = [_members(store, name) for name in (left, right)]
    is_sweep = [bool(SWEEP_ID.fullmatch(name)) for name in (left, right)]
    if is_sweep[0] != is_sweep[1]:
        raise QueryError(
            f"{left} and {right}: cannot compare a run with a sweep; name two runs or two sweeps",
            code="not_comparable",
            left=left,
            right=right,
        )
    rows = [list(dict.fromkeys(member.row for member in side)) for side in sides] if is_sweep[0] else [[""], [""]]
    common = [row for row in rows[0] if row in rows[1]]
    finished = [_finished(side) for side in sides]
    return RunsDiff(
        left=left,
        right=right,
        runs=(len(sides[0]), len(sides[1])),
        finished=(len(finished[0]), len(finished[1])),
        spec=_changes([member.spec for member in sides[0]], [member.spec for member in sides[1]]),
        facts=_changes(*([_facts(member.record) for member in side] for side in finished)),
        metrics=_metrics(finished, common, by_row=is_sweep[0]),
        only_left=[row for row in rows[0] if row not in rows[1]],
        only_right=[row for row in rows[1] if row not in rows[0]],
    )


def _members(store: Store, name: str) -> list[Member]:
    """The run with this id, or the runs of the sweep with this id. Raises NotFoundError."""
    if SWEEP_ID.fullmatch(name):
        if store.index.sweep(name) is None:
            raise no_sweep(store, name)
        rows = store.index.sweep_rows(name)
    else:
        rows = {name: name}
    records, specs = store.index.records(rows), store.index.specs(rows)
    if not SWEEP_ID.fullmatch(name) and name not in records:
        raise no_run(store, name)
    return [Member(records.get(i) or RunRecord(run_id=i), row, specs.get(i, {})) for i, row in rows.items()]


def _finished(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.record.status == "finished"]


def _facts(record: RunRecord) -> dict[str, Value]:
    return {name: record.facts[name] for name in COMPARED_FACTS if record.facts.get(name) is not None}


def _changes(left: Sequence[Mapping[str, Value]], right: Sequence[Mapping[str, Value]]) -> list[ChangedValue]:
    """The keys whose sets of values differ."""
    keys = dict.fromkeys(key for side in (left, right) for values in side for key in values)
    changes = [ChangedValue(key=key, left=_values(left, key), right=_values(right, key)) for key in keys]
    return [change for change in changes if change.left != change.right]


def _values(side: Sequence[Mapping[str, Value]], key: str) -> str | None:
    """The distinct values of a key, sorted; None if there are none."""
    distinct = {values[key] for values in side if key in values}
    ordered = sorted(distinct, key=lambda value: (isinstance(value, str), value))
    return ", ".join(significant(value, 6) if isinstance(value, float) else str(value) for value in ordered) or None


def _metrics(sides: Sequence[Sequence[Member]], rows: Sequence[str], *, by_row: bool) -> list[MetricChange]:
    """The metrics that finished runs of both sides have, with p corrected for all of them (Holm)."""
    compared: list[tuple[str, str, float, float, Difference]] = []
    for row in rows:
        left, right = ([m.record for m in side if not by_row or m.row == row] for side in sides)
        names = {name for record in left for name in record.metrics} & {name for r in right for name in r.metrics}
        for name in sorted(names):
            a, b = ({r.seed or 0: r.metrics[name] for r in side if name in r.metrics} for side in (left, right))
            compared.append((row, name, mean_of(a.values()), mean_of(b.values()), two_rows(b, a)))
    adjusted = holm([test.p for *_, test in compared])
    return [
        MetricChange(
            row=row, metric=metric, left=finite(left), right=finite(right), p_adjusted=finite(p),
            difference=MetricTest(n=test.n, **{name: finite(getattr(test, name)) for name in TESTED}),
        )
        for (row, metric, left, right, test), p in zip(compared, adjusted, strict=True)
    ]  # fmt: skip
