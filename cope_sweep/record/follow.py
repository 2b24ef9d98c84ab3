"""The one writer into MLflow: a process beside a sweep that carries the ledger there, and outlives it for a last time.

    python -m cope_sweep.record.follow --store store --sweep 20261120-110501-3f2a

The sweep holds its standard input. A line `finish SECONDS` asks for the last sync within that time, and a report on
standard output; the end of input without it means that the sweep's process died, and what it left is carried too. So
MLflow costs a sweep nothing (importing it takes seconds), and its going away harms none: with `--once`, a sweep is
carried at any later time, as often as one likes.
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

from cope_sweep.record.carry import Carrier
from cope_sweep.record.ledger import Ledger, StoreError
from cope_sweep.record.preflight import redacted, resolve_uri
from cope_sweep.record.tracking import Tracking, TrackingError

SYNC_EVERY_S = 2.0
LAST_TRIES = 4
RETRY_EVERY_S = 1.0
"""How often the last sync is tried, and seconds in between: people wait for it."""
ORPHAN_S = 60.0
"""Seconds that the last sync may take after the sweep's process died; half of it for its workers to die too."""
GRACE_S = 5.0
"""Seconds that a follower has, beyond its deadline, to say what came of it."""

log = logging.getLogger("cope_sweep.follow")


@dataclass(frozen=True)
class FollowReport:
    """What came of carrying a sweep."""

    runs_written: int
    """Runs that anything was sent of."""
    errors: list[str]
    """What is not in MLflow, why, and the way out, a line each."""


class Follower:
    """The sweep's end of the process: `start` it, and `finish` it once the sweep's record says how it ended."""

    def __init__(self, process: subprocess.Popen[str], way_out: str) -> None:
        self.process, self._way_out = process, way_out

    @classmethod
    def start(cls, ledger: Ledger, sweep_id: str, uri: str) -> Follower:
        """Begin to carry a sweep whose record is in the ledger. Returns at once.

        Raises StoreError where the store's log folder cannot be written.
        """
        log_path = ledger.root / "logs" / f"mlflow-{sweep_id}.log"
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_file = log_path.open("a")
        except OSError as error:
            raise StoreError(f"{log_path}: cannot be written ({error.strerror})") from error
        command = [sys.executable, "-m", "cope_sweep.record.follow", "--store", str(ledger.root), "--sweep", sweep_id]
        with log_file:
            process = subprocess.Popen(
                command,
                # Not an argument: a URI can hold a password, and arguments are public.
                env=os.environ | {"MLFLOW_TRACKING_URI": uri},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                # A Ctrl-C or a closed terminal is for the sweep; the last sync comes after it.
                start_new_session=True,
            )
        return cls(process, f"{_way_out(ledger, sweep_id, uri)}; details in {log_path}")

    def finish(self, timeout_s: float = 60.0) -> FollowReport:
        """Ask for the last sync; return when it is done, or has taken `timeout_s`. Nothing of MLflow's is raised."""
        try:
            out, _ = self.process.communicate(f"finish {timeout_s}\n", timeout=timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return FollowReport(0, [f"MLflow took longer than {timeout_s:.0f} s; {self._way_out}"])
        try:
            answer = json.loads(out)
            return FollowReport(answer["runs_written"], answer["errors"])
        except ValueError:
            code = self.process.returncode
            return FollowReport(0, [f"what carries runs into MLflow died (exit code {code}); {self._way_out}"])


def _way_out(ledger: Ledger, sweep_id: str, uri: str) -> str:
    command = (
        f"python -m cope_sweep.record.follow --once --store {ledger.root} --sweep {sweep_id} --uri {redacted(uri)}"
    )
    return f"nothing is lost, the store has it all; carry it later with `{command}`"


class _Sweep:
    """The follower's end of the pipe."""

    def __init__(self) -> None:
        self.process_id = os.getppid()
        self.ended = threading.Event()
        self.deadline_s: float | None = None
        """When the last sync must be done, on the monotonic clock; None where the sweep's process died."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, seconds = line.partition(" ")
            if word == "finish":
                self.deadline_s = time.monotonic() + float(seconds)
                break
        self.ended.set()


def follow(ledger: Ledger, sweep_id: str, uri: str, *, once: bool = False) -> FollowReport:
    """Sync until the sweep ends, and a last time; or, `once`, just now."""
    sweep = None if once else _Sweep()
    carrier: Carrier | None = None
    trouble: str | None = None

    def sync(*, abandoned: bool = False) -> bool:
        """Whether all is there."""
        nonlocal carrier, trouble
        try:
            if carrier is None:
                carrier = Carrier(ledger, sweep_id, _opened(uri))
            carrier.sync(abandoned=abandoned)
        except (TrackingError, StoreError, OSError) as error:
            if trouble != str(error):
                log.warning("%s", error)
            trouble = str(error)
            return False
        trouble = None
        for key, message in carrier.errors.items():
            log.warning("%s: %s", key, message)
        return not carrier.errors

    wait_s = 0.0
    # A process that the sweep forked can hold the pipe open; so its parent's id is looked at too.
    while sweep and not sweep.ended.wait(wait_s) and os.getppid() == sweep.process_id:
        began_s = time.monotonic()
        good = sync()
        # A tracker that does not answer is asked less often.
        wait_s = SYNC_EVERY_S if good else min(30.0, 2 * max(wait_s, SYNC_EVERY_S))
        log.info("sync %s in %.2f s", "done" if good else "incomplete", time.monotonic() - began_s)
    deadline_s = sweep.deadline_s if sweep else None
    abandoned = sweep is not None and deadline_s is None
    deadline_s = deadline_s or time.monotonic() + ORPHAN_S
    if abandoned:
        log.warning("the sweep's process is gone; what it left is carried now")
        _await_workers(ledger, sweep_id, time.monotonic() + ORPHAN_S / 2)
    for _ in range(LAST_TRIES):
        if sync(abandoned=abandoned) or time.monotonic() + RETRY_EVERY_S > deadline_s:
            break
        time.sleep(RETRY_EVERY_S)
    reasons = Counter(carrier.errors.values()) if carrier else Counter()
    if trouble:
        reasons[trouble] += 1
    way_out = _way_out(ledger, sweep_id, uri)
    errors = [
        f"{message} ({count}×); {way_out}" if count > 1 else f"{message}; {way_out}"
        for message, count in reasons.items()
    ]
    return FollowReport(len(carrier.written) if carrier else 0, errors)


def _opened(uri: str) -> Tracking:
    from cope_sweep.record.mlflow import MlflowTracking

    return MlflowTracking(uri)


def _await_workers(ledger: Ledger, sweep_id: str, deadline_s: float) -> None:
    """Workers notice a little later than the follower that the sweep died; until then their runs look alive."""
    record = next((each for each in ledger.sweeps() if each["sweep_id"] == sweep_id), None)
    runs = [ledger.run(run["run_id"]) for run in record["runs"]] if record else []
    while any(run.is_locked() for run in runs) and time.monotonic() < deadline_s:
        time.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow a sweep to its end; 0 if all of it is in MLflow."""
    parser = argparse.ArgumentParser(
        prog="python -m cope_sweep.record.follow", description="Carry a sweep into MLflow."
    )
    parser.add_argument("--store", type=Path, required=True, help="the ledger's folder")
    parser.add_argument("--sweep", required=True, help="the sweep's id: a file in the store's folder `sweeps`")
    parser.add_argument("--uri", help="tracking URI; default: $MLFLOW_TRACKING_URI, else SQLite in the store")
    parser.add_argument("--once", action="store_true", help="carry what there is now, and do not wait for the sweep")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Training comes first.
    with contextlib.suppress(OSError):
        os.nice(5)
    # Fail within a minute rather than after MLflow's four: there is always a next sync.
    for name, value in {"MAX_RETRIES": "1", "BACKOFF_FACTOR": "1", "TIMEOUT": "30"}.items():
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    # Only the report goes to standard output, whatever libraries print.
    with os.fdopen(os.dup(1), "w") as report_file:
        os.dup2(2, 1)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        ledger = Ledger(options.store)
        uri = resolve_uri(ledger, options.uri)
        log.info("following sweep %s into %s", options.sweep, redacted(uri))
        report = follow(ledger, options.sweep, uri, once=options.once)
        log.info("%d runs written, %d errors", report.runs_written, len(report.errors))
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(report)), file=report_file, flush=True)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
