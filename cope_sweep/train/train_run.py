"""Trains one run and records its outcome in the store: attempts, agreement between ranks, and failures."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Literal

from cope_sweep.config import RunSpec
from cope_sweep.store import Event, RunFolder, Store
from cope_sweep.store.errors import FencedError
from cope_sweep.train.loop import StopRequest, TrainingLoop
from cope_sweep.train.reporter import Diverged, RunReporter
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.workers import broadcast_flag

MAX_MESSAGE_CHARACTERS = 500

Outcome = Literal["finished", "failed", "interrupted", "stopped", "fenced"]


def train_run(
    spec: RunSpec,
    store: Store,
    runtime: Runtime,
    *,
    attempt: int | None = None,
    parent_id: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], StopRequest | None] = lambda: None,
) -> Outcome:
    """Train `spec` from its last resume file to the end, and write everything to its folder.

    With several ranks, all call this with the same arguments. Only rank 0 writes, and its `should_stop` decides. The
    caller holds the run's lease, or knows that nobody else trains the run.

    Args:
        spec: The run.
        store: Where its folder is. The index is neither read nor written.
        runtime: How this worker executes runs.
        attempt: The number of the attempt, from the run's lease; None: the next one.
        parent_id: A finished run that `spec` continues (`config.run.parent_ids`), unless it was begun before.
        on_event: Called with every event.
        should_stop: Asked after each step; a request ends the run, which can be continued.

    Returns:
        "finished": the run has a result, from now or from before.
        "failed": an error is recorded with its traceback (a loss that is not finite, a sequence that is too long for an
            encoding, out of memory, …). It is not raised, so that the next run can follow.
        "interrupted", "stopped": what `should_stop` returned.
        "fenced": a newer attempt of the run has begun elsewhere; nothing of it was overwritten.

    Raises, with several ranks, an error that may have occurred on one rank only, after it is recorded: the ranks are
    no longer in step and have to be restarted.
    """
    folder = store.run(spec.run_id)
    parent = store.run(parent_id) if parent_id else None
    if runtime.rank > 0:
        # Rank 0 writes. It broadcasts what it finds in the same order as below.
        if not broadcast_flag(runtime, False):
            return "finished"
        if not broadcast_flag(runtime, False):
            return "fenced"
        try:
            reporter = RunReporter(spec, runtime.worker_id, None, on_event)
            return TrainingLoop(spec, folder, runtime, reporter, parent).run(should_stop)
        except Diverged:
            return "failed"
    if not broadcast_flag(runtime, folder.status != "finished"):
        folder.repair(spec)
        return "finished"
    try:
        folder = folder.begin(spec, runtime.worker_id, attempt)
    except FencedError:
        broadcast_flag(runtime, False)
        return "fenced"
    broadcast_flag(runtime, True)
    reporter = RunReporter(spec, runtime.worker_id, folder, on_event)
    try:
        return TrainingLoop(spec, folder, runtime, reporter, parent).run(should_stop)
    except FencedError:
        if runtime.world_size > 1:
            raise
        return "fenced"
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE_CHARACTERS]
        _record_failure(folder, message)
        reporter.report("failed", message)
        if runtime.world_size > 1 and not isinstance(error, Diverged):
            raise
        return "failed"


def _record_failure(folder: RunFolder, message: str) -> None:
    """Write the error that is being handled to the run's folder, if it can be written."""
    try:
        folder.fail(message, traceback.format_exc())
    except (OSError, FencedError) as error:
        # A full disk, most often. The event still says why the run failed.
        sys.stderr.write(f"{folder.path}: the failure cannot be recorded ({error}): {message}\n")
