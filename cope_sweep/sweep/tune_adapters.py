"""Adapters between a sweep and Ray Tune: a Searcher, a Callback, a Stopper, schedulers, and the Tuner that has them.

Importing this module imports Tune, which takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher, SearchGenerator
from ray.tune.stopper import NoopStopper

from cope_sweep.config.ablation import Asha, EarlyStopping, Median
from cope_sweep.sweep.trial import RunTrial, SweepContext

if TYPE_CHECKING:
    from ray.tune.experiment import Trial

    from cope_sweep.sweep.ray_executor import RaySweep


MAX_STEPS = 10**9
"""The limit of `train.steps`."""


class _OfThisProcess:
    """An object that Tune copies and pickles into a file. Copies are the object itself, and no file is ever read."""

    substitute: Callable[[], Any]
    """Makes what is pickled in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).substitute, ()


class RunSearch(_OfThisProcess, Searcher):
    """Gives Tune the configuration of the next trial."""

    substitute = Searcher

    def __init__(self, sweep: RaySweep) -> None:
        super().__init__(metric="step", mode="max")  # of no meaning here; Tune wants them
        self.sweep = sweep

    def suggest(self, trial_id: str) -> Any:
        """The configuration of the next trial; None: none now."""
        return self.sweep.next_trial(trial_id)

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """See `TrialEvents`."""


class RunGenerator(_OfThisProcess, SearchGenerator):
    """Tells Tune whether there may be more runs.

    While there are none, Tune keeps no process for them. An idle one would keep others from its CPUs: those that Train
    starts for a run of several workers.
    """

    substitute = partial(SearchGenerator, Searcher())

    def __init__(self, sweep: RaySweep, searcher: Searcher) -> None:
        super().__init__(searcher)
        self.sweep = sweep

    def is_finished(self) -> bool:
        """Whether there is no run to start now, and another one may not come before a trial has ended."""
        return self.sweep.gives_no_run()

    def save_to_dir(self, dirpath: str, session_str: str = "", **others: Any) -> None:
        """Tune's state is never restored."""


class TrialEvents(_OfThisProcess, tune.Callback):
    """Passes on the results, ends and errors of trials, in Tune's thread."""

    substitute = tune.Callback

    def __init__(self, sweep: RaySweep) -> None:
        self.sweep = sweep

    def on_trial_start(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.sweep.note_start(trial.trial_id)

    def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: dict[str, Any], **info: Any) -> None:
        self.sweep.note_result(trial.trial_id, result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.sweep.note_end(trial.trial_id, trial.last_result, None)

    def on_trial_error(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        error: Exception = RuntimeError("its process ended")
        if trial.pickled_error_file:
            with contextlib.suppress(Exception):  # an error need not be unpickled here
                error = pickle.loads(Path(trial.pickled_error_file).read_bytes())  # noqa: S301 - Tune's own file
        self.sweep.note_end(trial.trial_id, trial.last_result, error)


class StopWithSweep(_OfThisProcess, tune.Stopper):
    """Stops all trials after the sweep has ended for any reason."""

    substitute = NoopStopper

    def __init__(self, sweep_ended: threading.Event) -> None:
        self.sweep_ended = sweep_ended

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.sweep_ended.is_set()


class _MedianRule(MedianStoppingRule):
    """The median rule, which Ray 2.60 breaks when the last result of a trial lacks the metric, as of a failed run."""

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        if self._metric in result:
            super().on_trial_complete(tune_controller, trial, result)


def scheduler_of(schedule: EarlyStopping) -> TrialScheduler:
    """Tune's scheduler for a schedule whose settings are all filled in. It compares runs by their evaluations.

    Raises ValueError where there is none for its kind.
    """
    options: dict[str, Any] = {
        "time_attr": "step", "metric": schedule.metric, "mode": schedule.goal, "grace_period": schedule.grace,
    }  # fmt: skip
    if isinstance(schedule, Asha):
        options |= {"max_t": MAX_STEPS, "reduction_factor": schedule.reduction, "stop_last_trials": False}
        return ASHAScheduler(**options)
    if isinstance(schedule, Median):
        # A trial is never paused for others to catch up.
        options["min_time_slice"] = math.inf
        return _MedianRule(**options)
    raise ValueError(f"schedule {schedule.kind!r}: there is no such scheduler; accepted: asha, median, none")


def tuner_of(sweep: RaySweep, context: SweepContext) -> tune.Tuner:
    """The Tuner of a sweep."""
    groups, schedule = sweep.work.resources.groups, sweep.work.schedule
    search: Searcher = RunSearch(sweep)
    if groups != "auto":
        search = ConcurrencyLimiter(search, max_concurrent=groups)
    metrics = [each.metric for each in (schedule, sweep.suggestions) if each is not None]
    return tune.Tuner(
        RunTrial,
        param_space={"sweep": context, "metrics": metrics},
        tune_config=tune.TuneConfig(
            num_samples=-1,  # until the search ends
            search_alg=RunGenerator(sweep, search),
            reuse_actors=True,
            scheduler=None if schedule is None else scheduler_of(schedule),
            trial_name_creator=lambda trial: str(trial.config["run_id"]),
            trial_dirname_creator=lambda trial: f"{trial.config['run_id']}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=sweep.scratch,
            stop=StopWithSweep(sweep.ended),
            callbacks=[TrialEvents(sweep)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
