"""HTTP connections with time limits, on top of uvicorn's parser: slow and idle clients do not hold them for long."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cope_services.errors import PROBLEM_JSON, problem_details
from cope_services.headers import with_security_headers
from cope_services.settings import Settings

MAX_HEAD_BYTES = 1 << 16
"""Bytes of the first line and the headers of a request."""
EXTRA_BODY_BYTES = 1 << 24
"""Bytes that a client may send beyond the limit of a body: some read the answer, 413, only after they have sent it."""
STALL_S = 60.0
"""Time for which a client may leave a response unread. One that reads slowly is not cut off."""


class TimedConnection(HttpToolsProtocol):
    """A connection that is closed if its client is too slow, or sends too much.

    A client has `head_s` to send the head of a request, from its connection or from the first byte after the last
    response, and `body_s` for the body. Between requests, uvicorn closes an idle connection after some seconds. If
    there are `max_connections`, the connection that has been idle longest makes room for a new one.

    A head has at most about `MAX_HEAD_BYTES`. The application answers 413 to a large body; a client that goes on
    sending is cut off after `max_body_bytes`.
    """

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 30.0
    max_connections: ClassVar[int] = 512
    max_body_bytes: ClassVar[int] = 1 << 24

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_since_s: float | None = None
        """When the connection began to wait for the head of a request; None while it has one."""
        self._in_head = self._in_body = False
        self._part_began = False
        """Whether a head or body began in the data that is being parsed."""
        self._part_bytes = 0
        """Bytes of the present head or body, without those that arrived with its begin."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._make_room()
        super().connection_made(transport)
        self.idle_since_s = self.loop.time()
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too_many_connections", f"the service has {self.max_connections} open connections")
        else:
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._body_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, if there are too many."""
        if len(self.connections) < self.max_connections:
            return
        idle = [
            each for each in self.connections if isinstance(each, TimedConnection) and each.idle_since_s is not None
        ]
        if idle:
            longest = min(idle, key=lambda each: each.idle_since_s or 0.0)
            self.connections.discard(longest)
            longest.transport.abort()

    # -- requests

    def data_received(self, data: bytes) -> None:
        self._part_began = False
        super().data_received(data)
        self._part_bytes = 0 if self._part_began else self._part_bytes + len(data)
        if self.transport.is_closing():
            return
        # Most requests arrive as a whole, so they need no timer.
        if self._in_body:
            if self._body_timer is None:
                self._body_timer = self.loop.call_later(self.body_s, self._body_is_late)
            if self._part_bytes > self.max_body_bytes:
                self.transport.abort()
        elif self._in_head or self.idle_since_s is not None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)
            if self._part_bytes > MAX_HEAD_BYTES:
                self._refuse_next(431, "head_too_large", f"a request may have {MAX_HEAD_BYTES} bytes before its body")

    def on_message_begin(self) -> None:
        self._in_head = self._part_began = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.idle_since_s = None
        self._in_head, self._in_body, self._part_began = False, True, True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()
        self._wait_for_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        """The connection is idle once the last request has arrived and its response is complete."""
        if not self._in_body and self.cycle.response_complete and not self.pipeline:
            self.idle_since_s = self.loop.time()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # the response to the request before is not complete
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def _body_is_late(self) -> None:
        self._body_timer = None
        cycle = self.cycle
        if cycle.response_started or self.pipeline:
            self.transport.close()
            return
        cycle.disconnected = True  # the application hears that the client is gone
        cycle.message_event.set()
        self._refuse(408, "slow_request", f"the body of the request did not arrive within {self.body_s:g} s")

    # -- responses

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse_next(400, "bad_request", "this is no valid HTTP request")

    def _refuse_next(self, status: int, code: str, detail: str) -> None:
        """Refuse; but if the response to the request before is not complete, only close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(status, code, detail)
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer without the application, and close the connection."""
        body = problem_details(status, code, detail)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", PROBLEM_JSON.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in with_security_headers(headers)]
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n", body)))
        self.transport.close()


def timed_connection(settings: Settings) -> type[TimedConnection]:
    """The connections of a server with these settings."""
    limits = {
        "head_s": settings.head_seconds,
        "body_s": settings.body_seconds,
        "max_connections": settings.max_connections,
        "max_body_bytes": settings.max_body_bytes + EXTRA_BODY_BYTES,
    }
    return type("TimedConnection", (TimedConnection,), limits)
