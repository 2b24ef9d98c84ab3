"""What a sweep costs beside its training: to the first step, from run to run, and over many short runs.

Everything is measured on real commands, each in a process of its own, and read off the stores that they leave. One
worker, one thread.
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

from cope_sweep.record import Ledger, RunFolder
from cope_sweep.record.provenance import versions

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
LOOK_EVERY_S = 0.02
FIRST_STEP_WITHIN_S = 300.0


def measure(runs: int = RUNS) -> dict[str, Any]:
    """Train `runs` short runs through Ray and in a plain loop, and a few with --local; about a minute on two cores.

    `first_step_s` is from the command to the first row in a run's curve. `gap_ms` is from a run's result to the next
    run's beginning, on one warm worker. `short_runs` compares the time from the first step to the last result with a
    loop over `cope_sweep.train.train_run`. Raises subprocess.CalledProcessError, with its output, where a command fails.
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
    """A command that trains runs into a store, carried out; and what the store then tells."""

    def __init__(self, store: Path, command: list[str]) -> None:
        self.ledger = Ledger(store, create=True)
        began_s = time.time()
        process = subprocess.Popen(
            [*command, "--store", str(store)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with process:
            first_s = None
            while first_s is None and process.poll() is None and time.time() - began_s < FIRST_STEP_WITHIN_S:
                time.sleep(LOOK_EVERY_S)
                first_s = next((time.time() for folder in self.ledger.runs() if folder.curve()), None)
            output, _ = process.communicate()
        if process.returncode or first_s is None:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        self.whole_s = time.time() - began_s
        self.first_step_s = first_s - began_s
        # Read now: the store goes with its temporary folder.
        folders = sorted(self.ledger.runs(), key=_begun_s)
        self.spans_s = [(_begun_s(folder), _ended_s(folder)) for folder in folders]
        self.after_first_step_s = self.spans_s[-1][1] - first_s

    def gaps_ms(self) -> list[float]:
        return [1000 * (after[0] - before[1]) for before, after in itertools.pairwise(self.spans_s)]


def _begun_s(folder: RunFolder) -> float:
    return float((folder.spec or {})["created_ms"]) / 1000


def _ended_s(folder: RunFolder) -> float:
    return (folder.path / "result.json").stat().st_mtime


def _ablation(path: Path, runs: int) -> Path:
    path.write_text(ABLATION.replace("SEEDS", str(list(range(runs)))))
    return path


def _plain_loop(ablation: Path, store: Path) -> None:
    """What the sweep does to each run, and nothing else."""
    from cope_sweep.plan import expand
    from cope_sweep.spec.ablation import load_ablation
    from cope_sweep.train import Runtime, train_run

    ledger = Ledger(store)
    for run in expand(load_ablation(ablation)).runs:
        train_run(run, ledger, Runtime())


if __name__ == "__main__":
    _plain_loop(Path(sys.argv[1]), Path(sys.argv[3]))
