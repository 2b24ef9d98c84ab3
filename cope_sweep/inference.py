"""What a checkpoint says about token ids, or about a text: log-probabilities and perplexity, in numpy.

    log p(token t | tokens < t),  perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)

The first token of a sequence has nothing before it: it is given, never scored. So a sequence of T tokens has n = T − 1
scored ones, and entry 0 of its log-probabilities is NaN. A text begins with the token that ends the text before, as in
training, and all of it is scored.

Attention is causal, so padding on the right changes nothing to its left: sequences of any lengths share a batch. Long
sequences go through in windows that a cache of keys and values joins, so memory is bounded by the caches. Batching and
windows change results by rounding only, and the same call gives the same bits.

Shapes: B sequences, T tokens, W tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cope_sweep.errors import UserError
from cope_sweep.model import Cache, CheckpointError, Transformer, check_reach, load_model
from cope_sweep.spec import RunSpec
from cope_sweep.text import TOKENIZER_FILE, TextError, TextTokenizer
from cope_sweep.text.reading import chunks

BATCH_TOKENS = 8192
"""Tokens in a batch, padding included; a longer sequence is a batch of its own."""
SCRATCH_BYTES = 256 << 20
"""What logits and attention may take at a time, about. It sets the window."""

TOGETHER = 64
"""Windows of a text that are scored side by side."""

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

    @staticmethod
    def of(log_probabilities: Iterable[np.ndarray]) -> Perplexity:
        """Over all the sequences of what `Predictor.log_probabilities` returns."""
        scored = [entry for sequence in log_probabilities for entry in sequence[1:].tolist()]
        nll_sum = -math.fsum(scored)
        mean = nll_sum / len(scored)
        return Perplexity(nll_sum, len(scored), _exp(mean), mean / math.log(2))


@dataclass(frozen=True)
class TextPerplexity(Perplexity):
    """How well a model foretells a text, whatever its tokens are: every one is scored, the first after nothing."""

    words: int
    """Between blanks; ends of lines count, too."""
    size_bytes: int
    """Of the text in UTF-8."""
    word_perplexity: float
    """exp(nll_sum / words); infinite where that is more than a float holds, or there is no word."""
    bits_per_byte: float


class Predictor:
    """A finished model, ready to score token ids, and texts where it was trained on one. Threads may share one."""

    def __init__(self, model: Transformer, run: RunSpec, tokenizer_json: Path | None = None) -> None:
        """`model` is that of `run`, in evaluation mode; it stays on its device."""
        self.model = model
        self.run = run
        self._tokenizer_json = tokenizer_json

    @classmethod
    def load(cls, folder: Path | str, device: str = "auto") -> Predictor:
        """The model of a checkpoint folder; device `auto` is CUDA where there is one.

        Raises CheckpointError where the checkpoint cannot be used.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(*load_model(Path(folder), device), tokenizer_json=Path(folder) / TOKENIZER_FILE)

    @property
    def vocabulary_size(self) -> int:
        """Token ids go from 0 up to this, exclusive."""
        return self.model.vocabulary_size

    @property
    def reads_text(self) -> bool:
        """Whether there is a `tokenizer`."""
        return self._tokenizer_json is not None and self._tokenizer_json.exists()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """What turned text into the ids that this model was trained on.

        Raises CheckpointError where the checkpoint has none, or one that does not fit the model.
        """
        path = self._tokenizer_json
        if path is None or not self.reads_text:
            raise CheckpointError(
                f"run {self.run.run_id} has no {TOKENIZER_FILE} beside its model: the task {self.run.task.kind} "
                "reads no text; ask it about token ids"
            )
        try:
            tokenizer = TextTokenizer.load(path)
        except TextError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.ids > self.vocabulary_size:
            raise CheckpointError(
                f"{path}: has {tokenizer.ids:,} ids, and the model of run {self.run.run_id} knows "
                f"{self.vocabulary_size:,}; it is another model's tokenizer"
            )
        return tokenizer

    def text_perplexity(self, text: str, *, context: int | None = None, stride: int | None = None) -> TextPerplexity:
        """Of a text of any length, read in windows as the task's test sets are (`Task.windows`).

        A window has `context` tokens (None: as many as in training), and begins `stride` after the one before (None:
        `context`, so that they are disjoint). Raises TokensError for a text with nothing in it, for a stride that is
        not 1 … `context`, and where an encoding does not reach that far; CheckpointError as `tokenizer`.
        """
        context = context or self.run.task.context
        stride = stride or context
        if not 1 <= stride <= context:
            raise TokensError(f"a stride of {stride} for windows of {context} tokens; it is 1 … {context}")
        if not text:
            raise TokensError("the text is empty; give one that says something")
        tokenizer = self.tokenizer
        ids_T = np.concatenate(([tokenizer.end_of_text], *tokenizer.encode(list(chunks([text]))))).astype(np.int64)
        nats: list[float] = []
        begins = range(0, max(1, len(ids_T) - 1 - context + stride), stride)
        for first in range(0, len(begins), TOGETHER):
            windows = [ids_T[begin : begin + context + 1] for begin in begins[first : first + TOGETHER]]
            for begin, scores in zip(begins[first : first + TOGETHER], self.log_probabilities(windows), strict=True):
                scored_before = context - stride if begin else 0
                nats += (-scores[1 + scored_before :]).tolist()
        units = tokenizer.units(ids_T[None, :-1], ids_T[None, 1:], np.ones((1, len(ids_T) - 1), dtype=bool))
        words, size_bytes, nll_sum = int(units["words"][0]), int(units["bytes"][0]), math.fsum(nats)
        bits = nll_sum / math.log(2)
        return TextPerplexity(
            nll_sum=nll_sum,
            tokens=len(nats),
            perplexity=_exp(nll_sum / len(nats)),
            bits_per_token=bits / len(nats),
            words=words,
            size_bytes=size_bytes,
            word_perplexity=_exp(nll_sum / words) if words else math.inf,
            bits_per_byte=bits / size_bytes,
        )

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

    def _check_reach(self, sequences: list[np.ndarray]) -> None:
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        length = len(sequences[longest])
        try:
            check_reach(self.run, length - 1)
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


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


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
