"""Answers of GET routes, made once for each version of store and ablation files, and sent as bytes by the event loop.

A route of this class answers by its path, its query, the `Accept` header, and what `Freshness` watches. An answer that
is known costs no thread, no query and no validation. Its ETag is a digest of its body: where a change of the store does
not concern it, clients still get 304.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from cope_services.http.access import check_scopes
from cope_services.http.freshness import Freshness

MAX_BYTES = 128 << 20
"""All answers in memory."""
THREAD_BYTES = 1 << 19
"""Larger bodies are hashed in a thread: they would block the event loop for half a millisecond or more."""
PACE = 4.0
"""An answer that took t seconds is shown for at least this many times t. So those of a store that changes all the time
take at most a fifth of a core each."""

ASKED = "cope_services.method"
"""The key of a scope for the method of a request that is answered as GET."""

Key = tuple[str, bytes, str]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True)
class Answer:
    """A response body, and its headers without type, length and ETag."""

    version: str
    made_s: float
    """When it was complete, on the monotonic clock."""
    took_s: float
    body: bytes
    media_type: str
    digest: str
    headers: dict[str, str]

    def holds(self, version: str, now_s: float, max_age_s: float) -> bool:
        """Whether it may be shown."""
        age_s = now_s - self.made_s
        return age_s < PACE * self.took_s or (self.version == version and age_s < max_age_s)

    @property
    def size_bytes(self) -> int:
        """Bytes that it occupies, with its key."""
        return len(self.body) + 10_000


class Answers:
    """The answers of an application. Its coroutines belong to one event loop."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._known: LRUCache[Key, Answer] = LRUCache(MAX_BYTES, lambda answer: answer.size_bytes)
        self._making: dict[Key, asyncio.Task[Answer | Response]] = {}

    async def respond(self, request: Request, handler: Handler, max_age_s: float) -> Response:
        """The response to a request: from the cache, or made by `handler`, once for all who ask for the same."""
        version = await self._freshness.version()
        scope = request.scope
        key = scope["path"], scope["query_string"], request.headers.get("accept", "")
        answer = self._known.get(key)
        if answer is None or not answer.holds(version, time.monotonic(), max_age_s):
            made = await self._made(key, version, request, handler)
            if isinstance(made, Response):
                return made
            answer = made
        return _response(answer, request)

    async def _made(self, key: Key, version: str, request: Request, handler: Handler) -> Answer | Response:
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(key, version, handler(request)))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    async def _make(self, key: Key, version: str, made: Awaitable[Response]) -> Answer | Response:
        """The answer; anything but a 200 with a body is returned as it is, and not kept."""
        began_s = time.monotonic()
        response = await made
        if response.status_code != 200 or not hasattr(response, "body"):
            return response
        body = bytes(response.body)
        digest = _digest(body) if len(body) < THREAD_BYTES else await asyncio.to_thread(_digest, body)
        now_s = time.monotonic()
        own = {
            name: value for name, value in response.headers.items() if name not in ("content-length", "content-type")
        }
        media_type = response.headers.get("content-type", "application/json")
        answer = Answer(version, now_s, now_s - began_s, body, media_type, digest, own)
        if answer.size_bytes <= MAX_BYTES // 4:
            self._known[key] = answer
        return answer


class ReadRoute(APIRoute):
    """A route that answers HEAD where it answers GET. The documentation has GET alone."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Like GET."""
        return super().matches(self._as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Like GET; the server leaves out the body of a response to HEAD."""
        await super().handle(self._as_get(scope), receive, send)

    def get_route_handler(self) -> Handler:
        """FastAPI's handler. Responses see the method of the request: that of a file does not read it for HEAD."""
        make = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request.scope["method"] = request.scope.pop(ASKED, request.scope["method"])
            return await make(request)

        return handler

    def _as_get(self, scope: Scope) -> Scope:
        if scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            return {**scope, "method": "GET", ASKED: "HEAD"}
        return scope


class CachedRoute(ReadRoute):
    """A GET route whose answers are kept: see the module."""

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


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def matches_etag(if_none_match: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names this ETag."""
    if not if_none_match:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags


def _response(answer: Answer, request: Request) -> Response:
    etag = f'"{answer.digest}"'
    # `no-cache` lets a client store the body if it validates the ETag before each use.
    headers = answer.headers | {"etag": etag, "cache-control": "no-cache", "vary": "Accept"}
    if matches_etag(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers, media_type=answer.media_type)
