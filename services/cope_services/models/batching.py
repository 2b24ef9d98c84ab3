"""Runs models for requests, within bounds. Windows of several requests are scored in one batch.

A batch is computed as soon as a thread is free, and contains the windows that have arrived until then: the oldest one,
and windows of the same model with a similar length.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from anyio import CapacityLimiter, to_thread

from cope_services.http.errors import BusyError
from cope_sweep.signals import user_code

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor, Scores, Window

T = TypeVar("T")

MAX_CANDIDATES = 512
"""A batch is chosen from this many of the oldest windows, so that choosing takes bounded time."""
PREPARATIONS = 4  # threads that read texts and write answers
RETRY_AFTER_S = 2
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the histogram buckets of batch sizes; one more bucket has larger batches."""


@dataclass
class BatchCounts:
    """Totals since the start of the process."""

    refused: int = 0
    """Requests that were answered with 429."""
    windows: int = 0
    """Windows in batches."""
    scored_tokens: int = 0
    """Tokens that models read in batches, without padding."""
    padding_tokens: int = 0
    generated_tokens: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(BATCH_SIZES) + 1))
    """Number of batches in each bucket of `BATCH_SIZES`."""

    def add_batch(self, reads: Sequence[int]) -> None:
        """Count a batch of windows. `reads` has the number of tokens of each window."""
        self.windows += len(reads)
        self.scored_tokens += sum(reads)
        self.padding_tokens += max(reads) * len(reads) - sum(reads)
        self.sizes[bisect_left(BATCH_SIZES, len(reads))] += 1


@dataclass(eq=False)  # by identity: two requests may send the same window
class _QueuedWindow:
    predictor: Predictor
    window: Window
    top: int
    scores: asyncio.Future[Scores]


class Batcher:
    """The queue of windows, and the threads in which models compute. Its methods belong to the event loop.

    The threads share the CPU's cores: several small batches at a time use them better than one batch on all cores,
    where every operation waits for the slowest core. A computation that runs alone gets all cores.
    """

    def __init__(self, max_inferences: int, max_queue_tokens: int) -> None:
        """Create the queue; threads start later.

        Args:
            max_inferences: Number of batches, generations and probes that are computed at a time.
            max_queue_tokens: Maximum number of tokens of all accepted requests.
        """
        self.max_inferences, self.max_queue_tokens = max_inferences, max_queue_tokens
        self.counts = BatchCounts()
        self.queued_tokens = self.running = 0
        self._queue: list[_QueuedWindow] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(max_inferences)
        self._threads = ThreadPoolExecutor(max_inferences, thread_name_prefix="inference")
        self._preparations = CapacityLimiter(PREPARATIONS)

    @property
    def waiting(self) -> int:
        """Number of windows in the queue."""
        return len(self._queue)

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Count the tokens of a request while it is answered. Raises BusyError if the queue has no room for them.

        A request larger than the whole queue is accepted if the queue is empty.
        """
        if self.queued_tokens and self.queued_tokens + tokens > self.max_queue_tokens:
            self.counts.refused += 1
            raise BusyError(
                f"{self.queued_tokens} of at most {self.max_queue_tokens} tokens are waiting in the queue; try again "
                f"in {RETRY_AFTER_S} s",
                RETRY_AFTER_S,
            )
        self.queued_tokens += tokens
        try:
            yield
        finally:
            self.queued_tokens -= tokens

    async def prepare(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, in a thread for reading texts and writing answers."""
        # A plugin's tokenizer or task may raise SystemExit.
        return await to_thread.run_sync(user_code()(compute), limiter=self._preparations)

    async def infer(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, in a thread for models. A caller that is cancelled in time does not start it."""
        shared_by = self.max_inferences if self._queue or self.running else 1
        self.running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _compute, compute, shared_by)
        finally:
            self.running -= 1

    async def score(self, predictor: Predictor, windows: Sequence[Window], top: int = 0) -> list[Scores]:
        """The scores of windows, computed in batches with other windows. They may contain NaN: check them.

        If the caller is cancelled, its waiting windows leave the queue.
        """
        loop = asyncio.get_running_loop()
        queued = [_QueuedWindow(predictor, window, top, loop.create_future()) for window in windows]
        self._queue += queued
        # As many tasks as can compute at a time. Each goes on until no window waits.
        for _ in queued[: self.max_inferences]:
            worker = loop.create_task(self._compute_batches())
            self._workers.add(worker)  # the event loop keeps only a weak reference
            worker.add_done_callback(self._workers.discard)
        return await asyncio.gather(*(item.scores for item in queued))

    async def _compute_batches(self) -> None:
        from cope_sweep.inference import score

        async with self._free:
            while batch := self._next_batch():
                predictor, top = batch[0].predictor, max(item.top for item in batch)
                windows = [item.window for item in batch]
                reads = [window.reads for window in windows]
                self.counts.add_batch(reads)
                compute = partial(score, predictor.model, predictor.run, windows, top=top)
                try:
                    scored = await self.infer(compute)
                except Exception as error:  # the requests of this batch raise it
                    for item in batch:
                        if not item.scores.done():
                            item.scores.set_exception(error)
                else:
                    for item, scores in zip(batch, scored, strict=True):
                        if not item.scores.done():
                            item.scores.set_result(scores)

    def _next_batch(self) -> list[_QueuedWindow]:
        """The oldest window, and windows of its model that `fitting` allows, removed from the queue."""
        from cope_sweep.inference import fitting

        self._queue = [item for item in self._queue if not item.scores.done()]  # without cancelled ones
        if not self._queue:
            return []
        oldest, *others = self._queue[:MAX_CANDIDATES]
        mates = [item for item in others if item.predictor is oldest.predictor]
        fits = fitting(oldest.window.reads, [item.window.reads for item in mates], oldest.predictor.model)
        batch = [oldest, *(mates[index] for index in fits)]
        removed = {*batch}
        self._queue = [item for item in self._queue if item not in removed]
        return batch


def _compute(compute: Callable[[], T], shared_by: int) -> T:
    import torch

    # The number of threads is a setting of the calling thread. On a thread's first call, torch overwrites it with the
    # value that any thread has set last, so read it once before setting it.
    torch.get_num_threads()
    torch.set_num_threads(max(1, _cores() // shared_by))
    with user_code():
        return compute()


@cache
def _cores() -> int:
    """Torch's default number of threads: the cores of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
