"""A sweep: one execution of an ablation's plan, with a record in the store and a copy in MLflow."""

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
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.store.mlflow_mirror import MlflowMirror
from cope_sweep.store.provenance import git_commit, versions
from cope_sweep.sweep.executor import Executor

MIRROR_TIMEOUT_S = 120.0
"""For the last sync with MLflow after the sweep."""


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended."""

    sweep_id: str | None
    """None if there was nothing to train."""
    trained: int
    """Number of runs that this sweep finished."""
    reused: int
    """Number of runs that were finished before it started."""
    failed: int
    interrupted: int
    """Number of runs that are neither finished nor failed, whether they were begun or not."""
    seconds: float
    tracking_errors: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: every run is finished. 130: stopped before the end, even if some runs failed. 1: some runs failed."""
        return 130 if self.interrupted else 1 if self.failed else 0


@contextlib.contextmanager
def stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM set `stop`, so that runs in training write checkpoints.

    A second Ctrl-C raises KeyboardInterrupt. Has no effect outside of the main thread.
    """

    def request_stop(signum: int, frame: object) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def sweep(
    plan: Plan,
    store: Store,
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
    """Train the runs of a plan that are not finished, and record the sweep in the store and in MLflow.

    Args:
        plan: The plan.
        store: The store.
        executor: Trains the runs.
        resources: Passed to the executor.
        file_text: The text of the ablation file, for the record.
        executor_name: For the record.
        tracking_uri: The MLflow store; None for no copy in MLflow.
        retry_failed: Whether runs that failed in earlier sweeps are trained again.
        on_event: Called with every event.
        stop: Set to interrupt the sweep, as Ctrl-C does.

    Raises:
        ClusterError: And whatever else the executor raises, after the sweep was recorded as failed or interrupted.
    """
    stop = stop or threading.Event()
    status = {run.run_id: store.run(run.run_id).status for run in plan.runs}
    skipped = {"finished"} if retry_failed else {"finished", "failed"}
    todo = [run for run in plan.runs if status[run.run_id] not in skipped]
    reused = [run_id for run_id, known in status.items() if known == "finished"]
    if not todo:
        failed = sum(known == "failed" for known in status.values())
        return SweepOutcome(None, 0, len(reused), failed, 0, 0.0)

    plugins = plan.ablation.content.plugins
    started_s = time.monotonic()
    record = _initial_record(plan, reused, executor_name, file_text)
    store.write_sweep(record["sweep_id"], record)
    mirror = MlflowMirror.start(store, record["sweep_id"], tracking_uri) if tracking_uri else None
    try:
        with stopping_on_signals(stop):
            executor(todo, store, resources, on_event=on_event, stop=stop, plugins=plugins)
    finally:
        outcome = _outcome(record["sweep_id"], todo, store, len(reused), started_s)
        store.write_sweep(record["sweep_id"], record | _final_entries(plan, store, outcome))
        errors = tuple(mirror.finish(MIRROR_TIMEOUT_S).errors) if mirror else ()
    return replace(outcome, tracking_errors=errors)


def _outcome(sweep_id: str, todo: list[RunSpec], store: Store, reused: int, started_s: float) -> SweepOutcome:
    statuses = [store.run(run.run_id).status for run in todo]
    finished, failed = statuses.count("finished"), statuses.count("failed")
    seconds = time.monotonic() - started_s
    return SweepOutcome(sweep_id, finished, reused, failed, len(statuses) - finished - failed, seconds)


def _final_entries(plan: Plan, store: Store, outcome: SweepOutcome) -> dict[str, Any]:
    """The entries of a record that are added at the end: status, time and table."""
    from cope_sweep.results import table

    final = table(plan, store)
    status = "interrupted" if outcome.interrupted else "failed" if outcome.failed else "finished"
    rendered = {"markdown": final.to_markdown(), "csv": final.to_csv(), "json": final.to_json()}
    return {"status": status, "ended_ms": int(time.time() * 1000), "table": rendered}


def _initial_record(plan: Plan, reused: list[str], executor_name: str, file_text: str) -> dict[str, Any]:
    """The record of a sweep at its start."""
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
