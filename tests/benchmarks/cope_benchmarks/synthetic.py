"""Ablations, stores of many finished runs, and commands on them, for the benchmarks of the sweep, the store and the service.

In the folder of a benchmark, `ablations` has the ablation files, and `store` is the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cope_sweep.config import Plan, RunSpec, expand, load_ablation
from cope_sweep.store import RunRecord, Store, SweepRecord, SweepRun

MANY_RUNS: dict[str, Any] = {
    "title": "Many short runs",
    "base": {
        "task": {"kind": "selective_copy", "tokens": 4, "blanks": 12, "dense_blanks": 6, "sparse_blanks": 24},
        "model": {"layers": 1, "dim": 32, "heads": 2, "position": ["cope"]},
        "train": {"steps": 50, "batch": 16},
        "evaluate": {"every": 50, "sequences": 32, "final_sequences": 32},
    },
    "metrics": [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"},
        {"name": "dense/token_error", "label": "OOD dense", "unit": "%"},
        {"name": "sparse/token_error", "label": "OOD sparse", "unit": "%"},
    ],
}
GRID: dict[str, Any] = {
    "model.layers": [1, 2, 3, 4],
    "model.position": {
        "none": [],
        "absolute": ["absolute"],
        "RoPE": ["rope"],
        "CoPE": ["cope"],
        "both": ["cope", "rope"],
    },
}
SEEDS = [0, 1, 2, 3, 4]
RUNS_PER_RATE = 100
CREATED_MS, RUN_MS = 1_790_000_000_000, 2_000
STEPS = 50
SWEEP_RUNS = 5_000
"""Runs of one sweep."""
CURVE_ROWS = 20
WEIGHTS = bytes(1024)


def write_ablation(root: Path, name: str, **keys: Any) -> Plan:
    """Write an ablation file, `MANY_RUNS` with other keys, and return its plan."""
    (root / "ablations").mkdir(parents=True, exist_ok=True)
    path = root / "ablations" / f"{name}.yaml"
    path.write_text(json.dumps(MANY_RUNS | keys))
    return expand(load_ablation(path))


def write_grid(root: Path, name: str, runs: int) -> Plan:
    """The same for `runs` runs of a grid, a multiple of 100. That of fewer runs is a part of it."""
    rates = [round(1e-5 * (index + 1), 5) for index in range(runs // RUNS_PER_RATE)]
    return write_ablation(root, name, grid=GRID | {"train.lr": rates}, seeds=SEEDS)


def command(*words: str) -> list[str]:
    """A command of `cope-sweep`."""
    return [sys.executable, "-m", "cope_sweep.cli", *words]


def environment(root: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of commands on the ablations and the store of a folder."""
    places = {"COPE_SWEEP_ABLATIONS": str(root / "ablations"), "COPE_SWEEP_STORE": str(root / "store")}
    return {**os.environ, **places, **(settings or {})}


def write_store(root: Path, plan: Plan) -> Store:
    """A store with the folders of all runs of a plan, as finished training leaves them, and the records of their sweeps.

    Metrics are random, and a checkpoint has 1 kB. The index is made when it is opened.
    """
    store = Store(root / "store", create=True)
    for record in _rows(plan):
        assert record.spec is not None
        folder = store.run(record.run_id).path
        curve = [
            {"step": step, "time_ms": record.created_ms, "train/loss": 3.0 / step} for step in range(1, CURVE_ROWS)
        ]
        curve.append({"step": STEPS, "time_ms": record.created_ms, **record.metrics})
        checked = {
            "checkpoint/config.json": json.dumps({"model": record.spec["model"]}).encode(),
            "checkpoint/model.safetensors": WEIGHTS,
            "curve.jsonl": "".join(json.dumps(row) + "\n" for row in curve).encode(),
        }
        files = {name: hashlib.sha256(content).hexdigest() for name, content in checked.items()}
        documents = {
            "spec": {"run_id": record.run_id, "spec": record.spec, "created_ms": record.created_ms},
            "state": {
                "status": "running",
                "updated_ms": record.created_ms,
                "worker_id": record.worker_id,
                "attempt": 1,
            },
            "result": {"metrics": record.metrics, "facts": record.facts, "files": files, "ended_ms": record.ended_ms},
        }
        (folder / "checkpoint").mkdir(parents=True)
        for name, content in checked.items():
            (folder / name).write_bytes(content)
        for name, document in documents.items():
            (folder / f"{name}.json").write_text(json.dumps(document))
    for sweep in _sweeps(plan):
        (root / "store" / "sweeps" / f"{sweep.sweep_id}.json").write_text(json.dumps(sweep.model_dump(mode="json")))
    return store


def write_index(root: Path, plan: Plan) -> Store:
    """A store whose index has the same runs and sweeps, without any run folder."""
    store = Store(root / "store", create=True)
    rows = list(_rows(plan))
    for start in range(0, len(rows), SWEEP_RUNS):
        store.index.write(rows[start : start + SWEEP_RUNS])
    for record in _sweeps(plan):
        store.write_sweep(record)
    return store


def _rows(plan: Plan) -> Iterator[RunRecord]:
    source = random.Random(0)
    for number, run in enumerate(plan.runs):
        yield finished(run, number, source)


def finished(run: RunSpec, number: int, source: random.Random) -> RunRecord:
    """The index's record of a finished run with random metrics."""
    created_ms = CREATED_MS + number * RUN_MS
    metrics = {
        f"{split}/{name}": 100 * source.random()
        for split in ("in_dist", "dense", "sparse")
        for name in ("token_error", "sequence_error", "loss")
    }
    facts = {
        "steps": STEPS, "resumed_from_step": 0, "tokens_per_s": 86553.2, "train_s": 0.198, "wall_s": 1.497,
        "parameters": 13_280 * run.model.layers, "peak_memory_bytes": 775_409_664, "device": "cpu",
        "precision": "fp32", "threads": 1, "workers": 1, "micro_batch": 16, "checkpoint_activations": False,
        "worker_id": "node-1:4711", "host": "node-1", "python": "3.11.7", "torch": "2.15.0",
    }  # fmt: skip
    return RunRecord.of(
        run.run_id, "finished", run.model_dump(mode="json"), attempt=1, step=STEPS, worker_id="node-1:4711",
        created_ms=created_ms, updated_ms=created_ms, ended_ms=created_ms + RUN_MS, metrics=metrics, facts=facts,
    )  # fmt: skip


def _sweeps(plan: Plan) -> Iterator[SweepRecord]:
    """Sweeps of `SWEEP_RUNS` runs each, one after another."""
    for number, start in enumerate(range(0, len(plan.runs), SWEEP_RUNS)):
        started_ms = CREATED_MS + start * RUN_MS
        yield SweepRecord(
            sweep_id=f"20260730-12{number // 60:02}{number % 60:02}-abcd", ablation=plan.name,
            title=plan.ablation.content.title, hypothesis="", executor="ray", command=["cope-sweep", "run", plan.name],
            status="finished", started_ms=started_ms, ended_ms=started_ms + SWEEP_RUNS * RUN_MS,
            versions={"torch": "2.15.0"}, machine={}, metrics=[], reused=[],
            runs=[_member(plan, run) for run in plan.runs[start : start + SWEEP_RUNS]],
        )  # fmt: skip


def _member(plan: Plan, run: RunSpec) -> SweepRun:
    row = plan.row_of(run.run_id)
    assert row is not None
    return SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)
