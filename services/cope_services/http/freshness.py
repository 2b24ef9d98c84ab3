"""The version of what the service shows: the store's index and the ablation files.

Requests do not look themselves: the version is at most CHECK_EVERY_S old, and one thread reads it for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

from cope_sweep import __version__
from cope_sweep.read.queries import Queries

CHECK_EVERY_S = 0.5
PATIENCE_S = 1.0
"""How long a request waits for a store that stalls, if an older version is known."""


class Freshness:
    """Reads the version of the store and the ablation files. Its coroutines belong to one event loop."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._version = ""
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        # One thread of its own: the check does not wait behind requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="freshness")

    async def version(self) -> str:
        """A text that changes when an ablation file or anything in the index changes.

        Raises what `Queries.state` raises.
        """
        if time.monotonic() - self._read_s < CHECK_EVERY_S:
            return self._version
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._done)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), PATIENCE_S if self._version else None)
        return self._version

    async def _read(self) -> None:
        began_s = time.monotonic()
        state = await asyncio.get_running_loop().run_in_executor(self._thread, self._queries.state)
        self._version = hashlib.sha256(f"{__version__} {state!r}".encode()).hexdigest()
        self._read_s = began_s

    def _done(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()  # those who wait raise it
