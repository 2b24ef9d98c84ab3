"""Connections to other processes: whether a port answers, and calls with a time limit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

CONNECT_TIMEOUT_S = 30.0
"""Time limit for a cluster to accept a process or a request."""
PORT_TIMEOUT_S = 3.0
"""Time limit for a port to accept a connection."""

T = TypeVar("T")


def connection_error(host: str, port: int) -> OSError | None:
    """Why no TCP connection can be made, or None if it can."""
    try:
        socket.create_connection((host, port), timeout=PORT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in another thread. Signal handlers stay as they are.

    Raises:
        TimeoutError: `call` has not returned within `timeout_s`. The thread continues.
        BaseException: What `call` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="call-within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return results[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
