"""Logs everything to MLflow that it lacks of a store, or of one sweep: the command `cope-sweep sync`.

MLflow is asked once for its runs, which takes a server 2 ms per run, and what differs from the index is sent. What
a sweep trains at the moment is left out: it sends that itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cope_sweep.store import ACTIVE, Store, StoreError
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.tracking.files import SweepFiles, no_files
from cope_sweep.tracking.states import IN_TRASH, run_state
from cope_sweep.tracking.uri import LOG_FILE, TrackingError, import_mlflow

if TYPE_CHECKING:
    from cope_sweep.tracking.mlflow import MLflowLogger

MAX_FAILURES = 2
"""After MLflow has refused this many runs in a row, it counts as down. Each try may take as long as a request may: with
thousands of runs, trying them all would take hours."""
RETRY_INTERVAL_S = 1.0

OnSending = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that there is to send."""


class Synced(NamedTuple):
    """The end of a sync."""

    sent: int
    """Number of runs and sweeps that were sent."""
    left: int | None
    """Number of runs and sweeps that MLflow still lacks; None: it did not answer."""
    reasons: list[str]
    """Why something was not sent, one line each."""


def mlflow_logger(store: Store, uri: str, files: SweepFiles = no_files) -> MLflowLogger:
    """Import mlflow, and connect to it for a store; `files` makes those of each sweep. Raises TrackingError."""
    import_mlflow(store.root / LOG_FILE)
    from cope_sweep.tracking.mlflow import MLflowLogger

    return MLflowLogger(store, uri, files)


def sync(
    store: Store,
    uri: str,
    on_sending: OnSending = lambda sent, total: None,
    *,
    sweep_id: str | None = None,
    timeout_s: float = 60.0,
    interrupted: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
    files: SweepFiles = no_files,
) -> Synced:
    """Send what MLflow lacks, and try again as long as there is progress.

    Args:
        store: The store.
        uri: The tracking URI.
        on_sending: Called after each run and sweep.
        sweep_id: Send only this sweep, what it was to train, and interrupted sweeps whose runs it reuses: a killed one
            could not send its last runs.
        timeout_s: How long to try without sending anything.
        interrupted: Asked before each run; True ends the sync.
        dry_run: Only count.
        files: Makes the files of each sweep that is sent.

    Raises:
        TrackingError: The store was moved or copied, and its SQLite file was not made again.
    """
    before = set() if sweep_id is None else _interrupted_before(store, sweep_id)
    sweep_ids = None if sweep_id is None else {sweep_id, *before}
    database, (runs, sweeps) = sqlite_file(uri), _ended(store, sweep_id, before)
    if not (runs or sweeps) or (dry_run and database is not None and not database.exists()):
        return Synced(0, len(runs) + len(sweeps), [])
    logger: MLflowLogger | None = None
    sent, left, progress_s, failed = 0, None, time.monotonic(), set[str]()

    def log(item: str, *, status_only: bool = False) -> None:
        (logger.log_sweep if item in sweeps else logger.log_run)(item, status_only=status_only)  # type: ignore[union-attr]

    def on_logged(item: str) -> None:
        nonlocal sent, left, progress_s
        sent, left, progress_s = sent + 1, (left or 0) - 1, time.monotonic()
        on_sending(sent, sent + left)

    while True:
        errors: dict[str, str] = {}
        try:
            logger = logger or mlflow_logger(store, uri, files)
            logged, (runs, sweeps) = logger.logged(sweep_ids), _ended(store, sweep_id, before)
            # Runs first: the description of a sweep links those that it has reused.
            missing = [item for item, state in (runs | sweeps).items() if logged.get(item) not in (state, IN_TRASH)]
            left = len(missing)
            if dry_run:
                break
            # Statuses first, which is quick: then nothing seems to be in training, also if the rest is interrupted.
            # Those of new sweeps, too: their runs, which come before them, would create them as active.
            log_each(partial(log, status_only=True), [item for item in missing if item in logged or item in sweeps])
            missing.sort(key=failed.__contains__)  # those that were refused keep no other from being sent
            errors = log_each(log, missing, stop=interrupted, on_logged=on_logged)
        except (TrackingError, StoreError) as error:
            if error.code == "moved_store":  # does not pass by itself
                raise
            errors[""] = str(error)
        failed |= errors.keys()
        if interrupted() or not errors or time.monotonic() - progress_s > timeout_s:
            break
        time.sleep(RETRY_INTERVAL_S)
    if logger is not None:
        logger.close()
    reasons = [f"{reason} ({count}×)" if count > 1 else reason for reason, count in Counter(errors.values()).items()]
    if left and interrupted() and not reasons:
        reasons = [f"interrupted with {left} {'runs and sweeps' if left > 1 else 'run or sweep'} to send"]
    return Synced(sent, left, reasons)


def log_each(
    log: Callable[[str], None],
    items: Iterable[str],
    *,
    stop: Callable[[], bool] = lambda: False,
    on_logged: Callable[[str], object] = lambda item: None,
) -> dict[str, str]:
    """Call `log` for each run or sweep until `stop`, or until MLflow is down; why some were not logged.

    One that is refused, or whose folder is damaged, keeps no other from being logged.
    """
    errors: dict[str, str] = {}
    failures = 0
    for item in items:
        if stop() or failures == MAX_FAILURES:
            break
        try:
            log(item)
        except (TrackingError, StoreError) as error:
            errors[item] = str(error)
            failures += isinstance(error, (TrackingError, IndexUnavailable))
        else:
            failures = 0
            on_logged(item)
    return errors


def _interrupted_before(store: Store, sweep_id: str) -> set[str]:
    """The interrupted sweeps that have trained runs which this sweep reuses, without those whose record is damaged."""
    record = store.sweep(sweep_id)
    trained_by = {row.sweep_id for row in store.index.records(record.reused if record else (), values=False).values()}
    interrupted = {sweep.sweep_id for sweep in store.index.sweeps() if sweep.status == "interrupted"}
    return {each for each in trained_by & interrupted if each is not None and _has_record(store, each)}


def _has_record(store: Store, sweep_id: str) -> bool:
    try:
        return store.sweep(sweep_id) is not None
    except DamagedError:
        return False


def _ended(store: Store, sweep_id: str | None, before: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The runs, and the sweeps, that have ended → their states: all of the store, or of one sweep.

    `before` are interrupted sweeps: of their runs, those that no other sweep has continued.
    """
    sweeps = {sweep.sweep_id: sweep.status for sweep in store.index.sweeps()}
    sent, run_ids = set(sweeps), set(store.index.statuses())
    if sweep_id is not None:
        sent, run_ids = {sweep_id, *before}, _runs_to_train(store, sweep_id)
        earlier = set().union(*(_runs_to_train(store, each) for each in before)) - run_ids
        records = store.index.records(earlier, values=False)
        run_ids |= {run_id for run_id, record in records.items() if record.sweep_id in before}
    runs = {
        run_id: run_state(record)
        for run_id, record in store.index.records(run_ids, values=False).items()
        if record.status not in ACTIVE and sweeps.get(record.sweep_id or "") != "running"
    }
    return runs, {key: status for key, status in sweeps.items() if key in sent and status not in ACTIVE}


def _runs_to_train(store: Store, sweep_id: str) -> set[str]:
    """The ids of the runs that a sweep was to train. Raises StoreError."""
    record = store.sweep(sweep_id)
    return {run.run_id for run in record.runs}.difference(record.reused) if record else set()
