"""What Ray Tune schedules: one small trial per run, which reports the evaluations of its run.

Trials use no CPUs, which are left to the workers. Tune gets as many as there are worker groups of each shape, while
groups come and go. A run does not depend on its trial's process: where a trial is only cleaned up, the run goes on. The
driver sees which trials a scheduler has ended, and tells the broker. Tune's own state is never restored: the next sweep
creates a new Tuner.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import NoopStopper

from cope_sweep.store import Event, Status
from cope_sweep.sweep.messages import Report

TRIAL_BYTES = 200_000_000
"""Memory of a trial's process. Asking for it spreads the trials over the nodes."""


class RunTrial(tune.Trainable):
    """The trial of one run."""

    broker: Any = None
    run_id: str
    metrics: Sequence[str]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"memory": TRIAL_BYTES}])

    def setup(self, config: dict[str, Any]) -> None:
        self.run_id, self.metrics = config["run_id"], config["metrics"]
        if self.broker is None:
            self.broker = ray.get_actor(config["broker"])

    def reset_config(self, config: dict[str, Any]) -> bool:
        self.setup(config)
        return True

    def step(self) -> dict[str, Any]:
        try:
            report: Report = ray.get(self.broker.progress.remote(self.run_id))
        except ray.exceptions.RayActorError:
            # The broker died and the sweep has ended, which the driver reports.
            return {"step": 0, "done": True}
        event = report.event
        # Tune keeps statistics of every value for every trial, so it gets only what it needs.
        known = {name: value for name, value in event.metrics.items() if name in self.metrics}
        status = event.status if not report.ended else "elsewhere" if report.elsewhere else f"ended: {event.status}"
        return {"step": event.step, "status": status, "done": report.ended, **known}


class _OfThisProcess:
    """An object that Tune copies and pickles into a file. Copies are the object itself, and no file is ever read."""

    substitute: Callable[[], Any]
    """Makes what is pickled in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).substitute, ()


class Source(Protocol):
    """A search that suggests runs by the results of others: `cope_sweep.sweep.suggestions.Suggestions`."""

    @property
    def metric(self) -> str: ...
    @property
    def left(self) -> int: ...
    def next_run(self) -> str | None: ...
    def report(self, run_id: str, step: int, value: float) -> None: ...
    def end(self, run_id: str, status: Status, value: float | None) -> None: ...


class RunSearch(_OfThisProcess, Searcher):
    """Gives Tune the next run whenever fewer trials than wanted are alive of its shape."""

    substitute = Searcher

    def __init__(
        self,
        run_ids: Iterable[str],
        *,
        wanted: Callable[[], Mapping[int, int]],
        shape_of: Callable[[str], int] = lambda run_id: 0,
        start: Callable[[str], None],
        stop: Callable[[str, str], None],
        rule: str,
        ended: threading.Event,
        source: Source | None = None,
        more: int = 0,
        on_exhausted: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the searcher.

        Args:
            run_ids: The runs, in order.
            wanted: Shape → how many trials of runs of this shape are wanted now.
            shape_of: The shape of a run.
            start: Called with each run that is given to Tune.
            stop: Called with each run that the scheduler has ended, and the reason.
            rule: What the scheduler is called in reasons.
            ended: Set when the sweep has ended.
            source: Suggests further runs by the results of others.
            more: How many runs `source` is asked for.
            on_exhausted: Called when `source` has nothing more to suggest.
        """
        super().__init__(metric="step", mode="max")  # of no meaning here; Tune wants them
        self.shape_of = shape_of
        self.todo: defaultdict[int, deque[str]] = defaultdict(deque)
        """Shape → runs without a trial, in order."""
        self.add(run_ids)
        self.wanted, self.start, self.stop, self.rule, self.ended = wanted, start, stop, rule, ended
        self.source, self.more, self.on_exhausted = source, more, on_exhausted
        self.suggested: set[str] = set()
        """The runs that `source` has suggested and that have not ended."""
        self.ends: deque[Event] = deque()
        """Ends of runs that were trained by other sweeps, from the driver's thread."""
        self.alive: dict[str, str] = {}
        """Id of each trial that has not ended → its run."""
        self.alive_of: Counter[int] = Counter()
        """Shape → number of trials that have not ended."""

    def add(self, run_ids: Iterable[str]) -> None:
        """Give these runs another trial."""
        for run_id in run_ids:
            self.todo[self.shape_of(run_id)].append(run_id)

    def suggest(self, trial_id: str) -> Any:
        """The configuration of the next trial; None: none now."""
        if self.ended.is_set():
            return self.FINISHED
        while self.ends:
            event = self.ends.popleft()
            self._tell_end(event.run_id, event.status, event.metrics)
        wanted = self.wanted()
        free = (shape for shape, number in wanted.items() if self.todo[shape] and self.alive_of[shape] < number)
        shape = next(free, None)
        if shape is not None:
            run_id = self.todo[shape].popleft()
        elif len(self.alive) >= sum(wanted.values()) or (suggested := self._ask_source()) is None:
            return None
        else:
            run_id = suggested
        self.alive[trial_id] = run_id
        self.alive_of[self.shape_of(run_id)] += 1
        self.start(run_id)
        return {"run_id": run_id}

    def _ask_source(self) -> str | None:
        if self.source is None or not self.more:
            return None
        run_id = self.source.next_run()
        if run_id is not None:
            self.more -= 1
            self.suggested.add(run_id)
        elif not self.source.left:
            self.more = 0
            self.on_exhausted()
        return run_id

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Pass an evaluation to the search that suggested the run."""
        run_id = self.alive.get(trial_id)
        if self.source is not None and run_id in self.suggested and self.source.metric in result:
            self.source.report(str(run_id), result["step"], result[self.source.metric])

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        run_id = self.alive.pop(trial_id, None)
        if run_id is not None:
            self.alive_of[self.shape_of(run_id)] -= 1
        result = result or {}
        status = str(result.get("status", ""))
        if run_id is None or status == "elsewhere":
            return
        # The last result of a trial that ended by itself does not say `running`.
        if status == "running" and not self.ended.is_set():
            self.stop(run_id, f"stopped by {self.rule} at step {result.get('step')}")
            status = "stopped"
        self._tell_end(run_id, cast(Status, status.removeprefix("ended: ")), result)

    def _tell_end(self, run_id: str, status: Status, metrics: Mapping[str, float]) -> None:
        """Tell the search that suggested the run how it ended."""
        if self.source is not None and run_id in self.suggested:
            self.suggested.discard(run_id)
            self.source.end(run_id, status, metrics.get(self.source.metric))

    def save(self, checkpoint_path: str) -> None:
        """Tune's state is never restored."""

    def restore(self, checkpoint_path: str) -> None:
        """Tune's state is never restored."""


class StopWithSweep(_OfThisProcess, tune.Stopper):
    """Stops all trials after the sweep has ended for any reason."""

    substitute = NoopStopper

    def __init__(self, sweep_ended: threading.Event) -> None:
        self.sweep_ended = sweep_ended

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.sweep_ended.is_set()


def run_trials(
    search: RunSearch,
    *,
    broker: str,
    metrics: Sequence[str],
    scratch: str,
    scheduler: TrialScheduler | None = None,
) -> None:
    """Have Tune run the trials of `search`. Returns when the sweep has ended.

    Args:
        search: The runs.
        broker: The name of the broker actor.
        metrics: The metrics that the scheduler and the search need.
        scratch: A folder for Tune's files.
        scheduler: May end trials early.
    """
    tune.Tuner(
        RunTrial,
        param_space={"broker": broker, "metrics": list(metrics)},
        tune_config=tune.TuneConfig(
            num_samples=-1,  # until the search ends
            search_alg=search,
            reuse_actors=True,
            scheduler=scheduler,
            trial_name_creator=lambda trial: str(trial.config["run_id"]),
            trial_dirname_creator=lambda trial: str(trial.config["run_id"]),
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=scratch,
            stop=StopWithSweep(search.ended),
            # A trial's process may die with its node; the run is not affected.
            failure_config=tune.FailureConfig(max_failures=-1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    ).fit()
