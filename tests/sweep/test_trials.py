"""Tune's trials, with a broker and without worker groups."""

import contextlib
import copy
import os
import pickle
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.messages import AssignmentResult
from cope_sweep.sweep.schedule import BrokerActor
from cope_sweep.sweep.trials import RunSearch, StopWithSweep, run_trials
from tests.sweep.runs import Recorded, seeds, wait_until


def search_of(run_ids: list[str], wanted: int = 2, **changes: Any) -> RunSearch:
    values: dict[str, Any] = {
        "wanted": lambda: {0: wanted},
        "start": lambda run_id: None,
        "stop": lambda run_id, reason: None,
        "rule": "ASHA",
        "ended": threading.Event(),
    }
    return RunSearch(run_ids, **values | changes)


def test_there_are_as_many_trials_as_wanted() -> None:
    started: list[str] = []
    wanted = [2]
    search = search_of(["a", "b", "c"], wanted=0, start=started.append)
    search.wanted = lambda: {0: wanted[0]}
    assert [search.suggest(trial) for trial in "123"] == [{"run_id": "a"}, {"run_id": "b"}, None]
    wanted[0] = 3  # another group
    assert search.suggest("3") == {"run_id": "c"}
    assert started == ["a", "b", "c"]
    search.on_trial_complete("1", {"status": "finished"})
    assert search.suggest("4") is None
    search.add(["a"])  # the sweep that trained it gave it up
    assert search.suggest("4") == {"run_id": "a"}
    search.ended.set()
    assert search.suggest("5") == Searcher.FINISHED


@pytest.mark.parametrize(
    ("result", "stopped"),
    [
        ({"status": "running", "step": 3, "done": True}, True),
        ({"status": "ended: finished", "step": 3}, False),
        ({"status": "ended: running", "step": 3}, False),  # the sweep was stopped, and its run writes a checkpoint
        ({"status": "elsewhere", "step": 3}, False),
        (None, False),
    ],
)
def test_a_trial_that_ended_while_its_run_trains_was_ended_by_the_scheduler(
    result: dict[str, Any] | None, stopped: bool
) -> None:
    stops: list[tuple[str, str]] = []
    search = search_of(["a"], stop=lambda run_id, reason: stops.append((run_id, reason)))
    search.suggest("1")
    search.on_trial_complete("1", result)
    assert stops == ([("a", "stopped by ASHA at step 3")] if stopped else [])


def test_the_end_of_the_sweep_stops_no_run() -> None:
    search = search_of(["a"], stop=lambda run_id, reason: pytest.fail("stopped"))
    search.suggest("1")
    search.ended.set()
    search.on_trial_complete("1", {"status": "running", "step": 3})


def test_copies_are_the_object_itself_and_pickles_have_no_effect() -> None:
    ended = threading.Event()
    stopper, search = StopWithSweep(ended), search_of(["a"], ended=ended)
    assert not stopper("trial", {})
    assert not stopper.stop_all()
    assert copy.deepcopy(search) is search
    copied = copy.deepcopy(stopper)
    ended.set()
    assert stopper.stop_all()
    assert copied.stop_all()
    assert not pickle.loads(pickle.dumps(stopper)).stop_all()
    assert isinstance(pickle.loads(pickle.dumps(search)), Searcher)


class Source:
    """A search that suggests runs c, d, … and keeps what it is told."""

    metric = "loss"

    def __init__(self, count: int) -> None:
        self.todo = ["c", "d", "e"][:count]
        self.told: list[tuple[Any, ...]] = []

    @property
    def left(self) -> int:
        return len(self.todo)

    def next_run(self) -> str | None:
        return self.todo.pop(0) if self.todo else None

    def report(self, run_id: str, step: int, value: float) -> None:
        self.told.append((run_id, step, value))

    def end(self, run_id: str, status: str, value: float | None) -> None:
        self.told.append((run_id, status, value))


def test_a_source_suggests_runs_and_learns_their_results() -> None:
    source = Source(3)
    search = search_of(["a"], wanted=9, source=source, more=2)
    assert [search.suggest(trial) for trial in "1234"] == [{"run_id": run} for run in "acd"] + [None]
    for trial in "12":
        search.on_trial_result(trial, {"loss": 1.0, "status": "running", "step": 3})
    for trial, status in (("1", "ended: finished"), ("2", "ended: finished"), ("3", "running")):
        search.on_trial_complete(trial, {"status": status, "step": 6, "loss": 0.5})
    assert source.told == [("c", 3, 1.0), ("c", "finished", 0.5), ("d", "stopped", 0.5)]


def test_a_suggested_run_that_another_sweep_trains_counts_when_it_has_ended() -> None:
    source = Source(1)
    search = search_of([], source=source, more=1)
    assert search.suggest("1") == {"run_id": "c"}
    search.on_trial_complete("1", {"status": "elsewhere", "step": 0})
    assert source.told == []
    search.ends.append(Event("c", "finished", 6, 6, {"loss": 0.5}))
    search.suggest("2")
    assert source.told == [("c", "finished", 0.5)]


def test_each_shape_has_the_trials_of_its_groups() -> None:
    wanted = {0: 1, 1: 2}
    search = search_of(["a", "b", "C", "D", "E"], shape_of=lambda run_id: int(run_id.isupper()))
    search.wanted = lambda: wanted
    assert [search.suggest(trial) for trial in "1234"] == [{"run_id": run} for run in "aCD"] + [None]
    search.on_trial_complete("2", {"status": "ended: finished"})
    assert search.suggest("5") == {"run_id": "E"}
    del wanted[1]  # the groups of this shape have left
    search.on_trial_complete("3", {"status": "ended: finished"})
    assert search.suggest("6") is None
    search.on_trial_complete("1", {"status": "ended: finished"})
    assert search.suggest("6") == {"run_id": "b"}


def test_a_source_that_has_nothing_new_says_so_once() -> None:
    exhausted: list[bool] = []
    search = search_of([], source=Source(1), more=5, on_exhausted=lambda: exhausted.append(True))
    assert [search.suggest(trial) for trial in "123"] == [{"run_id": "c"}, None, None]
    assert exhausted == [True]


class Sweep:
    """A broker actor, and a thread in which Tune runs the trials."""

    def __init__(self, store: Store, runs: list[RunSpec], scratch: Path, scheduler: Any = None) -> None:
        self.store = store
        self.name = f"broker-{secrets.token_hex(4)}"
        actor = ray.remote(BrokerActor).options(name=self.name, num_cpus=0, max_concurrency=100)
        self.broker = actor.remote(store.location, store.index_url, "this-sweep", runs, max_failures=1)
        self.ended = threading.Event()
        self.errors: list[Exception] = []
        self.search = search_of(
            [run.run_id for run in runs],
            wanted=1,
            start=self.broker.start.remote,
            stop=self.broker.stop.remote,
            ended=self.ended,
        )
        self.tune = threading.Thread(target=self._run, args=(str(scratch), scheduler), daemon=True)
        self.tune.start()

    def _run(self, scratch: str, scheduler: Any) -> None:
        try:
            run_trials(self.search, broker=self.name, metrics=["in_dist/loss"], scratch=scratch, scheduler=scheduler)
        except Exception as error:
            self.errors.append(error)

    def call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.broker, method).remote(*arguments), timeout=240)

    def end(self) -> None:
        self.ended.set()
        self.call("close")
        self.tune.join(240)
        assert not self.tune.is_alive()
        self.call("release")
        ray.kill(self.broker)
        assert self.errors == []


@pytest.fixture
def sweeps(store: Store, tmp_path: Path) -> Iterator[Any]:
    started: list[Sweep] = []

    def start(runs: list[RunSpec], scheduler: Any = None) -> Sweep:
        started.append(Sweep(store, runs, tmp_path, scheduler))
        return started[-1]

    yield start
    for sweep in started:
        sweep.end()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_every_run_gets_a_trial_in_the_same_process(sweeps: Any, store: Store) -> None:
    runs = seeds(3)
    sweep = sweeps(runs)
    trained: list[str] = []
    processes: set[int] = set()
    result = None
    while (assignment := sweep.call("lease", 0, result, 240.0)) is not None:
        trained.append(assignment.run.run_id)
        Recorded(store, assignment.run, assignment.attempt).end("finished")
        event = Event(assignment.run.run_id, "finished", 6, 6, {"x": 1.0})
        result = AssignmentResult(assignment.number, "finished", event)
        wait_until(lambda: bool(trial_processes()))
        processes.update(trial_processes())
    assert trained == [run.run_id for run in runs]
    assert sweep.call("poll", 0, 0.0).ended
    assert len(processes) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_run_goes_on_when_the_process_of_its_trial_is_killed(sweeps: Any, store: Store) -> None:
    """And when Tune ends at last, the run still trains."""
    (only,) = seeds(1)
    sweep = sweeps([only])
    assignment = sweep.call("lease", 0, None, 240.0)
    wait_until(lambda: bool(trial_processes()))
    (first,) = trial_processes()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: trial_processes() not in ([first], []))
    order = sweep.broker.watch.remote(0)
    ended = sweep.ended
    ended.set()
    sweep.tune.join(240)
    assert ray.wait([order], timeout=0.5)[0] == []
    assert store.status(assignment.run.run_id) == "running"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_scheduler_sees_every_evaluation_and_ends_a_run(sweeps: Any, store: Store) -> None:
    first, second = seeds(2)
    seen: list[tuple[int, float | None]] = []

    class StopsAtFour(FIFOScheduler):
        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            seen.append((result["step"], result.get("in_dist/loss")))
            return self.STOP if result["step"] == 4 else self.CONTINUE

    sweep = sweeps([first, second], StopsAtFour())
    assignment = sweep.call("lease", 0, None, 240.0)
    for step in (2, 4):
        metrics = {"in_dist/loss": 1.0 / step, "train/loss": 3.0}
        event = Event(first.run_id, "running", step, 6, metrics, evaluated=True)
        sweep.call("report", assignment.number, event)
    order = sweep.call("watch", 0)
    assert (order.number, order.request) == (assignment.number, "stopped")
    Recorded(store, first, assignment.attempt).end("stopped")
    following = sweep.call("lease", 0, AssignmentResult(assignment.number, "stopped", None), 240.0)
    assert following.run == second
    assert seen == [(2, 0.5), (4, 0.25)]
    wait_until(lambda: store.status(first.run_id) == "stopped")
    assert store.run(first.run_id).state["message"] == "stopped by ASHA at step 4"


def trial_processes() -> list[int]:
    """The processes of the trials on the cluster of these tests."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith("ray::RunTrial"):
                found.append(process.pid)
    return found
