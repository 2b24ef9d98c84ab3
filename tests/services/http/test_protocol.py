"""The limit on the URL, the headers and the trailers of a request, with sockets that send what no library would."""

from __future__ import annotations

import socket
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest
from cope_services.http.protocol import MAX_HEAD_BYTES

pytestmark = pytest.mark.slow

ENDLESS_BYTES = 32 << 20
"""More than any buffer on the way holds, so that whoever accepts it reads it."""


def sent_until_refused(client: httpx.Client, head: bytes, endless: bytes) -> int:
    """Send a request whose `endless` part is repeated: the bytes of it sent before the disconnect."""
    address = urlsplit(str(client.base_url))
    sent = 0
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    with connection, suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(head)
        while sent < ENDLESS_BYTES:
            connection.sendall(endless)
            sent += len(endless)
    return sent


@pytest.mark.parametrize(
    ("head", "endless"),
    [
        (b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n", b"x-field: " + b"a" * 1000 + b"\r\n"),
        (b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nx-field: ", b"a" * 1000),
        (b"GET /health/live HTTP/1.1\r\n", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (
            b"POST /api/v1/perplexity HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
            b"x-field: " + b"a" * 1000 + b"\r\n",
        ),
    ],
    ids=["headers", "one-header", "name-of-a-header", "url", "trailers"],
)
def test_an_endless_head_is_refused(client: httpx.Client, head: bytes, endless: bytes) -> None:
    assert sent_until_refused(client, head, endless) < ENDLESS_BYTES
    assert client.get("/health/live").status_code == 200


def test_headers_just_above_the_limit_are_answered_with_a_problem(client: httpx.Client) -> None:
    answer = client.get("/health/live", headers={"x-field": "a" * MAX_HEAD_BYTES})
    assert (answer.status_code, answer.json()["code"]) == (431, "headers_too_large")
    assert answer.json()["data"] == {"limit": MAX_HEAD_BYTES}


def test_long_headers_below_the_limit_are_read(client: httpx.Client) -> None:
    answer = client.get("/health/live", headers={"x-field": "a" * (MAX_HEAD_BYTES - 1000)})
    assert answer.status_code == 200


def test_each_request_of_a_connection_has_the_whole_limit(client: httpx.Client) -> None:
    for _ in range(3):
        assert client.get("/health/live", headers={"x-field": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200


def test_bodies_are_longer_than_heads(client: httpx.Client) -> None:
    answer = client.post("/api/v1/perplexity", json={"models": ["0" * 16], "texts": ["a" * (2 * MAX_HEAD_BYTES)]})
    assert answer.status_code in (404, 422)
