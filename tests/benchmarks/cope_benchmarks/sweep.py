"""Benchmark of the sweep: many trivial runs, MLflow, the time between two runs, and a killed process.

    python -m cope_benchmarks.sweep ablation.yaml STORE      trains the runs by a bare trainable of Tune

Real commands are measured, each in processes of its own, from the stores that they write. The sweep and the bare trainable
take turns, so that a slow moment of the machine affects both, and start the same cluster. All runs use one torch thread.
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
from cope_benchmarks.synthetic import MANY_RUNS, command, environment, write_ablation
from cope_sweep.config import RunSpec
from cope_sweep.store import RunFolder, Store

LONG_RUNS, LONG_STEPS, LONG_RUN_S = 6, 600, 30.0
"""Runs of a few seconds, one after another in one process; the gap is given as a share of runs of 30 s."""
ENDLESS_STEPS = 10_000_000
SETTLE_S = 3.0
"""From the first step of the last run to the death of a process."""
TIMEOUT_S = 900.0
WARM = 0.2
"""Share of the runs after which the growth of memory is measured."""
MIN_SAMPLES = 3
"""Samples of the driver's memory between that share and half of the runs."""


@dataclass
class Execution:
    """The times at which a command was started and began and ended its runs, and the memory of its first process."""

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
        """Bytes by which the driver grew per run, from a fifth of the runs to the end.

        Raises ValueError where that was not measured: too few samples in the first half of the runs, or less memory at
        the end, which a driver that keeps its trials cannot have.
        """
        runs = len(self.spans_s)
        warm = [each for each in self.samples if each[0] >= WARM * runs]
        early = [each for each in warm if each[0] <= runs / 2]
        if len(early) < MIN_SAMPLES or warm[-1][0] < runs:
            raise ValueError(f"{len(early)} samples of memory are too few: measure more than {runs} runs")
        growth = (warm[-1][1] - warm[0][1]) / (warm[-1][0] - warm[0][0])
        if growth <= 0:
            raise ValueError(f"{growth:.0f} bytes a run is no growth: memory was given back meanwhile")
        return growth


def execute(words: Sequence[str], root: Path) -> Execution:
    """Execute a command that trains runs into the new store of a folder, and measure it.

    Raises CalledProcessError, with its output.
    """
    opened = Store(root / "store", create=True)
    samples: list[tuple[int, int]] = []
    start_s = time.time()
    with started(words, root) as process:
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                samples.append((len(os.listdir(root / "store" / "runs")), driver.memory_info().rss))
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
def started(words: Sequence[str], root: Path, exit_code: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start a command on a folder and wait for its end. Raises CalledProcessError, with its output, for other exit codes.

    Compiled modules are kept: else each new process would compile those that it imports, which takes longer than the runs.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "MLFLOW_TRACKING_URI")
    settings = {name: value for name, value in environment(root).items() if name not in left_out}
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        settings.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}")
    settings |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, text=True, env=settings) as process:
            yield process
        if process.returncode != exit_code:
            output.seek(0)
            error = subprocess.CalledProcessError(process.returncode, list(words), output.read())
            error.add_note(str(error.output)[-3000:])
            raise error


def measure(runs: int = 1_000, repetitions: int = 3) -> Measured:
    """Measure the sweep with `runs` runs of one step, in turns with a bare trainable."""
    rows = Rows("sweep")
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        folder = Path(name)
        trivial_runs(rows, folder, runs, repetitions)
        with_mlflow(rows, folder, runs)
        gap(rows, folder)
        recovery(rows, folder)
    return rows.measured(runs=runs, repetitions=repetitions)


def trivial_runs(rows: Rows, folder: Path, runs: int, repetitions: int) -> None:
    """Runs of one step through the whole command, and by a bare trainable: the medians of the repetitions."""
    done: dict[str, list[Execution]] = {"sweep": [], "bare": []}
    for turn in range(repetitions):
        for way in ("bare", "sweep") if turn % 2 else ("sweep", "bare"):
            done[way].append(train_runs(folder / f"{way}{turn}", runs, 1, bare=way == "bare"))
    own, bare = (sorted(each, key=lambda one: one.steady_rate)[len(each) // 2] for each in done.values())
    rows.add("runs of 1 step", own.steady_rate, "runs/s", whole=f"{runs:,} in {own.whole_s:.0f} s")
    rows.add("– by a bare Tune trainable", bare.steady_rate, "runs/s")
    rows.add("runs of 1 step, ÷ a bare Tune trainable", own.steady_rate / bare.steady_rate)
    try:
        rows.add("growth of the driver", own.growth_bytes() / 1e3, "KB/run")
    except ValueError as error:
        rows.rows["growth of the driver"] = {"failed": str(error)}
    rows.add("from the command to the end of the first run", own.ends_s[0] - own.start_s, "s")


def with_mlflow(rows: Rows, folder: Path, runs: int) -> None:
    """The same runs with MLflow. Raises RuntimeError unless all are finished there, too."""
    done = train_runs(folder / "mlflow", runs, 1, mlflow=True)
    query = "SELECT COUNT(*) FROM runs JOIN tags t USING (run_uuid) WHERE t.key = 'cope_sweep.run_id' AND status = 'FINISHED'"
    with contextlib.closing(sqlite3.connect(folder / "mlflow" / "store" / "mlflow.db")) as database:
        ((finished,),) = database.execute(query).fetchall()
    if finished != runs:
        raise RuntimeError(f"of {runs} runs, {finished} are finished in MLflow")
    after_s = done.start_s + done.whole_s - done.ends_s[-1]
    rows.add("runs of 1 step with MLflow", done.steady_rate, "runs/s", whole=f"and {after_s:.0f} s after the last")


def gap(rows: Rows, folder: Path) -> None:
    """Runs of some seconds in one process: the time from the result of a run to the start of the next."""
    done = train_runs(folder / "long", LONG_RUNS, LONG_STEPS, groups=1)
    gaps_s = [after[0] - before[1] for before, after in itertools.pairwise(done.spans_s)]
    rows.add("between two runs, median", 1e3 * statistics.median(gaps_s), "ms")
    rows.add("between two runs, of runs of 30 s", 100 * statistics.mean(gaps_s) / LONG_RUN_S, "%")


def recovery(rows: Rows, folder: Path) -> None:
    """Kill one of two processes that train: how long until its run makes a step again. Raises TimeoutError."""
    root = folder / "recovery"
    words = _command(root, 2, ENDLESS_STEPS, groups=2)
    store = Store(root / "store", create=True)
    with started(words, root, exit_code=130) as process:  # interrupted
        try:
            _wait_for(lambda: sum(bool(each.curve()) for each in store.run_folders()) == 2, process)
            time.sleep(SETTLE_S)
            run = store.run_folders()[0]
            os.kill(int(run.state["worker_id"].rpartition(":")[2]), signal.SIGKILL)
            killed_s = time.time()
            _wait_for(lambda: any(row["time_ms"] / 1000 > killed_s for row in run.curve(times=True)), process)
            rows.add("a training process is killed: until the next step", time.time() - killed_s, "s")
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise TimeoutError("the sweep has ended, or no step was made in time")
        time.sleep(0.02)


def train_runs(
    root: Path, runs: int, steps: int, groups: int | str = "auto", *, bare: bool = False, mlflow: bool = False
) -> Execution:
    """Train so many runs in a new folder, by the sweep or a bare trainable, and measure it."""
    words = _command(root, runs, steps, groups, mlflow=mlflow)
    if bare:
        words = [
            sys.executable,
            "-m",
            "cope_benchmarks.sweep",
            str(root / "ablations" / "many.yaml"),
            str(root / "store"),
        ]
    return execute(words, root)


def _command(root: Path, runs: int, steps: int, groups: int | str = "auto", *, mlflow: bool = False) -> list[str]:
    """The command that trains so many runs, whose ablation file is written."""
    base = MANY_RUNS["base"]
    changed = {"train": base["train"] | {"steps": steps}, "evaluate": base["evaluate"] | {"every": steps}}
    resources = {"groups": groups, "device": "cpu"}
    write_ablation(root, "many", base=base | changed, seeds=list(range(runs)), resources=resources)
    return command("run", "many", *[] if mlflow else ["--no-mlflow"])


# The bare trainable ---------------------------------------------------------------------------------------------------


def main(ablation: str, root: str) -> None:
    """Train the runs of an ablation by a class trainable of Tune with `reuse_actors`: no leases, no index, no table."""
    from ray import tune

    from cope_sweep.config import expand, load_ablation
    from cope_sweep.store.provenance import usable_cpus
    from cope_sweep.sweep.cluster import connected
    from cope_sweep.sweep.executor import worker_id
    from cope_sweep.train import Runtime, train_run

    def train(run: str) -> None:
        spec = RunSpec.model_validate_json(run)
        train_run(spec, Store(root).run(spec.run_id), Runtime(worker_id=worker_id()))

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
            self.thread.submit(train, self.run).result()
            return {"done": True}

    runs = [run.model_dump_json() for run in expand(load_ablation(Path(ablation))).runs]
    with tempfile.TemporaryDirectory() as scratch, connected(None, Path(scratch) / "ray.log"):
        results = tune.Tuner(
            Trial,
            param_space={"run": tune.grid_search(runs)},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                max_concurrent_trials=usable_cpus(),
                trial_dirname_creator=lambda trial: str(trial.trial_id),  # else the run's JSON is in the name
            ),
            run_config=tune.RunConfig(
                storage_path=scratch, verbose=0, checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False)
            ),
        ).fit()
    if results.errors:
        raise results.errors[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
