"""Sweeps and runs in a store, as `cope_sweep.sweep` and `cope_sweep.train` write them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cope_sweep.config import Plan, RunSpec
from cope_sweep.records import Status
from cope_sweep.store import AttemptWriter, Lease, RunFolder, RunRecord, Store, SweepRecord, SweepRun
from cope_sweep.store.reading import read_run

LEASE_S = 100.0


def sweep_record(sweep_id: str = "20260101-000000-aa", runs: Sequence[SweepRun] = (), **changes: Any) -> SweepRecord:
    """The record of a sweep that has ended, with some entries replaced."""
    content: dict[str, Any] = {
        "ablation": "tiny", "title": "Tiny", "hypothesis": "", "executor": "local", "command": [], "status": "finished",
        "started_ms": 1, "ended_ms": 2, "versions": {}, "machine": {}, "metrics": [], "reused": [],
    }  # fmt: skip
    return SweepRecord(sweep_id=sweep_id, runs=list(runs), **(content | changes))


def members(plan: Plan, runs: Sequence[RunSpec] | None = None) -> list[SweepRun]:
    """The entries of a sweep's record for some runs of a plan, or for all, row by row."""
    return [
        SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)
        for row in plan.rows
        for run in row.runs
        if runs is None or run in runs
    ]


def write_sweep(store: Store, plan: Plan, *, ttl_s: float | None = LEASE_S, **changes: Any) -> SweepRecord:
    """Write the record of a sweep of `plan` that starts now, with some entries replaced. Returns the record."""
    content: dict[str, Any] = {
        "sweep_id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2),
        "runs": members(plan),
        "ablation": plan.name,
        "title": plan.ablation.content.title,
        "hypothesis": plan.ablation.content.hypothesis,
        "file_text": "title: x\n",
        "command": ["cope-sweep", "run", plan.name],
        "status": "running",
        "started_ms": time.time_ns() // 1_000_000,
        "ended_ms": None,
        "git_commit": "0123abc",
        "versions": {"torch": "2.15.0"},
        "machine": {"host": "here", "cpus": 2},
        "metrics": [metric.model_dump(mode="json") for metric in plan.ablation.content.metrics],
    }
    record = sweep_record(**(content | changes))
    store.write_sweep(record, ttl_s=ttl_s if record.status == "running" else None)
    return record


def end_sweep(store: Store, record: SweepRecord, status: Status = "finished") -> SweepRecord:
    """Write the record of a sweep that has ended. Returns the record."""
    ended_ms = time.time_ns() // 1_000_000
    ended = record.model_copy(update={"status": status, "ended_ms": ended_ms})
    store.write_sweep(ended)
    return ended


def begin(store: Store, run: RunSpec, *rows: Mapping[str, float], lease_s: float = LEASE_S) -> AttemptWriter:
    """Lease a run to the sweep `tests`, begin an attempt, and log some rows. Returns its folder, to write to."""
    row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"), created_ms=int(time.time() * 1000))
    lease = store.index.acquire(row, "tests", lease_s)
    assert isinstance(lease, Lease)
    folder = store.run(run.run_id).begin(run, "here", lease.attempt)
    for each in rows:
        folder.log(each)
    return folder


def end(store: Store, folder: RunFolder) -> None:
    """Write what a run's files say to the index, as a sweep does. That ends its lease."""
    row = read_run(folder)
    assert row is not None
    store.index.write([row])


def stop(store: Store, run: RunSpec, status: Status = "interrupted", **facts: Any) -> None:
    """Write `run` as interrupted, or as stopped by a scheduler."""
    folder = begin(store, run, {"step": 1, "train/loss": 2.5})
    folder.set_state(status, **facts)
    end(store, folder)
