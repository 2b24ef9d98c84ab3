"""The threads in which models compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")


class InferenceThreads:
    """`count` threads that share the cores of the CPU.

    Several small batches at a time use the cores better than one batch on all cores, where every operation ends with
    a wait for the slowest core. What is computed alone uses all cores, because nothing else would, unless it is so
    little that to wake other cores takes as long.

    The same threads compute all models: with another thread for each batch, each would start threads of its own.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.running = 0
        """Computations at this moment."""
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="inference")

    async def run(self, compute: Callable[[], T], *, alone: bool) -> T:
        """Result of `compute`; `alone`: nothing else waits, and it is more than a little.

        A computation that has not begun when the caller is cancelled is not begun.
        """
        share = 1 if alone and not self.running else self.count
        self.running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, _compute, compute, share)
        finally:
            self.running -= 1


def _compute(compute: Callable[[], T], shared_by: int) -> T:
    import torch

    # This is a setting of the calling thread.
    torch.set_num_threads(max(1, _cores() // shared_by))
    return compute()


@cache
def _cores() -> int:
    """Cores that torch uses unless it is told otherwise: those of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
