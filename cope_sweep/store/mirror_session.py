"""One process at a time sends a store to a tracker: the lock, the connection, and tries until all was sent."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cope_sweep.store.errors import StoreError
from cope_sweep.store.index import Index
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.mlflow import MlflowTracking
from cope_sweep.store.mlflow_connection import limit_requests
from cope_sweep.store.preflight import tracker_key
from cope_sweep.store.store import Store
from cope_sweep.store.tracker_sync import OnProgress, TrackerSync, backlog_count, mirrored_of
from cope_sweep.store.tracking import Tracking, TrackingError

LOCK_S = 30.0
"""How long the lock holds after its owner was last heard of."""
RETRY_INTERVAL_S = 1.0


class MirrorLock:
    """The right to send a store to one tracker: a named lock in the index, which a thread renews."""

    def __init__(self, index: Index, name: str, *, ttl_s: float = LOCK_S) -> None:
        self._index, self._name, self._ttl_s = index, name, ttl_s
        self._owner = new_owner(f"mirror-{secrets.token_hex(4)}")  # two sessions of a process are two owners
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.held = False
        """Whether this process holds it."""

    def acquire(self) -> bool:
        """Take the lock, if nobody has it; whether this process holds it. Raises StoreError."""
        if not self.held:
            self.held = self._index.lock(self._name, self._owner, self._ttl_s)
            if self.held and self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="mirror-lock", daemon=True)
                self._thread.start()
        return self.held

    def release(self) -> None:
        """Give the lock back."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self.held:
            self.held = False
            with contextlib.suppress(StoreError):  # it expires
                self._index.unlock(self._name, self._owner)

    def _renew(self) -> None:
        renewed_s = time.monotonic()
        while not self._closed.wait(self._ttl_s / 5):
            if not self.held:
                continue
            try:
                self.held = self._index.lock(self._name, self._owner, self._ttl_s)
                renewed_s = time.monotonic()
            except StoreError:
                # The database does not answer. Somebody else may take the lock once it has expired.
                self.held = time.monotonic() - renewed_s < self._ttl_s


class MirrorSession:
    """Sends a store to a tracker, as the only process that does so. A context manager."""

    def __init__(
        self,
        store: Store,
        uri: str,
        *,
        first_sweep: str | None = None,
        connect: Callable[[str], Tracking] = MlflowTracking,
    ) -> None:
        """Nothing is opened yet.

        Args:
            store: The store.
            uri: The tracking URI.
            first_sweep: The sweep whose runs are sent before those of others.
            connect: Opens the tracker at a URI.
        """
        self.store, self.uri = store, uri
        self._first_sweep, self._connect = first_sweep, connect
        self._lock: MirrorLock | None = None
        self._sync: TrackerSync | None = None
        self._error: str | None = None
        """Why the last try failed as a whole."""

    def __enter__(self) -> Self:
        limit_requests()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def written(self) -> int:
        """The number of runs of which anything was sent."""
        return len(self._sync.written) if self._sync else 0

    def sync(self, *, deadline_s: float = math.inf, on_progress: OnProgress = lambda done, left: None) -> bool:
        """Send what the tracker lacks, until `deadline_s`; whether it has everything now.

        Where another process sends, this one waits: nothing is sent, and the answer says whether anything is left.
        """
        try:
            if self._sync is None and not self._has_work():
                self._error = None
                return True
            lock = self._lock = self._lock or MirrorLock(self.store.index, f"mirror:{self._key}")
            if not lock.acquire():
                self._error = "another process sends to this tracker"
                self._sync = None  # what the tracker has is read again
                return backlog_count(self.store, self.uri) == 0
            if self._sync is None:
                tracking = self._connect(self.uri)
                self._sync = TrackerSync(self.store, self.uri, tracking, first_sweep=self._first_sweep)
            self._sync.sync(deadline_s=deadline_s, should_stop=lambda: not lock.held, on_progress=on_progress)
        except (TrackingError, StoreError, OSError) as error:
            self._error = str(error)
            return False
        self._error = None
        return not self._sync.left and not self._sync.errors

    def sync_until(
        self,
        deadline_s: float,
        *,
        tries: int | None = None,
        on_progress: OnProgress = lambda done, left: None,
    ) -> bool:
        """Try until everything was sent or the deadline has passed; whether everything was sent.

        `tries` is how many tries in a row may send nothing; None: any number.
        """
        failed = 0
        while True:
            before = self._left
            if self.sync(deadline_s=deadline_s, on_progress=on_progress):
                return True
            failed = 0 if self._left < before else failed + 1
            if failed == tries or time.monotonic() + RETRY_INTERVAL_S > deadline_s:
                return False
            time.sleep(RETRY_INTERVAL_S)

    @property
    def _left(self) -> float:
        return self._sync.left if self._sync else math.inf

    def reasons(self) -> list[str]:
        """Why something was not sent, one line for each reason."""
        found = self._sync.reasons() if self._sync else []
        return [self._error, *found] if self._error else found

    def _has_work(self) -> bool:
        """Whether there is anything to send. Without, MLflow need not be reached."""
        mirrored = mirrored_of(self.store, self.uri)
        return bool(mirrored.count() or mirrored.running() or mirrored.running_sweeps())

    @property
    def _key(self) -> str:
        return tracker_key(self.store, self.uri)
