"""Writes to a run's folder instead of its process, which has died."""

from __future__ import annotations

import contextlib

from cope_sweep.config import RunSpec
from cope_sweep.store import AttemptWriter, RunFolder
from cope_sweep.store.artifacts import CURVE_FILE, LOG_FILE
from cope_sweep.store.errors import FencedError


def record_failure(
    run: RunSpec, folder: RunFolder, attempt: int, message: str, details: str, *, keep_recorded: bool
) -> None:
    """Record the failure of a run's attempt, which its process may have died too early to begin.

    A result stays, and so does what a newer attempt has written.

    Args:
        run: The run.
        folder: Its folder, for the sweep that has leased it (`RunFolder.of_sweep`).
        attempt: The number of the attempt, from the run's lease.
        message: The reason, in one line.
        details: The whole reason.
        keep_recorded: A failure that the worker itself recorded stays.
    """
    with contextlib.suppress(FencedError):
        folder.repair(run)
        own_files = AttemptWriter(folder, attempt)
        own_files.check_fence()
        is_recorded = keep_recorded and folder.last_attempt == attempt and folder.status == "failed"
        if folder.result is None and not is_recorded:
            own_files.catch_up(CURVE_FILE, LOG_FILE)
            nobody = {"worker_id": ""} if folder.last_attempt < attempt else {}  # no worker began it
            own_files.fail(message, details, **nobody)
