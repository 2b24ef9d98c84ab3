"""Tune's schedulers as a schedule builds them, driven by results as trials report them. Without a cluster."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler

from cope_sweep.config.ablation import Asha, EarlyStopping, Median
from cope_sweep.sweep.tune_adapters import scheduler_of

ASHA = Asha(metric="in_dist/loss", goal="min", grace=10, reduction=2)
MEDIAN = Median(metric="in_dist/loss", goal="min", grace=10)


class FakeTrial:
    def __init__(self, trial_id: str) -> None:
        self.trial_id, self.status = trial_id, "RUNNING"


class Trials:
    """Trials of a scheduler."""

    def __init__(self, scheduler: TrialScheduler, count: int) -> None:
        self.scheduler = scheduler
        self.trials = [FakeTrial(str(number)) for number in range(count)]
        self.controller = SimpleNamespace(get_live_trials=lambda: [SimpleNamespace(status="PENDING")])
        for trial in self.trials:
            scheduler.on_trial_add(self.controller, trial)

    def report(self, trial: int, step: int, **metrics: float) -> str:
        result = {"step": step, "status": "running", **metrics}
        return self.scheduler.on_trial_result(self.controller, self.trials[trial], result)

    def complete(self, trial: int, result: Mapping[str, Any]) -> None:
        self.scheduler.on_trial_complete(self.controller, self.trials[trial], dict(result))


def test_an_unknown_kind_is_an_error() -> None:
    class Hyperband(EarlyStopping):
        kind: str = "hyperband"

    with pytest.raises(ValueError, match="'hyperband': there is no such scheduler; accepted: asha, median, none"):
        scheduler_of(Hyperband())


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_a_run_that_is_worse_than_the_others_is_stopped_after_the_grace(rule: EarlyStopping) -> None:
    trials = Trials(scheduler_of(rule), 5)
    for trial in range(4):
        for step in (5, 10, 20):
            assert trials.report(trial, step, **{"in_dist/loss": 1.0}) == "CONTINUE"
    assert trials.report(4, 5, **{"in_dist/loss": 9.0}) == "CONTINUE"
    assert trials.report(4, 10, **{"in_dist/loss": 9.0}) == "STOP"


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_results_without_the_metric_change_nothing(rule: EarlyStopping) -> None:
    """A run that failed before its first evaluation, and one of a task that has another metric."""
    trials = Trials(scheduler_of(rule), 6)
    trials.report(0, 10, other=1.0)
    trials.complete(0, {"step": 15, "status": "failed", "done": True})
    for trial in range(1, 5):
        assert trials.report(trial, 10, **{"in_dist/loss": 1.0}) == "CONTINUE"
        trials.complete(trial, {"step": 15, "status": "failed", "done": True})
    assert trials.report(5, 10, **{"in_dist/loss": 9.0}) == "STOP"
