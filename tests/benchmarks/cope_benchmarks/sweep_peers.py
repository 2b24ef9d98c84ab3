"""Other ways to train many runs with Ray, each a command of its own, for the benchmark of the sweep.

python -m cope_benchmarks.sweep_peers WAY ablation.yaml --store store

    trainer        a TorchTrainer in each Tune trial, as Ray documents it
    task           a Ray task per run, in a process of its own
    reused_task    a Ray task per run, in processes that are used again
    loop           no Ray: one run after another
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cope_sweep.spec import RunSpec
from cope_sweep.store import Store

CPUS = 2


def runs_of(ablation: Path) -> tuple[RunSpec, ...]:
    """The runs of an ablation file."""
    from cope_sweep.plan import expand
    from cope_sweep.spec import load_ablation

    return expand(load_ablation(ablation)).runs


def train(run: RunSpec, root: str) -> None:
    """Train one run."""
    from cope_sweep.train import Runtime, train_run

    train_run(run, Store(root), Runtime())


def loop(runs: tuple[RunSpec, ...], root: str) -> None:
    """One run after another in this process."""
    for run in runs:
        train(run, root)


def task(runs: tuple[RunSpec, ...], root: str) -> None:
    """A Ray task per run. Each gets a new process, as tasks with GPUs do by default (`max_calls=1`)."""
    _tasks(runs, root, max_calls=1)


def reused_task(runs: tuple[RunSpec, ...], root: str) -> None:
    """A Ray task per run, in processes that are used again, as tasks without GPUs do by default."""
    _tasks(runs, root, max_calls=0)


def _tasks(runs: tuple[RunSpec, ...], root: str, max_calls: int) -> None:
    import ray

    ray.init(num_cpus=CPUS, log_to_driver=False, include_dashboard=False)
    remote = ray.remote(num_cpus=1, max_calls=max_calls)(train)
    ray.get([remote.remote(run, root) for run in runs])


def trainer(runs: tuple[RunSpec, ...], root: str) -> None:
    """A Tune trial per run, each of which starts a TorchTrainer with one worker and waits for it."""
    import ray
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    ray.init(num_cpus=CPUS, log_to_driver=False)
    with tempfile.TemporaryDirectory() as scratch:

        def worker(config: dict[str, Any]) -> None:
            train(config["run"], root)

        def trial(config: dict[str, Any]) -> None:
            TorchTrainer(
                worker,
                train_loop_config={"run": runs[config["number"]]},
                scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
                run_config=RunConfig(name=f"run-{config['number']}", storage_path=scratch),
            ).fit()

        tune.Tuner(
            tune.with_resources(trial, {"CPU": 0.5}),
            param_space={"number": tune.grid_search(list(range(len(runs))))},
            tune_config=tune.TuneConfig(max_concurrent_trials=CPUS),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0),
        ).fit()


if __name__ == "__main__":
    WAYS = {"loop": loop, "task": task, "reused_task": reused_task, "trainer": trainer}
    WAYS[sys.argv[1]](runs_of(Path(sys.argv[2])), sys.argv[4])
