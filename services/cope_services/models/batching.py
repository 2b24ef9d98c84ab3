"""Dynamic batching: computes what requests ask of models, in batches over requests, within bounds.

Work waits in one queue. A free worker takes the oldest work and the work that fits it: windows of the same model with
similar lengths, or generations of the same model with similar prompts. There is no delay to collect a batch: while
batches are computed, the next ones gather. Generations are computed for a short time, and then wait again at the end.

A request is refused if the queue is full (`BusyError`). The work of a request that is cancelled leaves the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar, TypeVar

from anyio import CapacityLimiter, to_thread

from cope_services.http.errors import BusyError, TimeLimitError, TooLargeError

if TYPE_CHECKING:
    from cope_sweep.inference import Decoder, Generation, Predictor, Scores, Window

T = TypeVar("T")

LITTLE_TOKENS = 64
"""Tokens of a batch that one core computes as fast as several."""
MAX_CANDIDATES = 512
"""Work, from the oldest on, of which a batch is chosen: choosing takes a bounded time however long the queue is."""
MAX_GENERATIONS = 32
"""Generations that are decoded together."""
PROMPT_DIFFERENCE = 32
"""Difference of the prompts' lengths of generations that are decoded together: tokens that are read one by one."""
SLICE_S = 0.05
"""Time for which generations are computed before other work has its turn."""
MAX_RETRY_S = 60
PREPARATIONS = 4  # threads that read texts and make answers
EMPTY_SHARE = 0.75
"""Share of the queue's tokens that may wait when it takes requests again after it was full."""
MAX_REQUESTS = 512
"""Requests that are answered at a time, or wait."""


@dataclass(eq=False)
class _Request:
    """Windows of one request, and the future that has their scores when all are computed."""

    predictor: Predictor
    top: int
    future: asyncio.Future[list[Scores]]
    scores: list[Scores | None]
    missing: int

    def add(self, index: int, scores: Scores) -> None:
        self.scores[index] = scores
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result([each for each in self.scores if each is not None])


@dataclass(eq=False, slots=True)
class _Window:
    """One window that waits for its scores."""

    request: _Request
    index: int
    window: Window

    @property
    def cancelled(self) -> bool:
        return self.request.future.done()


@dataclass(eq=False)
class _Generation:
    """One generation that waits for its first step."""

    generation: Generation
    changed: asyncio.Event

    @property
    def cancelled(self) -> bool:
        return self.generation.cancelled


@dataclass(eq=False)
class _Decoding:
    """Generations that are decoded together."""

    members: list[_Generation]
    cache_bytes: int
    cancelled: ClassVar[bool] = False

    @cached_property
    def decoder(self) -> Decoder:
        from cope_sweep.inference import Decoder

        return Decoder([each.generation for each in self.members])

    def advance(self) -> None:
        """Compute for a short time, in a thread."""
        self.decoder.advance(SLICE_S)


_Work = _Window | _Generation | _Decoding


@dataclass
class _Batch:
    """Work for a thread, and its end in the event loop."""

    compute: Callable[[], object]
    finish: Callable[[object], None]
    fail: Callable[[Exception], None]
    tokens: int = 0
    """Without padding; 0 for generations."""


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
    tokens_per_s: float = 10_000.0
    """Moving average of the speed; before the first batch, a guess that only `Retry-After` depends on."""

    def add_speed(self, tokens: int, seconds: float) -> None:
        """Count the time of a batch with so many tokens."""
        self.tokens_per_s += 0.2 * (tokens / max(seconds, 1e-6) - self.tokens_per_s)

    def add_batch(self, reads: Sequence[int]) -> None:
        """Count a batch of windows with so many tokens each."""
        self.windows += len(reads)
        self.scored_tokens += sum(reads)
        self.padding_tokens += max(reads) * len(reads) - sum(reads)
        self.sizes[bisect_left(BATCH_SIZES, len(reads))] += 1


@dataclass
class Batcher:
    """The queue and its workers. Its methods belong to the event loop; models are computed in threads.

    The threads share the cores of the CPU. Several small batches at a time use the cores better than one batch on all
    cores, where every operation ends with a wait for the slowest core. What is computed alone uses all cores, because
    nothing else would, unless it is so little that to wake other cores takes as long.

    The same threads compute all models: with another thread for each batch, each would start threads of its own.
    """

    max_inferences: int
    """Batches that are computed at a time."""
    max_queue_tokens: int
    """Tokens of all accepted requests."""
    max_cache_bytes: int
    """Memory for the keys and values of generations."""
    queued_tokens: int = 0
    """Tokens of the accepted requests."""
    requests: int = 0
    """Requests that are being answered, those included whose tokens are not known yet."""
    running: int = 0
    """Batches, slices of generations and probes that are being computed."""
    _queue: deque[_Work] = field(default_factory=deque)
    cache_bytes: int = 0
    """Keys and values of generations in memory."""
    counts: BatchCounts = field(default_factory=BatchCounts)
    _workers: set[asyncio.Task[None]] = field(default_factory=set)
    _working: int = 0
    _full: bool = False

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(self.max_inferences, thread_name_prefix="inference")
        self._preparations = CapacityLimiter(PREPARATIONS)

    @property
    def waiting(self) -> int:
        """Windows and generations that wait in the queue."""
        return len(self._queue)

    # -- requests

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a request from its begin, before its tokens are known. Raises BusyError if there are too many."""
        self.check_room()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def check_room(self) -> None:
        """Raise BusyError where a request cannot be accepted, whatever it asks for.

        After the queue had no room for a request, it takes none until it has emptied a little: to read requests and
        then refuse them takes the time in which models could compute.
        """
        if self.requests >= MAX_REQUESTS:
            raise self._busy(f"{self.requests} requests are being answered")
        if self._full and self.queued_tokens > EMPTY_SHARE * self.max_queue_tokens:
            raise self._no_room()
        self._full = False

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Count the tokens of a request while it is answered. Raises BusyError if the queue has no room for them.

        A request that is larger than the queue is accepted while nothing else is.
        """
        if self.queued_tokens and self.queued_tokens + tokens > self.max_queue_tokens:
            self._full = True
            raise self._no_room()
        self.queued_tokens += tokens
        try:
            yield
        finally:
            self.queued_tokens -= tokens

    def _no_room(self) -> BusyError:
        return self._busy(
            f"{self.queued_tokens} tokens are waiting, and the queue has room for {self.max_queue_tokens}"
        )

    def _busy(self, reason: str) -> BusyError:
        self.counts.refused += 1
        wait_s = math.ceil(min(MAX_RETRY_S, max(1.0, self.queued_tokens / self.counts.tokens_per_s)))
        return BusyError(f"{reason}; try again in {wait_s} s", retry_after_s=wait_s)

    async def prepare(self, compute: Callable[[], T]) -> T:
        """Result of `compute`: reading texts and making answers, in threads of their own."""
        return await to_thread.run_sync(compute, limiter=self._preparations)

    async def infer(self, compute: Callable[[], T], *, little: bool = False) -> T:
        """Result of `compute`, in the threads of batches; `little`: it takes a few milliseconds.

        A computation that has not begun when the caller is cancelled is not begun.
        """
        alone = not (self._queue or self.running or little)
        self.running += 1
        try:
            shared_by = 1 if alone else self.max_inferences
            return await asyncio.get_running_loop().run_in_executor(self._threads, _compute, compute, shared_by)
        finally:
            self.running -= 1

    async def score(self, predictor: Predictor, windows: Sequence[Window], top: int = 0) -> list[Scores]:
        """The scores of windows, each in a batch with others; no number is checked."""
        if not windows:
            return []
        future: asyncio.Future[list[Scores]] = asyncio.get_running_loop().create_future()
        request = _Request(predictor, top, future, [None] * len(windows), len(windows))
        self._put([_Window(request, index, window) for index, window in enumerate(windows)])
        try:
            return await future
        finally:
            future.cancel()  # windows that still wait leave the queue

    async def generate(self, generations: Sequence[Generation], limit_s: float) -> AsyncGenerator[None, None]:
        """Generate to the ends; yields whenever generations may have grown. They are cancelled if it is closed.

        Raises TooLargeError and TimeLimitError.
        """
        from cope_sweep.inference import cache_bytes

        deadline_s = asyncio.get_running_loop().time() + limit_s
        changed = asyncio.Event()
        for each in generations:
            needed = cache_bytes(each.predictor, each.limit)
            if needed > self.max_cache_bytes:
                raise TooLargeError(
                    f"the keys and values of {each.limit} tokens need {needed:,} bytes; the limit is "
                    f"{self.max_cache_bytes:,}, so choose a shorter prompt or a smaller max_tokens"
                )
        try:
            self._put([_Generation(each, changed) for each in generations if not each.ended])
            while True:
                ended = all(each.ended for each in generations)
                yield
                if ended:
                    return
                try:
                    async with asyncio.timeout_at(deadline_s):
                        await changed.wait()
                except TimeoutError:
                    raise TimeLimitError(limit_s) from None
                changed.clear()
        finally:
            for each in generations:
                each.cancelled = True

    # -- workers

    def _put(self, work: Sequence[_Work]) -> None:
        self._queue.extend(work)
        self._start_workers()

    def _start_workers(self) -> None:
        for _ in range(min(len(self._queue), self.max_inferences - self._working)):
            self._working += 1
            task = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(task)  # the loop itself would not keep it
            task.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        try:
            while (batch := self._take()) is not None:
                started_s = time.monotonic()
                try:
                    result = await self.infer(batch.compute, little=0 < batch.tokens <= LITTLE_TOKENS)
                except Exception as error:  # whatever a model raises belongs to those who asked for it
                    batch.fail(error)
                else:
                    batch.finish(result)
                if batch.tokens:
                    self.counts.add_speed(batch.tokens, time.monotonic() - started_s)
        finally:
            # Not in a callback of the task: work that its last result brings may arrive before that.
            self._working -= 1

    def _take(self) -> _Batch | None:
        """The next batch: that of the oldest work that can start; None if there is none."""
        skipped: list[_Work] = []
        try:
            while candidates := self._candidates():
                batch = self._choose(candidates)
                if batch is not None:
                    self._queue.extendleft(reversed(candidates))
                    return batch
                skipped += candidates  # they wait for memory
            return None
        finally:
            self._queue.extendleft(reversed(skipped))

    def _choose(self, candidates: list[_Work]) -> _Batch | None:
        """The batch of the oldest candidate that can start. What is in it is removed from the candidates."""
        for work in candidates:
            if isinstance(work, _Window):
                return self._window_batch(work, candidates)
            if isinstance(work, _Decoding):
                candidates.remove(work)
                return self._slice(work)
            started = self._start_decoding(work, candidates)
            if started is not None:
                return self._slice(started)
        return None

    def _candidates(self) -> list[_Work]:
        """The oldest work, taken out of the queue, without what is cancelled."""
        found: list[_Work] = []
        while self._queue and len(found) < MAX_CANDIDATES:
            work = self._queue.popleft()
            if not work.cancelled:
                found.append(work)
        return found

    def _window_batch(self, oldest: _Window, candidates: list[_Work]) -> _Batch:
        """The oldest window, and those nearest to it in length, as many as `fitting` allows."""
        from cope_sweep.inference import fitting, score

        predictor = oldest.request.predictor
        others = [each for each in candidates if isinstance(each, _Window) and each is not oldest]
        mates = [each for each in others if each.request.predictor is predictor]
        fits = fitting(oldest.window.reads, [each.window.reads for each in mates], predictor.model)
        chosen = [oldest, *(mates[index] for index in fits)]
        taken = set(map(id, chosen))
        candidates[:] = [work for work in candidates if id(work) not in taken]
        windows, top = [each.window for each in chosen], max(each.request.top for each in chosen)
        reads = [window.reads for window in windows]
        self.counts.add_batch(reads)

        def finish(scored: object) -> None:
            for each, scores in zip(chosen, scored, strict=True):  # type: ignore[call-overload]
                each.request.add(each.index, scores)

        def fail(error: Exception) -> None:
            for each in chosen:
                if not each.cancelled:
                    each.request.future.set_exception(error)

        return _Batch(lambda: score(predictor.model, predictor.run, windows, top=top), finish, fail, sum(reads))

    def _start_decoding(self, oldest: _Generation, candidates: list[_Work]) -> _Decoding | None:
        """A generation and others of its model with similar prompts; None if the memory for keys is used up."""
        from cope_sweep.inference import cache_bytes

        members: list[_Generation] = []
        used = 0
        for work in [oldest, *(work for work in candidates if work is not oldest)]:
            if not isinstance(work, _Generation) or len(members) == MAX_GENERATIONS:
                continue
            first, other = oldest.generation, work.generation
            if other.predictor is not first.predictor or abs(len(other.ids) - len(first.ids)) > PROMPT_DIFFERENCE:
                continue
            needed = cache_bytes(other.predictor, other.limit)
            if self.cache_bytes + used + needed <= self.max_cache_bytes:
                members.append(work)
                used += needed
        if oldest not in members:
            return None
        taken = set(map(id, members))
        candidates[:] = [work for work in candidates if id(work) not in taken]
        self.cache_bytes += used
        return _Decoding(members, used)

    def _slice(self, decoding: _Decoding) -> _Batch:
        before = sum(len(each.generation.tokens) for each in decoding.members)

        def finish(_: object) -> None:
            self.counts.generated_tokens += sum(len(each.generation.tokens) for each in decoding.members) - before
            if decoding.decoder.ended:
                self.cache_bytes -= decoding.cache_bytes
            else:
                self._queue.append(decoding)
            for each in decoding.members:
                each.changed.set()
            self._start_workers()

        def fail(error: Exception) -> None:
            self.cache_bytes -= decoding.cache_bytes
            for each in decoding.members:
                each.generation.error = each.generation.error or error
                each.changed.set()

        return _Batch(decoding.advance, finish, fail)
