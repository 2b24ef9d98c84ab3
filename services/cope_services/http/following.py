"""Clients that follow the progress of sweeps, by server-sent events. All of them share one look at the index."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from cachetools import TTLCache
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from cope_services.http.caching import SharedTasks
from cope_services.http.middleware import answered_head
from cope_sweep.read.queries.progress import RATE_WINDOW_S, ProgressTracker
from cope_sweep.store import ACTIVE, Store, SweepProgress
from cope_sweep.store.index import IndexUnavailable

T = TypeVar("T")

TICK_S = 1.0
"""Time between two reads of the index."""
END_ID = "end"
"""The id of the last event. A client that has received it has received all events."""
LOOKS = 4
"""Looks at the index for listeners at a time."""
MAX_FOLLOWED = 1000
"""Maximum number of sweeps with progress in memory."""


class Watchers:
    """Sends the progress of sweeps to the clients that follow them.

    All listeners of a sweep share one read of the index per TICK_S. Nothing is queued: a slow listener misses events.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self.store = store
        self.threads = CapacityLimiter(LOOKS)
        """Threads that look at the index, so that listeners take none from other requests."""
        self._looking: SharedTasks[str, tuple[int, SweepProgress]] = SharedTasks()
        # Half a tick, so that a listener finds something newer each time that it looks.
        self._latest: TTLCache[str, tuple[int, SweepProgress]] = TTLCache(MAX_FOLLOWED, TICK_S / 2)
        self._trackers: TTLCache[str, ProgressTracker] = TTLCache(MAX_FOLLOWED, RATE_WINDOW_S)

    async def events(self, sweep_id: str, last_id: str | None) -> AsyncIterator[ServerSentEvent]:
        """The events of a sweep after the event `last_id`, until the sweep ends."""
        shown: SweepProgress | None = None
        while last_id != END_ID:
            try:
                revision, progress = await self._look(sweep_id)
            except IndexUnavailable:  # listeners get heartbeats until the index answers again
                await asyncio.sleep(TICK_S)
                continue
            ended = progress.status not in ACTIVE
            # A change of the remaining time alone is not sent: it changes every second.
            is_news = shown is None or _without_eta(progress) != _without_eta(shown)
            shown = progress
            if ended or (is_news and str(revision) != last_id):
                last_id = END_ID if ended else str(revision)
                data = json.dumps(progress.model_dump(mode="json"), separators=(",", ":"))  # ASCII, in one line
                yield ServerSentEvent(data, event="end" if ended else "progress", id=last_id)
            await asyncio.sleep(0 if ended else TICK_S)

    async def _look(self, sweep_id: str) -> tuple[int, SweepProgress]:
        """The revision of the index and the progress of a sweep."""
        latest = self._latest.get(sweep_id)
        if latest is None:
            latest = await self._looking.get(sweep_id, lambda: self.in_thread(self._poll, sweep_id))
            self._latest[sweep_id] = latest
        return latest

    async def in_thread(self, look: Callable[[str], T], sweep_id: str) -> T:
        """The result of `look`, from a thread of the listeners."""
        return await run_sync(look, sweep_id, limiter=self.threads)

    def _poll(self, sweep_id: str) -> tuple[int, SweepProgress]:
        store, tracker = self.store(), self._trackers.get(sweep_id)
        if tracker is None or tracker.store is not store:
            tracker = ProgressTracker(store, sweep_id)
        progress = tracker.poll()
        self._trackers[sweep_id] = tracker
        return tracker.revision, progress


def _without_eta(progress: SweepProgress) -> SweepProgress:
    return progress.model_copy(update={"eta_s": None})


# -- routes ------------------------------------------------------------------------------------------------------------


class EventStream(EventSourceResponse):
    """Server-sent events, with their media type in the documentation."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or none to HEAD. A client that does not read them is disconnected."""
        if await answered_head(self, scope, send):  # otherwise the response would never end
            return
        with suppress(SendTimeoutError):
            await super().__call__(scope, receive, send)
