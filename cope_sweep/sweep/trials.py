"""What Ray Tune schedules: one small trial per run, which opens the run at the broker and reports its metrics.

Trials use no CPUs, which are left to the workers. If a scheduler stops a trial early, its run is interrupted. Tune's
own state is never restored: the next sweep creates a new Tuner for the runs that the store does not have.
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

REPORT_INTERVAL_S = 1.0
"""Minimum time between two results of a trial."""
MAX_RESULTS_PER_S = 50
"""What Tune's event loop can handle, over all trials."""


class RunTrial(tune.Trainable):
    """The trial of one run."""

    broker: Any

    def setup(self, config: dict[str, Any]) -> None:
        self._open(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        self._interrupt_unended()
        self._open(config)
        return True

    def step(self) -> dict[str, Any]:
        event, ended = ray.get(self.broker.progress.remote(self.run_id, self.interval_s))
        self.ended = ended
        return {"step": event.step, "status": event.status, "done": ended, **event.metrics}

    def cleanup(self) -> None:
        self._interrupt_unended()

    def _open(self, config: dict[str, Any]) -> None:
        self.run_id, self.interval_s, self.ended = config["run_id"], config["interval_s"], False
        self.broker = ray.get_actor(config["broker"])
        ray.get(self.broker.open.remote(self.run_id, worker_id()))

    def _interrupt_unended(self) -> None:
        """Interrupt the run if it has not ended: the trial ends here."""
        if not self.ended:
            self.broker.interrupt.remote(self.run_id)


class StopWithSweep(tune.Stopper):
    """Stops all trials after the sweep has ended for any reason."""

    def __init__(self, sweep_ended: threading.Event) -> None:
        self.sweep_ended = sweep_ended

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.sweep_ended.is_set()

    def __deepcopy__(self, memo: dict[int, Any]) -> StopWithSweep:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its stopper into a file. An event cannot be pickled, and the copy is never used.
        return NoopStopper, ()


def run_trials(
    runs: Sequence[RunSpec],
    *,
    broker: str,
    trials: int,
    scratch: str,
    sweep_ended: threading.Event,
    scheduler: TrialScheduler | None = None,
) -> None:
    """Have Tune run one trial per run, in order. Returns when all have ended.

    Args:
        runs: The runs of the sweep.
        broker: The name of the broker actor.
        trials: How many trials run at the same time.
        scratch: A folder for Tune's files.
        sweep_ended: Set when all trials are to stop.
        scheduler: May stop trials early.
    """
    tune.Tuner(
        tune.with_resources(RunTrial, tune.PlacementGroupFactory([{"memory": 1}])),
        param_space={
            "run_id": tune.grid_search([run.run_id for run in runs]),
            "broker": broker,
            "interval_s": max(REPORT_INTERVAL_S, trials / MAX_RESULTS_PER_S),
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
            stop=StopWithSweep(sweep_ended),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    ).fit()
