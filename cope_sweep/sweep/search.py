"""A search by suggestions: Optuna suggests rows of an ablation, through Tune's `OptunaSearch`.

It names runs by their ids and knows no trials: a trial may die and be replaced, the run stays the same. State is not
restored from files of Tune or Optuna. What earlier sweeps have suggested comes from their records, and the results come
from the store.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from ray.tune.search.optuna import OptunaSearch

from cope_sweep.plan import Plan, Row, row_of_draw
from cope_sweep.plan.points import Dimension, dimensions_of
from cope_sweep.spec import SpecError, default_label
from cope_sweep.store import Status

MAX_ASKS = 100
"""How often the sampler is asked for a row that is new. After that, a small space counts as exhausted."""

STEP = "training_iteration"
"""The key of a result under which Tune's searchers expect how far a trial is."""

logger = logging.getLogger(__name__)


class Result(Protocol):
    """What is known of a run."""

    @property
    def status(self) -> Status: ...

    def value(self, name: str) -> float | None:
        """A metric: the final one of a finished run, the last one of a run that was stopped early."""


class RowSearch:
    """The search of one sweep: which run is next, and what became of those that were suggested."""

    def __init__(
        self,
        plan: Plan,
        results: Mapping[str, Result],
        on_suggest: Callable[[Row], None],
        *,
        claim: Callable[[Row], Sequence[Row]] = lambda row: (),
        retry_failed: bool = True,
    ) -> None:
        """Continue the search of `plan`, whose rows were suggested earlier.

        Finished rows and those that were stopped early count as evaluated. The others are suggested again, first.

        Args:
            plan: A plan whose `search` is not None.
            results: Run id → what is known of the runs of its rows; no entry: nothing.
            on_suggest: Called with each row before its id is returned. It must record the row's labels with the sweep,
                so that the next sweep can continue.
            claim: Called with each row that is new. Returns nothing, and the row is this search's; or the rows that
                other searches have suggested meanwhile, and the row is not.
            retry_failed: Whether failed rows are suggested again.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.on_suggest, self.claim = plan, on_suggest, claim
        self.metric = str(plan.search.metric)
        self.dimensions = dimensions_of(plan.ablation)
        self.results: dict[str, tuple[Status, float | None]] = {}
        """Run id → status and value of the metric, of every row that was suggested."""
        self._asked = 0
        self._stuck = False
        """Whether nothing new is suggested before another run has ended."""
        self._asks: dict[str, str] = {}
        """Run id → the id of the question to Optuna that it is the answer to; of the runs that have not ended."""
        evaluated, again = [], []
        for row in plan.rows:
            result = results.get(row.runs[0].run_id)
            status = result.status if result else "pending"
            value = result.value(self.metric) if result else None
            if status in ("finished", "stopped") or (status == "failed" and not retry_failed):
                evaluated.append((row, status, value))
            else:
                again.append(row)
        self.open = plan.open_samples
        """How many rows may still be new."""
        self._again = {row.runs[0].run_id for row in again}
        """The rows of the plan that are still to be suggested again."""
        self._foreign: deque[Row] = deque()
        """Rows of other searches that are still to be suggested."""
        self._running_foreign: dict[str, Row] = {}
        """Run id → row, of those of them that have not ended."""
        self.optuna = OptunaSearch(
            {dimension.name: _distribution(dimension) for dimension in self.dimensions},
            metric=self.metric,
            mode=plan.search.goal,
            points_to_evaluate=[self._parameters(row) for row in again],
            # Without the number of rows, the random draws at the start of a search would be repeated.
            seed=random.Random(f"{plan.search.seed}/{len(plan.rows)}").getrandbits(31),
        )
        for row, status, value in evaluated:
            self._add_evaluated(row, status, value)

    @property
    def left(self) -> int:
        """How many runs are still to be suggested."""
        return len(self._again) + len(self._foreign) + self.open

    def next_run(self) -> str | None:
        """The id of the next run. None: nothing new now; for good where `left` is 0.

        Rows of other searches are suggested, too: whoever asks waits for their results, and trains them if they are
        given up.
        """
        for _ in range(MAX_ASKS if self.left and not self._stuck else 0):
            if self._foreign:
                return self._suggest_foreign()
            self._asked += 1
            ask = str(self._asked)
            try:
                row = row_of_draw(self.plan.ablation, self._labels(self.optuna.suggest(ask) or {}))
            except SpecError as error:
                logger.warning("a suggestion is no valid run: %s", error)
                self._tell(ask, "failed", None)
                continue
            run_id = row.runs[0].run_id
            if run_id in self.results or not (run_id in self._again or self._claims(row)):
                self._tell(ask, *self.results.get(run_id, ("failed", None)))
                continue
            self._again.discard(run_id)
            self._asks[run_id] = ask
            self.results[run_id] = "running", None
            self.on_suggest(row)
            return run_id
        if self._foreign:
            return self._suggest_foreign()
        self._stuck = True
        if not self._asks and not self._running_foreign:
            # Every suggestion is known, and no result can change that.
            self.open = 0
            self._again.clear()
        return None

    def _claims(self, row: Row) -> bool:
        """Whether a new row becomes one of this search. Else other searches have suggested it, or all that are left."""
        run_id = row.runs[0].run_id
        while self.open > 0 and run_id not in self.results:
            others = self.claim(row)
            if not others:
                self.open -= 1
                return True
            for other in others:
                self._add_foreign(other)
        return False

    def _add_foreign(self, row: Row) -> None:
        run_id = row.runs[0].run_id
        if run_id not in self.results and run_id not in self._again:
            self.open = max(0, self.open - 1)
            self.results[run_id] = "running", None
            self._foreign.append(row)

    def _suggest_foreign(self) -> str:
        row = self._foreign.popleft()
        run_id = row.runs[0].run_id
        self._running_foreign[run_id] = row
        self.on_suggest(row)
        return run_id

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a suggested run. A value that is not finite is ignored.

        Of a row of another search, only the end counts.
        """
        if math.isfinite(value) and run_id in self._asks:
            self.optuna.on_trial_result(self._asks[run_id], {self.metric: value, STEP: step})

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
        if (row := self._running_foreign.pop(run_id, None)) is not None:
            self._add_evaluated(row, status, value)
            return
        self._tell(self._asks.pop(run_id), status, value)

    def _tell(self, ask: str, status: Status, value: float | None) -> None:
        if status == "finished" and value is not None and math.isfinite(value):
            self.optuna.on_trial_complete(ask, {self.metric: value})
        else:
            self.optuna.on_trial_complete(ask, error=status != "stopped")

    def _add_evaluated(self, row: Row, status: Status, value: float | None) -> None:
        self.results[row.runs[0].run_id] = status, value
        stopped, known = status == "stopped", value is not None
        self.optuna.add_evaluated_point(
            self._parameters(row),
            value,  # type: ignore[arg-type]
            error=not stopped and not (status == "finished" and known),
            pruned=stopped,
            intermediate_values=[value] if stopped and value is not None else None,
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
