"""A search by suggestions: Optuna suggests rows of an ablation, through Tune's `OptunaSearch`.

It names runs by their ids and knows no trials: a trial may die and be replaced, the run stays the same. State is not
restored from files of Tune or Optuna. What earlier sweeps have suggested comes from their records, and the results come
from the store.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
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
        retry_failed: bool = True,
    ) -> None:
        """Continue the search of `plan`, whose rows were suggested earlier.

        Finished rows and those that were stopped early count as evaluated. The others are suggested again, first.

        Args:
            plan: A plan whose `search` is not None.
            results: Run id → what is known of the runs of its rows; no entry: nothing.
            on_suggest: Called with each row before its id is returned. It must record the row's labels with the sweep,
                so that the next sweep can continue.
            retry_failed: Whether failed rows are suggested again.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.on_suggest = plan, on_suggest
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
        self.left = len(again) + plan.open_samples
        """How many runs are still to be suggested."""
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

    def next_run(self) -> str | None:
        """The id of the next run. None: nothing new now; for good where `left` is 0."""
        for _ in range(MAX_ASKS if self.left and not self._stuck else 0):
            self._asked += 1
            ask = str(self._asked)
            try:
                row = row_of_draw(self.plan.ablation, self._labels(self.optuna.suggest(ask) or {}))
            except SpecError as error:
                logger.warning("a suggestion is no valid run: %s", error)
                self._tell(ask, "failed", None)
                continue
            run_id = row.runs[0].run_id
            if run_id in self.results:
                self._tell(ask, *self.results[run_id])
                continue
            self.left -= 1
            self._asks[run_id] = ask
            self.results[run_id] = "running", None
            self.on_suggest(row)
            return run_id
        self._stuck = True
        if not self._asks:
            # Every suggestion is known, and no result can change that.
            self.left = 0
        return None

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a suggested run. A value that is not finite is ignored."""
        if math.isfinite(value):
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
