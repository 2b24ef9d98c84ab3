"""ASGI middleware around all routes: refusals, size of bodies, HEAD, compression, and headers."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.errors import HttpError, TooLargeError, error_response

# -- requests ----------------------------------------------------------------------------------------------------------


class Refusals:
    """Answers a request with the error of the first check that raises one, before its body is read."""

    def __init__(self, app: ASGIApp, *checks: Callable[[Scope], None]) -> None:
        """Create the application. Each check gets the scope of a request, and may raise an HttpError."""
        self.app, self.checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                for check in self.checks:
                    check(scope)
            except HttpError as error:
                response = error_response(scope, error.status, error.code, str(error), error.headers, error.data)
                return await response(scope, receive, send)
        return await self.app(scope, receive, send)


MAX_BRACKETS = 1 << 16
"""Maximum number of `[` and `{` in a body. Parsing 350,000 lists, possible in 1 MB, blocks the event loop for 0.5 s."""


class BodyLimit:
    """Answers 413 to a body that is too large: by its Content-Length, or as soon as too many bytes have arrived."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        message = f"the body is larger than {self.max_bytes} bytes; send several smaller requests"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            code, data = TooLargeError.default_code, {"limit": self.max_bytes}
            return await error_response(scope, TooLargeError.status, code, message, data=data)(scope, receive, send)
        size_bytes = brackets = 0

        async def limited_receive() -> Message:
            nonlocal size_bytes, brackets
            received = await receive()
            body = received.get("body", b"")
            size_bytes += len(body)
            brackets += body.count(b"[") + body.count(b"{")
            # FastAPI reports any other exception here as a body that it cannot parse.
            if size_bytes > self.max_bytes:
                raise HTTPException(TooLargeError.status, message)
            if brackets > MAX_BRACKETS:
                raise HTTPException(
                    TooLargeError.status,
                    f"the body has more than {MAX_BRACKETS} `[` and `{{`; send several smaller requests",
                )
            return received

        return await self.app(scope, limited_receive, send)


# -- responses ---------------------------------------------------------------------------------------------------------


ORIGINAL_METHOD = "cope_services.method"
"""Key in a scope: the method before `HeadAsGet` changed it."""


class HeadAsGet:
    """Treats HEAD as GET; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            return await self.app(scope, receive, send)
        as_get = {**scope, "method": "GET", ORIGINAL_METHOD: "HEAD"}
        try:
            await self.app(as_get, receive, send)
        finally:
            # The metrics name the route by what Starlette has noted in the other scope.
            scope.update({name: as_get[name] for name in ("endpoint", "path_params") if name in as_get})


async def answered_head(response: Response, scope: Scope, send: Send) -> bool:
    """Whether the request is a HEAD; then the head of the response is sent, and nothing of its body is made."""
    if scope.get(ORIGINAL_METHOD) != "HEAD":
        return False
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body"})
    return True


def compression(app: ASGIApp) -> ASGIApp:
    """The application with compressed text and JSON. Event streams, downloads and images are not compressed."""
    excluded = (
        *DEFAULT_EXCLUDED_CONTENT_TYPES,
        "application/octet-stream",
        "application/pdf",
        "application/vnd.apache.parquet",
    )
    return GZipMiddleware(app, minimum_size=1024, compresslevel=1, exclude_content_types=excluded)


NO_FRAMES = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    f"connect-src 'self'; {NO_FRAMES}"
)
"""Content-Security-Policy of the web page and the documentation: only files of the service, nothing inline."""
DATA_POLICY = f"default-src 'none'; {NO_FRAMES}"
"""Content-Security-Policy of all other responses."""
DOCUMENT_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {NO_FRAMES}; sandbox"
"""Content-Security-Policy of reports and figures: styles and images, no scripts."""
FIXED = [
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]


class SecurityHeaders:
    """Adds security headers, unless the route has set them (Content-Security-Policy, Cache-Control)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *FIXED]
                # It changes the list in the message itself.
                headers = MutableHeaders(raw=message["headers"])
                is_document = headers.get("content-type", "").startswith(("text/html", "image/svg"))
                headers.setdefault("content-security-policy", DOCUMENT_POLICY if is_document else DATA_POLICY)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)
