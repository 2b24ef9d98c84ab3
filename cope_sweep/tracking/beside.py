"""Copies a store to MLflow while a sweep runs, in a process of its own.

    python -m cope_sweep.tracking.beside --store store --sweep 20261120-110501-3f2a

This process is the only one that writes to MLflow. The sweep starts it with `MlflowMirror.start` and holds its
standard input. After the line `finish` the process sends the rest; it prints `left NUMBER` as it goes and a report as
its last line. After the line `stop` it ends once nothing that has ended is shown as running. If its input ends
without these lines, the sweep's process died, and the mirror sends what is there.

So the sweep does not wait for MLflow, whose import takes seconds, and an unavailable MLflow server does not stop it.
Where another process sends the same store to the same tracker, this one waits until it may. What is not sent at the end
is sent by the next sweep's mirror, or by `cope-sweep sync`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue

from cope_sweep.store.errors import StoreError
from cope_sweep.store.index.database import redacted
from cope_sweep.store.store import INDEX_VARIABLE, Store
from cope_sweep.tracking.sync import MirrorReport, MirrorSession, OnSending, interrupted_with, known_left
from cope_sweep.tracking.uri import resolve_uri

MODULE = "cope_sweep.tracking.beside"
SYNC_INTERVAL_S = 2.0
MAX_SYNC_INTERVAL_S = 30.0
"""The interval doubles after each failed sync, up to this."""
FINAL_TRIES = 5
"""Number of tries of the last sync, 1 s apart, that may send nothing: the user waits for it."""
PATIENCE_S = 120.0
"""How long a sweep waits for its mirror without progress."""
STOP_S = 30.0
"""Time that a mirror has to end after it was asked to stop."""
WORKERS_END_S = 10.0
"""How long the workers of a sweep go on after its process died."""
REPORT_INTERVAL_S = 0.2
"""Between two reports of progress."""

log = logging.getLogger("cope_sweep.tracking")


class MlflowMirror:
    """The mirror process of a sweep, as seen from the sweep."""

    def __init__(self, process: subprocess.Popen[str], store: Store, uri: str, hint: str) -> None:
        """`hint` is appended to errors; it says how to send the rest later."""
        self.process, self._store, self._uri, self._hint = process, store, uri, hint
        self._gave_up = False

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
        command = [sys.executable, "-m", MODULE, "--store", store.location]
        with log_file:
            process = subprocess.Popen(
                [*command, *(["--sweep", sweep_id] if sweep_id else [])],
                # Not as arguments: URLs may contain a password, and arguments are visible to all users.
                env=os.environ | {"MLFLOW_TRACKING_URI": uri, INDEX_VARIABLE: store.index_url},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                # Ctrl-C and a closed terminal must not end the mirror before its last sync.
                start_new_session=True,
            )
        return cls(process, store, uri, f"{sync_hint(store, uri)}; details in {log_path}")

    def finish(
        self, on_sending: OnSending = lambda sent, total: None, *, patience_s: float = PATIENCE_S
    ) -> MirrorReport:
        """Send what is left, and wait for it as long as there is progress. Errors of MLflow are reported, not raised.

        Ctrl-C ends the wait: the rest is left to `cope-sweep sync`.

        Args:
            on_sending: Called with the number of runs and sweeps that were sent since now, and that of all.
            patience_s: How long to wait without progress.
        """
        if total := known_left(self._store, self._uri):
            on_sending(0, total)
        self._request("finish")
        lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        report, interrupted, deadline_s = "", False, time.monotonic() + patience_s
        while True:
            try:
                line = lines.get(timeout=None if self._gave_up else max(0.0, deadline_s - time.monotonic()))
                if not line:
                    break
                if not line.startswith("left "):
                    report = line
                    continue
                left = int(line.split()[1])
                total = max(total, left)
                on_sending(total - left, total)
                if not interrupted:
                    deadline_s = time.monotonic() + patience_s
            except Empty:
                self._gave_up = True
                self.process.kill()
            except KeyboardInterrupt:
                if interrupted:
                    self.process.kill()
                interrupted = True
                self._request("stop")
                deadline_s = time.monotonic() + STOP_S
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        return self._report(report, patience_s, interrupted=interrupted)

    def _read(self, lines: SimpleQueue[str]) -> None:
        """Pass on what the process prints; an empty line at its end."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        for line in self.process.stdout:
            lines.put(line)
        lines.put("")

    def _request(self, word: str) -> None:
        assert self.process.stdin is not None  # noqa: S101 - it was started with a pipe
        with contextlib.suppress(OSError):  # it has died, which its output says, too
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def _report(self, text: str, patience_s: float, *, interrupted: bool) -> MirrorReport:
        try:
            report = MirrorReport(**json.loads(text))
        except (ValueError, TypeError):
            left = known_left(self._store, self._uri)
            if interrupted:
                reason = interrupted_with(left)
            elif self._gave_up:
                reason = f"MLflow made no progress for {patience_s:.0f} s"
            else:
                reason = f"the process that copies runs to MLflow died (exit code {self.process.returncode})"
            report = MirrorReport(0, [reason], left)
        return replace(report, errors=[f"{error}; {self._hint}" for error in report.errors])


def sync_hint(store: Store, uri: str) -> str:
    """Hint for the end of an error message: how to send what is missing."""
    command = shlex.join(["cope-sweep", "sync", "--store", store.location, "--mlflow", redacted(uri)])
    return f"the store has all results; send them to MLflow later with `{command}`"


class _SweepProcess:
    """The sweep's process, as seen from the mirror: reads its requests from standard input."""

    def __init__(self) -> None:
        self.process_id = os.getppid()
        self.ended = threading.Event()
        """Set when the sweep requested the last sync or died."""
        self.died = True
        """Whether it died, once it has ended."""
        self.stop = threading.Event()
        """Set when the last sync shall end."""
        threading.Thread(target=self._read_requests, daemon=True).start()

    def _read_requests(self) -> None:
        for line in sys.stdin:
            if line == "finish\n":
                self.died = False
                self.ended.set()
            elif line == "stop\n":
                self.stop.set()
        self.ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; whether the sweep is still running afterwards."""
        # The parent's id is also checked, because a process that the sweep forked may keep the pipe open.
        return not self.ended.wait(timeout_s) and os.getppid() == self.process_id


def mirror(
    store: Store, uri: str, first_sweep: str | None = None, on_sending: OnSending = lambda sent, total: None
) -> MirrorReport:
    """Copy a store until the parent process ends it, and one last time."""
    sweep = _SweepProcess()
    with MirrorSession(store, uri, first_sweep=first_sweep) as session:
        _sync_while(session, sweep)
        if sweep.died:
            log.warning("the sweep's process is gone; sending what it left")
            time.sleep(WORKERS_END_S)
        # What a dead process has left says that it is running. Its leases end here.
        with contextlib.suppress(StoreError):
            store.end_expired()
        return session.send_all(tries=FINAL_TRIES, interrupted=sweep.stop.is_set, on_sending=on_sending)


def _sync_while(session: MirrorSession, sweep: _SweepProcess) -> None:
    """Sync at intervals until the sweep ends. A long backlog is sent in parts, between the rows of running runs."""
    interval_s = 0.0
    while sweep.wait(interval_s):
        began_s = time.monotonic()
        complete = session.sync(deadline_s=began_s + SYNC_INTERVAL_S)
        reasons = session.reasons()
        if complete or not reasons:
            interval_s = SYNC_INTERVAL_S if complete else 0.0
        else:
            interval_s = min(MAX_SYNC_INTERVAL_S, 2 * max(interval_s, SYNC_INTERVAL_S))
        log.info("sync %s in %.2f s", "done" if complete else "incomplete", time.monotonic() - began_s)
        for reason in reasons:
            log.warning("%s", reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy a store to MLflow while the parent process runs. Returns the exit code: 0 if everything was sent, else 1."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Copy a store to MLflow.")
    parser.add_argument("--store", required=True, help="folder or URL of the store")
    parser.add_argument("--sweep", help="id of the sweep whose runs are sent first")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ctrl-C is the sweep's; training has priority.
    with contextlib.suppress(OSError):
        os.nice(5)
    # Only the report may go to standard output. Whatever libraries print goes to standard error, which is the log.
    with os.fdopen(os.dup(1), "w") as report_file:
        os.dup2(2, 1)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        store = Store(options.store)
        uri = resolve_uri(store)
        log.info("copying %s to %s", store.location, redacted(uri))
        reported_s = 0.0

        def on_sending(sent: int, total: int) -> None:
            nonlocal reported_s
            if sent == total or time.monotonic() - reported_s > REPORT_INTERVAL_S:
                reported_s = time.monotonic()
                with contextlib.suppress(BrokenPipeError):
                    print("left", total - sent, file=report_file, flush=True)

        report = mirror(store, uri, options.sweep, on_sending)
        log.info("%d runs written, %d left", report.runs_written, report.left)
        for reason in report.errors:
            log.warning("%s", reason)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(report)), file=report_file, flush=True)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
