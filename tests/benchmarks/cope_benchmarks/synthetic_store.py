"""Stores of many finished runs that were never trained: files of the shape that training leaves, with random metrics.

Every run has spec.json, state.json, curve.jsonl, result.json and a checkpoint of 1 kB, 0.3 ms of work each.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cope_sweep.config import Plan, RunSpec, expand, load_ablation
from cope_sweep.store import Store, SweepRecord, SweepRun
from cope_sweep.store.index import RunRow

ABLATION = """\
title: Many short runs
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12, dense_blanks: 6, sparse_blanks: 24}
  model: {dim: 32, heads: 2}
  train: {steps: 50, batch: 16}
  evaluate: {every: 50, sequences: 32, final_sequences: 32}
grid:
  model.layers: [1, 2, 3, 4]
  model.position: {none: [], absolute: [absolute], RoPE: [rope], CoPE: [cope], CoPE and RoPE: [cope, rope]}
  train.lr: RATES
seeds: [0, 1, 2, 3, 4]
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
  - {name: dense/token_error, label: OOD dense, unit: "%"}
  - {name: sparse/token_error, label: OOD sparse, unit: "%"}
"""
RUNS_PER_RATE = 100
CURVE_ROWS = 20
CREATED_MS = 1_790_000_000_000
RUN_MS = 2_000
SWEEP_RUNS = 5_000
"""Runs of one sweep."""
WEIGHTS = bytes(1024)


def write_ablation(path: Path, runs: int) -> Plan:
    """Write an ablation of `runs` runs, a multiple of 100, and return its plan; that of fewer runs is a part of it."""
    rates = [round(1e-5 * (index + 1), 5) for index in range(runs // RUNS_PER_RATE)]
    path.write_text(ABLATION.replace("RATES", json.dumps(rates)))
    return expand(load_ablation(path))


def write_store(root: Path, plan: Plan) -> Store:
    """Write the folders of all runs of a plan, each finished, and the records of the sweeps that trained them.

    The index is not written: see `cope_sweep.store.rebuild`.
    """
    store = Store(root, create=True)
    metrics = random.Random(0)
    for number, run in enumerate(plan.runs):
        _write_run(os.path.join(root, "runs", run.run_id), run, number, metrics)
    for record in _sweeps(plan):
        text = json.dumps(record.model_dump(mode="json"), indent=1)
        (root / "sweeps" / f"{record.sweep_id}.json").write_text(text)
    return store


def write_index(root: Path, plan: Plan) -> Store:
    """A store whose index has all runs of a plan, each finished, and their sweeps, without any run folder."""
    store = Store(root, create=True)
    store.index.mark_built()
    source = random.Random(0)
    rows = [_row(run, number, _metrics(source)) for number, run in enumerate(plan.runs)]
    for start in range(0, len(rows), SWEEP_RUNS):
        store.index.write(rows[start : start + SWEEP_RUNS])
    for record in _sweeps(plan):
        store.write_sweep(record)
    return store


def indexed_row(run: RunSpec, number: int, seed: int) -> RunRow:
    """The row of a finished run with metrics of its own."""
    return _row(run, number, _metrics(random.Random(seed)))


def _row(run: RunSpec, number: int, metrics: dict[str, float]) -> RunRow:
    created_ms = CREATED_MS + number * RUN_MS
    return RunRow(
        run.run_id, "finished", run.model_dump(mode="json"), attempt=1, step=50, worker_id="node-1:4711",
        created_ms=created_ms, updated_ms=created_ms, ended_ms=created_ms + RUN_MS, metrics=metrics,
        facts=_facts(run),
    )  # fmt: skip


def _metrics(source: random.Random) -> dict[str, float]:
    return {
        f"{split}/{name}": 100 * source.random()
        for split in ("in_dist", "dense", "sparse")
        for name in ("token_error", "sequence_error", "loss")
    }


def _write_run(folder: str, run: RunSpec, number: int, source: random.Random) -> None:
    created_ms = CREATED_MS + number * RUN_MS
    values = _metrics(source)
    config = json.dumps({"model": run.model.model_dump(mode="json")})
    curve = _curve(created_ms, values)
    files = {
        "checkpoint/config.json": _digest(config.encode()),
        "checkpoint/model.safetensors": _digest(WEIGHTS),
        "curve.jsonl": _digest(curve.encode()),
    }
    spec = {"run_id": run.run_id, "spec": run.model_dump(mode="json"), "created_ms": created_ms}
    state = {"status": "running", "updated_ms": created_ms, "worker_id": "node-1:4711", "attempt": 1}
    metrics = {"train/loss": 1.5, "train/lr": 1e-3, **values}
    result = {"metrics": metrics, "facts": _facts(run), "files": files, "ended_ms": created_ms + RUN_MS}
    os.makedirs(f"{folder}/checkpoint")
    for name, content in (("spec", spec), ("state", state), ("result", result)):
        _write(f"{folder}/{name}.json", json.dumps(content, indent=1).encode())
    _write(f"{folder}/curve.jsonl", curve.encode())
    _write(f"{folder}/checkpoint/config.json", config.encode())
    _write(f"{folder}/checkpoint/model.safetensors", WEIGHTS)


def _curve(created_ms: int, final: dict[str, float]) -> str:
    rows = [
        {"step": step, "time_ms": created_ms + step, "train/loss": 3.0 / step, "train/lr": 1e-3}
        for step in range(1, CURVE_ROWS)
    ]
    return "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 50, "time_ms": created_ms + 50, **final}])


def _facts(run: RunSpec) -> dict[str, Any]:
    return {
        "steps": 50, "resumed_from_step": 0, "tokens_per_s": 86553.2, "train_s": 0.198, "wall_s": 1.497,
        "parameters": 13_280 * run.model.layers, "peak_memory_bytes": 775_409_664, "device": "cpu",
        "precision": "fp32", "threads": 1, "workers": 1, "micro_batch": 16, "checkpoint_activations": False,
        "worker_id": "node-1:4711", "host": "node-1", "python": "3.11.7", "torch": "2.15.0",
    }  # fmt: skip


def _sweeps(plan: Plan) -> Iterator[SweepRecord]:
    """Sweeps of SWEEP_RUNS runs each, one after another."""
    for number, start in enumerate(range(0, len(plan.runs), SWEEP_RUNS)):
        started_ms = CREATED_MS + start * RUN_MS
        yield SweepRecord(
            sweep_id=f"20260730-12{number // 60:02}{number % 60:02}-abcd", ablation=plan.name,
            title=plan.ablation.content.title, hypothesis="", executor="ray", command=["cope-sweep", "run", plan.name],
            status="finished", started_ms=started_ms, ended_ms=started_ms + SWEEP_RUNS * RUN_MS,
            versions={"torch": "2.15.0"}, machine={}, metrics=[], reused=[],
            runs=_members(plan, plan.runs[start : start + SWEEP_RUNS]),
        )  # fmt: skip


def _members(plan: Plan, runs: Sequence[RunSpec]) -> list[SweepRun]:
    found = []
    for run in runs:
        row = plan.row_of(run.run_id)
        assert row is not None
        found.append(SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed))
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(descriptor, content)
    os.close(descriptor)
