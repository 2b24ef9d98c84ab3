"""Benchmark of the sweep: many trivial runs, MLflow, the time between two runs, other ways to use Ray, and faults.

Real commands are measured, each in processes of its own, from the stores that they write. The sweep and a bare class
trainable of Tune take turns, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cope_benchmarks.sweep_peers import TAG
from cope_sweep.cli.output import grid
from cope_sweep.store import RunFolder, Store
from cope_sweep.store.provenance import versions
from cope_sweep.sweep.cluster import usable_cpus

if TYPE_CHECKING:
    from rich.table import Table

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
"""Runs of a few seconds, one after another in one process; the gap is also given as a share of runs of 30 s."""
ENDLESS_STEPS = 10_000_000
SETTLE_S = 3.0
"""From the first step of the last run to the death of a process."""
SAMPLE_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.02
TIMEOUT_S = 900.0
WARM = 0.2
"""Share of the runs after which the growth of memory is measured."""
GOALS = {
    "runs_per_s": 25.0, "of_bare": 0.8, "bytes_per_run": 50e3, "share_of_30_s": 0.01, "of_trainer": 20.0,
    "of_task": 3.0, "first_step_s": 20.0,
}  # fmt: skip
TRIAL = "trial"
KINDS = {"ray::RunTrial": TRIAL, "ray::Trial": TRIAL, "ray::IndexActor": "index actor", "ray::IDLE": "idle"}
"""How the titles of processes begin → their kind. Ray keeps idle processes ready."""
PARTS = ("trivial_runs", "mlflow", "gap", "ways", "recovery")
TITLES = {
    "engine": "the sweep", "bare": "a bare Tune trainable", "loop": "a plain loop, one at a time",
    "task": "a Ray task each, in a new process", "reused_task": "a Ray task each, in processes used again",
    "trainer": "a TorchTrainer each",
}  # fmt: skip
"""The ways to train the same runs: the sweep, and those of `sweep_peers`."""
WAYS = tuple(TITLES)
REPEATED = ("engine", "bare")

Usage = dict[str, dict[str, float]]
"""Kind of process → `processes` (their number), and sums of `rss` in bytes and `cpu_s`."""


# -- a command that trains ---------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """When a command was started, when it began and ended its runs, and what its processes used."""

    start_s: float
    whole_s: float
    spans_s: list[tuple[float, float]]
    """Begin and end of each run, by time of day, in the order of their begins."""
    samples: list[tuple[int, Usage]] = field(default_factory=list)
    """Number of runs that had begun, and what the processes used."""

    @property
    def ends_s(self) -> list[float]:
        """When runs ended, in order."""
        return sorted(end for _, end in self.spans_s)

    @property
    def steady_rate(self) -> float:
        """Runs per second from the end of the first run to the end of the last."""
        return (len(self.spans_s) - 1) / (self.ends_s[-1] - self.ends_s[0])

    def rate(self, wanted: int, cpus: int) -> float:
        """Runs per second from the begin of the first run to the end of the last.

        Where fewer than `wanted` runs were trained, the time of the others is added: each takes as long as those after
        the first on each CPU, so that the start of the processes of every run counts.
        """
        number, ends_s = len(self.spans_s), self.ends_s
        total_s = ends_s[-1] - self.spans_s[0][0]
        parallel = min(cpus, number - 1)
        each_s = (ends_s[-1] - ends_s[parallel - 1]) / (number - parallel) if parallel else total_s
        return wanted / (total_s + (wanted - number) * each_s)

    def gaps_s(self) -> list[float]:
        """The time from the end of each run to the begin of the next, in the only process that trains."""
        return [after[0] - before[1] for before, after in itertools.pairwise(self.spans_s)]

    def growth(self, name: str) -> dict[str, float]:
        """What each kind of process used per run, of `rss` or `cpu_s`, from a fifth of the runs to the end.

        Empty where there are too few samples.
        """
        found: dict[str, float] = {}
        # When the sweep ends, the processes of its trials end before the driver.
        samples = [each for each in self.samples if each[0] >= WARM * len(self.spans_s) and TRIAL in each[1]]
        for kind in samples[0][1] if samples else ():
            of_kind = [(number, usage[kind]) for number, usage in samples if kind in usage]
            most = max(used["processes"] for _, used in of_kind)  # a process that has ended would count as a loss
            known = [(number, used[name]) for number, used in of_kind if used["processes"] == most]
            (first, before), (last, after) = known[0], known[-1]
            if last > first:
                found[kind] = (after - before) / (last - first)
        return found


def execute(command: Sequence[str], store: Path) -> Measured:
    """Execute a command that trains runs into a new store, and measure it.

    Raises:
        subprocess.CalledProcessError: The command failed. It holds the command's output.
    """
    opened = Store(store, create=True)
    samples: list[tuple[int, Usage]] = []
    start_s = time.time()
    with started(command, store) as process:
        while process.poll() is None:
            samples.append((len(os.listdir(store / "runs")), usage_by_kind(process.pid)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_INTERVAL_S)
        whole_s = time.time() - start_s
    return Measured(start_s, whole_s, sorted(map(_span_s, opened.files.run_folders())), samples)


def _span_s(folder: RunFolder) -> tuple[float, float]:
    """Begin and end of a run, by time of day."""
    spec, result = folder.spec, folder.result
    if spec is None or result is None:
        raise RuntimeError(f"{folder.path}: the run is not finished; look into its state.json")
    return spec["created_ms"] / 1000, result["ended_ms"] / 1000


@contextlib.contextmanager
def started(command: Sequence[str], store: Path, exit_code: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start a command on a store and wait for its end. Raises CalledProcessError, with its output, for other exit codes.

    Compiled modules are kept: else each new process would compile those that it imports, which takes longer than the
    runs. Ray does not ask for a token.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        environment.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}")
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as output:
        arguments = [sys.executable, "-m", *command, "--store", str(store)]
        with subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            yield process
        if process.returncode != exit_code:
            output.seek(0)
            error = subprocess.CalledProcessError(process.returncode, arguments, output.read())
            error.add_note(str(error.output)[-3000:])
            raise error


def usage_by_kind(driver: int) -> Usage:
    """What a command and all that it starts use: driver, trial, index actor, mirror, idle, or Ray (its own)."""
    found: Usage = {}
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        processes = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            line, cpu = " ".join(process.cmdline()), process.cpu_times()
            kind = next((kind for start, kind in KINDS.items() if line.startswith(start)), "Ray")
            kind = "driver" if process.pid == driver else "mirror" if "-m cope_sweep." in line else kind
            values = {"processes": 1, "rss": process.memory_info().rss, "cpu_s": cpu.user + cpu.system}
            sums = found.setdefault(kind, dict.fromkeys(values, 0))
            for name, value in values.items():
                sums[name] += value
    return found


# -- the parts ---------------------------------------------------------------------------------------------------------


def measure(
    runs: int = 1_000,
    short_runs: int = 20,
    peer_runs: int = 4,
    repetitions: int = 3,
    *,
    ways: Collection[str] = WAYS,
    parts: Collection[str] = PARTS,
) -> dict[str, Any]:
    """Measure the sweep on this machine.

    Args:
        runs: Runs of one step.
        short_runs: Runs of 50 steps, which are trained in several ways.
        peer_runs: How many of them are trained by one TorchTrainer each, which takes 10 to 30 s a run.
        repetitions: How many times the sweep and the bare trainable train the same runs.
        ways: The ways to train the same runs.
        parts: What to measure.

    Raises:
        subprocess.CalledProcessError: A command failed. It holds the command's output.
    """
    load = _load()
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        folder = Path(name)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "trivial_runs": lambda: _trivial(folder, runs, repetitions),
            "mlflow": lambda: _mlflow(folder, runs),
            "gap": lambda: _gap(folder),
            "ways": lambda: _ways(folder, short_runs, peer_runs, repetitions, ways),
            "recovery": lambda: _recovery(folder),
        }
        measured = {part: measures[part]() | {"load": _load()} for part in PARTS if part in parts}
    machine = {"host": platform.node(), "cpus": usable_cpus(), "load": [load, _load()]}
    return measured | {"goals": GOALS, "machine": machine, "versions": versions()}


def _trivial(folder: Path, runs: int, repetitions: int) -> dict[str, Any]:
    """Runs of one step through the whole command, and by a bare trainable. Details are of the median repetition."""
    ablation = _ablation(folder / "trivial.yaml", runs, 1)
    done = _in_turns({way: _command(way, ablation) for way in REPEATED}, folder, repetitions)
    for each in done.values():
        each.sort(key=lambda one: one.steady_rate)
    median = {way: each[len(each) // 2] for way, each in done.items()}
    own = median["engine"]
    return {
        "runs": runs,
        "runs_per_s": {way: round(one.steady_rate, 2) for way, one in median.items()},
        "all_runs_per_s": {way: [round(one.steady_rate, 2) for one in each] for way, each in done.items()},
        "of_bare": round(own.steady_rate / median["bare"].steady_rate, 3),
        "first_run_ended_s": round(own.ends_s[0] - own.start_s, 2),
        "whole_command_s": round(own.whole_s, 2),
        "driver_bytes_per_run": round(own.growth("rss").get("driver", 0)),
        "cpu_ms_per_run": {
            way: {kind: round(1000 * cpu_s, 1) for kind, cpu_s in one.growth("cpu_s").items()}
            for way, one in median.items()
        },
    }


def _mlflow(folder: Path, runs: int) -> dict[str, Any]:
    """The same runs with MLflow. Then all are sent once more: by `cope-sweep sync`, and by plain calls of MLflow."""
    store = folder / "mlflow"
    done = execute(["cope_sweep.cli", "run", str(_ablation(folder / "mlflow.yaml", runs, 1))], store)
    query = "SELECT status, COUNT(*) FROM runs JOIN tags t USING (run_uuid) WHERE t.key = ? GROUP BY 1"
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database:
        statuses = dict(database.execute(query, (TAG,)).fetchall())
        ((points,),) = database.execute("SELECT COUNT(*) FROM metrics").fetchall()
    sync = ["cope_sweep.cli", "sync", "--mlflow", f"sqlite:///{store}/sync.db"]
    sent_s = {}
    for name, command in {"sync": sync, "log_batch": _command("log_batch", folder)}.items():
        start_s = time.monotonic()
        with started(command, store):
            pass
        sent_s[name] = round(time.monotonic() - start_s, 2)
    return {
        "runs": runs,
        "training_s": round(done.ends_s[-1] - done.spans_s[0][0], 2),
        "after_training_s": round(done.start_s + done.whole_s - done.ends_s[-1], 2),
        "whole_command_s": round(done.whole_s, 2),
        "runs_by_status": statuses,
        "points": points,
        "sent_again_s": sent_s,
        "of_log_batch": round(sent_s["sync"] / sent_s["log_batch"], 2),
    }


def _gap(folder: Path) -> dict[str, Any]:
    """Runs of some seconds in one process: the time from the result of a run to the begin of the next."""
    ablation = _ablation(folder / "long.yaml", LONG_RUNS, LONG_STEPS, groups=1)
    done = execute(_command("engine", ablation), folder / "long")
    gaps_s = done.gaps_s()
    return {
        "run_s": round(statistics.median(end - start for start, end in done.spans_s), 2),
        "median_ms": round(1000 * statistics.median(gaps_s), 1),
        "most_ms": round(1000 * max(gaps_s), 1),
        "share_of_30_s": round(statistics.mean(gaps_s) / LONG_RUN_S, 5),
    }


def _ways(folder: Path, runs: int, trainer_runs: int, repetitions: int, wanted: Collection[str]) -> dict[str, Any]:
    """The same short runs by the sweep, by a bare trainable, in a plain loop, and by other ways to use Ray."""
    short = _ablation(folder / "short.yaml", runs, SHORT_STEPS)
    few = _ablation(folder / "few.yaml", trainer_runs, SHORT_STEPS)
    commands = {way: _command(way, few if way == "trainer" else short) for way in WAYS if way in wanted}
    found: dict[str, dict[str, Any]] = {}
    for way, each in _in_turns(commands, folder, repetitions).items():
        rates = [round(one.rate(runs, usable_cpus()), 4) for one in each]
        whole_s = round(statistics.median(one.whole_s for one in each), 2)
        found[way] = {
            "runs": len(each[0].spans_s), "runs_per_s": statistics.median(rates), "all_runs_per_s": rates,
            "whole_command_s": whole_s,
        }  # fmt: skip
        if "engine" in found:
            found[way]["engine_is_faster_by"] = round(found["engine"]["runs_per_s"] / found[way]["runs_per_s"], 2)
    return {"steps": SHORT_STEPS, "ways": found}


def _recovery(folder: Path) -> dict[str, Any]:
    """Kill one of two processes that train: how long until its run makes a step again. Raises TimeoutError."""
    root = folder / "recovery"
    store = Store(root, create=True)
    command = _command("engine", _ablation(folder / "recovery.yaml", 2, ENDLESS_STEPS, groups=2))
    with started(command, root, exit_code=130) as process:  # interrupted
        try:
            _wait_for(lambda: sum(bool(each.curve()) for each in store.files.run_folders()) == 2, process)
            time.sleep(SETTLE_S)
            run = store.files.run_folders()[0]
            os.kill(_pid(run), signal.SIGKILL)
            killed_s = time.time()
            _wait_for(lambda: any(row["time_ms"] / 1000 > killed_s for row in run.curve(times=True)), process)
            first_step_s = time.time() - killed_s
            trial = psutil.Process(_pid(run))
            return {
                "first_step_s": round(first_step_s, 2),
                "process_started_s": round(trial.create_time() - killed_s, 2),
                "process_cpu_s": round(sum(trial.cpu_times()[:2]), 2),
            }
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise TimeoutError("the sweep has ended, or no step was made in time")
        time.sleep(POLL_INTERVAL_S)


def _pid(run: RunFolder) -> int:
    """The process that trains a run."""
    return int(run.state["worker_id"].rpartition(":")[2])


def _in_turns(commands: Mapping[str, list[str]], folder: Path, repetitions: int) -> dict[str, list[Measured]]:
    """Execute each command once; those of `REPEATED` so many times, in turns, in changing order."""
    done: dict[str, list[Measured]] = {name: [] for name in commands}
    for turn in range(repetitions):
        for name in list(commands)[:: -1 if turn % 2 else 1]:
            if turn == 0 or name in REPEATED:
                with tempfile.TemporaryDirectory(dir=folder) as store:
                    done[name].append(execute(commands[name], Path(store)))
    return done


def _command(way: str, ablation: Path) -> list[str]:
    """The module and its arguments."""
    if way == "engine":
        return ["cope_sweep.cli", "run", str(ablation), "--no-mlflow"]
    return ["cope_benchmarks.sweep_peers", way, str(ablation)]


def _ablation(path: Path, runs: int, steps: int, groups: int | str = "auto") -> Path:
    text = ABLATION
    for name, value in {"SEEDS": list(range(runs)), "STEPS": steps, "GROUPS": groups}.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return path


def _load() -> float:
    return round(psutil.getloadavg()[0], 2)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(measured: Mapping[str, Any]) -> Table:
    """The measurement as a table, with the goals. It has the parts that were measured."""
    shown = grid("", "measured", "goal")
    rows = {"trivial_runs": _trivial_rows, "mlflow": _mlflow_rows, "gap": _gap_rows, "ways": _way_rows}
    for part, rows_of in (rows | {"recovery": _recovery_rows}).items():
        for name, value, *goal in rows_of(measured[part], measured["goals"]) if part in measured else ():
            shown.add_row(name, value, *(goal or [""]))
    return shown


Rows = Iterator[tuple[str, ...]]
"""Name, value and, where there is one, goal."""


def _trivial_rows(part: dict[str, Any], goals: dict[str, float]) -> Rows:
    rates, number = part["runs_per_s"], f"{part['runs']:,} runs of 1 step"
    yield number, f"{rates['engine']:.1f} runs/s, {part['whole_command_s']:.0f} s in all", f"≥ {goals['runs_per_s']:g}"
    text = f"{rates['bare']:.1f} runs/s; the sweep: {part['of_bare']:.2f} ×"
    yield f"{number}: {TITLES['bare']}", text, f"≥ {goals['of_bare']:g} ×"
    growth = f"{part['driver_bytes_per_run'] / 1e3:.1f} KB/run"
    yield "– growth of the driver", growth, f"≤ {goals['bytes_per_run'] / 1e3:g}"
    for way, cpu_ms in part["cpu_ms_per_run"].items():
        parts = ", ".join(f"{kind} {value:.0f}" for kind, value in cpu_ms.items() if value >= 1)
        yield f"– CPU time of a run, ms: {TITLES[way]}", parts
    yield "– from the command to the end of the first run", f"{part['first_run_ended_s']:.1f} s"


def _mlflow_rows(part: dict[str, Any], goals: dict[str, float]) -> Rows:
    text = f"{part['training_s']:.0f} s of training, {part['after_training_s']:.0f} s after it"
    yield f"{part['runs']:,} runs of 1 step with MLflow", f"{text}, {part['whole_command_s']:.0f} s in all"
    statuses = ", ".join(f"{number:,} {status}" for status, number in part["runs_by_status"].items())
    yield "– runs in MLflow", statuses, f"{part['runs']:,} FINISHED"
    sent = part["sent_again_s"]
    text = f"{sent['sync']:.0f} s; plain `log_batch` {sent['log_batch']:.0f} s; {part['of_log_batch']:.2f} ×"
    yield f"– sent again by `cope-sweep sync`, {part['points']:,} points", text


def _gap_rows(part: dict[str, Any], goals: dict[str, float]) -> Rows:
    text = f"{part['median_ms']:.0f} ms ({part['most_ms']:.0f})"
    yield f"between two runs of {part['run_s']:.1f} s, median (most)", text
    yield "– of the time, runs of 30 s", f"{part['share_of_30_s']:.2%}", f"≤ {goals['share_of_30_s']:.0%}"


def _way_rows(part: dict[str, Any], goals: dict[str, float]) -> Rows:
    for way, found in part["ways"].items():
        text = f"{found['runs_per_s']:.3g} runs/s, {found['whole_command_s']:.0f} s in all"
        if way != "engine" and "engine_is_faster_by" in found:
            text += f"; the sweep: {found['engine_is_faster_by']:.3g} ×"
        goal = f"≥ {goals[f'of_{way}']:g} ×" if f"of_{way}" in goals else ""
        yield f"{found['runs']} runs of {part['steps']} steps: {TITLES[way]}", text, goal


def _recovery_rows(part: dict[str, Any], goals: dict[str, float]) -> Rows:
    text = f"{part['first_step_s']:.1f} s, of them {part['process_started_s']:.1f} s until its process starts, which "
    text += f"then uses {part['process_cpu_s']:.1f} s of CPU time; load {part['load']:g}"
    yield "a training process is killed: until the first step", text, f"≤ {goals['first_step_s']:g} s"
