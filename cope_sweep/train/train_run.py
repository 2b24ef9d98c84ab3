"""Trains one run and records its outcome in the store: locking, agreement between ranks, and failures."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Literal

from cope_sweep.spec import RunSpec
from cope_sweep.store import Event, Store
from cope_sweep.train.collective import broadcast_flag
from cope_sweep.train.loop import TrainingLoop
from cope_sweep.train.reporter import Diverged, RunReporter
from cope_sweep.train.runtime import Runtime

MAX_MESSAGE_CHARACTERS = 500

Outcome = Literal["finished", "failed", "interrupted", "busy"]


def train_run(
    spec: RunSpec,
    store: Store,
    runtime: Runtime,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train `spec` from its last resume file to the end, and record everything in the store.

    With several ranks, all call this with the same arguments. Only rank 0 writes, and its `should_stop` decides.

    Returns:
        "finished": the run has a result, from now or from before.
        "failed": an error is recorded with its traceback (a loss that is not finite, a sequence that is too long for an
            encoding, out of memory, …). It is not raised, so that the next run can follow.
        "interrupted": `should_stop` returned True; the run can be resumed.
        "busy": another living process trains the run.

    Raises, with several ranks, an error that may have occurred on one rank only, after it is recorded: the ranks are
    no longer in step and have to be restarted.

    """
    folder = store.run(spec.run_id)
    if runtime.rank > 0:
        # Rank 0 locks and writes. It broadcasts its findings in the same order as below.
        if not broadcast_flag(runtime, False):
            return "busy"
        if not broadcast_flag(runtime, False):
            return "finished"
        try:
            reporter = RunReporter(spec, runtime.worker_id, None, on_event)
            return TrainingLoop(spec, folder, runtime, reporter).run(should_stop)
        except Diverged:
            return "failed"
    with folder.lock() as locked:
        if not broadcast_flag(runtime, locked):
            return "busy"
        if not broadcast_flag(runtime, folder.status != "finished"):
            return "finished"
        folder.begin(spec, runtime.worker_id)
        reporter = RunReporter(spec, runtime.worker_id, folder, on_event)
        try:
            return TrainingLoop(spec, folder, runtime, reporter).run(should_stop)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE_CHARACTERS]
            folder.fail(message, traceback.format_exc())
            reporter.report("failed", message)
            if runtime.world_size > 1 and not isinstance(error, Diverged):
                raise
            return "failed"
