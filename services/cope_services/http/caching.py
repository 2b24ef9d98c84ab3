"""ETags for the answers of GET routes, and tasks that several requests share.

The coroutines of these classes belong to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Hashable
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from cachetools import LRUCache
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from werkzeug.http import parse_etags

from cope_services.http.settings import Work
from cope_services.http.work import WorkQueue
from cope_sweep import __version__
from cope_sweep.read.queries import Queries

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedTasks(Generic[K, T]):
    """Tasks in progress, one per key, shared by requests. A request that stops waiting does not cancel its task."""

    def __init__(self) -> None:
        self.tasks: dict[K, asyncio.Task[T]] = {}

    def get(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """The task of this key, started if there is none. Cancelling the returned future does not cancel the task."""
        task = self.tasks.get(key)
        if task is None:
            task = self.tasks[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._end(key, done))
        return asyncio.shield(task)

    def _end(self, key: K, task: asyncio.Task[T]) -> None:
        del self.tasks[key]
        if not task.cancelled():
            task.exception()  # the waiting requests raise it; asked for, so that asyncio does not log it


# -- answers -----------------------------------------------------------------------------------------------------------

MAX_CACHE_BYTES = 128 << 20

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AnswerCache:
    """The latest answers of an application, by ETag. Requests for the same answer share its computation."""

    def __init__(self, asked_queries: Callable[[Request], Queries], looks: WorkQueue) -> None:
        """`asked_queries` says what answers a request."""
        self._asked_queries, self._looks = asked_queries, looks
        self._cached: LRUCache[str, Response] = LRUCache(MAX_CACHE_BYTES, lambda answer: len(answer.body))
        self._running: SharedTasks[str, Response] = SharedTasks()

    async def respond(self, request: Request, make: Handler) -> Response:
        """The answer of `make` to a request, with an ETag; or 304 if the client has this answer."""
        etag = await self._etag(request)
        # A weak ETag, because compression changes the bytes of the same answer.
        headers = {"etag": f'W/"{etag}"', "cache-control": "no-cache", "vary": "Accept"}
        unchanged = Response(status_code=304, headers=headers)
        known = request.headers.get("if-none-match")
        is_any_known = parse_etags(known).star_tag  # `*`: only an answer shows that there is one
        if matches_etag(known, etag) and not is_any_known:
            return unchanged
        answer = self._cached.get(etag) or await self._running.get(etag, lambda: make(request))
        if answer.status_code != 200:
            return answer
        # No single answer drives most of the others out.
        if len(answer.body) <= MAX_CACHE_BYTES // 4:
            self._cached[etag] = answer
        if is_any_known:
            return unchanged
        return Response(answer.body, headers=headers, media_type=answer.headers["content-type"])

    async def _etag(self, request: Request) -> str:
        """A text that changes with the request, the store, the ablation files and the version of the package."""
        async with self._looks.slot():
            state = await run_in_threadpool(self._asked_queries(request).state)
        identity = request.scope["path"], request.scope["query_string"], request.headers.get("accept")
        return hashlib.sha256(repr((__version__, state, identity)).encode()).hexdigest()[:32]


class CachedRoute(APIRoute):
    """A GET route whose answers depend on the index and the ablation files alone. They have an ETag.

    Only an answer that is being made has a slot of the route's kind of work: those in the cache do not wait for it.
    """

    work: ClassVar[Work]

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, called only for answers that are not in the cache."""
        make = super().get_route_handler()

        async def handler(request: Request) -> Response:
            answers: AnswerCache = request.app.state.components.answers
            return await answers.respond(request, make_in_slot)

        async def make_in_slot(request: Request) -> Response:
            queue: WorkQueue = request.app.state.components.work[self.work]
            async with queue.slot():
                return await make(request)

        return handler


@cache  # one class for each kind of work, however many routers have it
def cached(work: Work) -> type[CachedRoute]:
    """The class of cached routes whose answers are this kind of work."""
    return type("CachedRoute", (CachedRoute,), {"work": work})


def matches_etag(if_none_match: str | None, etag: str) -> bool:
    """The If-None-Match header names this ETag."""
    return parse_etags(if_none_match).contains_weak(etag.removeprefix("W/").strip('"'))
