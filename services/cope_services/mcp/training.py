"""Sweeps that an agent starts: processes of the command line in the background, within a budget."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO

import psutil

from cope_services.http.errors import BusyError, ConflictError
from cope_services.http.jobs import SweepJobs
from cope_sweep.api.requests import SweepRequest
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.queries import recorded_plan
from cope_sweep.read.queries.plans import plan_cost
from cope_sweep.store import ACTIVE, Budget, open_store
from cope_sweep.store.store import INDEX_VARIABLE
from cope_sweep.sweep.jobs import new_submission, record_submission, settle_submission

POLL_S = 0.5
"""Time between two looks at the CPU time of a sweep."""
STOP_S = 60.0
"""A sweep that has not ended this long after it was asked to stop is ended by a signal."""
LAST_LINES = 5
RETRY_AFTER_S = 10


class TrainingNotAllowedError(UserError):
    """The server only reads."""

    default_code = "training_not_allowed"


class BeyondBudgetError(UserError):
    """The sweep would use more than is left of the budget."""

    default_code = "beyond_budget"


@dataclass(frozen=True)
class Allowance:
    """What all sweeps of a server may use together, until the server ends."""

    max_runs: int
    max_cpu_minutes: float


@dataclass
class _Process:
    sweep_id: str
    popen: subprocess.Popen[bytes]
    cpu_s: float = 0.0
    stop_asked_s: float | None = None


class Training:
    """Starts and stops sweeps, one at a time. Thread-safe; its methods block."""

    def __init__(self, jobs: SweepJobs, allowance: Allowance, *, no_mlflow: bool = False) -> None:
        self.jobs, self.allowance, self.no_mlflow = jobs, allowance, no_mlflow
        self._lock = threading.Lock()
        self._active: _Process | None = None
        self._started: set[str] = set()
        self._runs, self._cpu_s = 0, 0.0
        """What ended sweeps have used: runs that they were allowed to train, and seconds of CPU time."""
        self._watching: threading.Thread | None = None

    @property
    def left(self) -> Allowance:
        """What is left of the budget."""
        used_s = self._cpu_s + (self._active.cpu_s if self._active else 0.0)
        return Allowance(self.allowance.max_runs - self._runs, self.allowance.max_cpu_minutes - used_s / 60)

    @property
    def left_text(self) -> str:
        """What is left of the budget, in words."""
        left = self.left
        return f"budget left: {left.max_runs} runs, {max(left.max_cpu_minutes, 0):.1f} CPU minutes"

    def run(self, request: SweepRequest) -> str:
        """Start a sweep in the background; return its id.

        Raises:
            BusyError: Another sweep of this server is active.
            BeyondBudgetError: The plan needs more than is left of the budget.
            ConflictError: Nothing is left to train.
            InvalidError, NotFoundError, SpecError: The request is invalid.
        """
        loaded, text, plan = self.jobs.planned(request)
        with self._lock:
            if self._active is not None:
                raise BusyError(
                    f"sweep {self._active.sweep_id} is training; wait for it, or stop it",
                    RETRY_AFTER_S,
                    sweep_id=self._active.sweep_id,
                )
            settings = self.jobs.settings
            open_store(settings.store, index=settings.index or None, create=True)  # makes the folder
            store = self.jobs.queries.store
            plan = recorded_plan(plan, store)
            cost = plan_cost(plan, store, leave_out=request.leave_out, max_runs=request.max_runs)
            if not cost.to_do:
                raise ConflictError("all runs are finished: there is nothing to train", code="nothing_left")
            self.check(cost.to_do, cost.least_s)
            budget = request.model_dump(include=set(Budget.model_fields)) | {"max_runs": cost.to_do}
            # It holds also where nobody watches any more, because this server was killed.
            budget["time_budget_s"] = max(self.left.max_cpu_minutes * 60, 1.0)
            submission = new_submission(
                loaded, file_text=text, scale=request.scale, sets=request.set, leave_out=request.leave_out,
                no_mlflow=self.no_mlflow, **budget,
            )  # fmt: skip
            record_submission(submission, plan, store)
            self._runs += cost.to_do
            self._start(submission.sweep_id)
        return submission.sweep_id

    def stop(self, sweep_id: str) -> None:
        """Ask a sweep of this server to stop: its runs write checkpoints first. Raises NotFoundError."""
        if sweep_id not in self._started:
            raise NotFoundError(
                f"this server has started no sweep {sweep_id[:80]!r}; stop others with `cope-sweep stop`",
                sweep_id=sweep_id[:80],
                allowed=sorted(self._started),
            )
        self.jobs.stop(sweep_id)

    def close(self) -> None:
        """End the sweep in training: the budget holds only while somebody watches. Its runs write checkpoints first."""
        if self._active is not None:
            self._active.popen.terminate()
            self.join()

    def join(self) -> None:
        """Wait until the last sweep has ended and its use of the budget is counted."""
        if self._watching is not None:
            self._watching.join(STOP_S)

    def check(self, runs: int, least_s: float) -> None:
        """Raise BeyondBudgetError if this many runs, or this much time, are more than is left."""
        left = self.left
        if runs > left.max_runs or least_s / 60 > left.max_cpu_minutes:
            raise BeyondBudgetError(
                f"the plan has {runs} runs and takes at least {least_s / 60:.1f} min; {self.left_text}: train fewer "
                "with `max_runs`, take a smaller scale or fewer seeds, or ask the person who started the server",
                runs=runs,
                minutes=round(least_s / 60, 2),
                runs_left=left.max_runs,
                cpu_minutes_left=round(left.max_cpu_minutes, 2),
            )

    def _start(self, sweep_id: str) -> None:
        settings = self.jobs.settings
        command = [sys.executable, "-m", "cope_sweep.cli", "run", "--submission", sweep_id, "--local", "--json"]
        # In the environment: their URLs may hold passwords.
        places = {"COPE_SWEEP_STORE": self.jobs.queries.store.location, "COPE_SWEEP_ABLATIONS": str(settings.ablations)}
        if settings.index:
            places[INDEX_VARIABLE] = settings.index
        log = tempfile.TemporaryFile()  # noqa: SIM115 - its watcher closes it
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **places}
        )
        self._active = _Process(sweep_id, popen)
        self._started.add(sweep_id)
        self._watching = threading.Thread(target=self._watch, args=(self._active, log), daemon=True)
        self._watching.start()

    def _watch(self, process: _Process, log: IO[bytes]) -> None:
        """Measure the CPU time of a sweep, stop it at the end of the budget, and record how it ended."""
        with log:
            while process.popen.poll() is None:
                process.cpu_s = max(process.cpu_s, _cpu_s(process.popen.pid))
                now_s = time.monotonic()
                if self.left.max_cpu_minutes <= 0 and process.stop_asked_s is None:
                    process.stop_asked_s = now_s
                    with contextlib.suppress(Exception):  # the signal below ends it where the index does not answer
                        self.jobs.queries.store.index.request_stop(process.sweep_id)
                elif process.stop_asked_s is not None and now_s - process.stop_asked_s > STOP_S:
                    process.popen.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(POLL_S)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        with contextlib.suppress(Exception):  # a sweep that recorded its own end stays as it is
            store = self.jobs.queries.store
            summary = store.index.sweep(process.sweep_id)
            if summary is not None and summary.status in ACTIVE:
                settle_submission(store, process.sweep_id, "\n".join(lines))
        with self._lock:
            self._cpu_s += process.cpu_s
            self._active = None


def _cpu_s(pid: int) -> float:
    """The CPU time of a process and its children, in seconds; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        times = [process.cpu_times(), *(child.cpu_times() for child in process.children(recursive=True))]
    except psutil.Error:
        return 0.0
    # Children that have ended count for their parent.
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)
