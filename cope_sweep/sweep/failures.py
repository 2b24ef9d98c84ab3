"""Writes to a run's folder instead of its process, which has died."""

from __future__ import annotations

import contextlib

from cope_sweep.config import RunSpec
from cope_sweep.store import AttemptWriter, Store
from cope_sweep.store.errors import DamagedError

MAX_MESSAGE_CHARACTERS = 500


def record_failure(run: RunSpec, store: Store, message: str, details: str, *, keep_recorded: bool) -> None:
    """Record the failure of a run. A result stays.

    Args:
        run: The run.
        store: The store.
        message: The reason, in one line.
        details: The whole reason.
        keep_recorded: A failure that the worker itself recorded stays.
    """
    folder = store.run(run.run_id)
    with contextlib.suppress(DamagedError):
        if folder.result is not None:
            return
    try:
        state = folder.state if folder.spec is not None else {}
    except DamagedError:
        state = {}
    if not state:
        attempt = folder.begin(run, "")  # puts damaged files aside
    elif keep_recorded and state.get("status") == "failed":
        return
    else:
        attempt = AttemptWriter(folder, folder.last_attempt)
    attempt.fail(message[:MAX_MESSAGE_CHARACTERS], details)
