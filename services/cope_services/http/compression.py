"""ASGI middleware that compresses text and JSON with gzip."""

from __future__ import annotations

from dataclasses import dataclass

from anyio import to_thread
from isal import isal_zlib
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIN_BYTES = 1024
"""Smaller bodies are sent as they are: they fit into one packet."""
THREAD_BYTES = 1 << 19
"""Larger pieces are compressed in a thread: they would block the event loop for a millisecond or more."""
LEVEL = 1
"""Level of ISA-L, 0 to 3. A page of runs takes a tenth of zlib's time at level 5, and is a twelfth larger."""
MEDIA_TYPES = frozenset(
    {
        b"application/javascript",
        b"application/json",
        b"application/problem+json",
        b"application/x-tex",
        b"image/svg+xml",
        b"text/css",
        b"text/csv",
        b"text/html",
        b"text/javascript",
        b"text/markdown",
        b"text/plain",
    }
)
"""Media types that are compressed. Event streams, downloads and pictures are not."""


class Compression:
    """Compresses a response if the client accepts it, its media type is one of `MEDIA_TYPES` and it is not a range."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "HEAD":
            return await self.app(scope, receive, send)
        accepted = next((value for name, value in scope["headers"] if name == b"accept-encoding"), b"")
        return await self.app(scope, receive, _Response(send, accepts_gzip(accepted.decode("latin-1"))).send)


@dataclass
class _Response:
    """One response on its way to the client."""

    to_client: Send
    accepted: bool
    start: Message | None = None
    """The begin of a response that may be compressed: it waits for the first piece of the body."""
    stream: isal_zlib.Compress | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == 200 and self._may_be_compressed(message["headers"]):
                self.start = message
                return
        elif message["type"] == "http.response.body":
            if self.start is not None:
                message = await self._first(self.start, message)
            elif self.stream is not None:
                message = await _next(self.stream, message)
        await self.to_client(message)

    def _may_be_compressed(self, raw: list[tuple[bytes, bytes]]) -> bool:
        given = dict(raw)
        if int(given.get(b"content-length", MIN_BYTES)) < MIN_BYTES or b"content-encoding" in given:
            return False
        if given.get(b"content-type", b"").partition(b";")[0].strip().lower() not in MEDIA_TYPES:
            return False
        MutableHeaders(raw=raw).add_vary_header("Accept-Encoding")
        return self.accepted

    async def _first(self, start: Message, message: Message) -> Message:
        """Send the begin of the response and return the first piece of its body, or the whole."""
        self.start = None
        body, more = message.get("body", b""), message.get("more_body", False)
        headers = MutableHeaders(raw=start["headers"])
        if not more and len(body) < MIN_BYTES:
            await self.to_client(start)
            return message
        etag = headers.get("etag")
        headers["content-encoding"] = "gzip"
        del headers["content-length"], headers["accept-ranges"]
        if etag and not etag.startswith("W/"):  # the bytes are others, the content is the same
            headers["etag"] = f"W/{etag}"
        if more:
            self.stream = isal_zlib.compressobj(LEVEL, wbits=31)
            message = await _next(self.stream, message)
        else:
            compressed = await _in_thread_if_large(isal_zlib.compressobj(LEVEL, wbits=31), body, last=True)
            message = {**message, "body": compressed}
            headers["content-length"] = str(len(message["body"]))
        await self.to_client(start)
        return message


async def _next(stream: isal_zlib.Compress, message: Message) -> Message:
    """A piece of the body, compressed."""
    last = not message.get("more_body", False)
    return {**message, "body": await _in_thread_if_large(stream, message.get("body", b""), last=last)}


async def _in_thread_if_large(stream: isal_zlib.Compress, body: bytes, *, last: bool) -> bytes:
    def compress() -> bytes:
        return stream.compress(body) + stream.flush(isal_zlib.Z_FINISH if last else isal_zlib.Z_SYNC_FLUSH)

    return await to_thread.run_sync(compress) if len(body) > THREAD_BYTES else compress()


def accepts_gzip(header: str) -> bool:
    """Whether an `Accept-Encoding` header accepts gzip: `gzip;q=0` is a no."""
    for part in header.split(","):
        coding, _, parameter = part.partition(";")
        if coding.strip().lower() == "gzip":
            name, _, quality = parameter.partition("=")
            if name.strip().lower() != "q":
                return True
            try:
                return float(quality) > 0
            except ValueError:
                return False
    return False
