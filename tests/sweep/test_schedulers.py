"""Tune's schedulers as a schedule builds them, driven by results as trials report them. Without a cluster."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import ray
from ray.tune.experiment import Trial

from cope_sweep.config import Resources
from cope_sweep.config.ablation import Asha, EarlyStopping, Median
from cope_sweep.store import Event
from cope_sweep.sweep.trial import RunTrial
from cope_sweep.sweep.tune_adapters import TrialEvents, scheduler_of

ASHA = Asha(metric="in_dist/loss", goal="min", grace=10, reduction=2)
MEDIAN = Median(metric="in_dist/loss", goal="min", grace=10)


class Asked(list[str]):
    """Which runs the scheduler wants to end. The sweep asks them."""

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[str, list[dict[str, float]]] = {}
        """Trial id → what earlier attempts of its run have logged."""

    def stop_run(self, trial_id: str) -> None:
        self.append(trial_id)

    def past_points(self, trial_id: str) -> list[dict[str, float]]:
        return self.curves.get(trial_id, [])


class FakeTrial:
    def __init__(self, trial_id: str, run_id: str) -> None:
        self.trial_id, self.status, self.config = trial_id, "RUNNING", {"run_id": run_id}


class Trials:
    """Trials of a scheduler."""

    def __init__(self, rule: EarlyStopping, count: int) -> None:
        self.asked = Asked()
        self.scheduler = scheduler_of(rule, self.asked)
        self.trials: list[FakeTrial] = []
        self.controller = SimpleNamespace(get_live_trials=lambda: [SimpleNamespace(status="PENDING")])
        for number in range(count):
            self.add(f"run {number}")

    def add(self, run_id: str, curve: Mapping[int, float] = MappingProxyType({})) -> int:
        """The number of another trial. `curve`: step → loss, of earlier attempts of its run."""
        number = len(self.trials)
        self.asked.curves[str(number)] = [{"step": step, "in_dist/loss": loss} for step, loss in curve.items()]
        self.trials.append(FakeTrial(str(number), run_id))
        self.scheduler.on_trial_add(self.controller, self.trials[number])
        return number

    def report(self, trial: int, step: int, **metrics: float) -> str:
        result = {"step": step, "status": "running", **metrics}
        assert self.scheduler.on_trial_result(self.controller, self.trials[trial], result) == "CONTINUE"
        return "asked" if self.asked else "trains"

    def complete(self, trial: int, result: Mapping[str, Any]) -> None:
        self.scheduler.on_trial_complete(self.controller, self.trials[trial], dict(result))


def test_an_unknown_kind_is_an_error() -> None:
    class Hyperband(EarlyStopping):
        kind: str = "hyperband"

    with pytest.raises(ValueError, match="hyperband"):
        scheduler_of(Hyperband(), Asked())


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_a_run_that_is_worse_than_the_others_is_stopped_after_the_grace(rule: EarlyStopping) -> None:
    trials = Trials(rule, 5)
    for trial in range(4):
        for step in (5, 10, 20):
            assert trials.report(trial, step, **{"in_dist/loss": 1.0}) == "trains"
    assert trials.report(4, 5, **{"in_dist/loss": 9.0}) == "trains"
    assert trials.report(4, 10, **{"in_dist/loss": 9.0}) == "asked"


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_results_without_the_metric_change_nothing(rule: EarlyStopping) -> None:
    """A run that failed before its first evaluation, and one of a task that has another metric."""
    trials = Trials(rule, 6)
    trials.report(0, 10, other=1.0)
    trials.complete(0, {"step": 15, "status": "failed", "done": True})
    for trial in range(1, 5):
        assert trials.report(trial, 10, **{"in_dist/loss": 1.0}) == "trains"
        trials.complete(trial, {"step": 15, "status": "failed", "done": True})
    assert trials.report(5, 10, **{"in_dist/loss": 9.0}) == "asked"


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_a_run_that_was_asked_to_end_is_asked_once_and_goes_on_until_it_has_written_its_state(
    rule: EarlyStopping,
) -> None:
    trials = Trials(rule, 5)
    for trial in range(4):
        trials.report(trial, 10, **{"in_dist/loss": 1.0})
    for step in (10, 11, 12):
        trials.report(4, step, **{"in_dist/loss": 9.0})
    assert trials.asked == ["4"]
    trials.complete(4, {"step": 12, "in_dist/loss": 9.0, "done": True})


def test_a_resumed_run_is_compared_by_what_it_has_logged_at_each_rung() -> None:
    """Its first value after that is better than any run's at an early rung."""
    trials = Trials(ASHA, 0)
    resumed = trials.add("resumed", {5: 9.0, 10: 8.0, 15: 7.0, 20: 6.0, 25: 5.0})
    assert trials.report(resumed, 30, **{"in_dist/loss": 4.0}) == "trains"
    for number in range(2):
        fresh = trials.add(f"fresh {number}")
        assert trials.report(fresh, 10, **{"in_dist/loss": 7.0 - number}) == "trains"
        assert trials.report(fresh, 20, **{"in_dist/loss": 5.0 - number}) == "trains"
    assert trials.report(trials.add("worse"), 10, **{"in_dist/loss": 8.5}) == "asked"


def test_the_median_counts_a_resumed_run() -> None:
    trials = Trials(MEDIAN, 0)
    for number in range(3):
        resumed = trials.add(f"resumed {number}", {10: 2.0, 20: 1.0})
        assert trials.report(resumed, 30, **{"in_dist/loss": 1.0}) == "trains"
    assert trials.report(trials.add("better"), 10, **{"in_dist/loss": 1.5}) == "trains"
    assert trials.report(trials.add("worse"), 10, **{"in_dist/loss": 2.5}) == "asked"


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_a_run_that_is_trained_again_counts_once(rule: EarlyStopping) -> None:
    trials = Trials(rule, 1)
    trials.report(0, 10, **{"in_dist/loss": 3.0})
    for _ in range(3):  # its process dies after each
        again = trials.add("run again", {5: 1.5, 10: 1.0})
        assert trials.report(again, 10, **{"in_dist/loss": 1.0}) == "trains"
    assert trials.report(trials.add("another"), 10, **{"in_dist/loss": 2.0}) == "trains"


@pytest.mark.parametrize("rule", [ASHA, MEDIAN])
def test_trials_that_end_before_they_have_started_are_forgotten(rule: EarlyStopping) -> None:
    trials = Trials(rule, 2)
    for trial in trials.trials:
        trials.scheduler.on_trial_remove(trials.controller, trial)


def test_results_have_the_metrics_of_their_own_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends at step 13 has not the value of its evaluation at step 10 there."""
    here = SimpleNamespace(get_actor_id=lambda: "actor", get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    trial: Any = SimpleNamespace(trial={"metrics": ["in_dist/loss"]}, leaves="")
    last = Event(run_id="a", step=13, metrics={"in_dist/loss": 9.0, "train/loss": 2.0})
    finished = RunTrial._result(trial, "ended", last.model_copy(update={"status": "finished", "evaluated": True}))
    assert (finished["in_dist/loss"], "train/loss" in finished) == (9.0, False)
    trials = Trials(ASHA, 5)
    for status in ("interrupted", "stopped"):
        trials.complete(0, RunTrial._result(trial, "ended", last.model_copy(update={"status": status})))
    for number in range(1, 5):
        assert trials.report(number, 13, **{"in_dist/loss": 10.0}) == "trains", "none was better at this rung"


def test_a_trial_that_has_ended_keeps_nothing_that_only_its_process_and_the_sweep_needed() -> None:
    """Tune keeps every trial to its end, and then writes all of them as text."""
    results: list[Mapping[str, Any]] = []

    class Sweep:
        def on_end(self, trial_id: str, result: Mapping[str, Any], error: Exception | None) -> None:
            results.append(result)  # read later, in another thread

    config = {"run_id": "a", "run": "content of a run", "resources": Resources()}
    for ended in (TrialEvents.on_trial_complete, TrialEvents.on_trial_error):
        trial = Trial("RunTrial", trial_id="a", config=config, evaluated_params={**config}, stub=True)
        trial.storage = SimpleNamespace(trial_driver_staging_path="")
        trial.update_last_result({"step": 3, "event": Event(run_id="a", status="finished", step=3, steps=3)})
        assert trial.metric_analysis
        assert trial.metric_n_steps
        assert "content of a run" in trial.get_json_state()[0]
        ended(TrialEvents(Sweep()), 1, [trial], trial)
        assert not trial.metric_n_steps
        assert not trial.metric_analysis
        assert trial.last_result.keys() == {"done", "trial_id"}
        assert not any(trial.get_json_state())
        assert results[-1]["step"] == 3
        assert results[-1]["event"].status == "finished"
