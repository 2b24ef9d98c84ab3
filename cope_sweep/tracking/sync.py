"""Sends what a tracker lacks of a store: its backlog, and the new rows of runs that are trained at the moment.

`cope-sweep sync` and the process beside a sweep do the same: one process at a time holds the lock of store and tracker,
and sends one run after another. A run is ended in the tracker before the next is created, those that the tracker
shows as running come first, and a sweep that has ended is shown as ended before its last runs are sent. So wherever
the sending ends, nothing that has ended stays running there; at a kill, the one run that was being sent.

What the tracker has is noted in the index, which knows by that what is left, and is looked up in the tracker before it
is sent. So a sync can be repeated at any time, also after a process was killed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cope_sweep.store import Store, StoreError
from cope_sweep.store.index import Index, IndexUnavailable
from cope_sweep.store.index.mirroring import Backlog, Mirrored
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.index.summaries import sweep_rows
from cope_sweep.tracking.uri import TrackingError, backlog_count, import_mlflow, mirrored_of, tracker_key

if TYPE_CHECKING:
    from cope_sweep.tracking.send import Sender

MAX_FAILURES = 2
"""After the tracker has refused this many runs or sweeps, it is taken to be down. The next sync sends the rest."""
NOTE_INTERVAL_S = 0.25
"""Between two notes in the index of what was sent."""
LOCK_S = 30.0
"""The time for which the lock holds after its owner was last heard of."""
RETRY_INTERVAL_S = 1.0

OnSending = Callable[[int, int], None]
"""Called with the number of runs and sweeps that were sent, and with the number that there is to send."""


class Sync:
    """Sends a store to a tracker, as the only process that does so. A context manager."""

    def __init__(self, store: Store, uri: str, *, first_sweep: str | None = None) -> None:
        """Nothing is opened yet. The runs of `first_sweep` are sent before those of others."""
        self.store, self.uri, self._first_sweep = store, uri, first_sweep
        self._lock = MirrorLock(store.index, f"mirror:{tracker_key(store, uri)}")
        self._sender: Sender | None = None
        """While this process has the lock."""
        self.sent, self.left = 0, 0
        """Runs and sweeps that have ended: how many were sent, and how many are not sent yet."""
        self._error: str | None = None
        """Why the last sync failed as a whole."""
        self._errors: dict[str, str] = {}
        """Id of a run or sweep that could not be sent yet → the reason."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget_tracker()
        self._lock.release()

    def sync(
        self,
        *,
        deadline_s: float = math.inf,
        interrupted: Callable[[], bool] = lambda: False,
        on_sent: Callable[[], None] = lambda: None,
    ) -> bool:
        """Send what the tracker lacks; whether it has everything now. What fails is sent by the next sync.

        Where another process sends, this one waits: nothing is sent, and the answer says whether anything is left.

        Args:
            deadline_s: When to end, on the monotonic clock. What is begun by then is completed.
            interrupted: Asked before each run whether to end as soon as nothing that has ended is shown as running.
            on_sent: Called after each run and sweep of the backlog.
        """
        try:
            self._error = None
            mirrored = mirrored_of(self.store, self.uri)
            if not (mirrored.count() or mirrored.running() or mirrored.running_sweeps()):
                self.left, self._errors = 0, {}
                return True  # without reaching the tracker
            if not self._lock.acquire():
                self._error = "another process sends to this tracker"
                self._forget_tracker()
                self.left = mirrored.count()
                return self.left == 0
            if self._sender is None:
                import_mlflow()
                from cope_sweep.tracking.send import Sender

                self._sender = Sender(self.store, self.uri)
            self._send(self._sender, mirrored, deadline_s, interrupted, on_sent)
        except (TrackingError, StoreError, OSError) as error:
            self._error = str(error)
            return False
        return not self.left and not self._errors

    def send_all(
        self,
        *,
        tries: int,
        interrupted: Callable[[], bool] = lambda: False,
        on_sending: OnSending = lambda sent, total: None,
    ) -> list[str]:
        """Send everything. Returns one line for each reason why something is left.

        Args:
            tries: How many tries in a row, 1 s apart, may send nothing.
            interrupted: See `sync`.
            on_sending: Called after each run and sweep of the backlog.
        """
        begin, failed, left = self.sent, 0, math.inf
        while not self.sync(
            interrupted=interrupted, on_sent=lambda: on_sending(self.sent - begin, self.sent - begin + self.left)
        ):
            # An index that does not answer is no progress, either.
            before, left = left, min(left, known_left(self.store, self.uri, math.inf))
            failed = 0 if left < before < math.inf else failed + 1
            if interrupted() or failed == tries:
                unsent = int(known_left(self.store, self.uri, 0))
                return self.reasons() or ([interrupted_with(unsent)] if unsent else [])
            time.sleep(RETRY_INTERVAL_S)
        return []

    def reasons(self) -> list[str]:
        """Why something was not sent, one line for each reason."""
        counts = Counter(self._errors.values())
        found = [f"{reason} ({count}×)" if count > 1 else reason for reason, count in counts.items()]
        return [self._error, *found] if self._error else found

    def _send(
        self,
        sender: Sender,
        mirrored: Mirrored,
        deadline_s: float,
        interrupted: Callable[[], bool],
        on_sent: Callable[[], None],
    ) -> None:
        """Send one run or sweep after another. Raises StoreError where the index cannot be read or written."""
        backlog, begun = mirrored.backlog(), mirrored.begun()
        revisions = backlog.runs | backlog.sweeps
        self.left = len(revisions)
        received: dict[str, tuple[int, str | None]] = {}
        noted_s, failures = time.monotonic(), 0

        def note() -> None:
            nonlocal received, noted_s
            if received:
                sender.tracker.settle()
                mirrored.mark(received)
            received, noted_s = {}, time.monotonic()

        try:
            for item, counts, send in self._items(sender, mirrored, backlog, begun):
                if interrupted() and not (item in begun and item in revisions):
                    return
                try:
                    tracked_id = send(item)
                except IndexUnavailable:
                    raise
                except (TrackingError, StoreError, OSError) as error:
                    self._errors[item] = str(error)
                    sender.forget(item)
                    failures += isinstance(error, TrackingError)
                    if failures == MAX_FAILURES:
                        return
                else:
                    self._errors.pop(item, None)
                    if counts:
                        received[item] = revisions[item], tracked_id
                        self.sent, self.left = self.sent + 1, self.left - 1
                        on_sent()
                if time.monotonic() - noted_s > NOTE_INTERVAL_S:
                    note()
                if not self._lock.held or (counts and time.monotonic() > deadline_s):
                    return
        finally:
            note()

    def _items(
        self, sender: Sender, mirrored: Mirrored, backlog: Backlog, begun: set[str]
    ) -> list[tuple[str, bool, Callable[[str], str | None]]]:
        """The items to send, in order: id, whether it counts as a part of the backlog, and the call that sends it."""
        first = set(sweep_rows(self.store.index, self._first_sweep)) if self._first_sweep and backlog.runs else set()
        ended = sorted(backlog.runs, key=lambda run_id: run_id not in first)
        running_run = functools.partial(sender.send_run, running=True)
        running_sweep = functools.partial(sender.send_sweep, running=True)
        items: list[tuple[str, bool, Callable[[str], str | None]]] = [
            *((sweep_id, False, sender.settle) for sweep_id in backlog.sweeps if sweep_id in begun),
            *((run_id, True, sender.send_run) for run_id in ended if run_id in begun),
            *((run_id, False, running_run) for run_id in mirrored.running()),
            *((run_id, True, sender.send_run) for run_id in ended if run_id not in begun),
            *((sweep_id, False, running_sweep) for sweep_id in mirrored.running_sweeps()),
            *((sweep_id, True, sender.send_sweep) for sweep_id in backlog.sweeps),
        ]
        # Those that failed come last, so that they do not keep others from being sent. Some have been deleted since.
        self._errors = {item: self._errors[item] for item, _, _ in items if item in self._errors}
        return sorted(items, key=lambda item: item[0] in self._errors)

    def _forget_tracker(self) -> None:
        if self._sender is not None:
            self._sender.tracker.close()
            self._sender = None


class MirrorLock:
    """The right to send a store to one tracker: a named lock in the index, which a thread renews."""

    def __init__(self, index: Index, name: str, *, ttl_s: float = LOCK_S) -> None:
        self._index, self._name, self._ttl_s = index, name, ttl_s
        self._owner = new_owner(f"mirror-{secrets.token_hex(4)}")  # two of a process are two owners
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


def known_left(store: Store, uri: str, unknown: float) -> float:
    """`backlog_count`; `unknown` where the index does not answer."""
    with contextlib.suppress(StoreError):
        return backlog_count(store, uri)
    return unknown


def interrupted_with(left: float) -> str:
    return f"interrupted with {left:.0f} {'runs and sweeps' if left != 1 else 'run or sweep'} to send"
