"""Sends what a tracker lacks of a store: its backlog, and the new rows of runs that are trained at the moment.

What the tracker has is noted in the index. Where that note is missing, a run is looked up in the tracker by its id
before it is created, and of its curve only the points that the tracker does not have are sent. So a sync can be
repeated at any time, also after a process was killed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from cope_sweep.store.errors import StoreError
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.mirror_runs import RunMirror
from cope_sweep.store.mirror_sweeps import SweepMirror
from cope_sweep.store.preflight import sqlite_path, tracker_key
from cope_sweep.store.store import Store
from cope_sweep.store.tracking import Tracking, TrackingError

MAX_FAILURES = 2
"""After the tracker has refused this many runs, or sweeps, it is taken to be down. The next sync sends the rest."""

OnProgress = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that is left."""


class _TrackerDown(Exception):
    """The tracker has refused too many runs or sweeps."""


class TrackerSync:
    """Keeps a tracker up to date with a store. Call `sync` as often as needed."""

    def __init__(self, store: Store, uri: str, tracking: Tracking, *, first_sweep: str | None = None) -> None:
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
        self._store, self._first_sweep = store, first_sweep
        self._sweep_mirror = SweepMirror(store, self._mirrored, tracking)
        self._run_mirror = RunMirror(store, self._mirrored, tracking, self._sweep_mirror)
        self._runs: dict[str, None] = {}
        """Ids of the runs to send, in order."""
        self._sweeps: dict[str, int] = {}
        self._revision = 0
        self._failures = 0
        self.written: set[str] = set()
        """Ids of the runs of which anything was sent."""
        self.errors: dict[str, str] = {}
        """What could not be sent yet: run or sweep id → the reason."""

    @property
    def left(self) -> int:
        """The number of runs and sweeps that have ended and were not sent yet."""
        return len(self._runs) + len(self._sweeps)

    def sync(
        self,
        *,
        deadline_s: float = math.inf,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: OnProgress = lambda done, left: None,
    ) -> None:
        """Send what has changed since the last sync. What fails is noted in `errors` and sent by the next sync.

        Args:
            deadline_s: When to end, on the monotonic clock. What is begun by then is completed.
            should_stop: Asked before each run whether to end.
            on_progress: Called after each run and sweep of the backlog.

        Raises:
            StoreError: The index cannot be read.
        """
        self._read_backlog()
        done = 0
        for items in (self._send_runs(), self._send_sweeps()):
            self._failures = 0
            with contextlib.suppress(_TrackerDown):
                for _ in items:
                    on_progress(done := done + 1, self.left)
                    if should_stop() or time.monotonic() > deadline_s:
                        return

    def reasons(self) -> list[str]:
        """Why something could not be sent, one line for each reason."""
        counts = Counter(self.errors.values())
        return [f"{reason} ({count}×)" if count > 1 else reason for reason, count in counts.items()]

    def _read_backlog(self) -> None:
        backlog = self._mirrored.backlog(self._revision)
        self._revision = backlog.revision
        self._sweeps |= backlog.sweeps
        if not backlog.runs:
            return
        first: set[str] = set()
        if self._first_sweep is not None:
            first = self._mirrored.members(self._first_sweep)
        self._runs |= dict.fromkeys(sorted(backlog.runs, key=lambda run_id: run_id not in first))

    def _send_runs(self) -> Iterator[None]:
        """Send one run after another; yields after each one of the backlog."""
        for run_id in self._mirrored.running():
            with self._collecting_errors(run_id):
                if self._run_mirror.send_running(run_id):
                    self.written.add(run_id)
        for run_id in list(self._runs):
            with self._collecting_errors(run_id):
                self._run_mirror.send(run_id)
                self.written.add(run_id)
                del self._runs[run_id]
            yield

    def _send_sweeps(self) -> Iterator[None]:
        """Send one sweep after another; yields after each one of the backlog."""
        for sweep_id in self._mirrored.running_sweeps():
            with self._collecting_errors(sweep_id):
                self._sweep_mirror.send_running(sweep_id)
        for sweep_id, revision in list(self._sweeps.items()):
            with self._collecting_errors(sweep_id):
                self._sweep_mirror.send(sweep_id, revision)
                del self._sweeps[sweep_id]
            yield

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


def backlog_count(store: Store, uri: str) -> int:
    """The number of runs and sweeps that have ended and that the tracker at `uri` does not have. Raises StoreError."""
    return mirrored_of(store, uri).count()


def mirrored_of(store: Store, uri: str) -> Mirrored:
    """What the tracker at `uri` has of a store; nothing, where its SQLite file was deleted. Raises StoreError."""
    mirrored = store.index.mirrored(tracker_key(store, uri))
    path = sqlite_path(uri)
    if path is not None and not path.exists() and mirrored.newest_tracked_id() is not None:
        mirrored.forget()
    return mirrored
