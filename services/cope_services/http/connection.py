"""Work for a request that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, cast

from fastapi import Request

from cope_services.http.errors import ClientGoneError, TimeLimitError

T = TypeVar("T")


async def while_connected(request: Request, work: Awaitable[T], limit_s: float | None) -> T:
    """The result of `work`. Cancels it if the client leaves (ClientGoneError) or after the limit (TimeLimitError).

    The body of the request must have been read: the next message of the connection is then its end.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await work
    except TimeoutError:
        if limit_s is not None and limit.expired():
            raise TimeLimitError(limit_s) from None
        raise
    except asyncio.CancelledError:
        if left and task.cancelling() == 1:  # the server does not stop at the same time
            raise ClientGoneError("the client closed the connection") from None
        raise
    finally:
        watcher.cancel()
        if left:
            # An asyncio.timeout around this must not take the cancellation for another one.
            task.uncancel()
