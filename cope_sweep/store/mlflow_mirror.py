"""Copies a running sweep from the store to MLflow, in a process of its own.

    python -m cope_sweep.store.mlflow_mirror --store store --sweep 20261120-110501-3f2a

This process is the only one that writes to MLflow. The sweep starts it with `MlflowMirror.start` and holds its
standard input. The line `finish SECONDS` requests a last sync within that time; the process then writes a report to
standard output. If its input ends without that line, the sweep's process died, and the mirror sends what is there.

So the sweep does not wait for MLflow, whose import takes seconds, and an unavailable MLflow server does not stop it.
With `--once`, a sweep can be copied at any later time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cope_sweep.store.artifacts import Store, StoreError
from cope_sweep.store.mlflow import MlflowTracking
from cope_sweep.store.preflight import redacted, resolve_uri
from cope_sweep.store.tracker_sync import TrackerSync
from cope_sweep.store.tracking import TrackingError

MODULE = "cope_sweep.store.mlflow_mirror"
SYNC_INTERVAL_S = 2.0
MAX_SYNC_INTERVAL_S = 30.0
"""The interval doubles after each failed sync, up to this."""
FINAL_SYNC_TRIES = 4
FINAL_RETRY_DELAY_S = 1.0
"""Between two tries of the last sync. The user waits for it."""
ABANDONED_SYNC_S = 60.0
"""Time limit of the last sync after the sweep's process died. Half of it is for the sweep's workers to end."""
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


class MlflowMirror:
    """The mirror process of a sweep, as seen from the sweep."""

    def __init__(self, process: subprocess.Popen[str], hint: str) -> None:
        """`hint` is appended to errors; it says how to send the sweep later."""
        self.process, self._hint = process, hint

    @classmethod
    def start(cls, store: Store, sweep_id: str, uri: str) -> MlflowMirror:
        """Start to copy a sweep whose record is in the store. Returns at once.

        Raises:
            StoreError: The log folder of the store cannot be written.
        """
        log_path = store.root / "logs" / f"mlflow-{sweep_id}.log"
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_file = log_path.open("a")
        except OSError as error:
            raise StoreError(f"{log_path}: cannot be written ({error.strerror})") from error
        command = [sys.executable, "-m", MODULE, "--store", str(store.root), "--sweep", sweep_id]
        with log_file:
            process = subprocess.Popen(
                command,
                # Not as an argument: the URI may contain a password, and arguments are visible to all users.
                env=os.environ | {"MLFLOW_TRACKING_URI": uri},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                # Ctrl-C and a closed terminal must not end the mirror before its last sync.
                start_new_session=True,
            )
        return cls(process, f"{_resend_hint(store, sweep_id, uri)}; details in {log_path}")

    def finish(self, timeout_s: float = 60.0) -> MirrorReport:
        """Request the last sync and wait for it, at most `timeout_s`. Errors of MLflow are reported, not raised."""
        try:
            output, _ = self.process.communicate(f"finish {timeout_s}\n", timeout=timeout_s + EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return MirrorReport(0, [f"MLflow took longer than {timeout_s:.0f} s; {self._hint}"])
        try:
            report = json.loads(output)
            return MirrorReport(report["runs_written"], report["errors"])
        except ValueError:
            code = self.process.returncode
            return MirrorReport(0, [f"the process that copies runs to MLflow died (exit code {code}); {self._hint}"])


def _resend_hint(store: Store, sweep_id: str, uri: str) -> str:
    command = f"python -m {MODULE} --once --store {store.root} --sweep {sweep_id} --uri {redacted(uri)}"
    return f"the store still has all results; copy them to MLflow later with `{command}`"


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
                self.deadline_s = time.monotonic() + float(seconds)
                break
        self.ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; whether the sweep is still running afterwards."""
        # The parent's id is also checked, because a process that the sweep forked may keep the pipe open.
        return not self.ended.wait(timeout_s) and os.getppid() == self.process_id


class _Mirror:
    """Copies one sweep; keeps the connection to MLflow and the latest error between syncs."""

    def __init__(self, store: Store, sweep_id: str, uri: str) -> None:
        self.store, self.sweep_id, self.uri = store, sweep_id, uri
        self._sync: TrackerSync | None = None
        self._error: str | None = None
        """Why the last sync failed as a whole."""

    def sync(self, *, abandoned: bool = False) -> bool:
        """Whether everything was sent."""
        try:
            if self._sync is None:
                self._sync = TrackerSync(self.store, self.sweep_id, MlflowTracking(self.uri))
            self._sync.sync(abandoned=abandoned)
        except (TrackingError, StoreError, OSError) as error:
            if self._error != str(error):
                log.warning("%s", error)
            self._error = str(error)
            return False
        self._error = None
        for key, message in self._sync.errors.items():
            log.warning("%s: %s", key, message)
        return not self._sync.errors

    def sync_while(self, sweep: _SweepProcess) -> None:
        """Sync at intervals until the sweep ends."""
        interval_s = 0.0
        while sweep.wait(interval_s):
            began_s = time.monotonic()
            complete = self.sync()
            interval_s = SYNC_INTERVAL_S if complete else min(MAX_SYNC_INTERVAL_S, 2 * max(interval_s, SYNC_INTERVAL_S))
            log.info("sync %s in %.2f s", "done" if complete else "incomplete", time.monotonic() - began_s)

    def sync_finally(self, deadline_s: float, *, abandoned: bool) -> None:
        """Sync once more; try again until everything was sent or the deadline is near."""
        for _ in range(FINAL_SYNC_TRIES):
            if self.sync(abandoned=abandoned) or time.monotonic() + FINAL_RETRY_DELAY_S > deadline_s:
                break
            time.sleep(FINAL_RETRY_DELAY_S)

    def report(self) -> MirrorReport:
        reasons = Counter(self._sync.errors.values()) if self._sync else Counter()
        if self._error:
            reasons[self._error] += 1
        hint = _resend_hint(self.store, self.sweep_id, self.uri)
        errors = [
            f"{reason} ({count}×); {hint}" if count > 1 else f"{reason}; {hint}" for reason, count in reasons.items()
        ]
        return MirrorReport(len(self._sync.written) if self._sync else 0, errors)


def mirror(store: Store, sweep_id: str, uri: str, *, once: bool = False) -> MirrorReport:
    """Copy a sweep until the parent process ends it, and one last time; with `once`, copy it one time only."""
    running = _Mirror(store, sweep_id, uri)
    sweep = None if once else _SweepProcess()
    if sweep:
        running.sync_while(sweep)
    deadline_s = sweep.deadline_s if sweep else None
    abandoned = sweep is not None and deadline_s is None
    deadline_s = deadline_s or time.monotonic() + ABANDONED_SYNC_S
    if abandoned:
        log.warning("the sweep's process is gone; sending what it left")
        _wait_for_workers(store, sweep_id, time.monotonic() + ABANDONED_SYNC_S / 2)
    running.sync_finally(deadline_s, abandoned=abandoned)
    return running.report()


def _wait_for_workers(store: Store, sweep_id: str, deadline_s: float) -> None:
    """Wait until no run of the sweep is locked: workers end a little later than the sweep's process."""
    record = next((each for each in store.sweeps() if each["sweep_id"] == sweep_id), None)
    runs = [store.run(run["run_id"]) for run in record["runs"]] if record else []
    while any(run.is_locked() for run in runs) and time.monotonic() < deadline_s:
        time.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy a sweep to MLflow. Returns the exit code: 0 if everything was sent, else 1."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Copy a sweep from the store to MLflow.")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store")
    parser.add_argument("--sweep", required=True, help="id of the sweep: a file in the store's folder `sweeps`")
    parser.add_argument("--uri", help="tracking URI; default: $MLFLOW_TRACKING_URI, else SQLite in the store")
    parser.add_argument("--once", action="store_true", help="copy the sweep as it is now and exit")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Training has priority.
    with contextlib.suppress(OSError):
        os.nice(5)
    # MLflow's defaults retry a request for four minutes. One minute is enough, because there is always a next sync.
    for name, value in {"MAX_RETRIES": "1", "BACKOFF_FACTOR": "1", "TIMEOUT": "30"}.items():
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    # Only the report may go to standard output. Whatever libraries print goes to standard error, which is the log.
    with os.fdopen(os.dup(1), "w") as report_file:
        os.dup2(2, 1)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        store = Store(options.store)
        uri = resolve_uri(store, options.uri)
        log.info("copying sweep %s to %s", options.sweep, redacted(uri))
        report = mirror(store, options.sweep, uri, once=options.once)
        log.info("%d runs written, %d errors", report.runs_written, len(report.errors))
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(report)), file=report_file, flush=True)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
