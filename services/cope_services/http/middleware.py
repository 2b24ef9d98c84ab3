"""ASGI middleware around all routes: refusals, the size of bodies, errors in plain text, compression, and headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from isal import isal_zlib
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware, GZipResponder, IdentityResponder
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from werkzeug.http import parse_accept_header

from cope_services.http.errors import ServiceError, TooLargeError, code_of, error_response

INFERENCE_PATH = re.compile(
    r"/api/v1/perplexity|/api/v1/runs/[^/]+/probe|(/openai/[^/]+)?/(v1/completions|tokenize|detokenize)"
)
"""Paths of the requests that ask a model."""

# -- requests ----------------------------------------------------------------------------------------------------------


class Refusals:
    """Answers a request with the error of the first check that raises one, before its body is read."""

    def __init__(self, app: ASGIApp, *checks: Callable[[Scope], None]) -> None:
        """Create the application. Each check gets the scope of a request, and may raise a ServiceError."""
        self.app, self.checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                for check in self.checks:
                    check(scope)
            except ServiceError as error:
                response = error_response(scope, error.status, error.code, str(error), error.headers)
                return await response(scope, receive, send)
        return await self.app(scope, receive, send)


def overload_check(check_room: Callable[[], None]) -> Callable[[Scope], None]:
    """A check that refuses inference while the queue is full.

    It takes a fraction of the time of a request that is read first. The routes ask for room again.
    """

    def check(scope: Scope) -> None:
        if scope["method"] == "POST" and INFERENCE_PATH.fullmatch(scope["path"]):
            check_room()

    return check


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


# -- responses ---------------------------------------------------------------------------------------------------------


class PlainErrors:
    """Gives errors in plain text the body of the others.

    Starlette's file responses answer a `Range` header that they cannot satisfy themselves, without an exception.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain: Message | None = None
        text = b""

        async def structured_send(message: Message) -> None:
            nonlocal plain, text
            if message["type"] == "http.response.start" and message["status"] >= 400:
                media_type = Headers(raw=message["headers"]).get("content-type", "text/plain")
                plain = message if media_type.startswith("text/plain") else None
                if plain is not None:
                    return
            if plain is None:
                await send(message)
                return
            text += message.get("body", b"")
            if not message.get("more_body", False):
                headers = MutableHeaders(raw=plain["headers"])
                del headers["content-type"], headers["content-length"]
                status, detail = plain["status"], text.decode(errors="replace")
                await error_response(scope, status, code_of(status), detail, headers)(scope, receive, send)

        await self.app(scope, receive, structured_send)


MIN_BYTES = 1024
"""Smaller bodies are sent as they are: they fit into one packet."""
THREAD_BYTES = 1 << 19
"""Larger pieces are compressed in a thread: they would block the event loop for a millisecond or more."""
LEVEL = 1
"""Level of ISA-L, 0 to 3. A page of runs takes a tenth of zlib's time at level 5, and is a twelfth larger."""
NOT_COMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/octet-stream", "application/pdf",
                  "application/vnd.apache.parquet")  # fmt: skip
"""Media types of event streams, downloads and pictures."""


class Compression(GZipMiddleware):
    """Starlette's compression, with a faster gzip, and ETags that say that the bytes are others."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, MIN_BYTES, LEVEL, THREAD_BYTES, exclude_content_types=NOT_COMPRESSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "HEAD":
            return await self.app(scope, receive, send)

        async def send_weakened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                if "content-encoding" in headers:
                    del headers["accept-ranges"]
                    if headers.get("etag", "W/").startswith('"'):
                        headers["etag"] = f"W/{headers['etag']}"
            await send(message)

        responder: IdentityResponder = IdentityResponder(self.app, MIN_BYTES, exclude_content_types=())
        if accepts_gzip(Headers(scope=scope).get("accept-encoding", "")):
            responder = _Gzip(self.app, MIN_BYTES, LEVEL, thread_minimum_size=THREAD_BYTES, exclude_content_types=())
        responder.exclude_content_types = self.exclude_content_types  # normalised once, not for each response
        return await responder(scope, receive, send_weakened)


class _Gzip(GZipResponder):
    _compressor: Any

    @property
    def compressor(self) -> Any:
        if self._compressor is None:
            self._compressor = isal_zlib.compressobj(self.compresslevel, wbits=31)
        return self._compressor


@lru_cache(maxsize=256)
def accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` header names gzip, and not with `q=0`."""
    return any(name.lower() == "gzip" and quality > 0 for name, quality in parse_accept_header(header))


NO_FRAMES = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    f"connect-src 'self'; {NO_FRAMES}"
)
"""Content-Security-Policy of the web page and the documentation: files of the service, no inline script or style."""
DATA_POLICY = f"default-src 'none'; {NO_FRAMES}"
"""That of everything else."""
DOCUMENT_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {NO_FRAMES}; sandbox"
"""That of reports and figures that a browser shows: they have styles and pictures in themselves, and no scripts."""
FIXED = [
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]


class SecurityHeaders:
    """Adds security headers. A policy and a `Cache-Control` that a route sets stay."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *FIXED]
                headers = MutableHeaders(raw=message["headers"])
                is_document = headers.get("content-type", "").startswith(("text/html", "image/svg"))
                headers.setdefault("content-security-policy", DOCUMENT_POLICY if is_document else DATA_POLICY)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)
