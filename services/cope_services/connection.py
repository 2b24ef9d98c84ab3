"""Work that ends when its client leaves or its time is up."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio
from fastapi import Request

from cope_services.errors import ServiceError, TimeLimitError

T = TypeVar("T")


class ClientGoneError(ServiceError):
    """The client has closed the connection; nobody receives the response."""

    status, code = 499, "client_gone"


async def while_connected(request: Request, work: Awaitable[T], limit_s: float) -> T:
    """What `work` returns. It is cancelled when the client leaves (ClientGoneError) or its time is up (TimeLimitError).

    The body of the request has to be read already: the next message of the connection is then its end.
    """
    results: list[T] = []
    errors: list[Exception] = []
    with anyio.move_on_after(limit_s) as limit:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                results.append(await work)
            except Exception as error:  # raised below: a task group would wrap it
                errors.append(error)
            group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if results:
        return results[0]
    if limit.cancelled_caught:
        raise time_limit(limit_s)
    raise ClientGoneError("the client closed the connection")


def time_limit(limit_s: float) -> TimeLimitError:
    """The error of a request that took too long."""
    return TimeLimitError(f"the request was not answered within {limit_s:g} s; send a smaller one, or try again later")
