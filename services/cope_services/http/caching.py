"""Shared work of requests: tasks in progress, and cached answers of GET routes.

A `CachedRoute` answers by its path, its query, the `Accept` header, and the version of the store's index and the
ablation files. An answer that is known costs no thread, no query and no validation, and is sent as bytes by the event
loop. Its ETag is a digest of its body: where a change of the store does not concern it, clients still get 304.

The coroutines of the classes belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cachetools import LRUCache
from fastapi import Request, Response
from fastapi.routing import APIRoute
from werkzeug.http import parse_etags

from cope_services.http.access import check_scopes
from cope_sweep import __version__
from cope_sweep.read.queries import Queries

PATIENCE_S = 1.0
"""Time that a request waits for a store that stalls, if an older version is known."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Shared(Generic[K, T]):
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
            task.exception()  # those who wait raise it


# -- answers -----------------------------------------------------------------------------------------------------------

CHECK_EVERY_S = 0.5
"""The version of the store and the files is at most so old."""
MAX_BYTES = 128 << 20
"""All answers in memory."""
THREAD_BYTES = 1 << 19
"""Larger bodies are hashed in a thread: they would block the event loop for half a millisecond or more."""

PACE = 4.0
"""An answer that took t seconds is shown for at least this many times t. So those of a store that changes all the time
take at most a fifth of a core each, and several viewers do not have the same figure drawn all the time."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True)
class Answer:
    """A response body, and its headers without type and length."""

    version: str
    made_s: float
    """Time at which it was complete, on the monotonic clock."""
    took_s: float
    body: bytes
    media_type: str
    headers: dict[str, str]

    def holds(self, version: str, max_age_s: float) -> bool:
        """Whether it may be shown."""
        age_s = time.monotonic() - self.made_s
        return age_s < PACE * self.took_s or (self.version == version and age_s < max_age_s)

    def response(self, request: Request) -> Response:
        """The response to a request: 304 where the client has it."""
        if matches_etag(request.headers.get("if-none-match"), self.headers["etag"]):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type=self.media_type)

    @property
    def size_bytes(self) -> int:
        """Bytes that it occupies, with its key."""
        return len(self.body) + 10_000


class Answers:
    """The answers of an application, each for a version of the store's index and the ablation files.

    Requests do not look themselves for the version: one thread reads it for all of them.
    """

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._version = ""
        self._read_s = float("-inf")
        self._reading: Shared[None, None] = Shared()
        # One thread of its own: the check does not wait behind requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="version")
        self._known: LRUCache[Hashable, Answer] = LRUCache(MAX_BYTES, lambda answer: answer.size_bytes)
        self._making: Shared[Hashable, Answer | Response] = Shared()

    async def version(self) -> str:
        """A text that changes when an ablation file or anything in the index changes.

        Raises what `Queries.state` raises.
        """
        if time.monotonic() - self._read_s >= CHECK_EVERY_S:
            reading = self._reading.get(None, self._read_version)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reading, PATIENCE_S if self._version else None)
        return self._version

    async def _read_version(self) -> None:
        began_s = time.monotonic()
        state = await asyncio.get_running_loop().run_in_executor(self._thread, self._queries.state)
        self._version = hashlib.sha256(f"{__version__} {state!r}".encode()).hexdigest()
        self._read_s = began_s

    async def respond(self, request: Request, handler: Handler, max_age_s: float) -> Response:
        """The response to a request: from the cache, or made by `handler`, once for all who ask for the same."""
        version = await self.version()
        key = request.scope["path"], request.scope["query_string"], request.headers.get("accept", "")
        answer: Answer | Response | None = self._known.get(key)
        if not (isinstance(answer, Answer) and answer.holds(version, max_age_s)):
            answer = await self._making.get(key, lambda: self._make(key, version, handler(request)))
        return answer.response(request) if isinstance(answer, Answer) else answer

    async def _make(self, key: Hashable, version: str, made: Coroutine[Any, Any, Response]) -> Answer | Response:
        """The answer; anything but a 200 with a body is returned as it is, and not kept."""
        began_s = time.monotonic()
        response = await made
        if response.status_code != 200 or not hasattr(response, "body"):
            return response
        body = bytes(response.body)
        digest = _digest(body) if len(body) < THREAD_BYTES else await asyncio.to_thread(_digest, body)
        headers = dict(response.headers)
        del headers["content-length"]
        media_type = headers.pop("content-type", "application/json")
        # `no-cache` lets a client store the body if it validates the ETag before each use.
        headers |= {"etag": f'W/"{digest}"', "cache-control": "no-cache", "vary": "Accept"}
        now_s = time.monotonic()
        answer = Answer(version, now_s, now_s - began_s, body, media_type, headers)
        if answer.size_bytes <= MAX_BYTES // 4:
            self._known[key] = answer
        return answer


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


class CachedRoute(APIRoute):
    """A GET route whose answers are kept."""

    max_age_s = float("inf")
    """Answers are made again when they are older, whatever the version."""

    def get_route_handler(self) -> Handler:
        """Calls FastAPI's handler for what is not known."""
        make = super().get_route_handler()

        async def handler(request: Request) -> Response:
            check_scopes(request, ("read",))  # the dependencies of the route are part of `make`
            answers: Answers = request.app.state.components.answers
            return await answers.respond(request, make, self.max_age_s)

        return handler


class RunFilesRoute(CachedRoute):
    """A kept GET route that reads files of runs, which change without the index."""

    max_age_s = 1.0


def matches_etag(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names this ETag."""
    return parse_etags(if_none_match).contains_weak(etag.removeprefix("W/").strip('"'))
