"""The record of a sweep: at its submission, at its start and at its end."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cope_sweep.plan import Plan
from cope_sweep.store import Status, Store, Submission, SweepRecord, SweepRun
from cope_sweep.store.provenance import git_commit, processor, versions

if TYPE_CHECKING:
    from cope_sweep.sweep.sweep import SweepOutcome


def new_sweep_id() -> str:
    """The id of a sweep that starts now."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


def initial_record(
    plan: Plan, reused: Sequence[str], executor_name: str, file_text: str, submission: Submission | None = None
) -> SweepRecord:
    """The record of a sweep at its start, or at its submission."""
    content = plan.ablation.content
    return SweepRecord(
        sweep_id=submission.sweep_id if submission else new_sweep_id(),
        ablation=plan.name,
        title=content.title,
        hypothesis=content.hypothesis,
        file_text=file_text,
        executor=executor_name,
        command=submission.command if submission else [Path(sys.argv[0]).name, *sys.argv[1:]],
        status="running",
        started_ms=int(time.time() * 1000),
        git_commit=git_commit(),
        versions=versions(),
        machine={
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": processor(),
            "cpus": os.cpu_count(),
        },
        metrics=[metric.model_dump(mode="json") for metric in content.metrics],
        runs=[
            SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)
            for row in plan.rows
            for run in row.runs
        ],
        reused=list(reused),
    )


def final_record(record: SweepRecord, plan: Plan, store: Store, outcome: SweepOutcome) -> SweepRecord:
    """The record with what is known at the end: status, time, table and notes."""
    from cope_sweep.results import table

    final = table(plan, store)
    status: Status = "interrupted" if outcome.exit_code == 130 else "failed" if outcome.failed else "finished"
    rendered = {"markdown": final.to_markdown(), "csv": final.to_csv(), "json": final.to_json()}
    return ended_record(record, status, outcome.notes).model_copy(update={"table": rendered})


def ended_record(record: SweepRecord, status: Status, notes: Collection[str]) -> SweepRecord:
    """The record of a sweep that has ended now."""
    return record.model_copy(update={"status": status, "ended_ms": int(time.time() * 1000), "notes": list(notes)})
