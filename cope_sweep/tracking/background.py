"""Logs a sweep to MLflow while it trains, from one background thread of its process."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cope_sweep.errors import UserError
from cope_sweep.redaction import redacted, redacted_command
from cope_sweep.store import Event, Store, SweepRecord
from cope_sweep.tracking.files import SweepFiles, no_files
from cope_sweep.tracking.sync import OnSending, log_each, mlflow_logger, sync

if TYPE_CHECKING:
    from cope_sweep.tracking.mlflow import MLflowLogger

INTERVAL_S = 2.0
"""Between two passes, each of which logs the runs with new metrics."""
MAX_INTERVAL_S = 30.0
"""The interval doubles each time that MLflow refuses, up to this."""
SWEEP_INTERVAL_S = 10.0
"""Between two descriptions of the sweep. Each reads its record and counts its runs."""
REFUSED_S = 3.0
"""How long the end of a sweep tries a server that refuses: the user waits."""
PATIENCE_S = 60.0
"""How long it waits without progress, as for a server that takes requests and is silent."""
STOP_S = 10.0
"""Time that the run that is being logged has after Ctrl-C."""

log = logging.getLogger("cope_sweep.tracking")


class BackgroundLogger:
    """Logs the runs of one sweep. No method raises, and only `finish` waits for MLflow."""

    def __init__(
        self,
        store: Store,
        uri: str,
        record: SweepRecord,
        on_note: Callable[[str], None] = lambda text: None,
        files: SweepFiles = no_files,
    ) -> None:
        """Start nothing yet.

        Args:
            store: The store.
            uri: The tracking URI.
            record: The record of the sweep, which is in the store when `start` is called.
            on_note: Called by the thread at its first failure, once.
            files: Makes the files of the sweep, once it has ended.
        """
        self._files = files
        self._store, self._uri, self._sweep_id, self._on_note = store, uri, record.sweep_id, on_note
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._lock = threading.Lock()
        """Guards the next two."""
        self._queue: dict[str, None] = {}
        """The runs to log, in order."""
        self._reported: dict[str, dict[str, float]] = {}
        """Run in training → its newest metrics."""
        self._has_ended, self._interrupted = threading.Event(), threading.Event()
        self._sending = 0, 0
        """What `OnSending` is called with."""
        self._reasons: list[str] = []
        """Why something is missing at the end."""

    def start(self) -> None:
        """Start the thread, which imports mlflow: that takes seconds."""
        self._thread.start()

    def report(self, event: Event) -> None:
        """Log the run soon, if it has ended or has new metrics. From any thread."""
        with self._lock:
            if event.status != "running":
                self._reported.pop(event.run_id, None)
            elif self._reported.get(event.run_id) != event.metrics:
                self._reported[event.run_id] = event.metrics
            else:
                return
            self._queue[event.run_id] = None

    def finish(self, on_sending: OnSending = lambda sent, total: None, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Log the rest of the sweep, whose end is in the store, and wait for it as long as there is progress.

        Ctrl-C ends the wait, and leaves the rest to `cope-sweep sync`.

        Args:
            on_sending: Called with the number of runs and sweeps logged from now on, and the number to log.
            patience_s: How long to wait without progress.

        Returns:
            One line for each reason why something is missing in MLflow, with the command that sends it later.
        """
        # The thread ends its pass, and then logs the rest by `sync`: it alone uses MLflow's client.
        self._has_ended.set()
        shown, progress_s = (0, 0), time.monotonic()
        try:
            is_alive = True
            while is_alive and time.monotonic() - progress_s < patience_s:
                self._thread.join(0.1)
                is_alive = self._thread.is_alive()  # asked first: then the numbers below are the last ones
                if self._sending != shown:
                    shown, progress_s = self._sending, time.monotonic()
                    on_sending(*shown)
            reason = f"MLflow made no progress for {patience_s:.0f} s"
        except KeyboardInterrupt:
            reason = "interrupted before everything was sent"
            self._interrupted.set()
            with suppress(KeyboardInterrupt):  # a second one does not wait for the run that is being logged
                self._thread.join(STOP_S)
        self._interrupted.set()
        reasons = [reason] if self._thread.is_alive() else self._reasons
        command = redacted_command(["cope-sweep", "sync", "--store", self._store.location, "--mlflow", self._uri])
        hint = f"the store has all results; send them to MLflow later with `{shlex.join(command)}`"
        return [f"{reason}; {hint}" for reason in reasons]

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s, has_noted, logger = 0.0, False, None
        sweep_s = -SWEEP_INTERVAL_S
        while not self._has_ended.wait(pause_s):
            reasons: list[str] = []
            with _collecting(reasons):
                logger = logger or mlflow_logger(self._store, self._uri, self._files)
                if time.monotonic() - sweep_s > SWEEP_INTERVAL_S:
                    sweep_s = time.monotonic()
                    reasons += log_each(logger.log_sweep, [self._sweep_id]).values()
                reasons += self._log_queue(logger).values()
            if reasons and not has_noted:
                has_noted = True
                self._on_note(f"{reasons[0]}; training goes on, and MLflow is tried again")
            pause_s = min(MAX_INTERVAL_S, 2 * max(pause_s, INTERVAL_S)) if reasons else INTERVAL_S
        with _collecting(self._reasons):
            self._reasons += sync(
                self._store,
                self._uri,
                self._note_sending,
                sweep_id=self._sweep_id,
                timeout_s=REFUSED_S,
                interrupted=self._interrupted.is_set,
                files=self._files,
            ).reasons

    def _log_queue(self, logger: MLflowLogger) -> dict[str, str]:
        """Log what is queued now, and keep what is left at the end of the queue. Returns the reasons."""
        with self._lock:  # before its files are read: what is reported from now on is logged in the next pass
            todo, self._queue = self._queue, {}
        try:
            return log_each(logger.log_run, list(todo), stop=self._has_ended.is_set, on_logged=todo.pop)
        finally:
            with self._lock:
                self._queue |= todo

    def _note_sending(self, sent: int, total: int) -> None:
        self._sending = sent, total


@contextmanager
def _collecting(reasons: list[str]) -> Iterator[None]:
    """Add the reason why the block failed: the sweep goes on, whatever a library does."""
    try:
        yield
    except UserError as error:
        reasons.append(str(error))
    except Exception as error:
        log.exception("sending to MLflow failed")
        reasons.append(redacted(f"sending to MLflow failed: {error!r}"))
