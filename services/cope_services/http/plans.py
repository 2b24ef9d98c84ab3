"""Makes the plans of ablations off the request path: a plan of many runs takes seconds.

Requests wait for a plan without occupying a thread, and those that need the same plan share its making.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from starlette.concurrency import run_in_threadpool

from cope_sweep.errors import UserError
from cope_sweep.read.queries import AblationFiles

MAX_THREADS = 4
"""Plans that are made at a time."""
PATIENCE_S = 1.0
"""How long answers about all ablations wait for plans that are being made; then they leave them out."""

Key = tuple[str, str | None]


class Plans:
    """Makes the plans of a folder of ablation files. Its coroutines belong to one event loop."""

    def __init__(self, files: AblationFiles) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="plans")
        self._making: dict[Key, asyncio.Task[None]] = {}
        self._all: asyncio.Task[None] | None = None
        self._all_began_s = 0.0

    async def prepare(self, name: str, scale: str | None) -> None:
        """Return when `AblationFiles.load` answers at once for this ablation and scale, with a plan or an error."""
        key = name, scale
        if key not in self._making and not await run_in_threadpool(self._is_ready, key):
            self._start(key)
        if key in self._making:
            await asyncio.shield(self._making[key])

    async def prepare_all(self) -> None:
        """Begin to make the plans that are not ready, of all ablations at all scales, and wait a moment for them."""
        if self._all is None:
            keys = await run_in_threadpool(self._missing)
            if not keys:
                return
            if self._all is None:
                self._all_began_s = time.monotonic()
                self._all = asyncio.create_task(self._make_all())
                self._all.add_done_callback(self._all_done)
        left_s = self._all_began_s + PATIENCE_S - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._all), left_s)

    def _start(self, key: Key) -> asyncio.Task[None]:
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._make(key))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return task

    async def _make(self, key: Key) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._load, key)

    async def _make_all(self) -> None:
        """One plan at a time: the others threads are for plans that somebody asks for."""
        tried: set[Key] = set()
        while keys := [key for key in await run_in_threadpool(self._missing) if key not in tried]:
            tried.add(keys[0])
            await self._start(keys[0])

    def _all_done(self, task: asyncio.Task[None]) -> None:
        self._all = None
        if not task.cancelled():
            task.exception()

    def _load(self, key: Key) -> None:
        with contextlib.suppress(UserError, OSError):  # the request that asks for the plan raises it
            self._files.load(*key)

    def _is_ready(self, key: Key) -> bool:
        with contextlib.suppress(OSError):
            return self._files.is_ready(*key)
        return True

    def _missing(self) -> list[Key]:
        """Parts that are not ready: the sizes of the files first, then their scales."""
        with contextlib.suppress(OSError):
            return self._files.missing()
        return []
