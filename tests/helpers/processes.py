"""Processes of their own, waits for conditions, free ports, and servers of a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TIMEOUT_S = 240
"""Importing mlflow or starting Ray takes seconds on an idle machine and minutes on a busy one."""


def output_of(*words: str, cwd: Path | None = None, timeout_s: float = 300, **environment: str) -> str:
    """The standard output of `python WORDS`, with some environment variables set. Its exit code has to be 0."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return when `condition` holds; fail after `timeout_s`. So no test depends on how fast a machine is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server on this machine whose requests `handler` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # It looks every 10 ms, and not twice a second, whether it is to end.
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def free_port() -> int:
    """A TCP port of the loopback interface that no process uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
