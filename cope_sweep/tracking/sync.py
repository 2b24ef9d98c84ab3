"""Sends what a tracker lacks of a store: its backlog, and the new rows of runs that are trained at the moment.

`cope-sweep sync` and the process beside a sweep do the same: one process at a time holds the lock of store and tracker,
and sends one run after another. A run is ended in the tracker before the next is created, those that the tracker
shows as running come first, and a sweep that has ended is shown as ended before its last runs are sent. So wherever
the sending ends, nothing that has ended stays running there; at a kill, the one run that was being sent.

What the tracker has is noted in the index. Where that note is missing, a run is looked up in the tracker by its id
before it is created, and of its curve only the points that the tracker does not have are sent. So a sync can be
repeated at any time, also after a process was killed.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from cope_sweep.store import Store, StoreError
from cope_sweep.store.index import Index, IndexUnavailable
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.index.summaries import sweep_rows
from cope_sweep.tracking.mirrors import RunMirror, SweepMirror
from cope_sweep.tracking.mlflow import MlflowTracking, limit_requests
from cope_sweep.tracking.translate import TrackingError
from cope_sweep.tracking.uri import sqlite_path, tracker_key

MAX_FAILURES = 2
"""After the tracker has refused this many runs, or sweeps, it is taken to be down. The next sync sends the rest."""
CHUNK = 25
"""Runs that are read from the index at a time."""
NOTE_INTERVAL_S = 0.25
"""Between two notes in the index of what was sent."""
LOCK_S = 30.0
"""How long the lock holds after its owner was last heard of."""
RETRY_INTERVAL_S = 1.0

OnSending = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that there is to send."""


class _TrackerDown(Exception):
    """The tracker has refused too many runs or sweeps."""


@dataclass(frozen=True)
class MirrorReport:
    """Result of a mirror."""

    runs_written: int
    """Number of runs of which anything was sent."""
    errors: list[str]
    """One line for each reason why something is missing in MLflow, with the command that sends it later."""
    left: int = 0
    """Number of runs and sweeps that are missing in MLflow."""


class TrackerSync:
    """Keeps a tracker up to date with a store. Call `sync` as often as needed."""

    def __init__(self, store: Store, uri: str, tracking: MlflowTracking, *, first_sweep: str | None = None) -> None:
        """Read what the tracker at `uri` has.

        Args:
            store: The store.
            uri: Names the tracker in the index.
            tracking: The tracker.
            first_sweep: The sweep whose runs are sent before those of others.

        Raises:
            StoreError, TrackingError: The index or the tracker cannot be read.
        """
        self._mirrored = mirrored_of(store, uri)
        newest = self._mirrored.newest_tracked_id()
        if newest is not None and tracking.get(newest) is None:
            self._mirrored.forget()
        self._store, self._first_sweep, self._tracking = store, first_sweep, tracking
        self._sweep_mirror = SweepMirror(store, self._mirrored, tracking)
        self._run_mirror = RunMirror(store, self._mirrored, tracking, self._sweep_mirror)
        self._runs: dict[str, None] = {}
        """Ids of the runs to send, in order."""
        self._begun: set[str] = set()
        """Ids of those that the tracker shows as running."""
        self._sweeps: dict[str, int] = {}
        self._received: dict[str, tuple[int, str | None]] = {}
        """The runs and sweeps that were sent and are not noted in the index yet."""
        self._noted_s = time.monotonic()
        self._revision = 0
        self._failures = 0
        self.done = 0
        """The number of runs and sweeps that have ended and were sent."""
        self.written: set[str] = set()
        """Ids of the runs of which anything was sent."""
        self.errors: dict[str, str] = {}
        """Id of a run or sweep that could not be sent yet → the reason."""

    @property
    def left(self) -> int:
        """The number of runs and sweeps that have ended and were not sent yet."""
        return len(self._runs) + len(self._sweeps)

    def sync(
        self,
        *,
        deadline_s: float = math.inf,
        is_allowed: Callable[[], bool] = lambda: True,
        interrupted: Callable[[], bool] = lambda: False,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Send what has changed since the last sync. What fails is noted in `errors` and sent by the next sync.

        Args:
            deadline_s: When to end, on the monotonic clock. What is begun by then is completed.
            is_allowed: Asked after each run whether this process may go on.
            interrupted: Asked after each run whether to end as soon as nothing that has ended is shown as running.
            on_sent: Called after each run and sweep of the backlog.

        Raises:
            StoreError: The index cannot be read.
        """
        self._read_backlog()
        for items in (self._send_runs(), self._send_sweeps()):
            self._failures = 0
            with contextlib.suppress(_TrackerDown):
                for _ in items:
                    on_sent()
                    ends = time.monotonic() > deadline_s or (interrupted() and not self._begun)
                    if ends or not is_allowed():
                        self._note()
                        return
            self._note()

    def reasons(self) -> list[str]:
        """Why something could not be sent, one line for each reason."""
        counts = Counter(self.errors.values())
        return [f"{reason} ({count}×)" if count > 1 else reason for reason, count in counts.items()]

    def _read_backlog(self) -> None:
        backlog = self._mirrored.backlog(self._revision)
        self._revision = backlog.revision
        self._sweeps |= backlog.sweeps
        self._sweep_mirror.ended = set(self._sweeps)
        if not backlog.runs:
            return
        first: set[str] = set()
        if self._first_sweep is not None:
            first = set(sweep_rows(self._store.index, self._first_sweep))
        begun = self._mirrored.begun()
        self._begun |= begun & backlog.runs.keys()
        new = sorted(backlog.runs, key=lambda run_id: (run_id not in begun, run_id not in first))
        self._runs = dict.fromkeys([*(run_id for run_id in new if run_id in begun), *self._runs, *new])

    def _send_runs(self) -> Iterator[None]:
        """Send one run after another; yields after each one of the backlog."""
        for sweep_id in list(self._sweeps):
            with self._collecting_errors(sweep_id):
                self._sweep_mirror.settle(sweep_id)
        for run_id in self._mirrored.running():
            with self._collecting_errors(run_id):
                if self._run_mirror.send_running(run_id):
                    self.written.add(run_id)
        waiting = list(self._runs)
        for start in range(0, len(waiting), CHUNK):
            chunk = waiting[start : start + CHUNK]
            items = self._run_mirror.read(chunk)
            for run_id in chunk:
                with self._collecting_errors(run_id):
                    item = items.get(run_id)
                    tracked_id = self._run_mirror.send(item)
                    self.written.add(run_id)
                    self.done += 1
                    del self._runs[run_id]
                    self._begun.discard(run_id)
                    if item is not None and tracked_id is not None:
                        self._received[run_id] = (item.record.revision, tracked_id)
                if time.monotonic() - self._noted_s > NOTE_INTERVAL_S:
                    self._note()
                yield

    def _send_sweeps(self) -> Iterator[None]:
        """Send one sweep after another; yields after each one of the backlog."""
        for sweep_id in self._mirrored.running_sweeps():
            with self._collecting_errors(sweep_id):
                self._sweep_mirror.send_running(sweep_id)
        for sweep_id, revision in list(self._sweeps.items()):
            with self._collecting_errors(sweep_id):
                self._received[sweep_id] = (revision, self._sweep_mirror.send(sweep_id))
                self.done += 1
                del self._sweeps[sweep_id]
            yield

    def _note(self) -> None:
        """Note in the index what was sent. Raises StoreError."""
        if self._received:
            self._tracking.settle()
            self._mirrored.mark(self._received)
            self._received = {}
        self._noted_s = time.monotonic()

    @contextlib.contextmanager
    def _collecting_errors(self, item: str) -> Iterator[None]:
        """Note an error of one run or sweep. Raises _TrackerDown after too many of the tracker."""
        try:
            yield
        except IndexUnavailable:
            raise
        except (TrackingError, StoreError, OSError) as error:
            self.errors[item] = str(error)
            self._run_mirror.forget(item)
            self._sweep_mirror.forget(item)
            if item in self._runs:
                # Those that failed come last, so that they do not keep others from being sent.
                self._runs[item] = self._runs.pop(item)
            self._failures += isinstance(error, TrackingError)
            if self._failures == MAX_FAILURES:
                raise _TrackerDown from error
        else:
            self.errors.pop(item, None)


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
            self.held = self._index.claim(self._name, self._owner, self._ttl_s) == self._owner
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
                self.held = self._index.claim(self._name, self._owner, self._ttl_s) == self._owner
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
        connect: Callable[[str], MlflowTracking] = MlflowTracking,
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
        self._tracking: MlflowTracking | None = None
        self._sync: TrackerSync | None = None
        self._error: str | None = None
        """Why the last try failed as a whole."""

    def __enter__(self) -> Self:
        limit_requests()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracking is not None:
            self._tracking.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def written(self) -> int:
        """The number of runs of which anything was sent."""
        return len(self._sync.written) if self._sync else 0

    def sync(
        self,
        *,
        deadline_s: float = math.inf,
        interrupted: Callable[[], bool] = lambda: False,
        on_sent: Callable[[], None] = lambda: None,
    ) -> bool:
        """Send what the tracker lacks, until `deadline_s`; whether it has everything now.

        Where another process sends, this one waits: nothing is sent, and the answer says whether anything is left.
        """
        try:
            if self._sync is None and not self._has_work():
                self._error = None
                return True
            lock = self._lock = self._lock or MirrorLock(
                self.store.index, f"mirror:{tracker_key(self.store, self.uri)}"
            )
            if not lock.acquire():
                self._error = "another process sends to this tracker"
                self._sync = None  # what the tracker has is read again
                return backlog_count(self.store, self.uri) == 0
            if self._sync is None:
                self._tracking = self._tracking or self._connect(self.uri)
                self._sync = TrackerSync(self.store, self.uri, self._tracking, first_sweep=self._first_sweep)
            self._sync.sync(
                deadline_s=deadline_s, is_allowed=lambda: lock.held, interrupted=interrupted, on_sent=on_sent
            )
        except (TrackingError, StoreError, OSError) as error:
            self._error = str(error)
            return False
        self._error = None
        return not self._sync.left and not self._sync.errors

    def send_all(
        self,
        *,
        tries: int,
        interrupted: Callable[[], bool] = lambda: False,
        on_sending: OnSending = lambda sent, total: None,
    ) -> MirrorReport:
        """Send everything, or say why something is left.

        Args:
            tries: How many tries in a row, 1 s apart, may send nothing.
            interrupted: Asked after each run whether to end, see `TrackerSync.sync`.
            on_sending: Called after each run and sweep of the backlog.
        """
        begin, failed, left = self._sync.done if self._sync else 0, 0, math.inf

        def on_sent() -> None:
            if self._sync is not None:
                sent = self._sync.done - begin
                on_sending(sent, sent + self._sync.left)

        while True:
            before = left
            if self.sync(interrupted=interrupted, on_sent=on_sent):
                return MirrorReport(self.written, [])
            left = self._sync.left if self._sync else math.inf
            if self._sync is None:  # another process sends
                with contextlib.suppress(StoreError):
                    left = backlog_count(self.store, self.uri)
            failed = 0 if left < before < math.inf else failed + 1
            if interrupted() or failed == tries:
                break
            time.sleep(RETRY_INTERVAL_S)
        known = known_left(self.store, self.uri)
        return MirrorReport(self.written, self.reasons() or ([interrupted_with(known)] if known else []), known)

    def reasons(self) -> list[str]:
        """Why something was not sent, one line for each reason."""
        found = self._sync.reasons() if self._sync else []
        return [self._error, *found] if self._error else found

    def _has_work(self) -> bool:
        """Whether there is anything to send. Without, MLflow need not be reached."""
        mirrored = mirrored_of(self.store, self.uri)
        return bool(mirrored.count() or mirrored.running() or mirrored.running_sweeps())


def backlog_count(store: Store, uri: str) -> int:
    """The number of runs and sweeps that have ended and that the tracker at `uri` does not have. Raises StoreError."""
    return mirrored_of(store, uri).count()


def known_left(store: Store, uri: str) -> int:
    """`backlog_count`; 0 where the index does not answer."""
    with contextlib.suppress(StoreError):
        return backlog_count(store, uri)
    return 0


def interrupted_with(left: int) -> str:
    return (
        f"interrupted with {left} runs and sweeps to send" if left != 1 else "interrupted with 1 run or sweep to send"
    )


def mirrored_of(store: Store, uri: str) -> Mirrored:
    """The part of a store that the tracker at `uri` has; nothing where its SQLite file is gone. Raises StoreError."""
    mirrored = Mirrored(store.index, tracker_key(store, uri))
    path = sqlite_path(uri)
    if path is not None and not path.exists() and mirrored.newest_tracked_id() is not None:
        mirrored.forget()
    return mirrored
