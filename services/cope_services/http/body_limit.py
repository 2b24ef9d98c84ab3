"""ASGI middleware that limits the size of request bodies while they are received."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.errors import TooLargeError, error_response


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`: by its Content-Length, or as soon as more bytes arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        message = f"the body is larger than {self.max_bytes} bytes; send several smaller requests"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            return await error_response(scope, TooLargeError.status, TooLargeError.code, message)(scope, receive, send)
        received_bytes = 0

        async def limited_receive() -> Message:
            nonlocal received_bytes
            received = await receive()
            received_bytes += len(received.get("body", b""))
            if received_bytes > self.max_bytes:
                # FastAPI reports any other exception here as a body that it cannot parse.
                raise HTTPException(TooLargeError.status, message)
            return received

        return await self.app(scope, limited_receive, send)
