"""The leases of one sweep: taken in the index, renewed by a thread, ended with what the run's folder says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cope_sweep.spec import RunSpec
from cope_sweep.store.event import Status
from cope_sweep.store.index import IndexUnavailable, Lease, Progress, Refusal, RunRow
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.reading import read_run
from cope_sweep.store.store import Store

LEASE_S = 30.0
"""How long a lease holds after its owner was last heard of."""
RETRY_INTERVAL_S = 0.5
"""Between two tries to reach a database that does not answer."""

T = TypeVar("T")


class LeaseHolder:
    """The leases of a sweep. All methods block; while the database does not answer they wait for it.

    An index that is away longer than the lease loses nothing: the leases are prolonged as soon as it is back, unless
    another sweep has taken them by then.
    """

    def __init__(self, store: Store, sweep_id: str, *, ttl_s: float = LEASE_S) -> None:
        """Start to renew the leases of the sweep `sweep_id` every fifth of `ttl_s`."""
        self.store, self.sweep_id, self.ttl_s = store, sweep_id, ttl_s
        self.owner = new_owner(sweep_id)
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._progress: dict[str, Progress] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="leases", daemon=True)
        self._thread.start()

    def acquire(self, run: RunSpec) -> Lease | Refusal:
        """Lease a run. A run that another sweep trains, or that is finished, is refused."""
        row = RunRow(run.run_id, "running", run.model_dump(mode="json"), created_ms=int(time.time() * 1000))
        answer = self._waiting(lambda: self.store.index.acquire(row, self.owner, self.ttl_s))
        if isinstance(answer, Lease):
            with self._lock:
                self._held.add(run.run_id)
                self._lost.discard(run.run_id)
        return answer

    def progress(self, run_id: str, step: int, worker_id: str) -> None:
        """Note how far a run is. It is written with the next renewal."""
        with self._lock:
            if run_id in self._held:
                self._progress[run_id] = Progress(step, worker_id)

    def end(self, run_id: str) -> Status:
        """End the lease of a run with what its folder says, and return the status; `pending` if it was never begun."""
        with self._lock:
            self._held.discard(run_id)
            self._progress.pop(run_id, None)
        row = read_run(self.store.run(run_id), self.sweep_id)
        if row is None:
            self._waiting(lambda: self.store.index.delete([run_id]))
            return "pending"
        self._waiting(lambda: self.store.index.end(row, self.owner))
        return row.status

    def lost(self) -> set[str]:
        """The runs whose lease this sweep took and does not hold any more, because another owner has it."""
        with self._lock:
            return set(self._lost)

    def close(self) -> None:
        """End all leases that are left, and stop to renew."""
        self._closed.set()
        self._thread.join()
        for run_id in sorted(self._held):
            self.end(run_id)

    def _renew_until_closed(self) -> None:
        while not self._closed.wait(self.ttl_s / 5):
            with self._lock:
                wanted = set(self._held)
                progress, self._progress = self._progress, {}
            if not wanted:
                continue
            try:
                held = self.store.index.renew(self.owner, self.ttl_s, progress)
            except IndexUnavailable:
                continue
            with self._lock:
                gone = (wanted & self._held) - held
                self._lost |= gone
                self._held -= gone

    def _waiting(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is tried until the database answers, or the holder is closed."""
        while True:
            try:
                return call()
            except IndexUnavailable:
                if self._closed.wait(RETRY_INTERVAL_S):
                    raise
