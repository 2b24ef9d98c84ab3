"""The results of a plan's runs: the input of tables, figures and reports."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan, Row, RunSpec
from cope_sweep.config.ablation import Metric
from cope_sweep.config.keys import names_of
from cope_sweep.frozen import SHARE_LEARNED, STEPS_UNTIL, learning_parts, metric_value
from cope_sweep.read.tables.rules import has_learned, learning_metric, least_rule_error, stuck_from
from cope_sweep.redaction import redacted_url
from cope_sweep.store import RunRecord, Store
from cope_sweep.store.errors import DamagedError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Results:
    """The runs of a plan with their records, and the store that has them: see `read_results`."""

    plan: Plan
    records: Mapping[str, RunRecord]
    """Run id → record, for every run of the plan."""
    store: Store
    """The store with the curves, and the checkpoints unless it is a folder of results."""
    others: str = ""
    """If no run is finished: which other values finished runs of this ablation have, and how to choose them."""

    @property
    def place(self) -> str:
        """Where the runs are, for messages: `the store runs`."""
        return f"the store {redacted_url(self.store.location)}"

    @property
    def training(self) -> str:
        """The command that trains the missing runs, and `others`."""
        return "; ".join([training_command(self.plan, self.store), *([self.others] if self.others else [])])

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per run of the plan; `tables.frames` describes the columns."""
        from cope_sweep.read.tables.frames import plan_frame  # pandas, which a table in a terminal does not need

        return plan_frame(self.plan, self.records)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves; `tables.frames` describes the columns. A damaged curve is left out."""
        from cope_sweep.read.tables.frames import curve_frame

        return curve_frame(self.plan, self.records, self.store)


def training_command(plan: Plan, store: Store) -> str:
    """The command that trains the runs of a plan into a store; of a folder of results: into the default store."""
    return f"cope-sweep run {shlex.join([*plan.ablation.arguments, *store.option])}"


def read_results(plan: Plan, store: Store) -> Results:
    """The current results of a plan in a store. Curves are read on first use.

    Raises StoreError; of a folder of results also NotFoundError and NotFinishedError, see `ParquetStore.records`.
    """
    started = store.records(plan)
    records = {run.run_id: (started.get(run.run_id) or RunRecord(run_id=run.run_id)).as_counted() for run in plan.runs}
    return Results(plan, with_learning(plan, records, store), store)


def with_learning(plan: Plan, records: dict[str, RunRecord], store: Store) -> dict[str, RunRecord]:
    """The records with the metrics of finished runs that depend on whether they have learned the task (`rules`).

    Steps until a metric is learned are read from the learning curve: those of the first evaluation at which it is. A
    run that never gets there counts with all its steps. One whose curve is lost, or has no evaluation, has no value.
    Raises StoreError.
    """
    columns = {metric.name: metric for metric in plan.ablation.content.metrics}
    wanted = {name: learning_parts(name) for name in columns if learning_parts(name)[0]}
    if not wanted:
        return records
    first = learning_metric(columns.values())
    for run in plan.runs:
        record = records[run.run_id]
        if record.status != "finished":
            continue
        values: dict[str, float | None] = {}
        for name, (prefix, of) in wanted.items():
            if prefix == STEPS_UNTIL:
                with suppress(DamagedError):
                    limit = stuck_from(least_rule_error(run, columns[of]))
                    steps = first_learned(store.run(run.run_id).curve(), columns[of], limit)
                    values[name] = None if steps is None else min(steps, run.train.steps)
            elif prefix == SHARE_LEARNED:
                values[name] = _share_learned(record, columns[of], run)
            elif first is not None and _share_learned(record, first, run):
                values[name] = record.value(of)
        known = {name: value for name, value in values.items() if value is not None}
        records[run.run_id] = record.model_copy(update={"metrics": {**record.metrics, **known}})
    return records


def _share_learned(record: RunRecord, metric: Metric, run: RunSpec) -> float | None:
    """100 % if a run has learned a metric, 0 if not; None if it has no value."""
    value = record.value(metric.name)
    return None if value is None else 100.0 * has_learned(metric, value, stuck_from(least_rule_error(run, metric)))


def first_learned(curve: Iterable[Mapping[str, float]], metric: Metric, limit: float) -> float | None:
    """The first step at which a run has learned a metric; infinite if it never has, None if it was never evaluated.

    Args:
        curve: The logged points of the run.
        metric: The metric, or a column.
        limit: The smallest error with which the run is stuck (`rules.stuck_from`).
    """
    values = ((point["step"], metric_value(point, metric.name)) for point in curve)
    steps = [step if has_learned(metric, value, limit) else math.inf for step, value in values if value is not None]
    return min(steps, default=None)


def setting(row: Row, key: str) -> Any:
    """The value of a dotted key in the specs of a row's runs, as JSON; None if they do not have the key."""
    value: Any = row.runs[0].model_dump(mode="json")
    for part in key.split("."):
        if isinstance(value, list) and part in names_of(value):
            value = value[names_of(value).index(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value
