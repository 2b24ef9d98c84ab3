"""Tune's trials, with a broker and without worker groups."""

import copy
import pickle
import secrets
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.sweep.broker import Broker, Lease, LeaseResult
from cope_sweep.sweep.trials import StopWithSweep, run_trials
from tests.sweep.runs import TIMEOUT_S, seeds


def start_broker(store: Store, runs: list[RunSpec], trials: int) -> tuple[str, Any]:
    name = f"broker-{secrets.token_hex(4)}"
    actor = ray.remote(Broker).options(name=name, num_cpus=0, max_concurrency=100)
    return name, actor.remote(str(store.root), runs, max_failures=1, trials=trials, ahead=0)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_every_run_gets_a_trial_and_trials_end_with_their_runs(store: Store, tmp_path: Path) -> None:
    runs = seeds(3)
    name, broker = start_broker(store, runs, trials=1)
    # A first trial, so that runs are leased only after theirs have started.
    ray.get(broker.open.remote(runs[0].run_id, "test"))
    trained: list[str] = []

    def train() -> None:
        result = None
        while (lease := ray.get(broker.lease.remote(0, result, 1.0))) is not None:
            result = None
            if lease != "wait":
                trained.append(lease.run.run_id)
                result = LeaseResult(lease.number, "finished", Event(lease.run.run_id, "finished", 6, 6, {"x": 1.0}))

    group = threading.Thread(target=train, daemon=True)
    group.start()
    run_trials(runs, broker=name, trials=1, scratch=str(tmp_path), sweep_ended=threading.Event())
    group.join(TIMEOUT_S)
    assert trained == [run.run_id for run in runs]
    assert ray.get(broker.poll_events.remote(0, 0.0)).ended


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_end_of_the_sweep_stops_trials_and_interrupts_their_runs(store: Store, tmp_path: Path) -> None:
    runs = seeds(2)
    name, broker = start_broker(store, runs, trials=2)
    # A first trial, so that a run is leased only after its trial has started.
    ray.get(broker.open.remote(runs[0].run_id, "test"))
    sweep_ended = threading.Event()
    leases: list[Lease] = []

    def end_when_both_are_open() -> None:
        leases.extend(ray.get([broker.lease.remote(group, None, TIMEOUT_S) for group in range(2)]))
        sweep_ended.set()

    threading.Thread(target=end_when_both_are_open, daemon=True).start()
    run_trials(runs, broker=name, trials=2, scratch=str(tmp_path), sweep_ended=sweep_ended)
    to_interrupt = ray.get([broker.watch.remote(group, 0) for group in range(2)], timeout=TIMEOUT_S)
    assert to_interrupt == [lease.number for lease in leases]


def test_the_stopper_stops_all_trials_when_the_sweep_has_ended() -> None:
    ended = threading.Event()
    stopper = StopWithSweep(ended)
    assert not stopper("trial", {})
    assert not stopper.stop_all()
    copied = copy.deepcopy(stopper)
    ended.set()
    assert stopper.stop_all()
    assert copied.stop_all()
    assert not pickle.loads(pickle.dumps(stopper)).stop_all()
