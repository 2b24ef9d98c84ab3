"""HTTP as uvicorn speaks it, with a limit for what is not a body: the URL, the headers and the trailers of a request.

uvicorn's parser keeps them in memory until they are complete, however long they are; it limits bodies only.
"""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cope_services.http.errors import PROBLEM_JSON, problem_details

MAX_HEAD_BYTES = 1 << 16
"""Maximum length of a request without its body."""


class HeadTooLargeError(Exception):
    """Ends the parsing of a request whose URL, headers or trailers are too long."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 to a request with too much before or after its body, and disconnects."""

    _head_bytes = _unread_bytes = 0

    def data_received(self, data: bytes) -> None:
        # The parser gives a header to this object when it is complete. Of one without an end, only these bytes tell.
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._head_bytes = self._unread_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._unread_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError

    def send_400_response(self, msg: str) -> None:
        # The parser stops at an error of a callback, and uvicorn calls this method.
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        if self.cycle is None or self.cycle.response_complete:  # else the answer to this or an earlier request is sent
            detail = f"the URL and the headers have more than {MAX_HEAD_BYTES:,} bytes; send shorter ones"
            body = problem_details(status, "headers_too_large", detail, {"limit": MAX_HEAD_BYTES})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {PROBLEM_JSON}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
