"""Other ways to train many runs, each a command of its own, with which the benchmark compares the sweep.

python -m cope_benchmarks.sweep_peers WAY ablation.yaml --store STORE

    bare           a class trainable of Tune with `reuse_actors`, which calls `train_run`: no leases, no index, no table
    trainer        a TorchTrainer in each Tune trial, as Ray documents it
    task           a Ray task per run, in a process of its own
    reused_task    a Ray task per run, in processes that are used again
    loop           no Ray: one run after another
    log_batch      trains nothing: sends the runs in STORE/mlflow.db to STORE/again.db by plain calls of MLflow

All ways with Ray start the same cluster as the sweep, with the same settings. All runs use one torch thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cope_sweep.config import RunSpec
from cope_sweep.store import Store

TAG = "cope_sweep.run_id"
"""The tag by which MLflow's runs of trained runs are known. The run of the sweep has none."""


def train(run: RunSpec, root: str) -> None:
    """Train one run."""
    from cope_sweep.sweep.executor import worker_id
    from cope_sweep.train import Runtime, train_run

    train_run(run, Store(root), Runtime(worker_id=worker_id()))


def loop(runs: Sequence[RunSpec], root: str) -> None:
    """One run after another in this process."""
    for run in runs:
        train(run, root)


def task(runs: Sequence[RunSpec], root: str, max_calls: int = 1) -> None:
    """A Ray task per run. Each gets a new process, as tasks with GPUs do by default (`max_calls=1`)."""
    import ray

    with _cluster():
        remote = ray.remote(num_cpus=1, max_calls=max_calls)(train)
        ray.get([remote.remote(run, root) for run in runs])


def reused_task(runs: Sequence[RunSpec], root: str) -> None:
    """A Ray task per run, in processes that are used again, as tasks without GPUs do by default."""
    task(runs, root, max_calls=0)


def bare(runs: Sequence[RunSpec], root: str) -> None:
    """A trial per run, whose process trains the next run, too."""
    from ray import tune

    class Trial(tune.Trainable):
        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
            return tune.PlacementGroupFactory([{"CPU": 1}])

        def setup(self, config: dict[str, Any]) -> None:
            self.run = config["run"]
            self.thread = ThreadPoolExecutor(1)  # torch keeps a pool of threads for each thread that it computes in

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.run = config["run"]
            return True

        def step(self) -> dict[str, Any]:
            self.thread.submit(train, RunSpec.model_validate_json(self.run), root).result()
            return {"done": True}

    with _cluster() as cpus:
        _tune(Trial, runs, cpus)


def trainer(runs: Sequence[RunSpec], root: str) -> None:
    """A trial per run, each of which starts a TorchTrainer with one worker and waits for it."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def worker(config: dict[str, Any]) -> None:
        train(RunSpec.model_validate_json(config["run"]), root)

    def trial(config: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            TorchTrainer(
                worker,
                train_loop_config=config,
                scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
                run_config=RunConfig(storage_path=scratch),
            ).fit()

    with _cluster() as cpus:
        _tune(tune.with_resources(trial, {"CPU": 0.5}), runs, cpus)


@contextlib.contextmanager
def _cluster() -> Iterator[int]:
    """The cluster that a sweep starts on this machine. Yields its number of CPUs."""
    from cope_sweep.sweep.cluster import connected, usable_cpus

    with tempfile.TemporaryDirectory() as folder, connected(None, Path(folder) / "ray.log"):
        yield usable_cpus()


def _tune(trainable: Any, runs: Sequence[RunSpec], cpus: int) -> None:
    """Have Tune start a trial for each run, as many at a time as there are CPUs."""
    from ray import tune

    with tempfile.TemporaryDirectory() as scratch:
        results = tune.Tuner(
            trainable,
            param_space={"run": tune.grid_search([run.model_dump_json() for run in runs])},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                max_concurrent_trials=cpus,
                trial_dirname_creator=lambda trial: str(trial.trial_id),  # else the run's JSON is in the name
            ),
            run_config=tune.RunConfig(
                storage_path=scratch, verbose=0, checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False)
            ),
        ).fit()
    if results.errors:
        raise results.errors[0]


def log_batch(root: str) -> None:
    """Send each run with one call of `create_run`, `log_batch` and `set_terminated`."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(f"sqlite:///{root}/again.db")
    experiment = client.create_experiment("again", f"file://{root}/again")
    with contextlib.closing(sqlite3.connect(Path(root) / "mlflow.db")) as source:

        def rows(columns: str, table: str, run: str) -> list[tuple[Any, ...]]:
            return source.execute(f"SELECT {columns} FROM {table} WHERE run_uuid = ?", (run,)).fetchall()

        for (run,) in source.execute("SELECT run_uuid FROM tags WHERE key = ?", (TAG,)).fetchall():
            metrics = [Metric(*row) for row in rows("key, value, timestamp, step", "metrics", run)]
            params = [Param(*row) for row in rows("key, value", "params", run)]
            tags = [RunTag(*row) for row in rows("key, value", "tags", run)]
            created = client.create_run(experiment).info.run_id
            client.log_batch(created, metrics, params, tags, synchronous=True)
            client.set_terminated(created)


def _main(way: str, ablation: str, root: str) -> None:
    if way == "log_batch":
        log_batch(root)
        return
    from cope_sweep.config import expand, load_ablation

    ways = {"loop": loop, "task": task, "reused_task": reused_task, "bare": bare, "trainer": trainer}
    ways[way](expand(load_ablation(Path(ablation))).runs, root)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[4])
