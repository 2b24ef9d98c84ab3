"""Records of sweeps like those that `cope_sweep.sweep` writes."""

import secrets
import time
from typing import Any

from cope_sweep.plan import Plan
from cope_sweep.store import Store


def write_sweep(store: Store, plan: Plan, **changes: Any) -> dict[str, Any]:
    """Write the record of a sweep of `plan` that starts now, with some entries replaced. Returns the record."""
    record = {
        "sweep_id": time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2),
        "ablation": plan.name,
        "title": plan.ablation.content.title,
        "hypothesis": plan.ablation.content.hypothesis,
        "file_text": "title: x\n",
        "executor": "local",
        "command": ["cope-sweep", "run", plan.name],
        "status": "running",
        "started_ms": time.time_ns() // 1_000_000,
        "ended_ms": None,
        "git_commit": "0123abc",
        "versions": {"torch": "2.15.0"},
        "machine": {"host": "here", "cpus": 2},
        "metrics": [metric.model_dump(mode="json") for metric in plan.ablation.content.metrics],
        "runs": [
            {"run_id": run.run_id, "row": row.name, "labels": row.labels, "seed": run.seed}
            for row in plan.rows
            for run in row.runs
        ],
        "reused": [],
        "table": None,
    } | changes
    store.write_sweep(record["sweep_id"], record)
    return record


def end_sweep(store: Store, record: dict[str, Any], status: str = "finished") -> dict[str, Any]:
    """Write the record of a sweep that has ended. Returns the record."""
    table = {"markdown": "| a |\n|---|\n| 1 |\n", "csv": "a\n1\n", "json": {"rows": []}}
    ended = record | {"status": status, "ended_ms": time.time_ns() // 1_000_000, "table": table}
    store.write_sweep(record["sweep_id"], ended)
    return ended
