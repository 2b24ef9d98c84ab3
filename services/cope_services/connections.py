"""HTTP connections with time limits, on top of uvicorn's parser: slow and idle clients do not hold them for long."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cope_services.errors import PROBLEM_JSON, problem_details
from cope_services.headers import with_security_headers
from cope_services.settings import Settings

STALL_S = 60.0
"""Time for which a client may leave a response unread. One that reads slowly is not cut off."""


class TimedConnection(HttpToolsProtocol):
    """A connection that is closed if its client is too slow.

    A client has `head_s` to send the head of a request, from its connection or from the first byte after the last
    response, and `body_s` for the body. Between requests, uvicorn closes an idle connection after some seconds. If
    there are `max_connections`, the connection that has been idle longest makes room for a new one.
    """

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 30.0
    max_connections: ClassVar[int] = 512

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_since_s: float | None = None
        """When the connection began to wait for the head of a request; None while it has one."""
        self._in_body = False
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
        super().data_received(data)
        # Most requests arrive as a whole, so they need no timer.
        if self.transport.is_closing():
            return
        if self._in_body and self._body_timer is None:
            self._body_timer = self.loop.call_later(self.body_s, self._body_is_late)
        elif self.idle_since_s is not None and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def on_headers_complete(self) -> None:
        self.idle_since_s = None
        self._in_body = True
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
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # another response is being sent
            return
        self._refuse(400, "bad_request", "this is no valid HTTP request")

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
    }
    return type("TimedConnection", (TimedConnection,), limits)
