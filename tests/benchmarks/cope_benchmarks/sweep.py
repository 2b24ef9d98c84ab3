"""Benchmark of the sweep: many trivial runs, MLflow, the time between two runs, other ways to use Ray, and a killed process.

    python -m cope_benchmarks.sweep WAY ablation.yaml --store STORE      trains the runs in another way, see `WAYS`

Real commands are measured, each in processes of its own, from the stores that they write. The sweep and a bare class
trainable of Tune take turns, so that a slow moment of the machine affects both. All ways start the same cluster as the
sweep; all runs use one torch thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cope_benchmarks.report import Measured, Rows
from cope_sweep.config import RunSpec
from cope_sweep.store import RunFolder, Store

ABLATION = """\
title: Many short runs
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12, dense_blanks: 6, sparse_blanks: 24}
  model: {layers: 1, dim: 32, heads: 2, position: [cope]}
  train: {steps: STEPS, batch: 16, lr: 1e-3}
  evaluate: {every: STEPS, sequences: 32, final_sequences: 32}
seeds: SEEDS
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
resources: {groups: GROUPS, device: cpu}
"""
SHORT_STEPS = 50
LONG_RUNS, LONG_STEPS, LONG_RUN_S = 6, 600, 30.0
"""Runs of a few seconds, one after another in one process; the gap is given as a share of runs of 30 s."""
ENDLESS_STEPS = 10_000_000
SETTLE_S = 3.0
"""From the first step of the last run to the death of a process."""
TIMEOUT_S = 900.0
WARM = 0.2
"""Share of the runs after which the growth of memory is measured."""


@dataclass
class Execution:
    """When a command was started, when it began and ended its runs, and the memory of its first process."""

    start_s: float
    whole_s: float
    spans_s: list[tuple[float, float]]
    """Begin and end of each run, by time of day, in the order of their begins."""
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Number of runs that had begun, and bytes of the driver."""

    @property
    def ends_s(self) -> list[float]:
        return sorted(end for _, end in self.spans_s)

    @property
    def steady_rate(self) -> float:
        """Runs per second from the end of the first run to the end of the last."""
        return (len(self.spans_s) - 1) / (self.ends_s[-1] - self.ends_s[0])

    def growth_bytes(self) -> float:
        """Bytes by which the driver grew per run, from a fifth of the runs to the end; 0 where samples are too few."""
        warm = [each for each in self.samples if each[0] >= WARM * len(self.spans_s)]
        if len(warm) < 2 or warm[0][0] == warm[-1][0]:
            return 0
        return (warm[-1][1] - warm[0][1]) / (warm[-1][0] - warm[0][0])


def execute(command: Sequence[str], store: Path) -> Execution:
    """Execute a command that trains runs into a new store, and measure it. Raises CalledProcessError, with its output."""
    opened = Store(store, create=True)
    samples: list[tuple[int, int]] = []
    start_s = time.time()
    with started(command, store) as process:
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                samples.append((len(os.listdir(store / "runs")), driver.memory_info().rss))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        whole_s = time.time() - start_s
    return Execution(start_s, whole_s, sorted(map(_span_s, opened.run_folders())), samples)


def _span_s(folder: RunFolder) -> tuple[float, float]:
    spec, result = folder.spec, folder.result
    if spec is None or result is None:
        raise RuntimeError(f"{folder.path}: the run is not finished; look into its state.json")
    return spec["created_ms"] / 1000, result["ended_ms"] / 1000


@contextlib.contextmanager
def started(command: Sequence[str], store: Path, exit_code: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start a command on a store and wait for its end. Raises CalledProcessError, with its output, for other exit codes.

    Compiled modules are kept: else each new process would compile those that it imports, which takes longer than the runs.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        environment.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}")
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    arguments = [sys.executable, "-m", *command, "--store", str(store)]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            yield process
        if process.returncode != exit_code:
            output.seek(0)
            error = subprocess.CalledProcessError(process.returncode, arguments, output.read())
            error.add_note(str(error.output)[-3000:])
            raise error


def measure(runs: int = 1_000, repetitions: int = 3) -> Measured:
    """Measure the sweep with `runs` runs of one step, in turns with a bare trainable."""
    rows = Rows("sweep")
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        for part in (trivial_runs, with_mlflow, gap, trainers, recovery):
            part(rows, Path(name), runs, repetitions)
    return rows.measured(runs=runs, repetitions=repetitions)


def trivial_runs(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """Runs of one step through the whole command, and by a bare trainable: the medians of the repetitions."""
    ablation = _ablation(folder / "trivial.yaml", runs, 1)
    done: dict[str, list[Execution]] = {"sweep": [], "bare": []}
    for turn in range(repetitions):
        for way in ("bare", "sweep") if turn % 2 else ("sweep", "bare"):
            done[way].append(execute(command_of(way, ablation), folder / f"{way}{turn}"))
    own, bare = (sorted(each, key=lambda one: one.steady_rate)[len(each) // 2] for each in done.values())
    rows.add("runs of 1 step", own.steady_rate, " runs/s", f", {runs:,} in {own.whole_s:.0f} s")
    rows.add("– by a bare Tune trainable", bare.steady_rate, " runs/s")
    rows.add("runs of 1 step, ÷ a bare Tune trainable", own.steady_rate / bare.steady_rate, " ×")
    rows.add("growth of the driver", own.growth_bytes() / 1e3, " KB/run")
    rows.add("from the command to the end of the first run", own.ends_s[0] - own.start_s, " s")


def with_mlflow(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """The same runs with MLflow. Raises RuntimeError unless all are finished there, too."""
    store = folder / "mlflow"
    done = execute(["cope_sweep.cli", "run", str(_ablation(folder / "mlflow.yaml", runs, 1))], store)
    query = "SELECT COUNT(*) FROM runs JOIN tags t USING (run_uuid) WHERE t.key = 'cope_sweep.run_id' AND status = 'FINISHED'"
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database:
        ((finished,),) = database.execute(query).fetchall()
    if finished != runs:
        raise RuntimeError(f"of {runs} runs, {finished} are finished in MLflow")
    after_s = done.start_s + done.whole_s - done.ends_s[-1]
    rows.add("runs of 1 step with MLflow", done.steady_rate, " runs/s", f", and {after_s:.0f} s after the last")


def gap(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """Runs of some seconds in one process: the time from the result of a run to the begin of the next."""
    done = execute(
        command_of("sweep", _ablation(folder / "long.yaml", LONG_RUNS, LONG_STEPS, groups=1)), folder / "long"
    )
    gaps_s = [after[0] - before[1] for before, after in itertools.pairwise(done.spans_s)]
    rows.add("between two runs, median", 1e3 * statistics.median(gaps_s), " ms")
    rows.add("between two runs, of runs of 30 s", 100 * statistics.mean(gaps_s) / LONG_RUN_S, "%")


def trainers(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """Short runs by the sweep, and by a TorchTrainer for each."""
    from cope_sweep.sweep.cluster import usable_cpus

    # After the first, as many as two rounds of all CPUs: a TorchTrainer takes 10 to 30 s a run.
    number = 2 * usable_cpus() + 1
    ablation = _ablation(folder / "short.yaml", number, SHORT_STEPS)
    own, each = (
        execute(command_of(way, ablation), folder / f"short_{way}").steady_rate for way in ("sweep", "trainer")
    )
    rows.add("runs of 50 steps, ÷ a TorchTrainer each", own / each, " ×", f" ({own:.3g} ÷ {each:.3g} runs/s)")


def recovery(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """Kill one of two processes that train: how long until its run makes a step again. Raises TimeoutError."""
    root = folder / "recovery"
    store = Store(root, create=True)
    command = command_of("sweep", _ablation(folder / "recovery.yaml", 2, ENDLESS_STEPS, groups=2))
    with started(command, root, exit_code=130) as process:  # interrupted
        try:
            _wait_for(lambda: sum(bool(each.curve()) for each in store.run_folders()) == 2, process)
            time.sleep(SETTLE_S)
            run = store.run_folders()[0]
            os.kill(int(run.state["worker_id"].rpartition(":")[2]), signal.SIGKILL)
            killed_s = time.time()
            _wait_for(lambda: any(row["time_ms"] / 1000 > killed_s for row in run.curve(times=True)), process)
            rows.add("a training process is killed: until the next step", time.time() - killed_s, " s")
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise TimeoutError("the sweep has ended, or no step was made in time")
        time.sleep(0.02)


def command_of(way: str, ablation: Path) -> list[str]:
    """The module and its arguments."""
    if way == "sweep":
        return ["cope_sweep.cli", "run", str(ablation), "--no-mlflow"]
    return ["cope_benchmarks.sweep", way, str(ablation)]


def _ablation(path: Path, runs: int, steps: int, groups: int | str = "auto") -> Path:
    text = ABLATION
    for name, value in {"SEEDS": list(range(runs)), "STEPS": steps, "GROUPS": groups}.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return path


# Other ways to train the runs -----------------------------------------------------------------------------------------


def train(run: RunSpec, root: str) -> None:
    """Train one run."""
    from cope_sweep.sweep.executor import worker_id
    from cope_sweep.train import Runtime, train_run

    train_run(run, Store(root), Runtime(worker_id=worker_id()))


def bare(runs: Sequence[RunSpec], root: str, cpus: int) -> None:
    """A class trainable of Tune with `reuse_actors`, which calls `train_run`: no leases, no index, no table."""
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

    _tune(Trial, runs, cpus)


def trainer(runs: Sequence[RunSpec], root: str, cpus: int) -> None:
    """A TorchTrainer with one worker in each Tune trial, as Ray documents it."""
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

    _tune(tune.with_resources(trial, {"CPU": 0.5}), runs, cpus)


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


WAYS = {"bare": bare, "trainer": trainer}


def main(way: str, ablation: str, root: str) -> None:
    from cope_sweep.config import expand, load_ablation
    from cope_sweep.sweep.cluster import connected, usable_cpus

    runs = expand(load_ablation(Path(ablation))).runs
    with tempfile.TemporaryDirectory() as folder, connected(None, Path(folder) / "ray.log"):
        WAYS[way](runs, root, usable_cpus())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[4])
