"""The progress of sweeps as server-sent events.

All listeners of a sweep share one watcher, which reads what has changed in the index. It keeps the latest event only:
a slow listener misses older ones, and nothing is queued for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fastapi.concurrency import run_in_threadpool
from sse_starlette import ServerSentEvent

from cope_services.http.errors import BusyError
from cope_sweep.api.answers import SweepProgress
from cope_sweep.read.queries.progress import ACTIVE, ProgressTracker
from cope_sweep.store import Store
from cope_sweep.store.index import IndexUnavailable

TICK_S = 1.0
"""Between two looks at the index."""
HEARTBEAT_S = 15
"""Between two comments on a quiet connection."""
SEND_S = 10.0
"""A client that has not taken an event after this time is not followed any more: it may connect again."""
END_ID = "end"
"""The id of the last event: a client that has it needs no other."""
RETRY_AFTER_S = 10


class Watchers:
    """The watchers of the sweeps that somebody follows."""

    def __init__(self, store: Callable[[], Store], max_listeners: int) -> None:
        self.store, self.max_listeners = store, max_listeners
        self.listeners = 0
        self.watchers: dict[str, _Watcher] = {}

    def require_place(self) -> None:
        """Raise BusyError where no more clients may follow sweeps."""
        if self.listeners >= self.max_listeners:
            raise BusyError(f"{self.listeners} clients follow sweeps, and no more may", RETRY_AFTER_S)

    @asynccontextmanager
    async def listening(self, sweep_id: str) -> AsyncIterator[_Watcher]:
        """The watcher of a sweep, while the block runs. Raises BusyError."""
        self.require_place()
        watcher = self.watchers.get(sweep_id)
        if watcher is None:
            watcher = self.watchers[sweep_id] = _Watcher(sweep_id, self.store)
        self.listeners += 1
        watcher.listeners += 1
        try:
            yield watcher
        finally:
            self.listeners -= 1
            watcher.listeners -= 1
            if not watcher.listeners:
                watcher.close()
                self.watchers.pop(sweep_id, None)

    async def events(self, sweep_id: str, last_id: str | None) -> AsyncIterator[ServerSentEvent]:
        """The events of a sweep after the one with the id `last_id`, up to its end. Raises BusyError."""
        async with self.listening(sweep_id) as watcher:
            while True:
                event = await watcher.after(last_id)
                last_id = event.id
                yield event
                if event.id == END_ID:
                    return


class _Watcher:
    """Follows a sweep for its listeners."""

    def __init__(self, sweep_id: str, store: Callable[[], Store]) -> None:
        self.sweep_id, self.store = sweep_id, store
        self.listeners = 0
        self._tracker: ProgressTracker | None = None
        self._latest: ServerSentEvent | None = None
        self._shown: SweepProgress | None = None
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop to follow the sweep."""
        self._task.cancel()

    async def after(self, last_id: str | None) -> ServerSentEvent:
        """The latest event, as soon as it is another than that with this id. Raises what the watcher raised."""
        while self._latest is None or self._latest.id == last_id:
            if self._task.done():
                self._task.result()
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({news, self._task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        return self._latest

    async def _watch(self) -> None:
        while True:
            with suppress(IndexUnavailable):  # listeners get heartbeats until it answers again
                progress = await run_in_threadpool(self._poll)
                if self._publish(progress):
                    return
            await asyncio.sleep(TICK_S)

    def _poll(self) -> SweepProgress:
        store = self.store()
        if self._tracker is None or self._tracker.store is not store:
            self._tracker = ProgressTracker(store, self.sweep_id)
        return self._tracker.poll()

    def _publish(self, progress: SweepProgress) -> bool:
        """Tell the listeners what is new; whether the sweep has ended."""
        ended = progress.status not in ACTIVE
        # The remaining time alone is no news: it would be sent every second.
        if ended or self._shown is None or _without_eta(progress) != _without_eta(self._shown):
            self._shown = progress
            number = f"{self._tracker.revision if self._tracker else 0}"
            self._latest = ServerSentEvent(
                progress.model_dump_json(), event="end" if ended else "progress", id=END_ID if ended else number
            )
            self._news.set()
            self._news = asyncio.Event()
        return ended


def _without_eta(progress: SweepProgress) -> SweepProgress:
    return progress.model_copy(update={"eta_s": None})
