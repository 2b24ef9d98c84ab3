"""Adapters between a sweep and Ray Tune: a Searcher, a Callback, a Stopper, schedulers, and the Tuner that has them.

Importing this module imports Tune, which takes seconds.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher, SearchGenerator
from ray.tune.stopper import NoopStopper

from cope_sweep.config.ablation import Asha, EarlyStopping, Median
from cope_sweep.sweep.trial import RunTrial, SweepContext

MAX_STEPS = 10**9
"""The limit of `train.steps`."""


class Trials(Protocol):
    """The sweep as Tune sees it. Every method is called in Tune's thread."""

    def next_trial(self, trial_id: str) -> dict[str, Any] | None:
        """The configuration of a trial of the next run; None while no run can be leased."""

    def is_exhausted(self) -> bool:
        """`next_trial` returns None until a trial has ended."""

    def on_start(self, trial_id: str) -> None:
        """The process of a trial has started, or is used again."""

    def on_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """A trial has reported something."""

    def on_end(self, trial_id: str, result: Mapping[str, Any], error: Exception | None) -> None:
        """A trial has ended. `result` is its last one; `error`: why its process died."""

    def stop_run(self, trial_id: str) -> None:
        """Ask the run of a trial to end, because the scheduler wants it."""

    def past_points(self, trial_id: str) -> Iterable[Mapping[str, float]]:
        """The curve that earlier attempts of a trial's run have logged, in order of steps."""


class NotPickled:
    """`deepcopy` returns the object itself; Tune's pickle of it is never read back."""

    substitute: Callable[[], Any]
    """Makes the object that is pickled instead."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).substitute, ()


class RunSearch(NotPickled, Searcher):
    """Gives Tune the configuration of the next trial."""

    substitute = Searcher

    def __init__(self, trials: Trials) -> None:
        super().__init__(metric="step", mode="max")  # never read: Tune refuses a Searcher without them
        self.trials = trials

    def suggest(self, trial_id: str) -> Any:
        """The configuration of the next trial; Tune asks again after None."""
        return self.trials.next_trial(trial_id)

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """See `TrialEvents`."""


class RunGenerator(NotPickled, SearchGenerator):
    """Says to Tune if there may be more runs.

    While there are none, Tune keeps no process for them. An idle one would keep others from its CPUs: those that Train
    starts for a run of several workers.
    """

    substitute = partial(SearchGenerator, Searcher())

    def __init__(self, trials: Trials, searcher: Searcher) -> None:
        super().__init__(searcher)
        self.trials = trials

    def is_finished(self) -> bool:
        """There is no run to start now, nor before a trial has ended."""
        return self.trials.is_exhausted()

    def save_to_dir(self, dirpath: str, session_str: str = "", **others: Any) -> None:
        """Tune's state is never restored."""


class TrialEvents(NotPickled, tune.Callback):
    """Reports the results, ends and errors of trials to the sweep, in Tune's thread."""

    substitute = tune.Callback

    def __init__(self, trials: Trials) -> None:
        self.trials = trials

    def on_trial_start(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.trials.on_start(trial.trial_id)

    def on_trial_result(self, iteration: int, trials: Any, trial: Trial, result: dict[str, Any], **info: Any) -> None:
        self.trials.on_result(trial.trial_id, result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        self.trials.on_end(trial.trial_id, trial.last_result, None)
        _forget(trial)

    def on_trial_error(self, iteration: int, trials: Any, trial: Trial, **info: Any) -> None:
        # A run's own errors are in its results. This is Ray's, of a process that has ended.
        error: Exception = RuntimeError("its process ended")
        if trial.pickled_error_file:
            with contextlib.suppress(Exception):  # an error need not be unpickled here
                error = pickle.loads(Path(trial.pickled_error_file).read_bytes())  # noqa: S301 - Tune's own file
        self.trials.on_end(trial.trial_id, trial.last_result, error)
        _forget(trial)


def _forget(trial: Trial) -> None:
    """Free what a trial that has ended still holds: its configuration, its last result, statistics of every number.

    Tune keeps all trials to its end, and then the text of each in memory, for a snapshot that nothing reads. The
    statistics are 16 kB of a trial, and its text is 15 kB.
    """
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    trial.config, trial.evaluated_params = {}, {}
    # Not empty: Tune would ask the trial's process for a result. The sweep still reads the dictionary that it was.
    trial.run_metadata.last_result = {"done": True}
    trial.get_json_state = _no_text  # type: ignore[method-assign]


def _no_text() -> tuple[str, str]:
    return "", ""


class StopWithSweep(NotPickled, tune.Stopper):
    """Stops all trials after the sweep has ended for any reason."""

    substitute = NoopStopper

    def __init__(self, sweep_ended: threading.Event) -> None:
        self.sweep_ended = sweep_ended

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.sweep_ended.is_set()


@dataclass(frozen=True)
class _Run:
    """What a scheduler gets in place of a trial: a run that is trained again has another trial, and is the same run."""

    trial_id: str
    """The id of the run."""


class _Asking(NotPickled, TrialScheduler):
    """Makes a scheduler ask runs to end, instead of Tune ending their trials: a run writes its state first.

    It compares runs, not trials, and knows what each run has logged before its trial. Else ASHA would take the first
    value of a resumed run for its value at an early rung, and stop runs that are better than it was there.

    To be inherited before a scheduler of Tune.
    """

    substitute = FIFOScheduler
    trials: Trials
    metric_name: str
    _asked: set[str]
    """The runs that were asked to end."""
    _last_steps: dict[str, int]
    """Run id → the step of its last evaluation that the scheduler knows."""

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        run = _run_of(trial)
        super().on_trial_add(tune_controller, run)
        for point in self.trials.past_points(trial.trial_id):
            if self._is_new(run, point):
                # The call that decides nothing: the run has passed this step. ASHA forgets the run with it.
                super().on_trial_complete(tune_controller, run, dict(point))
                super().on_trial_add(tune_controller, run)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        run = _run_of(trial)
        if run.trial_id in self._asked or not self._is_new(run, result):
            return TrialScheduler.CONTINUE
        if super().on_trial_result(tune_controller, run, result) == TrialScheduler.STOP:
            self._asked.add(run.trial_id)
            self.trials.stop_run(trial.trial_id)
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        run = _run_of(trial)
        if self._is_new(run, result):
            super().on_trial_complete(tune_controller, run, result)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        super().on_trial_remove(tune_controller, _run_of(trial))

    def _is_new(self, run: _Run, result: Mapping[str, Any]) -> bool:
        """The result is an evaluation, at a later step than those that the scheduler knows of the run."""
        # Ray 2.60 breaks if the last result of a trial lacks the metric, as the result of a failed run does.
        if self.metric_name not in result or result["step"] <= self._last_steps.get(run.trial_id, 0):
            return False
        self._last_steps[run.trial_id] = int(result["step"])
        return True

    def connect(self, trials: Trials, metric_name: str) -> None:
        """Name the sweep, and the metric by which runs are compared. To be called once, before anything else."""
        self.trials, self.metric_name, self._asked, self._last_steps = trials, metric_name, set(), {}


def _run_of(trial: Trial) -> Any:
    return _Run(trial.config["run_id"])


class AskingASHA(_Asking, ASHAScheduler):
    """ASHA that asks."""


class AskingMedianRule(_Asking, MedianStoppingRule):
    """The median rule that asks."""


def scheduler_of(schedule: EarlyStopping, trials: Trials) -> TrialScheduler:
    """Tune's scheduler for a schedule whose settings are all filled in. It compares runs by their evaluations.

    Raises ValueError for a kind without a scheduler.
    """
    metric_name = str(schedule.metric)
    options: dict[str, Any] = {
        "time_attr": "step", "metric": metric_name, "mode": schedule.goal, "grace_period": schedule.grace,
    }  # fmt: skip
    scheduler: AskingASHA | AskingMedianRule
    if isinstance(schedule, Asha):
        scheduler = AskingASHA(max_t=MAX_STEPS, reduction_factor=schedule.reduction, stop_last_trials=False, **options)
    elif isinstance(schedule, Median):
        # A trial is never paused for others to catch up.
        scheduler = AskingMedianRule(min_time_slice=MAX_STEPS, **options)
    else:
        raise ValueError(f"schedule {schedule.kind!r}: there is no such scheduler; accepted: asha, median, none")
    scheduler.connect(trials, metric_name)
    return scheduler


def tuner_of(
    trials: Trials,
    context: SweepContext,
    *,
    groups: int | None,
    schedule: EarlyStopping | None,
    metrics: Sequence[str],
    ended: threading.Event,
    scratch: str,
) -> tune.Tuner:
    """The Tuner of a sweep.

    Args:
        trials: The sweep.
        context: What its processes need.
        groups: The number of trials at a time; None: as many as the cluster has room for.
        schedule: The rule that ends runs early.
        metrics: The metrics of an evaluation that the sweep needs.
        ended: Set when the sweep has ended.
        scratch: The folder for Tune's files.
    """
    search: Searcher = RunSearch(trials)
    if groups is not None:
        search = ConcurrencyLimiter(search, max_concurrent=groups)
    return tune.Tuner(
        RunTrial,
        param_space={"sweep": context, "metrics": list(metrics)},
        tune_config=tune.TuneConfig(
            num_samples=-1,  # until the search ends
            search_alg=RunGenerator(trials, search),
            reuse_actors=True,
            scheduler=None if schedule is None else scheduler_of(schedule, trials),
            trial_name_creator=lambda trial: str(trial.config["run_id"]),
            trial_dirname_creator=lambda trial: f"{trial.config['run_id']}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=scratch,
            stop=StopWithSweep(ended),
            callbacks=[TrialEvents(trials)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
