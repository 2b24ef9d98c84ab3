"""The leases of one process: taken in the index, renewed by a thread, ended with what the run's folder says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from cope_sweep.config import RunSpec
from cope_sweep.store.event import Event, Status
from cope_sweep.store.index import IndexUnavailable, Lease, Refusal, RunRecord, waiting
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.reading import read_run
from cope_sweep.store.store import Store

LEASE_S = 30.0
"""The time for which a lease holds after its owner was last heard of."""
RENEWAL_S = 2.0
"""Time between two renewals, which also tell how far a run is, and learn of requests to stop."""
WAIT_NOTE_S = 3.0
STOP_WAIT_S = 15.0
"""The time for which a sweep that was stopped waits for a database that does not answer."""

T = TypeVar("T")


class LeaseHolder:
    """The leases of this process. All methods block; while the database does not answer they wait for it.

    An index that is away longer than the lease loses nothing: the leases are prolonged as soon as it is back, unless
    another sweep has taken them by then.
    """

    def __init__(
        self,
        store: Store,
        sweep_id: str,
        *,
        ttl_s: float = LEASE_S,
        stop: threading.Event | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to renew the leases that this process takes for the sweep `sweep_id`, which `stop` interrupts.

        `on_wait` is called, from the thread that waits, when the database has not answered for `WAIT_NOTE_S`.
        """
        self.store, self.sweep_id, self.ttl_s, self._stop, self._on_wait = store, sweep_id, ttl_s, stop, on_wait
        self._stopped_s: float | None = None
        self.owner = new_owner(sweep_id)
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._stops: Mapping[str, str] = {}
        self._progress: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="leases", daemon=True)
        self._thread.start()

    def acquire(self, run: RunSpec) -> Lease | Refusal:
        """Lease a run. A run that another sweep trains, or that is finished, is refused."""
        row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"), created_ms=int(time.time() * 1000))
        answer = self.waiting(lambda: self.store.index.acquire(row, self.owner, self.ttl_s))
        if isinstance(answer, Lease):
            with self._lock:
                self._held.add(run.run_id)
                self._lost.discard(run.run_id)
        return answer

    def progress(self, event: Event) -> None:
        """Note how far a run is. It is written with the next renewal."""
        with self._lock:
            if event.run_id in self._held:
                self._progress[event.run_id] = event

    def end(self, run_id: str) -> Status:
        """End the lease of a run with what its folder says, and return the status; `pending` if it was never begun.

        Where another owner has the lease, it stays, and is lost here.
        """
        with self._lock:
            self._held.discard(run_id)
            self._progress.pop(run_id, None)
        row = read_run(self.store.run(run_id), self.sweep_id)
        if row is None:
            self.waiting(lambda: self.store.index.delete([run_id], owner=self.owner))
            return "pending"
        if not self.waiting(lambda: self.store.index.end(row, self.owner)):
            with self._lock:
                self._lost.add(run_id)
        return row.status

    def is_lost(self, run_id: str) -> bool:
        """Whether this process took the lease of a run and does not hold it any more, because another owner has it."""
        with self._lock:
            return run_id in self._lost

    def stop_reason(self, run_id: str) -> str | None:
        """Why a run, `""` for the whole sweep, was asked to end, as of the last renewal; None: it was not."""
        with self._lock:
            return self._stops.get(run_id)

    def refresh(self) -> None:
        """Renew the leases now. Raises IndexUnavailable."""
        with self._lock:
            wanted = set(self._held)
            progress, self._progress = self._progress, {}
        held, stops = self.store.index.renew(self.owner, self.ttl_s, list(progress.values()))
        with self._lock:
            gone = (wanted & self._held) - held
            self._lost |= gone
            self._held -= gone
            self._stops = stops

    def close(self) -> None:
        """End all leases that are left, and stop to renew."""
        self._closed.set()
        self._thread.join()
        for run_id in sorted(self._held):
            self.end(run_id)

    def _renew_until_closed(self) -> None:
        while not self._closed.wait(min(RENEWAL_S, self.ttl_s / 5)):
            if self._held:
                try:
                    self.refresh()
                except IndexUnavailable:
                    continue

    def waiting(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is tried until the database answers.

        Raises:
            IndexUnusable: At once.
            IndexUnavailable: The holder was closed, or the sweep was stopped `STOP_WAIT_S` ago.
        """
        is_told = False

        def gives_up(waited_s: float) -> bool:
            nonlocal is_told
            now_s = time.monotonic()
            if waited_s >= WAIT_NOTE_S and not is_told:
                is_told = True
                self._on_wait()
            if self._stop is not None and self._stop.is_set():
                self._stopped_s = self._stopped_s or now_s
            return self._closed.is_set() or (self._stopped_s or now_s) < now_s - STOP_WAIT_S

        return waiting(call, gives_up)
