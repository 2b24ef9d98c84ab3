"""Counters of inference, for metrics. Counters only grow; the event loop writes them, and any thread may read them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Upper bounds of the classes of batch sizes."""


@dataclass(frozen=True)
class BatcherStats:
    """The state of the queue, and totals since the start."""

    requests: int
    """Requests that are being answered."""
    queued_tokens: int
    """Tokens of the accepted requests that are not answered yet."""
    waiting: int
    """Windows and generations that wait in the queue."""
    running: int
    """Batches, slices of generations and probes that are being computed."""
    cache_bytes: int
    """Keys and values of generations in memory."""
    refused: int
    """Total of the requests that were answered with 429."""
    batches: int
    """Total of the batches of windows."""
    windows: int
    """Total of the windows in them."""
    scored_tokens: int
    """Total of the tokens that models read in them, without padding."""
    padding_tokens: int
    """Total of the padding in them."""
    generated_tokens: int
    """Total of the tokens that models generated."""
    batch_sizes: tuple[tuple[int, int], ...]
    """Upper bound of the number of windows, and total of the batches with at most so many, and more than the previous
    bound. Larger batches count in the last class."""


@dataclass(frozen=True)
class PredictorsStats:
    """Models in memory, and totals since the start."""

    models: int
    """Models in memory."""
    model_bytes: int
    """Size of their weights."""
    max_model_bytes: int
    lookups: int
    """Total of the times that a model was asked for."""
    loads: int
    """Total of the models that were read from files: lookups that found none in memory."""

    @property
    def hits(self) -> int:
        """Total of the lookups that found the model in memory."""
        return self.lookups - self.loads


@dataclass
class BatchCounts:
    """The totals of a batcher."""

    refused: int = 0
    batches: int = 0
    windows: int = 0
    scored_tokens: int = 0
    padding_tokens: int = 0
    generated_tokens: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * len(BATCH_SIZES))
    tokens_per_s: float = 10_000.0
    """Moving average of the speed; before the first batch, a guess that only `Retry-After` depends on."""

    def add_speed(self, tokens: int, seconds: float) -> None:
        """Count the time of a batch with so many tokens."""
        self.tokens_per_s += 0.2 * (tokens / max(seconds, 1e-6) - self.tokens_per_s)

    def add_batch(self, windows: int, tokens: int, padded_tokens: int) -> None:
        """Count a batch of so many windows, with so many tokens without and with padding."""
        self.batches += 1
        self.windows += windows
        self.scored_tokens += tokens
        self.padding_tokens += padded_tokens - tokens
        self.sizes[min(bisect_left(BATCH_SIZES, windows), len(BATCH_SIZES) - 1)] += 1

    def stats(self, *, requests: int, queued_tokens: int, waiting: int, running: int, cache_bytes: int) -> BatcherStats:
        """The totals, beside the state at this moment."""
        return BatcherStats(
            requests, queued_tokens, waiting, running, cache_bytes, self.refused, self.batches, self.windows,
            self.scored_tokens, self.padding_tokens, self.generated_tokens,
            tuple(zip(BATCH_SIZES, self.sizes, strict=True)),
        )  # fmt: skip
