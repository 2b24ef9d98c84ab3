"""A bound on request bodies, kept while they come in: what is too large is never held in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.errors import TooLargeError, problem


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` gets 413, by its Content-Length or as soon as it is seen."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        message = f"the body is larger than {self.max_bytes} bytes; send it in parts"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            return await problem(TooLargeError.status, TooLargeError.type, message)(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            received = await receive()
            seen += len(received.get("body", b""))
            if seen > self.max_bytes:
                # FastAPI takes any other exception here for a body that it cannot parse.
                raise HTTPException(TooLargeError.status, message)
            return received

        return await self.app(scope, counted, send)
