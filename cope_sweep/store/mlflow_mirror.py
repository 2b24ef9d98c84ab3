"""Copies a store to MLflow while a sweep runs, in a process of its own.

    python -m cope_sweep.store.mlflow_mirror --store store --sweep 20261120-110501-3f2a

This process is the only one that writes to MLflow. The sweep starts it with `MlflowMirror.start` and holds its
standard input. The line `finish TIME` requests a last sync until then (seconds since 1970); the process then writes a
report to standard output. If its input ends without that line, the sweep's process died, and the mirror sends what is
there.

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
from dataclasses import asdict, dataclass

from cope_sweep.store.errors import StoreError
from cope_sweep.store.mirror_session import MirrorSession
from cope_sweep.store.preflight import redacted, resolve_uri
from cope_sweep.store.store import INDEX_VARIABLE, Store
from cope_sweep.store.tracker_sync import backlog_count

MODULE = "cope_sweep.store.mlflow_mirror"
SYNC_INTERVAL_S = 2.0
MAX_SYNC_INTERVAL_S = 30.0
"""The interval doubles after each failed sync, up to this."""
FINAL_TRIES = 5
"""Of the last sync, in a row and 1 s apart, that may send nothing: the user waits for it."""
ABANDONED_SYNC_S = 60.0
"""Time limit of the last sync after the sweep's process died."""
WORKERS_END_S = 10.0
"""How long the workers of a sweep go on after its process died."""
EXIT_GRACE_S = 5.0
"""Time that a mirror has, after the deadline of its last sync, to write its report."""

log = logging.getLogger("cope_sweep.mlflow_mirror")


@dataclass(frozen=True)
class MirrorReport:
    """What a mirror has copied."""

    runs_written: int
    """Number of runs of which anything was sent."""
    errors: list[str]
    """One line for each reason why something is missing in MLflow, with the command that sends it later."""
    left: int = 0
    """Number of runs and sweeps that are missing in MLflow."""


class MlflowMirror:
    """The mirror process of a sweep, as seen from the sweep."""

    def __init__(self, process: subprocess.Popen[str], hint: str) -> None:
        """`hint` is appended to errors; it says how to send the rest later."""
        self.process, self._hint = process, hint

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
        return cls(process, f"{sync_hint(store, uri)}; details in {log_path}")

    def finish(self, timeout_s: float = 60.0) -> MirrorReport:
        """Request the last sync and wait for it, at most `timeout_s`. Errors of MLflow are reported, not raised."""
        try:
            # The time of day, because the process may still be starting.
            request = f"finish {time.time() + timeout_s}\n"
            output, _ = self.process.communicate(request, timeout=timeout_s + EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return MirrorReport(0, [f"MLflow took longer than {timeout_s:.0f} s; {self._hint}"])
        try:
            report = json.loads(output)
            return MirrorReport(
                report["runs_written"], [f"{error}; {self._hint}" for error in report["errors"]], report["left"]
            )
        except ValueError:
            code = self.process.returncode
            return MirrorReport(0, [f"the process that copies runs to MLflow died (exit code {code}); {self._hint}"])


def sync_hint(store: Store, uri: str) -> str:
    """What to do where something was not sent, for the end of an error message."""
    command = shlex.join(["cope-sweep", "sync", "--store", store.location, "--mlflow", redacted(uri)])
    return f"the store has all results; send them to MLflow later with `{command}`"


class _SweepProcess:
    """The sweep's process, as seen from the mirror: reads its requests from standard input."""

    def __init__(self) -> None:
        self.process_id = os.getppid()
        self.ended = threading.Event()
        """Set when the sweep requested the last sync or died."""
        self.deadline_s: float | None = None
        """Deadline of the last sync, on the monotonic clock. None if the sweep's process died."""
        threading.Thread(target=self._read_requests, daemon=True).start()

    def _read_requests(self) -> None:
        for line in sys.stdin:
            request, _, seconds = line.partition(" ")
            if request == "finish":
                self.deadline_s = time.monotonic() + float(seconds) - time.time()
                break
        self.ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; whether the sweep is still running afterwards."""
        # The parent's id is also checked, because a process that the sweep forked may keep the pipe open.
        return not self.ended.wait(timeout_s) and os.getppid() == self.process_id


def mirror(store: Store, uri: str, first_sweep: str | None = None) -> MirrorReport:
    """Copy a store until the parent process ends it, and one last time."""
    sweep = _SweepProcess()
    with MirrorSession(store, uri, first_sweep=first_sweep) as session:
        _sync_while(session, sweep)
        deadline_s = sweep.deadline_s
        if deadline_s is None:
            log.warning("the sweep's process is gone; sending what it left")
            time.sleep(WORKERS_END_S)
            deadline_s = time.monotonic() + ABANDONED_SYNC_S
        # What a dead process has left says that it is running. Its leases end here.
        with contextlib.suppress(StoreError):
            store.settle()
        complete = session.sync_until(deadline_s, tries=FINAL_TRIES)
        return report_of(session, complete=complete)


def report_of(session: MirrorSession, *, complete: bool) -> MirrorReport:
    """What a session has sent, and why it has not sent everything."""
    if complete:
        return MirrorReport(session.written, [])
    left = 0
    with contextlib.suppress(StoreError):
        left = backlog_count(session.store, session.uri)
    return MirrorReport(session.written, session.reasons() or [f"the time ran out with {left} items to send"], left)


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
    # Training has priority.
    with contextlib.suppress(OSError):
        os.nice(5)
    # Only the report may go to standard output. Whatever libraries print goes to standard error, which is the log.
    with os.fdopen(os.dup(1), "w") as report_file:
        os.dup2(2, 1)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        store = Store(options.store)
        uri = resolve_uri(store)
        log.info("copying %s to %s", store.location, redacted(uri))
        report = mirror(store, uri, options.sweep)
        log.info("%d runs written, %d left", report.runs_written, report.left)
        for reason in report.errors:
            log.warning("%s", reason)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(report)), file=report_file, flush=True)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
