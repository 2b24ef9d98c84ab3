"""Bounds on how many requests of a kind are answered at a time; more wait for a slot, and too many get 429.

A router declares the kind of its routes by their class: `APIRouter(route_class=limited("exports"))`, or
`cached("tables")` in `caching`. `settings.LIMITS` has the numbers. A request takes a thread only while it has a slot,
and there are more threads than slots, so the files of the page find one however many other requests there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import ClassVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from cope_services.http.connection import while_connected
from cope_services.http.errors import BusyError, ClientGoneError
from cope_services.http.settings import Limit, Work

OWN_THREADS: frozenset[Work] = frozenset({"models", "listeners"})
"""Kinds whose requests use no threads of the shared pool."""
FREE_THREADS = 16
"""Threads for what has no limit: the files of the page, and looks at the jobs of sweeps."""


def threads(limits: Mapping[Work, Limit]) -> int:
    """The size of the shared pool of threads: one for each slot, and some more."""
    return FREE_THREADS + sum(limit.running for work, limit in limits.items() if work not in OWN_THREADS)


class WorkQueue:
    """The slots of one kind of work, and the requests that wait for them. It belongs to one event loop."""

    def __init__(self, work: Work, limit: Limit) -> None:
        self.work, self.limit = work, limit
        self.running = self.waiting = 0
        """Requests that have a slot, and that wait for one."""
        self.refused = 0
        """Requests that were answered with 429."""
        self._slots = asyncio.Semaphore(limit.running)

    @asynccontextmanager
    async def slot(self, request: Request | None = None) -> AsyncIterator[None]:
        """A slot, in the order of arrival. Raises BusyError if too many requests wait.

        With `request`, whose body must have been read, a client that leaves gives up its place in the queue
        (ClientGoneError).
        """
        if self.running + self.waiting >= self.limit.running + self.limit.waiting:
            self.refused += 1
            raise BusyError(
                f"{self.running} requests for {self.work} are being answered and {self.waiting} wait, the most that "
                f"this service accepts; try again in {self.limit.retry_after_s} s",
                self.limit.retry_after_s,
                work=self.work,
                running=self.running,
                waiting=self.waiting,
            )
        self.waiting += 1
        try:
            # Where there is a free slot, nobody has to watch for a client that leaves.
            if request is None or not self._slots.locked():
                await self._slots.acquire()
            else:
                await while_connected(request, self._slots.acquire(), None)
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()


WorkQueues = Mapping[Work, WorkQueue]


def work_queues(limits: Mapping[Work, Limit]) -> WorkQueues:
    return {work: WorkQueue(work, limit) for work, limit in limits.items()}


class LimitedRoute(APIRoute):
    """A route whose requests have a slot from before its dependencies until the last byte is sent or the client left.

    The body is read first: a client that sends it slowly has no slot. `middleware.BodyLimit` bounds its size.
    """

    work: ClassVar[Work]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of this route. Raises BusyError, ClientGoneError."""
        queues: WorkQueues = scope["app"].state.components.work
        request = Request(scope, receive)
        try:
            unread: bytes | None = await request.body()
        except ClientDisconnect:
            raise ClientGoneError("the client closed the connection") from None

        async def receive_again() -> Message:
            nonlocal unread
            if unread is None:
                return await receive()
            body, unread = unread, None
            return {"type": "http.request", "body": body, "more_body": False}

        async with queues[self.work].slot(request):
            await super().handle(scope, receive_again, send)


@cache  # one class for each kind of work, however many routers have it
def limited(work: Work) -> type[LimitedRoute]:
    """The class of routes that take a slot of this kind of work."""
    return type("LimitedRoute", (LimitedRoute,), {"work": work})
