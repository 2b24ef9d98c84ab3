"""What a checkpoint says about token ids: log-probabilities and perplexity, in numpy.

    log p(token t | tokens < t),  perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)

The first token of a sequence has nothing before it, and models here have no start token: it is given, never scored.
So a sequence of T tokens has n = T − 1 scored ones, and entry 0 of its log-probabilities is NaN.

Attention is causal, so padding on the right changes nothing to its left: sequences of any lengths share a batch. Long
sequences go through in windows that a cache of keys and values joins, so memory is bounded by the caches. Batching and
windows change results by rounding only, and the same call gives the same bits.

Shapes: B sequences, T tokens, W tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cope_sweep.errors import UserError
from cope_sweep.model import Cache, CheckpointError, Transformer, check_reach, load_model
from cope_sweep.spec import RunSpec

BATCH_TOKENS = 8192
"""Tokens in a batch, padding included; a longer sequence is a batch of its own."""
SCRATCH_BYTES = 256 << 20
"""What logits and attention may take at a time, about. It sets the window."""

TokenIds = Sequence[int] | np.ndarray


class TokensError(UserError, ValueError):
    """Token ids that a model cannot score; the message says which, and what it takes."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model foretells tokens, each token counting alike."""

    nll_sum: float
    """−Σ log p, in nats."""
    tokens: int
    """Scored tokens: the first of each sequence is not."""
    perplexity: float
    """exp(nll_sum / tokens); infinite where that is more than a float holds."""
    bits_per_token: float

    @classmethod
    def of(cls, log_probabilities: Iterable[np.ndarray]) -> Perplexity:
        """Over all the sequences of what `Predictor.log_probabilities` returns."""
        scored = [entry for sequence in log_probabilities for entry in sequence[1:].tolist()]
        nll_sum = -math.fsum(scored)
        mean = nll_sum / len(scored)
        try:
            perplexity = math.exp(mean)
        except OverflowError:
            perplexity = math.inf
        return cls(nll_sum, len(scored), perplexity, mean / math.log(2))


class Predictor:
    """A finished model, ready to score token ids. Threads may share one."""

    def __init__(self, model: Transformer, run: RunSpec) -> None:
        """`model` is that of `run`, in evaluation mode; it stays on its device."""
        self.model = model
        self.run = run

    @classmethod
    def load(cls, folder: Path | str, device: str = "auto") -> Predictor:
        """The model of a checkpoint folder; device `auto` is CUDA where there is one.

        Raises CheckpointError where the checkpoint cannot be used.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(*load_model(Path(folder), device))

    @property
    def vocabulary_size(self) -> int:
        """Token ids go from 0 up to this, exclusive."""
        return self.model.vocabulary_size

    def perplexity(self, token_ids: Sequence[TokenIds]) -> Perplexity:
        """Over all the sequences together. Raises as `log_probabilities`."""
        return Perplexity.of(self.log_probabilities(token_ids))

    def log_probabilities(self, token_ids: Sequence[TokenIds]) -> list[np.ndarray]:
        """For each sequence a float64 array of its length: entry t is log p(token t | tokens < t) in nats, entry 0 NaN.

        Raises TokensError (a ValueError) for a sequence of fewer than two tokens, for what is no token id of this
        model, and for a sequence longer than an encoding of this model reaches; CheckpointError where the model's
        outputs are not numbers.
        """
        sequences = [_checked(index, ids, self.vocabulary_size) for index, ids in enumerate(token_ids)]
        if not sequences:
            raise TokensError("no sequence came; give one or more")
        self._check_reach(sequences)
        results = [np.full(len(ids), np.nan) for ids in sequences]
        for batch in _batches([len(ids) for ids in sequences]):
            tokens_BT = np.zeros((len(batch), max(len(sequences[index]) for index in batch)), dtype=np.int64)
            for row, index in enumerate(batch):
                tokens_BT[row, : len(sequences[index])] = sequences[index]
            scores_BT = self._score(torch.from_numpy(tokens_BT).to(self.model.embedding.weight.device))
            for row, index in enumerate(batch):
                results[index][1:] = scores_BT[row, : len(results[index]) - 1]
                if np.isnan(results[index][1:]).any():
                    raise CheckpointError(
                        f"run {self.run.run_id}: the model's outputs are not numbers; its weights are damaged"
                    )
        return results

    def check_reach(self, tokens: int) -> None:
        """Raise ValueError where an encoding does not reach as many tokens: ask before the work, not in its middle."""
        check_reach(self.run, tokens)

    def _check_reach(self, sequences: list[np.ndarray]) -> None:
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        length = len(sequences[longest])
        try:
            self.check_reach(length - 1)
        except ValueError as error:
            raise TokensError(
                f"sequence {longest} of {length} tokens is too long (all but the last are fed to the model): {error}"
            ) from error

    @torch.inference_mode()
    def _score(self, tokens_BT: Tensor) -> np.ndarray:
        """Log p of tokens 1 … T − 1, shape (B, T − 1), float64."""
        B, T = tokens_BT.shape
        window = self._window(B, T)
        cache: Cache | None = None if window >= T else [{} for _ in self.model.blocks]
        scores_BT = torch.empty(B, T - 1, dtype=torch.float64, device=tokens_BT.device)
        # The last token predicts nothing that is asked for, so it is never fed.
        for start in range(0, T - 1, window):
            stop = min(start + window, T - 1)
            logits_BWV = self.model(tokens_BT[:, start:stop], cache).double()
            chosen_BW = logits_BWV.gather(-1, tokens_BT[:, start + 1 : stop + 1, None]).squeeze(-1)
            scores_BT[:, start:stop] = chosen_BW - logits_BWV.logsumexp(-1)
        return scores_BT.cpu().numpy()

    def _window(self, batch: int, length: int) -> int:
        """Tokens to feed at a time: all, or as many as keep logits and attention within SCRATCH_BYTES."""
        spec = self.run.model
        logits = 24 * self.vocabulary_size  # bytes for each token: float32, float64, and what logsumexp makes of them
        attention = 40 * spec.heads * length  # about ten float32 copies of a row of the attention matrix
        scored = any(encoding.scores for encoding in spec.position)
        if batch * length * (logits + scored * attention) <= SCRATCH_BYTES:
            return length
        return max(1, SCRATCH_BYTES // (batch * (logits + attention)))


def _checked(index: int, ids: TokenIds, vocabulary_size: int) -> np.ndarray:
    tokens_T = checked(ids, vocabulary_size, f"sequence {index}")
    if len(tokens_T) < 2:
        raise TokensError(
            f"sequence {index} has {len(tokens_T)} tokens; it takes two or more, for the first is given and not scored"
        )
    return tokens_T


def checked(ids: TokenIds, vocabulary_size: int, name: str = "the sequence") -> np.ndarray:
    """One sequence as int64. Raises TokensError, naming the position, for anything else."""
    try:
        items: list[Any] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    except TypeError:
        raise TokensError(f"{name}: {_short(ids)} is not a list of token ids") from None
    for position, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise TokensError(f"{name}, position {position}: {_short(item)} is not a token id")
        if not 0 <= item < vocabulary_size:
            raise TokensError(
                f"{name}, position {position}: token id {_short(item)} is out of range; "
                f"this model's vocabulary is 0 … {vocabulary_size - 1} ({vocabulary_size} ids)"
            )
    return np.array(items, dtype=np.int64)


def _short(item: Any) -> str:
    text = "of more than 60 digits" if isinstance(item, int) and abs(item) >= 10**60 else repr(item)
    return text if len(text) <= 60 else text[:59] + "…"


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of sequences, the longest first, so that a batch holds sequences of like lengths and pads little."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
