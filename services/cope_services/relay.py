"""Answers requests with replicas of Ray Serve, which have the routes: checks a request, and passes it to one of them.

    client ─ Serve's proxy ─▶ Gateway ─ RelayedRequest ─▶ a replica, which runs the routes of the models
                                      ◀─ messages of ASGI ─┘

A request goes to a replica that has its model in memory. Where the replica dies before the response begins, another one
gets the request: inference changes nothing, so it may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.errors import NOT_FOUND, BusyError, NotReadyError, ServiceError, error_object, error_response
from cope_services.http.overload import INFERENCE_PATH
from cope_services.models.connection import time_limit

LOG = logging.getLogger("ray.serve")
READ_PATH = re.compile(r"/api/v1/version|/v1/models(/[^/]+)?|(/openai/[^/]+)?/tokenizer_info")
RUN_PATH = re.compile(r"/(?:api/v1/runs|openai)/([^/]+)/.*")
RUN_ID = re.compile(r"[0-9a-f]{16}")
REPLICA_LOST = (RayActorError, WorkerCrashedError, ObjectLostError, ReplicaUnavailableError)
MAX_ATTEMPTS = 3
"""Replicas that get a request whose replica has died. The request itself may be what ends them."""
RETRY_AFTER_S = 5
"""When clients should repeat a request for which all queues were full."""

Messages = list[Message]


@dataclass(frozen=True)
class RelayedRequest:
    """A request whose key and size have been checked."""

    scope: dict[str, Any]
    """Plain data of the ASGI scope, with the key in `cope_key`."""
    body: bytes
    run_id: str
    """The run whose model it asks; "" where that is not known."""


Call = Callable[[RelayedRequest], AsyncIterator[Messages]]
"""Sends a request to a replica; yields the messages of the response, some at a time."""


class Relay:
    """ASGI application: has replicas answer the requests that ask models."""

    def __init__(self, call: Call, max_seconds: float) -> None:
        """Create the application.

        Args:
            call: Sends a request to a replica.
            max_seconds: Time limit of a request until its response begins.
        """
        self.call = call
        self.max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return None
        try:
            if not _is_answered(scope):
                raise _UnknownPathError(f"there is no {scope['path']} here; `cope-sweep serve` has the other routes")
            await self._answer(await _read(scope, receive), send)
        except ServiceError as error:
            await error_response(scope, error.status, error.code, str(error), error.headers)(scope, receive, send)

    async def _answer(self, request: RelayedRequest, send: Send) -> None:
        """Send the response. Raises BusyError, NotReadyError, TimeLimitError before it has begun."""
        first, rest = await self._begin(request)
        async with aclosing(rest):
            for message in first:
                await send(message)
            try:
                async for messages in rest:
                    for message in messages:
                        await send(message)
            except REPLICA_LOST:
                LOG.warning("a replica died during a response: %s", request.scope["path"])
                await _end_broken(first[0], send)

    async def _begin(self, request: RelayedRequest) -> tuple[Messages, AsyncGenerator[Messages, None]]:
        """The first messages of a response, and the others, from a replica that lives."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            response = _closed_at_end(self.call(request))
            try:
                async with asyncio.timeout(self.max_seconds) as limit:
                    return await anext(response), response
            except REPLICA_LOST as error:
                LOG.warning("attempt %d: a replica died before its response: %s", attempt, type(error).__name__)
            except BackPressureError as error:
                raise BusyError("the queues of all replicas are full; try again later", RETRY_AFTER_S) from error
            except TimeoutError:
                if not limit.expired():
                    raise
                raise time_limit(self.max_seconds) from None
        raise NotReadyError(f"{MAX_ATTEMPTS} replicas ended while they answered this request; send a smaller one")


class _UnknownPathError(ServiceError):
    status, code = 404, NOT_FOUND


def _is_answered(scope: Scope) -> bool:
    """Whether replicas have a route for a request."""
    paths = READ_PATH if scope["method"] in ("GET", "HEAD") else INFERENCE_PATH
    return paths.fullmatch(scope["path"]) is not None


async def _read(scope: Scope, receive: Receive) -> RelayedRequest:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
    plain = {name: scope[name] for name in names if name in scope}
    # The key itself stays here.
    plain["headers"] = [(bytes(k), bytes(v)) for k, v in scope["headers"] if k != b"authorization"]
    plain["cope_key"] = scope.get("cope_key")
    return RelayedRequest(plain, body, run_of(scope["path"], scope["query_string"], body))


def run_of(path: str, query: bytes, body: bytes) -> str:
    """The run whose model a request asks, from its path, query or body; "" if they name none.

    It decides only which replica gets the request, which reads the request itself.
    """
    if in_path := RUN_PATH.fullmatch(path):
        named: object = in_path[1]
    else:
        named = parse_qs(query.decode("latin-1")).get("model", [""])[0]
        try:
            fields = json.loads(body) if body else {}
        except ValueError:
            fields = {}
        if isinstance(fields, dict):
            models = fields.get("models")
            named = fields.get("model") or (models[0] if isinstance(models, list) and models else named)
    return named if isinstance(named, str) and RUN_ID.fullmatch(named) else ""


async def _end_broken(start: Message, send: Send) -> None:
    """End a response that cannot be completed: a stream of events by one with the error; others by an exception."""
    if dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
        error = error_object(503, NotReadyError.code, "the replica of the model ended; send the request again")
        await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n"})
        return
    raise NotReadyError("the replica of the model ended during the response")


async def _closed_at_end(response: AsyncIterator[Messages]) -> AsyncGenerator[Messages, None]:
    """The same messages. Closing it cancels the request, if it is not answered yet."""
    cancel = getattr(response, "cancel", None)
    ended = False
    try:
        async for messages in response:
            yield messages
        ended = True
    finally:
        if not ended and cancel is not None:
            cancel()


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def messages_of(app: ASGIApp, request: RelayedRequest) -> AsyncGenerator[Messages, None]:
    """Messages of an application for a request: those so far, whenever there are some.

    The first ones include the begin of the body: a response is complete then, or it is a stream. Closing the generator
    cancels the application.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    body = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Event().wait()  # the client's end cancels this task
        raise AssertionError

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        ready: Messages = []
        while (message := await sent.get()) is not None:
            ready.append(message)
            if sent.empty() and message["type"] == "http.response.body":
                yield ready
                ready = []
        if ready:
            yield ready
        await asyncio.wait([task])
        if (error := task.exception()) is not None:  # the application has answered with an error of the server
            LOG.error("%s %s", request.scope["method"], request.scope["path"], exc_info=error)
    finally:
        task.cancel()
