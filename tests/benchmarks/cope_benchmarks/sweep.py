"""Benchmark of the sweep: the time to the first step, between two runs, and of many short runs.

Real commands are measured, each in its own process, from the stores that they write. One worker, one thread.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from cope_sweep.store import RunFolder, Store
from cope_sweep.store.provenance import versions

ABLATION = """\
title: Many short runs
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12, dense_blanks: 6, sparse_blanks: 24}
  model: {layers: 1, dim: 32, heads: 2, position: [cope]}
  train: {steps: 50, batch: 16, lr: 1e-3}
  evaluate: {every: 50, sequences: 32, final_sequences: 32}
seeds: SEEDS
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
resources: {groups: 1, device: cpu}
"""
RUNS = 100
POLL_INTERVAL_S = 0.02
FIRST_STEP_TIMEOUT_S = 300.0


def measure(runs: int = RUNS) -> dict[str, Any]:
    """Train `runs` short runs with Ray and in a plain loop, and a few with --local: about a minute on two cores.

    `first_step_s` is the time from the command to the first row of a run's curve. `gap_ms` is the time from a run's
    result to the start of the next run on the same worker. `short_runs` compares the time from the first step to the last result with a
    loop over `cope_sweep.train.train_run`. Raises subprocess.CalledProcessError, with its output, if a command fails.
    """
    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        folder = Path(name)
        few, many = _ablation(folder / "few.yaml", 2), _ablation(folder / "many.yaml", runs)
        run = [sys.executable, "-m", "cope_sweep.cli", "run"]
        local = _Measured(folder / "local", [*run, str(few), "--no-mlflow", "--local"])
        ray = _Measured(folder / "ray", [*run, str(many), "--no-mlflow"])
        plain = _Measured(folder / "plain", [sys.executable, "-m", "cope_benchmarks.sweep", str(many)])
    gaps_ms = ray.gaps_ms()
    return {
        "first_step_s": {"ray": round(ray.first_step_s, 2), "local": round(local.first_step_s, 2)},
        "gap_ms": {
            "median": round(statistics.median(gaps_ms), 1),
            "p95": round(statistics.quantiles(gaps_ms, n=20)[-1], 1),
            "of": len(gaps_ms),
        },
        "short_runs": {
            "runs": runs,
            "steps": 50,
            "ray_s": round(ray.after_first_step_s, 2),
            "plain_loop_s": round(plain.after_first_step_s, 2),
            "ratio": round(ray.after_first_step_s / plain.after_first_step_s, 3),
            "ray_whole_command_s": round(ray.whole_s, 2),
        },
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "load_before": round(load, 2),
            "bytecode_cached": not sys.dont_write_bytecode,
        },
        "versions": versions(),
    }


class _Measured:
    """Executes a command that trains runs, and measures times from its store."""

    def __init__(self, store: Path, command: list[str]) -> None:
        self.store = Store(store, create=True)
        start_s = time.time()
        process = subprocess.Popen(
            [*command, "--store", str(store)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with process:
            first_s = None
            while first_s is None and process.poll() is None and time.time() - start_s < FIRST_STEP_TIMEOUT_S:
                time.sleep(POLL_INTERVAL_S)
                first_s = next((time.time() for folder in self.store.files.run_folders() if folder.curve()), None)
            output, _ = process.communicate()
        if process.returncode or first_s is None:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        self.whole_s = time.time() - start_s
        self.first_step_s = first_s - start_s
        # Read now, because the store is in a temporary folder.
        folders = sorted(self.store.files.run_folders(), key=_start_s)
        self.spans_s = [(_start_s(folder), _end_s(folder)) for folder in folders]
        self.after_first_step_s = self.spans_s[-1][1] - first_s

    def gaps_ms(self) -> list[float]:
        return [1000 * (after[0] - before[1]) for before, after in itertools.pairwise(self.spans_s)]


def _start_s(folder: RunFolder) -> float:
    return float((folder.spec or {})["created_ms"]) / 1000


def _end_s(folder: RunFolder) -> float:
    return (folder.path / "result.json").stat().st_mtime


def _ablation(path: Path, runs: int) -> Path:
    path.write_text(ABLATION.replace("SEEDS", str(list(range(runs)))))
    return path


def _plain_loop(ablation: Path, root: Path) -> None:
    """Train the runs of an ablation one after another, without a sweep."""
    from cope_sweep.plan import expand
    from cope_sweep.spec.ablation import load_ablation
    from cope_sweep.train import Runtime, train_run

    store = Store(root)
    for run in expand(load_ablation(ablation)).runs:
        train_run(run, store, Runtime())


if __name__ == "__main__":
    _plain_loop(Path(sys.argv[1]), Path(sys.argv[3]))
