"""Ablations, clusters' processes and databases for tests of faults in the middle of a sweep."""

import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cope_sweep.config import Plan, expand, load_ablation
from cope_sweep.store import Store
from tests.helpers import processes as waiting

ABLATION = """\
title: Tiny
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2}
  train: {batch: 4}
  evaluate: {every: 100, sequences: 8, final_sequences: 8}
grid:
  train.steps: {ROWS}
seeds: SEEDS
metrics: [{name: in_dist/token_error, label: In-dist.}]
resources: {groups: GROUPS, device: cpu, checkpoint_every_s: 0.2}
"""
SHORT, LONG = 20, 1500
"""Steps of runs. The long ones take seconds on an idle machine, so that a fault can happen meanwhile."""
RUN = [sys.executable, "-m", "cope_sweep.cli", "run"]
until = partial(waiting.until, timeout_s=600.0)
"""Each fault happens after a cluster, a command and its workers have started."""
SWEEP_PROCESSES = ("ray::StopRequests", "ray::RunTrial", "ray::JobSupervisor")


def write_ablation(path: Path, steps: Mapping[str, int], *, seeds: int = 1, groups: int | str = 1) -> Plan:
    """Write an ablation with a row for each of `steps`, and return its plan."""
    rows = ", ".join(f"{name}: {number}" for name, number in steps.items())
    values = {"ROWS": rows, "SEEDS": list(range(seeds)), "GROUPS": groups}
    text = ABLATION
    for name, value in values.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return expand(load_ablation(path))


def is_training(store: Store, run_id: str) -> bool:
    """Whether a run has written a state that a later attempt can continue from, and has not ended."""
    folder = store.run(run_id)
    return folder.resume.exists() and folder.status == "running"


def logged(store: Store, run_id: str) -> list[tuple[int, str]]:
    """Every (step, metric) of a run's curve, sorted."""
    rows = store.run(run_id).curve()
    return sorted((row["step"], name) for row in rows for name in row if name != "step")


def attempts(store: Store, plan: Plan) -> list[int]:
    """How often each run of a plan was begun."""
    return [store.run(run.run_id).state["attempt"] for run in plan.runs]


def processes(cluster: Any, *titles: str) -> list[psutil.Process]:
    """The processes of a cluster whose titles begin with one of `titles`; by default those of sweeps."""
    found = []
    for node in cluster.list_all_nodes():
        (raylet,) = node.all_processes["raylet"]
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(raylet.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, IndexError):
                    if process.cmdline()[0].startswith(titles or SWEEP_PROCESSES):
                        found.append(process)
    return found


def commands_on(store: str) -> list[psutil.Process]:
    """The processes that have a store's location in their command lines: commands, and the senders to MLflow."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(store in word for word in process.cmdline()):
                found.append(process)
    return found
