"""Waits for conditions, so that no test depends on how fast a machine is."""

import time
from collections.abc import Callable

from sqlalchemy import select

from cope_sweep.store.index import Index
from cope_sweep.store.index.tables import locks, runs

TIMEOUT_S = 240
"""Importing mlflow or starting Ray takes seconds on an idle machine and minutes on a busy one."""


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return when `condition` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def until_prolonged(index: Index, name: str, ttl_s: float) -> None:
    """Return when the lease of a run, or a lock, has been prolonged so often that without it would have expired."""
    key, expiry = (runs.c.run_id, runs.c.expires_s) if len(name) == 16 else (locks.c.name, locks.c.expires_s)

    def expires_s() -> float:
        with index.database.reading() as connection:
            return connection.execute(select(expiry).where(key == name)).scalar_one()

    first_s = expires_s()
    until(lambda: expires_s() > first_s + ttl_s)
