"""Look-ups that requests share: as new as each request, one thread for each key, and no victim of another's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from cope_services.models.lookups import Lookups

PATIENCE_S = 60


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


class Slow:
    """Counts its calls, each of which waits until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        number = self.calls
        assert self.release.wait(PATIENCE_S)
        return number


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_requests_share_a_lookup_that_begins_after_they_asked() -> None:
    async def work() -> None:
        lookups, slow = Lookups[int](4), Slow()
        first = asyncio.create_task(lookups.get("a", slow))
        await until(lambda: slow.calls)
        later = [asyncio.create_task(lookups.get("a", slow)) for _ in range(20)]
        await asyncio.sleep(0.01)
        assert slow.calls == 1
        slow.release.set()
        assert await first == 1
        assert set(await asyncio.gather(*later)) == {2}  # not 1: that one began before they asked
        assert (lookups._running, lookups._next) == ({}, {})

    run(work)


def test_a_key_that_does_not_answer_stops_no_other() -> None:
    async def work() -> None:
        lookups, slow = Lookups[int](2), Slow()
        stalled = [asyncio.create_task(lookups.get("a", slow)) for _ in range(20)]
        await until(lambda: slow.calls)
        assert await lookups.get("b", lambda: 7) == 7
        slow.release.set()
        await asyncio.gather(*stalled)

    run(work)


def test_a_cancelled_request_does_not_cancel_others() -> None:
    async def work() -> None:
        lookups, slow = Lookups[int](2), Slow()
        gone, stays = (asyncio.create_task(lookups.get("a", slow)) for _ in range(2))
        await until(lambda: slow.calls)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        slow.release.set()
        assert await stays == 1

    run(work)


def test_an_error_is_that_of_all_who_asked_and_of_no_later_request() -> None:
    def failing() -> int:
        raise ValueError("no")

    async def work() -> None:
        lookups = Lookups[int](2)
        results = await asyncio.gather(*(lookups.get("a", failing) for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["no"] * 3
        assert await lookups.get("a", lambda: 5) == 5

    run(work)
