"""Copies a store to MLflow while a sweep runs, in a process of its own.

    python -m cope_sweep.tracking.beside store 20261120-110501-3f2a

This process is the only one that writes to MLflow. The sweep starts it with `MlflowMirror.start` and holds its standard
input, whose end means that the sweep has ended, or has died. Then the process sends the rest, and prints one line for
each reason why something is left. SIGTERM makes it end once nothing that has ended is shown as running. The index tells
the sweep how much is left.

So the sweep does not wait for MLflow, whose import takes seconds, and an unavailable MLflow server does not stop it.
Where another process sends the same store to the same tracker, this one waits until it may. What is not sent at the end
is sent by the next sweep's mirror, or by `cope-sweep sync`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time

from cope_sweep.store.errors import StoreError
from cope_sweep.store.index.database import redacted
from cope_sweep.store.store import INDEX_VARIABLE, Store
from cope_sweep.tracking.sync import OnSending, Sync, interrupted_with, known_left
from cope_sweep.tracking.uri import resolve_uri

SYNC_INTERVAL_S = 2.0
MAX_SYNC_INTERVAL_S = 30.0
"""The interval doubles after each failed sync, up to this."""
FINAL_TRIES = 5
"""Number of tries of the last sync, 1 s apart, that may send nothing: the user waits for it."""
PATIENCE_S = 120.0
"""The time for which a sweep waits for its mirror without progress."""
STOP_S = 30.0
"""Time that a mirror has to end after it was asked to stop."""
WORKERS_END_S = 10.0
"""The time for which the workers of a sweep go on after its process died."""
REPORT_INTERVAL_S = 0.5
"""Between two looks at how much is left."""

log = logging.getLogger("cope_sweep.tracking")


class MlflowMirror:
    """The mirror process of a sweep, as seen from the sweep."""

    def __init__(self, process: subprocess.Popen[str], store: Store, uri: str, hint: str) -> None:
        """`hint` is appended to errors; it says how to send the rest later."""
        self.process, self._store, self._uri, self._hint = process, store, uri, hint

    @classmethod
    def start(cls, store: Store, sweep_id: str | None, uri: str) -> MlflowMirror:
        """Start to copy the store, the runs of a sweep first. Returns at once.

        Raises:
            StoreError: The log folder of the store cannot be written.
        """
        log_path = store.root / "logs" / f"mlflow-{sweep_id or 'sync'}.log"
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_file = log_path.open("a")
        except OSError as error:
            raise StoreError(f"{log_path}: cannot be written ({error.strerror})") from error
        # The process inherits what is blocked here, so that SIGTERM waits until it is ready for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with log_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "cope_sweep.tracking.beside", store.location, *filter(None, [sweep_id])],
                    # Not as arguments: URLs may contain a password, and arguments are visible to all users.
                    env=os.environ | {"MLFLOW_TRACKING_URI": uri, INDEX_VARIABLE: store.index_url},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    text=True,
                    # Ctrl-C and a closed terminal must not end the mirror before its last sync.
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        command = shlex.join(["cope-sweep", "sync", "--store", store.location, "--mlflow", redacted(uri)])
        hint = f"the store has all results; send them to MLflow later with `{command}`; details in {log_path}"
        return cls(process, store, uri, hint)

    def finish(self, on_sending: OnSending = lambda sent, total: None, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Send what is left, and wait for it as long as there is progress.

        Ctrl-C ends the wait: the rest is left to `cope-sweep sync`.

        Args:
            on_sending: Called with the number of runs and sweeps that were sent since now, and that of all.
            patience_s: How long to wait without progress.

        Returns:
            One line for each reason why something is missing in MLflow, with the command that sends it later.
        """
        total = left = known_left(self._store, self._uri, 0)
        interrupted = gave_up = False
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                if total:
                    on_sending(int(total - left), int(total))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, _ = self.process.communicate(timeout=REPORT_INTERVAL_S)  # closes its standard input
                    break
                before, left = left, known_left(self._store, self._uri, left)
                total = max(total, left)
                if left < before and not interrupted:
                    deadline_s = time.monotonic() + patience_s
                if time.monotonic() > deadline_s and not gave_up:
                    gave_up = True
                    self.process.kill()
            except KeyboardInterrupt:
                if interrupted:
                    self.process.kill()
                interrupted = True
                self.process.terminate()
                deadline_s = time.monotonic() + STOP_S
        left = known_left(self._store, self._uri, left)
        if total:
            on_sending(int(total - left), int(total))
        reasons = printed.splitlines()
        if self.process.returncode and not reasons:  # it could not say why
            reasons = [f"the process that copies runs to MLflow died (exit code {self.process.returncode})"]
            if gave_up:
                reasons = [f"MLflow made no progress for {patience_s:.0f} s"]
            if interrupted:
                reasons = [interrupted_with(left)]
        return [f"{reason}; {self._hint}" for reason in reasons]


def mirror(store: Store, uri: str, sweep_id: str | None, stop: threading.Event) -> list[str]:
    """Copy a store until standard input or the parent process ends, and once more. Returns why something is left."""
    parent, interval_s = os.getppid(), 0.0
    with Sync(store, uri, first_sweep=sweep_id) as session:
        # The parent's id is also checked, because a process that the sweep forked may keep the pipe open.
        while not select.select([sys.stdin], [], [], interval_s)[0] and os.getppid() == parent:
            began_s = time.monotonic()
            # A long backlog is sent in parts, between the rows of running runs.
            complete = session.sync(deadline_s=began_s + SYNC_INTERVAL_S)
            reasons = session.reasons()
            if complete or not reasons:
                interval_s = SYNC_INTERVAL_S if complete else 0.0
            else:
                interval_s = min(MAX_SYNC_INTERVAL_S, 2 * max(interval_s, SYNC_INTERVAL_S))
            log.info("sync %s in %.2f s", "done" if complete else "incomplete", time.monotonic() - began_s)
            for reason in reasons:
                log.warning("%s", reason)
        with contextlib.suppress(StoreError):
            summary = store.index.sweep(sweep_id) if sweep_id else None
            if summary is not None and summary.ended_ms is None:
                log.warning("the sweep's process is gone; sending what it left")
                time.sleep(WORKERS_END_S)
            # What a dead process has left says that it is running. Its leases end here.
            store.end_expired()
        reasons = session.send_all(tries=FINAL_TRIES, interrupted=stop.is_set)
        log.info("%d runs and sweeps sent, %.0f left", session.sent, known_left(store, uri, 0))
    return reasons


def main(location: str, sweep_id: str | None = None) -> int:
    """Copy a store to MLflow while the parent process runs. Returns the exit code: 0 if everything was sent, else 1."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `MlflowMirror.start`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the sweep's
    # Training has priority.
    with contextlib.suppress(OSError):
        os.nice(5)
    # Only the reasons may go to standard output. Whatever libraries print goes to standard error, which is the log.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        store = Store(location)
        uri = resolve_uri(store)
        log.info("copying %s to %s", store.location, redacted(uri))
        reasons = mirror(store, uri, sweep_id, stop)
        for reason in reasons:
            log.warning("%s", reason)
            with contextlib.suppress(BrokenPipeError):
                print(reason, file=output, flush=True)
    return 1 if reasons else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
