"""Computes what requests ask of models: perplexity windows in batches over requests, within bounds.

No window waits for others: while batches are computed, the next ones gather. A batch has the oldest window and those of
the same model that fit it in length.
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

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor, Scores, Window

T = TypeVar("T")

MAX_CANDIDATES = 512
"""Windows, from the oldest on, of which a batch is chosen: choosing takes a bounded time however many wait."""
PREPARATIONS = 4  # threads that read texts and make answers
MAX_REQUESTS = 512
"""Requests that are answered at a time, or wait."""
RETRY_AFTER_S = 2
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the classes of batch sizes; larger batches are in a class of their own."""


@dataclass
class BatchCounts:
    """Totals since the start. They only grow."""

    refused: int = 0
    """Requests that were answered with 429."""
    windows: int = 0
    """Windows in batches."""
    scored_tokens: int = 0
    """Tokens that models read in them, without padding."""
    padding_tokens: int = 0
    generated_tokens: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(BATCH_SIZES) + 1))
    """Batches of windows in each class of `BATCH_SIZES`."""

    def add_batch(self, reads: Sequence[int]) -> None:
        """Count a batch of windows with so many tokens each."""
        self.windows += len(reads)
        self.scored_tokens += sum(reads)
        self.padding_tokens += max(reads) * len(reads) - sum(reads)
        self.sizes[bisect_left(BATCH_SIZES, len(reads))] += 1


@dataclass(eq=False)
class _Waiting:
    """A window that waits for its scores."""

    predictor: Predictor
    window: Window
    top: int
    scores: asyncio.Future[Scores]


class Batcher:
    """The queue of windows, and the threads in which models compute. Its methods belong to the event loop.

    The threads share the cores of the CPU: several small batches at a time use them better than one batch on all cores,
    where every operation ends with a wait for the slowest core. What is computed alone has all cores.
    """

    def __init__(self, max_inferences: int, max_queue_tokens: int) -> None:
        """Start no thread yet.

        Args:
            max_inferences: Batches, generations and probes that are computed at a time.
            max_queue_tokens: Tokens of all accepted requests.
        """
        self.max_inferences, self.max_queue_tokens = max_inferences, max_queue_tokens
        self.counts = BatchCounts()
        self.requests = self.queued_tokens = self.running = 0
        self._queue: list[_Waiting] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(max_inferences)
        self._threads = ThreadPoolExecutor(max_inferences, thread_name_prefix="inference")
        self._preparations = CapacityLimiter(PREPARATIONS)

    @property
    def waiting(self) -> int:
        """Windows that wait in the queue."""
        return len(self._queue)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request from its begin, before its tokens are known. Raises BusyError if there are too many."""
        if self.requests >= MAX_REQUESTS:
            raise self._busy(f"{self.requests} requests are being answered")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Count the tokens of a request while it is answered. Raises BusyError if the queue has no room for them.

        A request that is larger than the queue is accepted while nothing else is.
        """
        if self.queued_tokens and self.queued_tokens + tokens > self.max_queue_tokens:
            raise self._busy(
                f"{self.queued_tokens} tokens are waiting, and the queue has room for {self.max_queue_tokens}"
            )
        self.queued_tokens += tokens
        try:
            yield
        finally:
            self.queued_tokens -= tokens

    def _busy(self, reason: str) -> BusyError:
        self.counts.refused += 1
        return BusyError(f"{reason}; try again in {RETRY_AFTER_S} s", retry_after_s=RETRY_AFTER_S)

    async def prepare(self, compute: Callable[[], T]) -> T:
        """Result of `compute`: reading texts and making answers, in threads of their own."""
        return await to_thread.run_sync(compute, limiter=self._preparations)

    async def infer(self, compute: Callable[[], T]) -> T:
        """Result of `compute`, which asks a model, in a thread. It is not started if the caller is cancelled before."""
        shared_by = self.max_inferences if self._queue or self.running else 1
        self.running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _compute, compute, shared_by)
        finally:
            self.running -= 1

    async def score(self, predictor: Predictor, windows: Sequence[Window], top: int = 0) -> list[Scores]:
        """The scores of windows, each in a batch with others; no number is checked.

        Where the caller is cancelled, windows that still wait leave the queue.
        """
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(predictor, window, top, loop.create_future()) for window in windows]
        self._queue += waiting
        for _ in waiting[: self.max_inferences]:
            worker = loop.create_task(self._compute_batches())
            self._workers.add(worker)  # the loop itself would not keep it
            worker.add_done_callback(self._workers.discard)
        return await asyncio.gather(*(each.scores for each in waiting))

    async def _compute_batches(self) -> None:
        """Compute batches until no window waits."""
        from cope_sweep.inference import score

        async with self._free:
            while batch := self._next_batch():
                predictor, top = batch[0].predictor, max(each.top for each in batch)
                windows = [each.window for each in batch]
                reads = [window.reads for window in windows]
                self.counts.add_batch(reads)
                compute = partial(score, predictor.model, predictor.run, windows, top=top)
                try:
                    scored = await self.infer(compute)
                except Exception as error:  # whatever a model raises belongs to those who asked for it
                    for each in batch:
                        if not each.scores.done():
                            each.scores.set_exception(error)
                else:
                    for each, scores in zip(batch, scored, strict=True):
                        if not each.scores.done():
                            each.scores.set_result(scores)

    def _next_batch(self) -> list[_Waiting]:
        """The oldest window, and those of its model that `fitting` allows, taken out of the queue."""
        from cope_sweep.inference import fitting

        self._queue = [each for each in self._queue if not each.scores.done()]  # without cancelled ones
        if not self._queue:
            return []
        oldest, *others = self._queue[:MAX_CANDIDATES]
        mates = [each for each in others if each.predictor is oldest.predictor]
        fits = fitting(oldest.window.reads, [each.window.reads for each in mates], oldest.predictor.model)
        batch = [oldest, *(mates[index] for index in fits)]
        taken = {*batch}
        self._queue = [each for each in self._queue if each not in taken]
        return batch


def _compute(compute: Callable[[], T], shared_by: int) -> T:
    import torch

    # This is a setting of the calling thread. When a thread first asks for it, torch replaces it by the one that any
    # thread has made last, so a new thread asks before it sets its own.
    torch.get_num_threads()
    torch.set_num_threads(max(1, _cores() // shared_by))
    return compute()


@cache
def _cores() -> int:
    """Cores that torch uses unless it is told otherwise: those of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
