"""What Ray Tune schedules: a thin trial for each run. It opens its run at the broker and relays its metrics.

Trials need no CPU, so that the workers have them all; stopping one, as an early-stopping scheduler does, interrupts
its run. Tune keeps nothing that is read again: a next sweep is a new Tuner with what the ledger says is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler
from ray.tune.stopper import NoopStopper

from cope_sweep.spec import RunSpec
from cope_sweep.sweep.executor import worker_id

REPORT_EVERY_S = 1.0
"""Seconds from one result of a trial to the next, at least."""
RESULTS_PER_S = 50
"""What Tune's single loop handles at ease, of all trials together."""


class RunTrial(tune.Trainable):
    """One run, as Tune sees it."""

    broker: Any

    def setup(self, config: dict[str, Any]) -> None:
        self._begin(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        self._abandon()
        self._begin(config)
        return True

    def step(self) -> dict[str, Any]:
        event, over = ray.get(self.broker.progress.remote(self.run_id, self.every_s))
        self.over = over
        return {"step": event.step, "status": event.status, "done": over, **event.metrics}

    def cleanup(self) -> None:
        self._abandon()

    def _begin(self, config: dict[str, Any]) -> None:
        self.run_id, self.every_s, self.over = config["run_id"], config["every_s"], False
        self.broker = ray.get_actor(config["broker"])
        ray.get(self.broker.open.remote(self.run_id, worker_id()))

    def _abandon(self) -> None:
        """The trial ends here; if its run has not, it is interrupted."""
        if not self.over:
            self.broker.interrupt.remote(self.run_id)


class Ended(tune.Stopper):
    """Stops all trials once the sweep is over, for whatever reason."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.ended.is_set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ended:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its state into a file; that copy stops nothing.
        return NoopStopper, ()


def run_trials(
    runs: Sequence[RunSpec],
    *,
    broker: str,
    trials: int,
    scratch: str,
    ended: threading.Event,
    scheduler: TrialScheduler | None = None,
) -> None:
    """Have Tune run a trial for each run, in order, `trials` of them at a time. Returns when all are done.

    `broker` is the broker actor's name.
    """
    tune.Tuner(
        tune.with_resources(RunTrial, tune.PlacementGroupFactory([{"memory": 1}])),
        param_space={
            "run_id": tune.grid_search([run.run_id for run in runs]),
            "broker": broker,
            "every_s": max(REPORT_EVERY_S, trials / RESULTS_PER_S),
        },
        tune_config=tune.TuneConfig(
            num_samples=1,
            max_concurrent_trials=trials,
            reuse_actors=True,
            scheduler=scheduler,
            trial_name_creator=lambda trial: str(trial.config["run_id"]),
            trial_dirname_creator=lambda trial: str(trial.config["run_id"]),
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=scratch,
            stop=Ended(ended),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    ).fit()
