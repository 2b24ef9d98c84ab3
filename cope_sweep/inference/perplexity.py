"""Perplexity, from log-probabilities.

perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Perplexity:
    """Perplexity over tokens; every token has the same weight."""

    nll_sum: float
    """−Σ log p, in nats."""
    tokens: int
    """Number of scored tokens: those that the task trains (`Task.with_targets`)."""
    positions: int
    """Number of all tokens but the first of each sequence."""
    perplexity: float
    """exp(nll_sum / tokens); infinite where a float overflows."""
    bits_per_token: float

    @staticmethod
    def of(log_probabilities: Iterable[np.ndarray]) -> Perplexity:
        """Perplexity over all sequences, from the log-probabilities of their tokens; NaN: the token is not scored."""
        sequences = list(log_probabilities)
        scored = [entry for sequence in sequences for entry in sequence[~np.isnan(sequence)].tolist()]
        positions = sum(len(sequence) - 1 for sequence in sequences)
        nll_sum = -math.fsum(scored)
        mean = nll_sum / len(scored)
        return Perplexity(nll_sum, len(scored), positions, _exp(mean), mean / math.log(2))


@dataclass(frozen=True)
class TextPerplexity(Perplexity):
    """Perplexity over a text, all of its tokens scored; also per word and per byte, independent of the tokenizer."""

    words: int
    """Number of words separated by blanks; line breaks count as words."""
    size_bytes: int
    """Size of the text in UTF-8."""
    word_perplexity: float
    """exp(nll_sum / words); infinite where a float overflows or the text has no word."""
    bits_per_byte: float

    @property
    def byte_perplexity(self) -> float:
        """exp(nll_sum / size_bytes); infinite where a float overflows."""
        return _exp(self.nll_sum / self.size_bytes)

    @staticmethod
    def per_unit(total: Perplexity, words: int, size_bytes: int) -> TextPerplexity:
        """The perplexity of a text with this number of words and bytes."""
        return TextPerplexity(
            **vars(total),
            words=words,
            size_bytes=size_bytes,
            word_perplexity=_exp(total.nll_sum / words) if words else math.inf,
            bits_per_byte=total.nll_sum / math.log(2) / size_bytes,
        )


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
