"""The log of a sweep's driver, for `cope-sweep logs SWEEP`: `logs/<sweep id>/driver.log` in the store."""

from __future__ import annotations

import contextlib
import threading
import time

from cope_sweep.config import Plan, Row
from cope_sweep.redaction import redacted
from cope_sweep.store import Event, Status, Store, StoreError

UPLOAD_EVERY_S = 30.0
"""Time between two copies to an object store."""


class DriverLog:
    """What a sweep's driver does, in lines with the time of day: how its runs begin and end, notes, errors.

    It is thread-safe. A log that cannot be written does not stop a sweep: lines are lost.
    """

    def __init__(self, store: Store, sweep_id: str, plan: Plan) -> None:
        self._store = store
        self._name = driver_log_name(sweep_id)
        self._lock = threading.Lock()
        self._shown: dict[str, tuple[Status, str | None]] = {}
        """Run id → status and worker of its last line."""
        self._rows: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._uploaded_s = time.monotonic()
        for row in plan.rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Let lines name the runs of this row."""
        self._rows |= {run.run_id: row.name for run in row.runs}
        self._names |= {run.run_id: f"{row.name}, seed {run.seed}" for run in row.runs}

    def row_of(self, run_id: str) -> str:
        """The name of a run's row; the run's id if it is not known."""
        return self._rows.get(run_id, run_id)

    def report(self, event: Event) -> None:
        """Append a line if the status of a run, or its worker, has changed."""
        now = (event.status, event.worker_id)
        # Without a worker, the run was handed to a process that has not started it.
        is_waiting = event.status == "running" and not event.worker_id
        if is_waiting or self._shown.get(event.run_id) == now:
            return
        self._shown[event.run_id] = now
        worker = f" on {event.worker_id}" if event.worker_id and event.status == "running" else ""
        reason = f": {event.message}" if event.message else ""
        name = self._names.get(event.run_id, "")
        self.write(f"{event.run_id} ({name}): {event.status}{worker}, step {event.step} of {event.steps}{reason}")

    def write(self, text: str) -> None:
        """Append lines."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        path = self._store.root / self._name
        with self._lock, contextlib.suppress(OSError, StoreError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"{now}  {line}\n" for line in redacted(text).splitlines())
            if time.monotonic() - self._uploaded_s > UPLOAD_EVERY_S:
                self._upload()

    def close(self) -> None:
        """Copy the log to the object store, where the store is one."""
        with self._lock, contextlib.suppress(OSError, StoreError):
            self._upload()

    def _upload(self) -> None:
        self._uploaded_s = time.monotonic()
        path = self._store.root / self._name
        if self._store.objects and path.exists():
            self._store.objects.upload(path, self._name)


def driver_log_name(sweep_id: str) -> str:
    """The name of a sweep's log in the store."""
    return f"logs/{sweep_id}/driver.log"
