"""Sends a sweep to MLflow while it runs, from one background thread of its process.

Nothing here stops or slows the sweep: the thread imports mlflow, which takes seconds, waits for a server that does not
answer, and tries again later. What it has not sent at the end, `cope-sweep sync` sends.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cope_sweep.redaction import redacted, redacted_command
from cope_sweep.store import Event, Store, StoreError, SweepRecord
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.tracking.uri import LOG_FILE, TrackingError, import_mlflow

if TYPE_CHECKING:
    from cope_sweep.tracking.send import Sender

SEND_INTERVAL_S = 2.0
MAX_SEND_INTERVAL_S = 30.0
"""The interval doubles each time that MLflow refuses, up to this."""
PROGRESS_INTERVAL_S = 10.0
"""Between two notes about the progress of a sweep."""
MAX_FAILURES = 2
"""After MLflow has refused this many runs in a row, it counts as down until the next interval."""
FINAL_TRIES = 5
"""Number of tries at the end, 1 s apart, that may send nothing: the user waits."""
RETRY_INTERVAL_S = 1.0
PATIENCE_S = 120.0
"""The time for which the end of a sweep waits without progress."""
STOP_S = 10.0
"""Time that the thread has to end after Ctrl-C."""

OnSending = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that there is to send."""

log = logging.getLogger("cope_sweep.tracking")


class Recorder:
    """Sends the runs of one sweep, and what earlier sweeps of the same ablation have left. No method raises."""

    def __init__(self, store: Store, uri: str, record: SweepRecord) -> None:
        """`record` is in the store when the recorder is started."""
        self._store, self._uri, self._record = store, uri, record
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._condition = threading.Condition()
        """Guards the next five."""
        self._changed: dict[str, bool] = {}
        """Run that MLflow lacks a part of → whether it has ended."""
        self._noted: dict[str, dict[str, float]] = {}
        """Run that is trained → its metrics when it was last noted."""
        self._sent = 0
        self._is_ending = self._is_interrupted = False
        self._sender: Sender | None = None
        self._older: list[str] | None = None
        """Sweeps of the same ablation that MLflow lacks a part of; None: not known yet."""
        self._looked_again = False
        """Whether such sweeps were also looked for at the end."""
        self._older_runs: set[str] = set()
        """Their runs, which are in `_changed`, too."""
        self._shown: set[str] = set()
        """Runs that MLflow shows as running."""
        self._complete: dict[str, tuple[str, int]] = {}
        """Run → status and attempt that it was sent with."""
        self._noted_s = -PROGRESS_INTERVAL_S
        """When the progress of the sweep was last sent."""
        self._is_complete = False
        """Whether all of the sweep was sent."""
        self._is_refusing = False
        """Whether MLflow or the index counts as down."""
        self._errors: dict[str, str] = {}
        """Run, or empty for all → why it could not be sent."""

    def start(self) -> None:
        """Start to send. Returns at once."""
        self._thread.start()

    def note(self, event: Event) -> None:
        """Note that a run has made progress or has ended: what MLflow lacks of it is sent soon. From any thread."""
        if event.status == "pending":
            return
        with self._condition:
            if event.status != "running":
                self._noted.pop(event.run_id, None)
                self._changed[event.run_id] = True
            elif self._noted.get(event.run_id) != event.metrics:
                self._noted[event.run_id] = dict(event.metrics)
                self._changed[event.run_id] = False

    def finish(self, on_sending: OnSending = lambda sent, total: None, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Send the rest of the sweep, whose end is in the store, and wait for it as long as there is progress.

        Ctrl-C ends the wait: what has ended is shown as ended, and the rest is left to `cope-sweep sync`.

        Args:
            on_sending: Called with the number of runs and sweeps sent from now on, and the number to send.
            patience_s: How long to wait without progress.

        Returns:
            One line for each reason why something is missing in MLflow, with the command that sends it later.
        """
        with self._condition:
            self._is_ending, before = True, self._sent
            self._condition.notify_all()
        seen, total, deadline_s = before, 0, time.monotonic() + patience_s
        is_late = was_interrupted = False
        while self._thread.is_alive() and not is_late:
            try:
                self._thread.join(0.1)
                with self._condition:
                    sent = self._sent
                    total = max(total, sent - before + self._left())
                on_sending(sent - before, total)
                if sent > seen and not was_interrupted:
                    seen, deadline_s = sent, time.monotonic() + patience_s
                is_late = time.monotonic() > deadline_s
            except KeyboardInterrupt:
                is_late = was_interrupted
                was_interrupted, deadline_s = True, time.monotonic() + STOP_S
                with self._condition:
                    self._is_interrupted = True
                    self._condition.notify_all()
        with self._condition:
            self._is_interrupted = True
            reasons, unsent = list(dict.fromkeys(self._errors.values())), self._left()
        if total:
            on_sending(self._sent - before, max(total, self._sent - before + unsent))
        if was_interrupted and unsent:
            reasons = [f"interrupted with {unsent} {'runs and sweeps' if unsent > 1 else 'run or sweep'} to send"]
        elif is_late and not reasons:
            reasons = [f"MLflow made no progress for {patience_s:.0f} s"]
        arguments = ["cope-sweep", "sync", "--store", self._store.location, "--mlflow", self._uri]
        command = shlex.join(redacted_command(arguments))
        hint = f"the store has all results; send them to MLflow later with `{command}`"
        return [f"{reason}; {hint}" for reason in reasons]

    def _left(self) -> int:
        """Runs and sweeps that have ended and are not sent."""
        return sum(self._changed.values()) + len(self._older or ()) + (not self._is_complete)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        interval_s, tries = 0.0, 0
        while True:
            with self._condition:
                if not self._is_ending:
                    self._condition.wait_for(lambda: self._is_ending, interval_s)
                elif tries:
                    self._condition.wait_for(lambda: self._is_interrupted, RETRY_INTERVAL_S)
                is_ending, before, self._errors = self._is_ending, self._sent, {}
            self._is_refusing = False
            try:
                self._send(is_ending)
            except (TrackingError, StoreError, OSError) as error:
                self._is_refusing, self._errors[""] = True, str(error)
            except Exception as error:  # the sweep goes on, whatever a library does
                log.exception("sending to MLflow failed")
                self._is_refusing, self._errors[""] = True, redacted(f"sending to MLflow failed: {error!r}")
            for reason in self._errors.values():
                log.info("%s", reason)
            if self._is_refusing:
                interval_s = min(MAX_SEND_INTERVAL_S, 2 * max(interval_s, SEND_INTERVAL_S))
            else:
                with self._condition:
                    has_more = any(ended for run_id, ended in self._changed.items() if run_id not in self._errors)
                interval_s = 0.0 if has_more else SEND_INTERVAL_S
            tries = tries + 1 if self._sent == before else 1
            if is_ending and (not self._errors or self._is_interrupted or tries > FINAL_TRIES):
                return

    def _send(self, is_ending: bool) -> None:
        """Send what has changed; at the end of the sweep all of it."""
        sender = self._sender
        if sender is None:
            if self._is_interrupted:
                return
            import_mlflow(self._store.root / LOG_FILE)
            from cope_sweep.tracking.send import Sender

            sender = self._sender = Sender(self._store, self._uri)
        if not is_ending and time.monotonic() - self._noted_s > PROGRESS_INTERVAL_S:
            sender.send_sweep(self._record.sweep_id)
            self._noted_s = time.monotonic()
        if self._older is None or (is_ending and not self._looked_again):
            # Again at the end: a sweep whose process died just before this one started was still leased then.
            self._looked_again = is_ending
            self._find_older(sender)
        if is_ending:
            self._find_rest()
        self._send_runs(sender, is_ending)
        if self._is_interrupted:
            self._end_shown(sender)
        elif is_ending and not self._errors:
            for sweep_id in [*(self._older or ()), self._record.sweep_id]:
                sender.send_sweep(sweep_id)
                with self._condition:
                    self._sent += 1
                    self._older = [each for each in self._older or () if each != sweep_id]
                    self._is_complete = sweep_id == self._record.sweep_id
            sender.tracker.close()

    def _send_runs(self, sender: Sender, is_ending: bool) -> None:
        """Send runs that have changed: first those that have ended and are shown as running, then those in training.

        While the sweep trains, a long backlog of others is sent in parts, between the rows of running runs.
        """
        with self._condition:
            changed, self._changed = self._changed, {}

        def rank(run_id: str) -> int:
            if run_id in self._older_runs:
                return 3
            if changed[run_id]:
                return 0 if run_id in self._shown else 2
            return 1

        todo = sorted(changed, key=rank)
        begun_s, failures = time.monotonic(), 0
        try:
            while todo:
                is_late = not is_ending and time.monotonic() - begun_s > SEND_INTERVAL_S and rank(todo[0]) > 1
                self._is_refusing = failures == MAX_FAILURES
                if self._is_interrupted or self._is_refusing or is_late:
                    return
                run_id = todo[0]
                try:
                    record = sender.send_run(run_id)
                except IndexUnavailable:
                    raise
                except (TrackingError, StoreError, OSError) as error:
                    self._errors[run_id] = str(error)
                    failures = failures + 1 if isinstance(error, TrackingError) else failures
                    self._put_back({run_id: changed[run_id]})
                else:
                    failures = 0
                    self._note_sent(run_id, is_running=record is not None and record.status == "running")
                    if record is not None:
                        self._complete[run_id] = record.status, record.attempt
                todo.pop(0)
        finally:
            self._put_back({run_id: changed[run_id] for run_id in todo})

    def _note_sent(self, run_id: str, *, is_running: bool) -> None:
        if is_running:
            self._shown.add(run_id)
            return
        self._shown.discard(run_id)
        with self._condition:
            self._sent += 1

    def _put_back(self, runs: dict[str, bool]) -> None:
        with self._condition:
            for run_id, has_ended in runs.items():
                self._changed[run_id] = has_ended or self._changed.get(run_id, False)

    def _find_older(self, sender: Sender) -> None:
        """Find what earlier sweeps of the same ablation have left, and show as ended what has ended of it.

        A sweep that is complete in MLflow has left nothing. One that was to send nothing is left to `cope-sweep sync`.
        """
        seen_sweeps = sender.seen_sweeps(experiment=self._record.ablation)
        older = []
        for summary in self._store.index.sweeps():
            seen = seen_sweeps.get(summary.sweep_id)
            is_other = summary.ablation != self._record.ablation or summary.status in ("running", "pending")
            if is_other or (seen is not None and seen.has_sweep(summary.status)):
                continue
            record = self._store.sweep(summary.sweep_id)
            if record is None or not record.mlflow:
                continue
            parent_id = seen.tracked_id if seen else None
            if seen is not None:
                sender.end_sweep(summary.sweep_id)
            older.append(summary.sweep_id)
            seen_runs = sender.seen_runs(experiment=self._record.ablation, sweep_id=summary.sweep_id)
            rows = self._store.index.records((run.run_id for run in record.runs), values=False)
            for run_id, row in rows.items():
                if row.sweep_id not in (summary.sweep_id, None) or row.status in ("running", "pending"):
                    continue
                seen = seen_runs.get(run_id)
                if seen is not None:
                    sender.end_run(seen, row)
                if seen is None or not seen.has_run(row, parent_id):
                    self._older_runs.add(run_id)
                    self._put_back({run_id: True})
        self._older = older

    def _find_rest(self) -> None:
        """Note the runs that were not sent completely, even if nobody has reported their end."""
        record = self._store.sweep(self._record.sweep_id) or self._record  # a search has added runs
        rows = self._store.index.records((run.run_id for run in record.runs), values=False)
        for run_id, row in rows.items():
            is_own = row.sweep_id == record.sweep_id or run_id in self._shown
            is_sent = self._complete.get(run_id) == (row.status, row.attempt)
            if is_own and row.status not in ("running", "pending") and not is_sent:
                self._put_back({run_id: True})

    def _end_shown(self, sender: Sender) -> None:
        """Show everything as ended that has ended, without its rest. Takes STOP_S at most."""
        deadline_s = time.monotonic() + STOP_S
        sender.end_sweep(self._record.sweep_id)
        rows = self._store.index.records(self._shown, values=False)
        sender.end_shown({run_id: row for run_id, row in rows.items() if row.status != "running"}, deadline_s)
