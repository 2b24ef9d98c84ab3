"""Security headers of every response."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

FIXED = (
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
CONTENT_SECURITY_POLICY, CACHE_CONTROL = b"content-security-policy", b"cache-control"
DATA = (CONTENT_SECURITY_POLICY, DATA_POLICY.encode())
DOCUMENT = (CONTENT_SECURITY_POLICY, DOCUMENT_POLICY.encode())
REVALIDATE = (CACHE_CONTROL, b"no-cache")


class SecurityHeaders:
    """ASGI middleware that adds the headers. A policy and a `Cache-Control` that a route sets stay."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = with_security_headers(message["headers"])
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def with_security_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a response, and those that are added to it."""
    policy: tuple[bytes, bytes] | None = DATA
    cached = False
    added = list(FIXED)
    for name, value in headers:
        if name == CONTENT_SECURITY_POLICY:
            policy = None
        elif name == CACHE_CONTROL:
            cached = True
        elif name == b"content-type" and policy and value.startswith((b"text/html", b"image/svg")):
            policy = DOCUMENT
    if policy:
        added.append(policy)
    if not cached:
        added.append(REVALIDATE)
    return [*headers, *added]
