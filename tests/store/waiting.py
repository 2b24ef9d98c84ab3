"""Waits for conditions, so that no test depends on how fast a machine is."""

import time
from collections.abc import Callable

TIMEOUT_S = 240
"""Importing mlflow or starting Ray takes seconds on an idle machine and minutes on a busy one."""


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return when `condition` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
