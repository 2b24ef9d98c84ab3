"""Slow, idle and numerous connections, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from cope_services import connections
from cope_services.server import configuration
from psutil import CONN_ESTABLISHED, Process

from tests.services.sample_store import API, SampleStore, serving

PATIENCE_S = 60
HEAD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def connected(client: httpx.Client) -> Iterator[socket.socket]:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=PATIENCE_S) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection, which has to happen."""
    received = b""
    with connection:
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                return received
            if not piece:
                return received
            received += piece


def one_answer(connection: socket.socket) -> None:
    """Read the answer of `/health/live` as a whole; it may arrive in pieces."""
    received = b""
    while not received.endswith(b'{"status":"live"}'):
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    assert received.startswith(b"HTTP/1.1 200 OK")


@pytest.fixture(scope="module")
def impatient(sample: SampleStore) -> Iterator[httpx.Client]:
    """A client of a server with short limits. Keep-alive is 5 s, so that it is not what closes a connection."""
    with serving(sample.settings(head_seconds=0.4, body_seconds=0.4)) as client:
        yield client


@pytest.fixture(scope="module")
def patient(sample: SampleStore) -> Iterator[httpx.Client]:
    """A client of a server that closes no connection for its time."""
    with serving(sample.settings(head_seconds=3600, body_seconds=3600)) as client:
        yield client


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, HEAD + b"x: y", b"\r\n"])
def test_without_a_complete_head_a_connection_is_closed(impatient: httpx.Client, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        assert rest(connection) == b""


def test_bytes_that_trickle_do_not_hold_a_connection(impatient: httpx.Client) -> None:
    """Each byte arrives soon after the last, but the head as a whole takes too long."""
    with connected(impatient) as connection:
        closed = False
        for _ in range(10_000):
            try:
                connection.sendall(b"G" if closed else b"\r\n")
            except OSError:
                closed = True
                break
            time.sleep(0.05)
        assert closed


def test_the_second_head_has_a_limit_too(impatient: httpx.Client) -> None:
    with connected(impatient) as connection:
        connection.sendall(HEAD + b"\r\n")
        one_answer(connection)
        connection.sendall(HEAD)
        assert rest(connection) == b""


@pytest.mark.parametrize("length", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_a_slow_body_gets_408(impatient: httpx.Client, length: bytes) -> None:
    head = f"POST {API}/perplexity HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    with connected(impatient) as connection:
        connection.sendall(head + length + b"\r\n\r\n")
        connection.sendall(b"{" if b"content" in length else b"1\r\n{\r\n")
        answer, _, body = rest(connection).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"content-type: application/problem+json" in answer
    assert b"x-content-type-options: nosniff" in answer
    assert b"connection: close" in answer
    assert b'"code": "slow_request"' in body


def test_a_body_that_nobody_reads_has_a_limit(impatient: httpx.Client) -> None:
    """The response is complete before the body is, so the connection does not wait for the rest of it."""
    with connected(impatient) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert rest(connection).startswith(b"HTTP/1.1 200 OK")


def test_a_fast_client_is_not_cut_off(impatient: httpx.Client) -> None:
    """Requests on one connection, for longer than all limits together."""
    with connected(impatient) as connection:
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            connection.sendall(HEAD + b"\r\n")
            one_answer(connection)


def test_pipelined_requests_are_answered_in_order(impatient: httpx.Client) -> None:
    with connected(impatient) as connection:
        other = HEAD.replace(b"live", b"ready") + b"connection: close\r\n\r\n"
        connection.sendall(HEAD + b"\r\n" + HEAD + b"\r\n" + other)
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"live") == 2
    assert answer.endswith(b'{"status":"ready"}')


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
def test_what_is_not_http_gets_problem_details(impatient: httpx.Client, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        answer, _, body = rest(connection).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/problem+json" in answer
    assert b"content-security-policy: " in answer
    assert b'"code": "bad_request"' in body


@pytest.mark.parametrize("begin", [HEAD + b"x: ", HEAD + b"x: y\r\n", b"GET /", b"\r\n"])
def test_a_head_that_never_ends_is_refused(patient: httpx.Client, begin: bytes) -> None:
    """Headers that fit are accepted; 64 KiB do not."""
    repeated = begin[-6:] if begin.endswith(b"y\r\n") else begin if begin == b"\r\n" else b"a" * 6
    with connected(patient) as connection:
        with contextlib.suppress(ConnectionError):  # the server stops reading
            connection.sendall(begin)
            for _ in range(100):
                time.sleep(0.001)  # in several pieces, of which the first does not count
                connection.sendall(repeated * 1000)
        answer = rest(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert patient.get("/health/live", headers={"x": "a" * 60_000}).status_code == 200


def test_a_body_that_goes_on_after_413_is_cut_off(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "EXTRA_BODY_BYTES", 100_000)
    head = f"POST {API}/perplexity HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n".encode()
    with serving(sample.settings(max_body_bytes=1000)) as client, connected(client) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.sendall(b" " * 65536)


def test_idle_connections_make_room(sample: SampleStore) -> None:
    """More idle connections than the server accepts: those that are idle longest are closed, and others answered."""
    with serving(sample.settings(max_connections=5, head_seconds=60)) as client, ExitStack() as stack:
        idle = [stack.enter_context(connected(client)) for _ in range(12)]
        for _ in range(3):
            with connected(client) as other:
                other.sendall(HEAD + b"connection: close\r\n\r\n")
                assert rest(other).startswith(b"HTTP/1.1 200 OK")
        assert rest(idle[0]) == b""  # the oldest one


def test_too_many_busy_connections_are_refused(sample: SampleStore) -> None:
    with serving(sample.settings(max_connections=3, body_seconds=60)) as client, ExitStack() as stack:
        head = f"POST {API}/perplexity HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        for _ in range(3):
            busy = stack.enter_context(connected(client))
            busy.sendall(f"{head}Expect: 100-continue\r\nContent-Type: application/json\r\n\r\n".encode())
            assert busy.recv(100).startswith(b"HTTP/1.1 100")  # the server waits for the body
        with connected(client) as other:
            answer = rest(other)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b'"code": "too_many_connections"' in answer
        busy.close()  # one of them leaves
        for _ in range(PATIENCE_S * 10):
            with connected(client) as other:
                other.sendall(HEAD + b"connection: close\r\n\r\n")
                if rest(other).startswith(b"HTTP/1.1 200 OK"):
                    return
            time.sleep(0.1)
        pytest.fail("the connection that was closed still counts")


def test_a_client_that_does_not_read_its_response_is_cut_off(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALL_S", 0.3)
    checkpoint = own_sample.store.run(own_sample.ids[0]).checkpoint
    with (checkpoint / "large.bin").open("wb") as large:
        large.truncate(1 << 28)  # more than all buffers on the way
    path = f"{API}/runs/{own_sample.ids[0]}/checkpoint/large.bin"
    with serving(own_sample.settings()) as client, connected(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(100)
        for _ in range(PATIENCE_S * 10):
            servers = [each for each in Process().net_connections("tcp") if each.laddr.port == client.base_url.port]
            if not [each for each in servers if each.status == CONN_ESTABLISHED]:
                return
            time.sleep(0.1)
        pytest.fail("the connection is still open")


def test_the_server_uses_the_fast_parser_and_loop(sample: SampleStore) -> None:
    config = configuration(sample.settings())
    config.load()
    assert issubclass(config.http_protocol_class, connections.TimedConnection)
    assert config.get_loop_factory().__module__.startswith("uvloop")
