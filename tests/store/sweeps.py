"""Sweeps and runs in a store, as `cope_sweep.sweep` and `cope_sweep.train` write them."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from cope_sweep.config import Plan, RunSpec
from cope_sweep.store import Lease, RunFolder, Store, SweepRecord, SweepRun
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.reading import read_run

LEASE_S = 600.0


def write_sweep(store: Store, plan: Plan, owner: str | None = None, **changes: Any) -> SweepRecord:
    """Write the record of a sweep of `plan` that starts now, with some entries replaced. Returns the record."""
    content: dict[str, Any] = {
        "sweep_id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2),
        "ablation": plan.name,
        "title": plan.ablation.content.title,
        "hypothesis": plan.ablation.content.hypothesis,
        "file_text": "title: x\n",
        "executor": "local",
        "command": ["cope-sweep", "run", plan.name],
        "status": "running",
        "started_ms": time.time_ns() // 1_000_000,
        "git_commit": "0123abc",
        "versions": {"torch": "2.15.0"},
        "machine": {"host": "here", "cpus": 2},
        "metrics": [metric.model_dump(mode="json") for metric in plan.ablation.content.metrics],
        "runs": [
            SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)
            for row in plan.rows
            for run in row.runs
        ],
        "reused": [],
    }
    record = SweepRecord(**(content | changes))
    store.write_sweep(record, owner)
    return record


def end_sweep(store: Store, record: SweepRecord, status: Status = "finished") -> SweepRecord:
    """Write the record of a sweep that has ended. Returns the record."""
    table = {"markdown": "| a |\n|---|\n| 1 |\n", "csv": "a\n1\n", "json": {"rows": []}}
    ended_ms = time.time_ns() // 1_000_000
    ended = record.model_copy(update={"status": status, "ended_ms": ended_ms, "table": table})
    store.write_sweep(ended)
    return ended


def begin(store: Store, run: RunSpec, *rows: Mapping[str, float], lease_s: float = LEASE_S) -> RunFolder:
    """Lease a run to this process, begin an attempt, and log some rows. Returns its folder, to write to."""
    row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"), created_ms=int(time.time() * 1000))
    lease = store.index.acquire(row, new_owner("tests"), lease_s)
    assert isinstance(lease, Lease)
    folder = store.run(run.run_id).begin(run, "here", lease.attempt)
    for each in rows:
        folder.log(each)
    return folder


def end(store: Store, run: RunSpec) -> None:
    """End the lease of a run: write what its folder says into the index."""
    row = read_run(store.run(run.run_id))
    assert row is not None
    store.index.write([row])


def finish(store: Store, run: RunSpec, metrics: Mapping[str, float], facts: Mapping[str, Any] | None = None) -> None:
    """Write `run` as finished, with a curve and a checkpoint."""
    folder = begin(store, run, {"step": 1, "train/loss": 2.5}, {"step": 6, "train/loss": 1.25}, {"step": 6, **metrics})
    with folder.writing_checkpoint() as path:
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "config.json").write_text("{}")
    default = {"steps": 6, "parameters": 1234, "device": "cpu", "threads": 2}
    folder.finish({"train/loss": 1.25, **metrics}, facts or default)
    end(store, run)


def fail(store: Store, run: RunSpec, message: str = "Diverged: the loss is nan", trace: str = "Traceback") -> None:
    """Write `run` as failed."""
    begin(store, run, {"step": 1, "train/loss": 2.5}).fail(message, f"{trace}\n{message}\n")
    end(store, run)


def stop(store: Store, run: RunSpec, status: Status = "interrupted", **facts: Any) -> None:
    """Write `run` as interrupted, or as stopped by a scheduler."""
    begin(store, run, {"step": 1, "train/loss": 2.5}).set_state(status, **facts)
    end(store, run)
