"""Work that requests share when they ask for the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


class Lookups(Generic[T]):
    """Looks things up in threads, for each key in one at a time. All requests that waited for a result share it.

    A look-up begins after it was asked for, so what it finds is as new as the request. A request that is cancelled
    stops to wait; the look-up goes on. So a store that does not answer occupies one thread for each key, however many
    requests ask for it, and at most `threads` in all.
    """

    def __init__(self, threads: int) -> None:
        self._limiter = CapacityLimiter(threads)
        self._running: dict[Hashable, asyncio.Task[T]] = {}
        self._next: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Result of `compute`, or its error."""
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._run(key, compute, self._running.get(key)))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _run(self, key: Hashable, compute: Callable[[], T], before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        task = self._running[key] = self._next.pop(key)
        try:
            return await to_thread.run_sync(compute, limiter=self._limiter)
        finally:
            if self._running.get(key) is task:
                del self._running[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """Mark the error as seen: where all requests have been cancelled, nobody else does."""
    if not task.cancelled():
        task.exception()
