"""Work that ends when its client leaves or its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, cast

from fastapi import Request

from cope_services.http.errors import ServiceError, TimeLimitError

T = TypeVar("T")


class ClientGoneError(ServiceError):
    """The client has closed the connection; nobody receives the response."""

    status, code = 499, "client_gone"


async def while_connected(request: Request, work: Awaitable[T], limit_s: float) -> T:
    """Result of `work`. It is cancelled when the client leaves (ClientGoneError) or its time is up (TimeLimitError).

    The body of the request has to be read already: the next message of the connection is then its end.
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
        if limit.expired():
            raise time_limit(limit_s) from None
        raise
    except asyncio.CancelledError:
        if left and task.cancelling() == 1:  # the server does not stop at the same time
            raise ClientGoneError("the client closed the connection") from None
        raise
    finally:
        watcher.cancel()
        if left:
            task.uncancel()


def time_limit(limit_s: float) -> TimeLimitError:
    """The error of a request that took too long."""
    return TimeLimitError(f"the request was not answered within {limit_s:g} s; send a smaller one, or try again later")
