"""Logs a sweep to MLflow while it trains, from one background thread of its process."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from cope_sweep.redaction import redacted, redacted_command
from cope_sweep.store import ACTIVE, Event, Store, StoreError, SweepRecord
from cope_sweep.tracking.tracker import log_each
from cope_sweep.tracking.uri import LOG_FILE, TrackingError, import_mlflow

if TYPE_CHECKING:
    from cope_sweep.tracking.tracker import Tracker

INTERVAL_S = 2.0
MAX_INTERVAL_S = 30.0
"""The interval doubles each time that MLflow refuses, up to this."""
PROGRESS_INTERVAL_S = 10.0
"""Between two notes about the progress of a sweep."""
FINAL_TRIES = 3
"""Number of tries at the end, a second apart, that may log nothing: the user waits."""
RETRY_INTERVAL_S = 1.0
PATIENCE_S = 60.0
"""The time for which the end of a sweep waits without progress, as for a server that takes requests and is silent."""
STOP_S = 10.0
"""Time that the run that is being logged has after Ctrl-C."""

OnSending = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that there is to send."""

log = logging.getLogger("cope_sweep.tracking")


class BackgroundLogger:
    """Logs the runs of one sweep. No method raises, and only `finish` waits for MLflow."""

    def __init__(
        self, store: Store, uri: str, record: SweepRecord, on_note: Callable[[str], None] = lambda text: None
    ) -> None:
        """`record` is in the store when `start` is called. `on_note` is told once, from the thread, of a failure."""
        self._store, self._uri, self._record, self._on_note = store, uri, record, on_note
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._condition = threading.Condition()
        """Guards the next five."""
        self._queue: dict[str, bool] = {}
        """Run or sweep to log → whether it has ended."""
        self._noted: dict[str, dict[str, float]] = {}
        """Run in training → its metrics when it was last noted."""
        self._logged = 0
        self._is_ending = False
        self._errors: dict[str, str] = {}
        """Why something was not logged in the last pass."""
        self._stop = threading.Event()
        self._complete: set[str] = set()
        """Runs that were logged after their end. Only the thread uses it."""

    def start(self) -> None:
        """Start the thread, which imports mlflow: that takes seconds."""
        self._thread.start()

    def note(self, event: Event) -> None:
        """Note that a run has made progress or has ended. From any thread."""
        if event.status == "pending":
            return
        with self._condition:
            if event.status != "running":
                self._noted.pop(event.run_id, None)
                self._queue[event.run_id] = True
            elif self._noted.get(event.run_id) != event.metrics:
                self._noted[event.run_id] = dict(event.metrics)
                self._queue[event.run_id] = False

    def finish(self, on_sending: OnSending = lambda sent, total: None, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Log the rest of the sweep, whose end is in the store, and wait for it as long as there is progress.

        Ctrl-C ends the wait. What is missing then, also that a run has ended, is left to `cope-sweep sync`.

        Args:
            on_sending: Called with the number of runs and sweeps logged from now on, and the number to log.
            patience_s: How long to wait without progress.

        Returns:
            One line for each reason why something is missing in MLflow, with the command that sends it later.
        """
        with self._condition:
            self._is_ending, before = True, self._logged
            self._condition.notify_all()
        done, total, deadline_s, interrupted = 0, 0, time.monotonic() + patience_s, False
        try:
            while self._thread.is_alive() and time.monotonic() < deadline_s:
                self._thread.join(0.1)
                with self._condition:
                    now, total = self._logged - before, max(total, self._logged - before + len(self._queue))
                if now > done:
                    done, deadline_s = now, time.monotonic() + patience_s
                on_sending(now, total)
        except KeyboardInterrupt:
            interrupted = True
        self._stop.set()
        with suppress(KeyboardInterrupt):  # a second one does not wait for the run that is being logged
            self._thread.join(STOP_S if interrupted else 0)
        with self._condition:
            reasons, left = list(dict.fromkeys(self._errors.values())), len(self._queue)
        if interrupted and left:
            reasons = [f"interrupted with {left} {'runs and sweeps' if left > 1 else 'run or sweep'} to send"]
        elif self._thread.is_alive() and not reasons:
            reasons = [f"MLflow made no progress for {patience_s:.0f} s"]
        arguments = ["cope-sweep", "sync", "--store", self._store.location, "--mlflow", self._uri]
        command = shlex.join(redacted_command(arguments))
        hint = f"the store has all results; send them to MLflow later with `{command}`"
        return [f"{reason}; {hint}" for reason in reasons]

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        tracker: Tracker | None = None
        pause_s, tries, told, queued_rest = 0.0, 0, False, False
        sweep_s = -PROGRESS_INTERVAL_S
        while True:
            with self._condition:
                if not self._is_ending:
                    self._condition.wait_for(lambda: self._is_ending, pause_s)
                is_ending, before = self._is_ending, self._logged
            errors: dict[str, str] = {}
            try:
                tracker = tracker or self._open()
                if is_ending and not queued_rest:
                    self._queue_rest()
                    queued_rest = True
                elif time.monotonic() - sweep_s > PROGRESS_INTERVAL_S:
                    with self._condition:
                        self._queue = {self._record.sweep_id: False} | self._queue
                    sweep_s = time.monotonic()
                errors = self._log_queue(tracker)
            except (TrackingError, StoreError, OSError) as error:
                errors[""] = str(error)
            except Exception as error:  # the sweep goes on, whatever a library does
                log.exception("sending to MLflow failed")
                errors[""] = redacted(f"sending to MLflow failed: {error!r}")
            with self._condition:
                self._errors, progress = errors, self._logged > before
            for reason in errors.values():
                log.info("%s", reason)
            if errors and not told and not is_ending:
                told = True
                self._on_note(f"{next(iter(errors.values()))}; training goes on, and MLflow is tried again")
            pause_s = min(MAX_INTERVAL_S, 2 * max(pause_s, INTERVAL_S)) if errors else INTERVAL_S
            if is_ending:
                tries = 0 if progress else tries + 1
                if not errors or tries == FINAL_TRIES or self._stop.wait(RETRY_INTERVAL_S):
                    break
        if tracker is not None and not errors:
            tracker.close()

    def _open(self) -> Tracker:
        import_mlflow(self._store.root / LOG_FILE)
        from cope_sweep.tracking.mlflow import MLflowLogger

        return MLflowLogger(self._store, self._uri)

    def _queue_rest(self) -> None:
        """Queue the end of the sweep, and its runs whose end nobody has reported, as when their process was killed."""
        sweep_id = self._record.sweep_id
        record = self._store.sweep(sweep_id) or self._record  # a search has added runs
        rows = self._store.index.records((run.run_id for run in record.runs), values=False)
        own = {run_id for run_id, row in rows.items() if row.sweep_id == sweep_id and row.status not in ACTIVE}
        with self._condition:
            # The sweep first: Ctrl-C in a long backlog of runs then leaves no sweep that seems to be in training.
            self._queue = {sweep_id: True} | self._queue | dict.fromkeys(own - self._complete, True)

    def _log_queue(self, tracker: Tracker) -> dict[str, str]:
        """Log what is queued now, and keep what is left at the end of the queue. Returns the reasons."""
        with self._condition:
            todo = dict(self._queue)

        def log_item(item: str) -> None:
            with self._condition:  # before its files are read: what is noted from now on is logged in the next pass
                todo[item] = self._queue.pop(item)
            try:
                (tracker.log_sweep if item == self._record.sweep_id else tracker.log_run)(item)
            except BaseException:
                with self._condition:
                    self._queue[item] = todo[item] or self._queue.get(item, False)
                raise

        def on_logged(item: str) -> None:
            if todo[item]:
                self._complete.add(item)
            with self._condition:
                self._logged += 1

        return log_each(list(todo), log_item, stop=self._stop.is_set, on_logged=on_logged)
