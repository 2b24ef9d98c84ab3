"""The leases of a sweep: on itself, and on the runs that it trains. Only the driver takes and renews them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cope_sweep.config import RunSpec
from cope_sweep.store import Event, Lease, Refusal, RunRecord, Store
from cope_sweep.store.index import IndexUnavailable, waiting
from cope_sweep.store.reading import read_run

LEASE_S = 20.0
"""A lease ends when its sweep has not been heard of for this long: the runs of a killed driver are free then."""
RENEWAL_S = 2.0
"""Time between two renewals, which also write the progress of runs and read the request to stop. A trial reports as
often: more would not be written."""
WAIT_NOTE_S = 3.0
"""After this long without an answer of the index, the user gets a note."""
STOP_WAIT_S = 15.0
"""The time for which a sweep that was stopped waits for an index that does not answer."""

T = TypeVar("T")


class Leases:
    """The leases of one sweep. A thread renews them all with one statement; a context manager ends it.

    If the index is away for longer than `LEASE_S`, nothing is lost: the leases are prolonged as soon as it is back,
    unless another sweep has taken them by then.
    """

    def __init__(
        self,
        store: Store,
        sweep_id: str,
        *,
        stop: threading.Event,
        on_stop_request: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to renew the leases of the sweep `sweep_id`.

        Args:
            store: The store.
            sweep_id: The sweep that holds the leases.
            stop: Set when the sweep has to end: an index that does not answer is then waited for `STOP_WAIT_S` only.
            on_stop_request: Called once, from the thread that renews, when somebody asks the sweep to stop.
            on_wait: Called, from the thread that waits, when the index has not answered for `WAIT_NOTE_S`.
        """
        self.store, self.sweep_id = store, sweep_id
        self._stop, self._on_stop_request, self._on_wait = stop, on_stop_request, on_wait
        self._stopped_s: float | None = None
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._progress: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="leases", daemon=True)
        self._thread.start()

    def acquire(self, run: RunSpec) -> Lease | Refusal:
        """Lease a run. One that another sweep trains, or that is finished, is refused. Raises IndexUnavailable."""
        row = RunRecord.of(run.run_id, "running", run.model_dump(mode="json"), created_ms=int(time.time() * 1000))
        answer = self.store.index.acquire(row, self.sweep_id, LEASE_S)
        if isinstance(answer, Lease):
            with self._lock:
                self._held.add(run.run_id)
                self._lost.discard(run.run_id)  # of an earlier attempt here
        return answer

    def report(self, event: Event) -> None:
        """A run is as far as `event` says, which the next renewal writes. Of several events, the last one counts."""
        with self._lock:
            if event.run_id in self._held:
                self._progress[event.run_id] = event

    def end(self, run_id: str) -> RunRecord | None:
        """End the lease of a run with what its folder says. Waits for the index.

        Returns its record, which is pending if the run has never started; None if another sweep has the lease.
        """
        # First: else a renewal takes the ended lease for one that another sweep has taken.
        with self._lock:
            self._held.discard(run_id)
            self._progress.pop(run_id, None)
        record = read_run(self.store.run(run_id), self.sweep_id)
        if record is None:
            self.waiting(lambda: self.store.index.release([run_id], self.sweep_id))
            return RunRecord(run_id=run_id)
        return record if self.waiting(lambda: self.store.index.end(record, self.sweep_id)) else None

    def is_lost(self, run_id: str) -> bool:
        """Another sweep has taken the lease of a run that this sweep held."""
        with self._lock:
            return run_id in self._lost

    def renew(self) -> None:
        """Renew the leases now. Raises IndexUnavailable."""
        with self._lock:
            wanted = set(self._held)
            progress, self._progress = self._progress, {}
        # Without the lock, since the database may take long: `report` is called from threads that must not wait.
        renewal = self.store.index.renew(self.sweep_id, LEASE_S, list(progress.values()))
        with self._lock:
            # Only runs that were held before and after: one that was leased or ended in between is not lost.
            gone = (wanted & self._held) - renewal.held
            self._lost |= gone
            self._held -= gone
        if renewal.stop_requested and not self._stop.is_set():
            self._on_stop_request()

    def close(self) -> None:
        """Stop renewing, and end the leases of runs that are left. If the index does not answer, they expire."""
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(IndexUnavailable):
            for run_id in sorted(self._held):
                self.end(run_id)

    def waiting(self, call: Callable[[], T]) -> T:
        """The result of `call`, which is tried until the index answers.

        Raises:
            IndexUnusable: At once.
            IndexUnavailable: The leases were closed, or the sweep was stopped, `STOP_WAIT_S` ago.
        """
        has_noted = False

        def gives_up(waited_s: float) -> bool:
            nonlocal has_noted
            now_s = time.monotonic()
            if waited_s >= WAIT_NOTE_S and not has_noted:
                has_noted = True
                self._on_wait()
            if self._stop.is_set() or self._closed.is_set():
                self._stopped_s = self._stopped_s or now_s
            return self._stopped_s is not None and self._stopped_s < now_s - STOP_WAIT_S

        return waiting(call, gives_up)

    def _renew_until_closed(self) -> None:
        while not self._closed.wait(RENEWAL_S):
            try:
                self.renew()
            except IndexUnavailable:
                continue  # the progress of this round is lost: the next event of each run has it
