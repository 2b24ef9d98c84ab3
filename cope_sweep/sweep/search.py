"""A search by suggestions: Optuna suggests rows of an ablation through Tune's `OptunaSearch`.

Tune's trials receive a run id, as those of a grid do; the rows that the ids belong to are passed to a callback. Tune's
state is never restored. What earlier sweeps have suggested comes from their records, and the results from the store.
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
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from cope_sweep.plan import Plan, Row, row_of_draw
from cope_sweep.plan.points import Dimension, dimensions_of
from cope_sweep.spec import SpecError, default_label
from cope_sweep.store import Status

MAX_ASKS = 100
"""How often the sampler is asked for a row that is new. After that, a small space counts as exhausted."""

logger = logging.getLogger(__name__)


class Result(Protocol):
    """What is known of a run."""

    @property
    def status(self) -> Status: ...

    def value(self, name: str) -> float | None:
        """A metric: the final one of a finished run, the last one of a run that was stopped early."""


class RunSearch(OptunaSearch):
    """Suggests run ids to Tune. Give it to `TuneConfig(search_alg=…, num_samples=search.trials)`.

    Tune's results need the key `status` (`finished`, `stopped`, …) in the last one of a trial. A result without the
    metric is ignored.
    """

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
            on_suggest: Called with each row, in Tune's process, before its trial starts. It must record the row's
                labels with the sweep, so that the next sweep can continue.
            retry_failed: Whether failed rows are suggested again.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.on_suggest = plan, on_suggest
        self.dimensions = dimensions_of(plan.ablation)
        self.results: dict[str, tuple[Status, float | None]] = {}
        """Run id → status and value of the metric, of every row that was suggested."""
        self._asks: dict[str, str] = {}
        """Tune's trial id → the id of the question to Optuna that it comes from."""
        self._runs: dict[str, str] = {}
        """Tune's trial id → run id."""
        metric = str(plan.search.metric)
        evaluated, again = [], []
        for row in plan.rows:
            result = results.get(row.runs[0].run_id)
            status = result.status if result else "pending"
            value = result.value(metric) if result else None
            if status in ("finished", "stopped") or (status == "failed" and not retry_failed):
                evaluated.append((row, status, value))
            else:
                again.append(row)
        self.trials = len(again) + plan.open_samples
        """How many trials are left."""
        super().__init__(
            {dimension.name: _distribution(dimension) for dimension in self.dimensions},
            metric=metric,
            mode=plan.search.goal,
            points_to_evaluate=[self._parameters(row) for row in again],
            # Without this, the random draws at the start of a search would be repeated.
            seed=random.Random(f"{plan.search.seed}/{len(plan.rows)}").getrandbits(31),
        )
        for row, status, value in evaluated:
            self._add_evaluated(row, status, value)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The configuration of a trial, `{"run_id": …}`; None to be asked again later; FINISHED if nothing is new."""
        for number in range(MAX_ASKS):
            ask = f"{trial_id}/{number}"
            parameters = super().suggest(ask)
            if parameters is None:
                return None
            try:
                row = row_of_draw(self.plan.ablation, self._labels(parameters))
            except SpecError as error:
                logger.warning("a suggestion is no valid run: %s", error)
                super().on_trial_complete(ask, error=True)
                continue
            run_id = row.runs[0].run_id
            if run_id in self.results:
                self._complete(ask, *self.results[run_id])
                continue
            self._asks[trial_id], self._runs[trial_id] = ask, run_id
            self.results[run_id] = "pending", None
            self.on_suggest(row)
            return {"run_id": run_id}
        running = any(status == "pending" for status, _ in self.results.values())
        return None if running else Searcher.FINISHED

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Report the result of an evaluation."""
        value = result.get(self.metric)
        if value is not None and math.isfinite(value):
            super().on_trial_result(self._asks[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Report the end of a trial: as its result, as pruned if the scheduler stopped it, or as failed."""
        result = result or {}
        value, reported = result.get(self.metric), result.get("status")
        if value is not None and not math.isfinite(value):
            value = None
        status: Status = "finished" if reported == "finished" else "stopped"
        if error or reported in ("failed", "interrupted"):
            status = "failed"
        self.results[self._runs[trial_id]] = status, value
        self._complete(self._asks[trial_id], status, value)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its searcher into a file. The callback cannot be pickled, and the copy is never used.
        return Searcher, ()

    def _complete(self, ask: str, status: Status, value: float | None) -> None:
        if status == "finished" and value is not None:
            super().on_trial_complete(ask, {self.metric: value})
        else:
            super().on_trial_complete(ask, error=status != "stopped")

    def _add_evaluated(self, row: Row, status: Status, value: float | None) -> None:
        self.results[row.runs[0].run_id] = status, value
        stopped, known = status == "stopped", value is not None
        self.add_evaluated_point(
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
