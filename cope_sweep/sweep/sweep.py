"""A sweep: one execution of an ablation's plan, recorded from its start to its table."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cope_sweep.plan import Plan
from cope_sweep.record import Event, Ledger
from cope_sweep.record.follow import Follower
from cope_sweep.record.provenance import git_commit, versions
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.sweep.executor import Executor


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended."""

    sweep_id: str | None
    """None where there was nothing to train."""
    trained: int
    """Runs that this sweep finished."""
    reused: int
    """Runs that were finished before it began."""
    failed: int
    interrupted: int
    """Runs that were begun or never begun, and are still to do."""
    seconds: float
    tracking_errors: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: every run is finished. 1: some failed. 130: stopped before the end."""
        return 130 if self.interrupted else 1 if self.failed else 0


@contextlib.contextmanager
def stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `stop`, so that runs in training are checkpointed; a second Ctrl-C interrupts at once."""

    def ask(signum: int, frame: object) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def sweep(
    plan: Plan,
    ledger: Ledger,
    executor: Executor,
    *,
    resources: Resources,
    file_text: str = "",
    executor_name: Literal["ray", "local"],
    tracking_uri: str | None,
    retry_failed: bool = True,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
) -> SweepOutcome:
    """Train what is not finished yet, and record it: in the ledger, and from there in MLflow at `tracking_uri`.

    None for `tracking_uri` leaves MLflow out. Raises what the executor raises (`ClusterError`), after the sweep is
    recorded as failed.
    """
    stop = stop or threading.Event()
    status = {run.run_id: ledger.run(run.run_id).status for run in plan.runs}
    left = {"finished"} if retry_failed else {"finished", "failed"}
    todo = [run for run in plan.runs if status[run.run_id] not in left]
    reused = [run_id for run_id, known in status.items() if known == "finished"]
    if not todo:
        failed = sum(known == "failed" for known in status.values())
        return SweepOutcome(None, 0, len(reused), failed, 0, 0.0)

    started_s = time.monotonic()
    record = _record(plan, reused, executor_name, file_text)
    ledger.write_sweep(record["sweep_id"], record)
    follower = Follower.start(ledger, record["sweep_id"], tracking_uri) if tracking_uri else None
    try:
        with stopping_on_signals(stop):
            executor(todo, ledger, resources, on_event=on_event, stop=stop)
    finally:
        outcome = _outcome(record["sweep_id"], todo, ledger, len(reused), started_s)
        ledger.write_sweep(record["sweep_id"], record | _ending(plan, ledger, outcome))
        errors = tuple(follower.finish(timeout_s=120).errors) if follower else ()
    return replace(outcome, tracking_errors=errors)


def _outcome(sweep_id: str, todo: list[RunSpec], ledger: Ledger, reused: int, started_s: float) -> SweepOutcome:
    ends = [ledger.run(run.run_id).status for run in todo]
    finished, failed = ends.count("finished"), ends.count("failed")
    seconds = time.monotonic() - started_s
    return SweepOutcome(sweep_id, finished, reused, failed, len(ends) - finished - failed, seconds)


def _ending(plan: Plan, ledger: Ledger, outcome: SweepOutcome) -> dict[str, Any]:
    """What the record gains at the end: how it ended, and the table as it then stands."""
    from cope_sweep.results import table

    shown = table(plan, ledger)
    status = "interrupted" if outcome.interrupted else "failed" if outcome.failed else "finished"
    rendered = {"markdown": shown.to_markdown(), "csv": shown.to_csv(), "json": shown.to_json()}
    return {"status": status, "ended_ms": int(time.time() * 1000), "table": rendered}


def _record(plan: Plan, reused: list[str], executor_name: str, file_text: str) -> dict[str, Any]:
    content = plan.ablation.content
    now = time.time()
    return {
        "sweep_id": time.strftime("%Y%m%d-%H%M%S-", time.gmtime(now)) + secrets.token_hex(2),
        "ablation": plan.name,
        "title": content.title,
        "hypothesis": content.hypothesis,
        "file_text": file_text,
        "executor": executor_name,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "status": "running",
        "started_ms": int(now * 1000),
        "ended_ms": None,
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": {"host": platform.node(), "system": platform.platform(), "cpus": os.cpu_count()},
        "metrics": [metric.model_dump(mode="json") for metric in content.metrics],
        "runs": [
            {"run_id": run.run_id, "row": row.name, "labels": row.labels, "seed": run.seed}
            for row in plan.rows
            for run in row.runs
        ],
        "reused": reused,
        "table": None,
    }
