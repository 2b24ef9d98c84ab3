"""A search by suggestions: Optuna's TPE sampler suggests rows of an ablation.

`RowSearch` names runs by their ids and knows no trials: a trial may die and be replaced, the run stays the same. State
is not restored from files of Optuna. What earlier sweeps have suggested comes from their records, and the
results come from the store. `Suggestions` connects it with the store and with other sweeps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from cope_sweep.config import Plan, Row, RunSpec, SpecError, default_label, row_of_draw
from cope_sweep.config.points import Dimension, dimensions_of
from cope_sweep.store import Event, Status, Store, SweepRecord, SweepRun
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import waiting
from cope_sweep.store.index.claims import ClaimedRow, append_row, claim_row
from cope_sweep.sweep.executor import ENDED, final_event

MAX_ASKS = 100
"""The number of times that the sampler is asked for a new row. After that, a small space counts as exhausted."""

WRITE_SHARE = 0.1
"""Largest share of the time that goes into writing the record, which holds all rows."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


Known = tuple[Status, float | None]
"""Status of a run, and its metric. That is the final value of a finished run, the last one of a run
that was stopped early; None: there is none."""


class RowSearch:
    """The search of one sweep: which run is next, and what became of those that were suggested."""

    def __init__(
        self,
        plan: Plan,
        results: Mapping[str, Known],
        *,
        claim: Callable[[Row], Sequence[Row]] = lambda row: (),
        retry_failed: bool = True,
    ) -> None:
        """Continue the search of `plan`, whose rows were suggested earlier.

        Finished rows and those that were stopped early count as evaluated. The others are suggested again, first.

        Args:
            plan: A plan whose `search` is not None.
            results: Run id → what is known of the runs of its rows; no entry: nothing.
            claim: Called with each row that is new. Returns nothing, and the row is this search's; or the rows that
                other searches have suggested meanwhile, and the row is not.
            retry_failed: Whether failed rows are suggested again.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.claim = plan, claim
        self.metric = str(plan.search.metric)
        self.dimensions = dimensions_of(plan.ablation)
        self.results: dict[str, Known] = {}
        """Run id → result, of every row that was suggested."""
        self._stuck = False
        """Whether nothing new is suggested before another run has ended."""
        self._trials: dict[str, Trial] = {}
        """Run id → Optuna's trial, of the runs that have not ended."""
        evaluated, again = [], []
        for row in plan.rows:
            status, value = results.get(row.runs[0].run_id, ("pending", None))
            if status in ("finished", "stopped") or (status == "failed" and not retry_failed):
                evaluated.append((row, status, value))
            else:
                again.append(row)
        self.open = plan.open_samples
        """The number of rows that may still be new."""
        self._again: set[str] = set()
        """Rows of earlier and of other searches that are still to be suggested here. Optuna has them in its queue."""
        self.distributions = {dimension.name: _distribution(dimension) for dimension in self.dimensions}
        # Without the number of rows, the random draws at the start of a search would be repeated.
        seed = random.Random(f"{plan.search.seed}/{len(plan.rows)}").getrandbits(31)
        self.study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            direction="minimize" if plan.search.goal == "min" else "maximize",
        )
        for row in again:
            self._suggest_again(row)
        for row, status, value in evaluated:
            self._add_evaluated(row, status, value)

    @property
    def left(self) -> int:
        """The number of runs that are still to be suggested."""
        return len(self._again) + self.open

    def next_row(self) -> Row | None:
        """The next row. None: nothing new now; for good where `left` is 0.

        Whoever asks records its labels with the sweep, so that the next sweep can continue. Rows of other searches are
        suggested, too: whoever asks waits for their results, and trains them if they are given up.
        """
        for _ in range(MAX_ASKS if self.left and not self._stuck else 0):
            trial = self.study.ask(self.distributions)
            try:
                row = row_of_draw(self.plan.ablation, self._labels(trial.params))
            except SpecError as error:
                logger.warning("a suggestion is no valid run: %s", error)
                self._tell(trial, "failed", None)
                continue
            run_id = row.runs[0].run_id
            if run_id in self.results or not (run_id in self._again or self._claims(row)):
                self._tell(trial, *self.results.get(run_id, ("failed", None)))
                continue
            self._again.discard(run_id)
            self._trials[run_id] = trial
            self.results[run_id] = "running", None
            return row
        self._stuck = True
        if not self._trials:
            # Every suggestion is known, and no result can change that.
            self.open = 0
            self._again.clear()
        return None

    def _claims(self, row: Row) -> bool:
        """Whether a new row becomes one of this search. Else other searches have suggested it, or all that are left."""
        run_id = row.runs[0].run_id
        while self.open > 0 and run_id not in self._again:
            others = self.claim(row)
            if not others:
                self.open -= 1
                return True
            for other in others:
                if other.runs[0].run_id not in self.results.keys() | self._again:
                    self.open = max(0, self.open - 1)
                    self._suggest_again(other)
        return run_id in self._again

    def _suggest_again(self, row: Row) -> None:
        self._again.add(row.runs[0].run_id)
        self.study.enqueue_trial(self._parameters(row))

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a suggested run. A value that is not finite is ignored."""
        if math.isfinite(value) and run_id in self._trials:
            self._trials[run_id].report(value, step)

    def end(self, run_id: str, status: Status, value: float | None) -> None:
        """Tell how a run ended.

        Args:
            run_id: A run that was suggested and has not ended.
            status: "finished": `value` is its result. "stopped": the schedule ended it, and what was reported counts.
                Any other: nothing is known of it.
            value: The metric's last value; None: there is none.
        """
        self._stuck = False
        self.results[run_id] = status, value
        self._tell(self._trials.pop(run_id), status, value)

    def _tell(self, trial: Trial, status: Status, value: float | None) -> None:
        state = _state(status, value)
        self.study.tell(trial, value if state == TrialState.COMPLETE else None, state)

    def _add_evaluated(self, row: Row, status: Status, value: float | None) -> None:
        self.results[row.runs[0].run_id] = status, value
        state = _state(status, value)
        self.study.add_trial(
            create_trial(
                state=state,
                value=value if state == TrialState.COMPLETE else None,
                params=self._parameters(row),
                distributions=self.distributions,
                intermediate_values={0: value} if state == TrialState.PRUNED and value is not None else None,
            )
        )

    def _labels(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """The labels of the row that Optuna's parameters mean."""
        labels: dict[str, str] = {}
        for dimension in self.dimensions:
            parameter = parameters[dimension.name]
            distribution = dimension.distribution
            if distribution is None:
                option = dimension.options[dimension.labels.index(parameter)]
                labels |= {key: value.label for key, value in option.items()}
            elif distribution.choice is not None:
                labels[dimension.name] = parameter
            else:
                labels[dimension.name] = default_label(distribution.rounded(parameter))
        return labels

    def _parameters(self, row: Row) -> dict[str, Any]:
        """The parameters of Optuna that mean a row: the inverse of `_labels`."""
        parameters: dict[str, Any] = {}
        for dimension in self.dimensions:
            distribution = dimension.distribution
            label = " · ".join(row.labels[key] for key in dimension.keys)
            is_number = distribution is not None and distribution.choice is None
            parameters[dimension.name] = distribution.value_of(label) if distribution and is_number else label
        return parameters


def _state(status: Status, value: float | None) -> TrialState:
    """Optuna's state of a run that has ended, or of which nothing is known. Only a finite result counts as one."""
    if status == "finished" and value is not None and math.isfinite(value):
        return TrialState.COMPLETE
    return TrialState.PRUNED if status == "stopped" else TrialState.FAIL


def _distribution(dimension: Dimension) -> BaseDistribution:
    distribution = dimension.distribution
    if distribution is None:
        return CategoricalDistribution(dimension.labels)
    if distribution.choice is not None:
        return CategoricalDistribution([default_label(value) for value in distribution.choice])
    low, high = distribution.bounds
    if distribution.is_int:
        return IntDistribution(int(low), int(high), log=distribution.is_log)
    return FloatDistribution(low, high, log=distribution.is_log)


class Suggestions:
    """The search of one sweep. An executor asks for runs and reports events, from one thread or from several.

    Each new row is claimed in the index before its run is returned, so that sweeps of the same ablation at the same
    time suggest no more rows together than one of them would alone. A row that another sweep claims is suggested here,
    too: its run is left to that sweep unless it gives it up. The file of the record is written at the same time, unless
    that would take more than `WRITE_SHARE` of the time; then a later call writes it.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        record: SweepRecord,
        owner: str,
        *,
        early_ends: bool = False,
        retry_failed: bool = True,
        max_runs: int | None = None,
        on_row: Callable[[Row], None] = lambda row: None,
        on_event: Callable[[Event], None] = lambda event: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Continue the search of a plan.

        Args:
            plan: A plan whose `search` is not None, with the rows of earlier sweeps.
            store: The store.
            record: The record of this sweep.
            owner: The process that executes the sweep.
            early_ends: Whether a suggested run is left alone that an earlier schedule has stopped.
            retry_failed: Whether failed rows are suggested again.
            max_runs: How many runs may be trained; None: no limit.
            on_row: Called with each row, from the thread that calls `publish`.
            on_event: Called, from that thread, with the last event of each suggested run that has ended before.
            on_note: Called, from that thread, with what the user should know.
        """
        self.store, self.record, self.owner = store, record, owner
        self.on_row, self.on_event, self.on_note = on_row, on_event, on_note
        self.early_ends = early_ends
        self.runs: list[RunSpec] = []
        """All suggested runs, including those that have ended before."""
        self._plan, self._rows = plan, list(plan.rows)
        self._budget = len(plan.rows) + plan.open_samples if max_runs is None else max_runs
        """The number of runs that may still be trained."""
        self.own_resources = dict(plan.own_resources)
        """Run id → resources, of the runs that have their own. It grows with every such row."""
        self._recorded = {run.run_id for run in record.runs}
        self._open: set[str] = set()
        """Ids of the runs that were returned and have not ended."""
        self._reported: set[str] = set()
        """Ids of those that have reported a value."""
        self._buffered: RunSpec | None = None
        self._unpublished: list[Callable[[], None]] = []
        """Calls of `on_row`, `on_event` and `on_note` that are still to be made, in order."""
        self._written, self._next_write_s, self._closed = True, 0.0, False
        self._stopped = False
        self._lock = threading.RLock()
        records = store.index.records(row.runs[0].run_id for row in plan.rows)
        known = {run_id: self._known(run_id, row.status, row.value(self.metric)) for run_id, row in records.items()}
        self._seen: Counter[str] = Counter()
        """Id of each other sweep of the ablation → how many of its rows were seen."""
        self._claimed: set[str] = set()
        """The runs whose rows this sweep has claimed."""
        self.is_recorded = False
        """Whether the index has this sweep."""
        self._search = RowSearch(plan, known, claim=self._claim, retry_failed=retry_failed)

    @property
    def metric(self) -> str:
        """The metric that is optimised."""
        return str(self._plan.search.metric) if self._plan.search else ""

    @property
    def plan(self) -> Plan:
        """The plan with all rows."""
        return replace(self._plan, rows=tuple(self._rows))

    @property
    def missing(self) -> int:
        """The number of rows that the search has still to suggest, in this sweep or a later one."""
        with self._lock:
            return self._search.left

    @property
    def left(self) -> int:
        """The number of runs still to be trained in this sweep, besides those that `next_run` has returned."""
        with self._lock:
            return min(self._search.left, self._budget) + (self._buffered is not None)

    def has_run(self) -> bool:
        """Whether there is a next run now. It is kept for `next_run`."""
        with self._lock:
            self._buffered = self._buffered or self._next()
            return self._buffered is not None

    def next_run(self) -> RunSpec | None:
        """The next run to train. None: none now; for good if `left` is 0."""
        with self._lock:
            if self._stopped:
                return None
            run, self._buffered = self._buffered or self._next(), None
            self._write_if_due()
            return run

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the search the metric's value at an evaluation of a run that has not ended."""
        with self._lock:
            if run_id in self._open:
                self._reported.add(run_id)
                self._search.report(run_id, step, value)

    def end(self, run_id: str, status: Status, value: float | None) -> None:
        """Tell the search the result of a run. Has no effect for one that has ended before, or goes on later.

        Args:
            run_id: The run.
            status: How it ended.
            value: The value of the metric; None: there is none.
        """
        with self._lock:
            if run_id in self._open and status in ENDED:
                self._open.remove(run_id)
                self._end(run_id, self._known(run_id, status, value))

    def stop(self) -> None:
        """Return no more runs in this sweep."""
        self._stopped = True

    def publish(self) -> None:
        """Pass on what is new, and write the record if that is due. From the thread of the display."""
        with self._lock:
            calls, self._unpublished = self._unpublished, []
            self._write_if_due()
        for call in calls:
            call()

    def close(self) -> SweepRecord:
        """Write the record no more, and return it with all rows."""
        with self._lock:
            self._closed = True
            return self.record

    def _next(self) -> RunSpec | None:
        kept = ("finished", "stopped") if self.early_ends else ("finished",)
        while self._budget and self._search.left:
            row = self._search.next_row()
            if row is None:
                if not self._search.left:
                    note = "the search ended early: every row that it can suggest was trained"
                    self._unpublished.append(partial(self.on_note, note))
                return None
            run = self._add(row)
            run_id = run.run_id
            record = self._waiting(partial(self.store.index.records, [run_id])).get(run_id)
            if record is not None and record.status in kept:
                self._end(run_id, self._known(run_id, record.status, record.value(self.metric)))
                self._unpublished.append(partial(self.on_event, final_event(run, self.store)))
                continue
            self._budget -= 1
            self._open.add(run_id)
            return run
        return None

    def _end(self, run_id: str, known: Known) -> None:
        status, value = known
        if status == "stopped" and value is not None and run_id not in self._reported:
            # Of a run that was stopped, only what was reported counts, and of that only the last value.
            self._search.report(run_id, self._last(run_id)[0], value)
        self._search.end(run_id, status, value)

    def _known(self, run_id: str, status: Status, value: float | None) -> Known:
        """Result of a run: its final value, or the last one before it was stopped."""
        return (status, self._last(run_id)[1] if status == "stopped" else value)

    def _last(self, run_id: str) -> tuple[int, float | None]:
        """Step and value of the metric's last evaluation."""
        with contextlib.suppress(DamagedError):
            for row in reversed(self.store.run(run_id).curve()):
                if self.metric in row:
                    return int(row["step"]), row[self.metric]
        return 0, None

    def _add(self, row: Row) -> RunSpec:
        """Note a row that the search suggests, and return its run."""
        (run,) = row.runs
        self.runs.append(run)
        if run.run_id in self._recorded:
            return run
        self._recorded.add(run.run_id)
        if row.resources is not None:
            self.own_resources[run.run_id] = row.resources
        self._rows.append(row)
        self._unpublished.append(partial(self.on_row, row))
        new, reused = self._member(row)
        if self.is_recorded and run.run_id not in self._claimed:
            self._waiting(lambda: append_row(self.store.index, self.record.sweep_id, _entry(new, reused)))
        self.record = self.record.model_copy(
            update={"runs": [*self.record.runs, new], "reused": [*self.record.reused, *[run.run_id] * reused]}
        )
        self._written = False
        return run

    def _claim(self, row: Row) -> list[Row]:
        """Claim a new row; or, and then it is not claimed, the rows that other sweeps have claimed meanwhile."""
        if not self.is_recorded:
            self.store.write_sweep(self.record, self.owner)
            self.is_recorded = True
        entry = _entry(*self._member(row))
        while True:
            unseen = self._waiting(lambda: claim_row(self.store.index, self.record.sweep_id, entry, self._seen))
            if not unseen:
                self._claimed.add(row.runs[0].run_id)
                return []
            for each in unseen:
                self._seen[each.sweep_id] = max(self._seen[each.sweep_id], each.ordinal + 1)
            if rows := [found for each in unseen if (found := self._row_of(each)) is not None]:
                return rows

    def _row_of(self, claimed: ClaimedRow) -> Row | None:
        """A row of another sweep; None if it is known here, or is none of this ablation as it is today."""
        if claimed.run_id in self._recorded:
            return None
        with contextlib.suppress(SpecError):
            row = row_of_draw(self._plan.ablation, claimed.labels)
            if row.runs[0].run_id == claimed.run_id:
                return row
        return None

    def _member(self, row: Row) -> tuple[SweepRun, bool]:
        """The row as it is recorded, and whether its run was finished before."""
        (run,) = row.runs
        reused = self._waiting(lambda: self.store.status(run.run_id)) == "finished"
        return SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed), reused

    def _waiting(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is tried until the database answers, or the sweep is stopped."""
        return waiting(call, lambda waited_s: self._stopped or self._closed)

    def _write_if_due(self) -> None:
        started_s = time.monotonic()
        if self._written or self._closed or started_s < self._next_write_s:
            return
        self.store.write_sweep(self.record, self.owner)
        ended_s = time.monotonic()
        self._written, self._next_write_s = True, ended_s + (ended_s - started_s) / WRITE_SHARE


def _entry(member: SweepRun, reused: bool) -> dict[str, Any]:
    """A row as the index keeps it."""
    return {**member.model_dump(), "reused": reused}
