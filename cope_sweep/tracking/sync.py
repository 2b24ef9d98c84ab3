"""Logs everything to MLflow that it lacks of a store: the command `cope-sweep sync`.

MLflow is asked once for all its runs, which takes a server 2 ms per run, and what differs from the index is sent. What
a sweep trains at the moment is left out: it sends that itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cope_sweep.store import ACTIVE, Store, StoreError
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.tracking.background import RETRY_INTERVAL_S, OnSending
from cope_sweep.tracking.tracker import IN_TRASH, log_each, run_state
from cope_sweep.tracking.uri import LOG_FILE, TrackingError, import_mlflow

if TYPE_CHECKING:
    from cope_sweep.tracking.tracker import Tracker


class Synced(NamedTuple):
    """The end of a sync."""

    sent: int
    """Number of runs and sweeps that were sent."""
    left: int | None
    """Number of runs and sweeps that MLflow still lacks; None: it did not answer."""
    reasons: list[str]
    """Why something was not sent, one line each."""


def sync(
    store: Store,
    uri: str,
    on_sending: OnSending = lambda sent, total: None,
    *,
    timeout_s: float = 60.0,
    interrupted: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
) -> Synced:
    """Send what MLflow lacks, and try again as long as there is progress.

    Args:
        store: The store.
        uri: The tracker.
        on_sending: Called after each run and sweep.
        timeout_s: How long to try without sending anything.
        interrupted: Asked before each run whether to end.
        dry_run: Only count.

    Raises:
        TrackingError: The store was moved or copied, and its SQLite file was not made again.
    """
    database = sqlite_file(uri)
    missing = _missing(store, {})
    if not missing or (dry_run and database is not None and not database.exists()):
        return Synced(0, len(missing), [])
    import_mlflow(store.root / LOG_FILE)
    from cope_sweep.tracking.mlflow import MLflowLogger

    tracker: Tracker | None = None
    sent, progress_s, failed = 0, time.monotonic(), set[str]()
    left: int | None = None

    def log(item: str) -> None:
        (tracker.log_sweep if missing[item] else tracker.log_run)(item)  # type: ignore[union-attr]

    def on_logged(item: str) -> None:
        nonlocal sent, left, progress_s
        sent, left, progress_s = sent + 1, (left or 0) - 1, time.monotonic()
        failed.discard(item)
        on_sending(sent, sent + left)

    while True:
        errors: dict[str, str] = {}
        try:
            tracker = tracker or MLflowLogger(store, uri)
            missing = _missing(store, tracker.logged())
            left = len(missing)
            if dry_run:
                break
            # Those that were refused come last: they keep no other from being sent.
            errors = log_each(sorted(missing, key=failed.__contains__), log, stop=interrupted, on_logged=on_logged)
        except (TrackingError, StoreError, OSError) as error:
            if isinstance(error, TrackingError) and error.code == "moved_store":  # does not pass by itself
                raise
            errors[""] = str(error)
        failed |= errors.keys()
        if interrupted() or not errors or time.monotonic() - progress_s > timeout_s:
            break
        time.sleep(RETRY_INTERVAL_S)
    if tracker is not None:
        tracker.close()
    reasons = [f"{reason} ({count}×)" if count > 1 else reason for reason, count in Counter(errors.values()).items()]
    if left and interrupted() and not reasons:
        reasons = [f"interrupted with {left} {'runs and sweeps' if left > 1 else 'run or sweep'} to send"]
    return Synced(sent, left, reasons)


def _missing(store: Store, logged: Mapping[str, str]) -> dict[str, bool]:
    """The runs, then the sweeps, that have ended and are not `logged` as they are → whether it is a sweep."""
    sweeps = {sweep.sweep_id: sweep.status for sweep in store.index.sweeps()}
    states = {
        run_id: run_state(record)
        for run_id, record in store.index.records(store.index.statuses(), values=False).items()
        if record.status not in ACTIVE and sweeps.get(record.sweep_id or "") != "running"
    }
    # Runs first: the description of a sweep links the runs that it has reused.
    runs = {run_id: False for run_id, state in states.items() if logged.get(run_id) not in (state, IN_TRASH)}
    ended = {key: status for key, status in sweeps.items() if status not in ACTIVE}
    return runs | {key: True for key, status in ended.items() if logged.get(key) not in (status, IN_TRASH)}
