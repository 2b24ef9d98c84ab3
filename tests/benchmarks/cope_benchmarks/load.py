"""Load on an HTTP server: clients in this process that each send one GET request after another over one connection."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import psutil

END = b"\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """What clients ask for."""

    paths: Iterator[str]
    """Each request takes the next one, of whichever client it is."""
    headers: str = ""
    """Lines that end with \\r\\n."""
    status: int = 200


@dataclass
class Load:
    """What a load has measured."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    server_us: float
    """Processor time of the server for one request, in microseconds."""


@dataclass(eq=False)
class _Client(asyncio.Protocol):
    """Asks until `stop_s`. It reads no more of an answer than its length needs: the clients share the machine."""

    requests: Iterator[bytes]
    status: bytes
    stop_s: float
    taken_s: list[float]
    done: asyncio.Future[None]
    received: bytearray = field(default_factory=bytearray)
    wanted: int = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self.began_s = time.perf_counter()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.wanted < 0:
            head, separator, _ = bytes(self.received).partition(END)
            if not separator:
                return None
            if head[9:12] != self.status:
                return self._fail(RuntimeError(f"the server answered {head[:300]!r}"))
            length = (
                0 if self.status == b"304" else int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            )
            self.wanted = len(head) + len(END) + length
        if len(self.received) < self.wanted:
            return None
        now_s = time.perf_counter()
        self.taken_s.append(now_s - self.began_s)
        self.received.clear()
        self.wanted = -1
        if now_s < self.stop_s:
            return self._ask()
        self.transport.close()
        if not self.done.done():
            self.done.set_result(None)
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.transport.close()


def measure(address: tuple[str, int], server: psutil.Process, target: Target, clients: int, seconds: float) -> Load:
    """Ask a server for `seconds` with `clients` clients. Raises RuntimeError for another status."""
    return _new_loop()(_measure(address, server, target, clients, seconds))


async def _measure(
    address: tuple[str, int], server: psutil.Process, target: Target, clients: int, seconds: float
) -> Load:
    loop = asyncio.get_running_loop()
    rest = f" HTTP/1.1\r\nHost: {address[0]}\r\n{target.headers}\r\n"
    requests = (f"GET {path}{rest}".encode() for path in target.paths)
    taken_s: list[float] = []
    before, began_s = server.cpu_times(), time.perf_counter()
    finished = []
    for _ in range(clients):
        done: asyncio.Future[None] = loop.create_future()
        client = _Client(requests, str(target.status).encode(), began_s + seconds, taken_s, done)
        await loop.create_connection(lambda client=client: client, *address)  # type: ignore[misc]
        finished.append(done)
    await asyncio.gather(*finished)
    elapsed_s, after = time.perf_counter() - began_s, server.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    percentiles = statistics.quantiles(taken_s, n=100)
    return Load(len(taken_s) / elapsed_s, 1e3 * percentiles[49], 1e3 * percentiles[98], 1e6 * used_s / len(taken_s))


def _new_loop() -> Callable[..., Load]:
    """uvloop's `run` where it is installed: a client then takes a third of the time of asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run
