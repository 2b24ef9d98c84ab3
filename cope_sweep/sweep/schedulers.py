"""Tune's schedulers for the `schedule` of an ablation, which end runs early.

They compare runs by their values at evaluations. A result without the metric, as a failed run has, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from cope_sweep.config import RunSpec

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

    from cope_sweep.config.search import EarlyStopping

TIME = "step"
"""The key of a result by which schedulers measure how far a run is."""


@dataclass(frozen=True)
class StoppingRule:
    """A schedule without open defaults."""

    kind: Literal["asha", "median"]
    metric: str
    goal: Literal["min", "max"]
    grace: int
    """Steps before which no run is stopped."""
    steps: int
    """The steps of the longest run."""
    reduction: float = 4.0

    def __str__(self) -> str:
        name = {"asha": "ASHA", "median": "the median rule"}[self.kind]
        return f"{name} ({self.metric}, grace {self.grace} steps)"


def stopping_rule(schedule: EarlyStopping | None, runs: Sequence[RunSpec]) -> StoppingRule | None:
    """The rule of a plan's schedule; None where every run is trained to its end.

    Args:
        schedule: The schedule, with metric, goal and grace filled in.
        runs: The runs that are to be compared.

    Raises:
        ValueError: There is no scheduler for this kind.
    """
    if schedule is None or not runs:
        return None
    if schedule.kind not in ("asha", "median"):
        raise ValueError(f"schedule {schedule.kind!r}: there is no such scheduler; accepted: asha, median, none")
    return StoppingRule(
        kind=cast(Literal["asha", "median"], schedule.kind),
        metric=str(schedule.metric),
        goal=schedule.goal or "min",
        grace=schedule.grace or 1,
        steps=max(run.train.steps for run in runs),
        reduction=float(getattr(schedule, "reduction", 4.0)),
    )


def scheduler_of(rule: StoppingRule) -> TrialScheduler:
    """Tune's scheduler for a rule."""
    from ray.tune.schedulers import ASHAScheduler

    if rule.kind == "asha":
        return ASHAScheduler(
            time_attr=TIME,
            metric=rule.metric,
            mode=rule.goal,
            max_t=rule.steps,
            grace_period=rule.grace,
            reduction_factor=rule.reduction,
            stop_last_trials=False,
        )
    return _median_rule(rule)


def _median_rule(rule: StoppingRule) -> TrialScheduler:
    from ray.tune.schedulers import MedianStoppingRule

    class Median(MedianStoppingRule):
        """The median rule, which Ray 2.60 breaks when the last result of a trial lacks the metric."""

        def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
            if rule.metric in result:
                super().on_trial_complete(tune_controller, trial, result)

    return Median(
        time_attr=TIME,
        metric=rule.metric,
        mode=rule.goal,
        grace_period=rule.grace,
        # A trial is never paused for others to catch up.
        min_time_slice=math.inf,  # type: ignore[arg-type]
    )
