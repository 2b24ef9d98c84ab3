"""Log-probabilities and perplexity of token ids and texts under a checkpoint, as numpy arrays and numbers.

    log p(token t | tokens < t),  perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)

The first token of a sequence has no context: it is an input and is not scored. A sequence of T tokens has n = T − 1
scored tokens, and entry 0 of its log-probabilities is NaN. A text is preceded by the end-of-text token, as in training,
so every token of the text is scored.

Attention is causal, so padding on the right does not change the results on its left: sequences of different lengths
share a batch. Long sequences are processed in windows with a cache of keys and values, so the cache determines the
memory. Batching and windows change results by rounding errors only. The same call gives the same bits.

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
"""Limit for the tokens of a batch, including padding. A longer sequence is a batch of its own."""
SCRATCH_BYTES = 256 << 20
"""Approximate memory for logits and attention. It determines the window."""

WINDOWS_PER_CALL = 64
"""Windows of a text that are scored in one call."""

TokenIds = Sequence[int] | np.ndarray


class TokensError(UserError, ValueError):
    """Token ids that a model cannot score. The message names them and the ids that the model accepts."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity over tokens; every token has the same weight."""

    nll_sum: float
    """−Σ log p, in nats."""
    tokens: int
    """Number of scored tokens: all but the first of each sequence."""
    perplexity: float
    """exp(nll_sum / tokens); infinite where a float overflows."""
    bits_per_token: float

    @staticmethod
    def of(log_probabilities: Iterable[np.ndarray]) -> Perplexity:
        """Perplexity over all sequences, from the arrays that `Predictor.log_probabilities` returns."""
        scored = [entry for sequence in log_probabilities for entry in sequence[1:].tolist()]
        nll_sum = -math.fsum(scored)
        mean = nll_sum / len(scored)
        return Perplexity(nll_sum, len(scored), _exp(mean), mean / math.log(2))


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


class Predictor:
    """A trained model that scores token ids, and texts if it was trained on text. It is thread-safe."""

    def __init__(self, model: Transformer, run: RunSpec, tokenizer_json: Path | None = None) -> None:
        """`model` is the model of `run`, in evaluation mode; `tokenizer_json` is the file of its tokenizer."""
        self.model = model
        self.run = run
        self._tokenizer_json = tokenizer_json

    @classmethod
    def load(cls, folder: Path | str, device: str = "auto") -> Predictor:
        """Load a checkpoint folder. Device `auto` is CUDA if available, else the CPU.

        Raises CheckpointError for a checkpoint that is damaged or does not fit this version of the code.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(*load_model(Path(folder), device), tokenizer_json=Path(folder) / TOKENIZER_FILE)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 … vocabulary_size − 1."""
        return self.model.vocabulary_size

    @property
    def reads_text(self) -> bool:
        """Whether the checkpoint has a tokenizer."""
        return self._tokenizer_json is not None and self._tokenizer_json.exists()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the training data.

        Raises CheckpointError for a checkpoint without one, or with one that does not fit the model.
        """
        path = self._tokenizer_json
        if path is None or not self.reads_text:
            raise CheckpointError(
                f"run {self.run.run_id} has no {TOKENIZER_FILE} beside its model: the task {self.run.task.kind} "
                "does not use text; give token ids instead"
            )
        try:
            tokenizer = TextTokenizer.load(path)
        except TextError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.ids > self.vocabulary_size:
            raise CheckpointError(
                f"{path}: the tokenizer has {tokenizer.ids:,} ids, but the vocabulary of run {self.run.run_id} has "
                f"{self.vocabulary_size:,}; it is the tokenizer of another model"
            )
        return tokenizer

    def text_perplexity(self, text: str, *, context: int | None = None, stride: int | None = None) -> TextPerplexity:
        """Perplexity of a text of any length, in windows as in the task's test sets (`Task.windows`).

        Args:
            text: The text.
            context: Tokens of a window. None: as many as in training.
            stride: Tokens from the begin of a window to the begin of the next, 1 … `context`. None: `context`, which
                makes the windows disjoint.

        Raises TokensError for an empty text, for a stride out of range, and for a context longer than an encoding
        supports; CheckpointError as `tokenizer`.
        """
        context = context or self.run.task.context
        stride = stride or context
        if not 1 <= stride <= context:
            raise TokensError(
                f"the stride is {stride}, but windows have {context} tokens; choose a stride of 1 … {context}"
            )
        if not text:
            raise TokensError("the text is empty; give at least one character")
        tokenizer = self.tokenizer
        ids_T = np.concatenate(([tokenizer.end_of_text], *tokenizer.encode(list(chunks([text]))))).astype(np.int64)
        nlls: list[float] = []
        begins = range(0, max(1, len(ids_T) - 1 - context + stride), stride)
        for first in range(0, len(begins), WINDOWS_PER_CALL):
            windows = [ids_T[begin : begin + context + 1] for begin in begins[first : first + WINDOWS_PER_CALL]]
            for begin, scores in zip(
                begins[first : first + WINDOWS_PER_CALL], self.log_probabilities(windows), strict=True
            ):
                scored_before = context - stride if begin else 0
                nlls += (-scores[1 + scored_before :]).tolist()
        units = tokenizer.units(ids_T[None, :-1], ids_T[None, 1:], np.ones((1, len(ids_T) - 1), dtype=bool))
        words, size_bytes, nll_sum = int(units["words"][0]), int(units["bytes"][0]), math.fsum(nlls)
        bits = nll_sum / math.log(2)
        return TextPerplexity(
            nll_sum=nll_sum,
            tokens=len(nlls),
            perplexity=_exp(nll_sum / len(nlls)),
            bits_per_token=bits / len(nlls),
            words=words,
            size_bytes=size_bytes,
            word_perplexity=_exp(nll_sum / words) if words else math.inf,
            bits_per_byte=bits / size_bytes,
        )

    def perplexity(self, token_ids: Sequence[TokenIds]) -> Perplexity:
        """Perplexity over all sequences together. Raises as `log_probabilities`."""
        return Perplexity.of(self.log_probabilities(token_ids))

    def log_probabilities(self, token_ids: Sequence[TokenIds]) -> list[np.ndarray]:
        """For each sequence, float64 of shape (T,): entry t is log p(token t | tokens < t) in nats; entry 0 is NaN.

        Raises TokensError (a ValueError) for a sequence of fewer than two tokens, for an entry that is no token id of
        this model, and for a sequence longer than an encoding supports; CheckpointError where the model's outputs are
        NaN.
        """
        sequences = [_validate_sequence(index, ids, self.vocabulary_size) for index, ids in enumerate(token_ids)]
        if not sequences:
            raise TokensError("there is no sequence; give at least one")
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
                        f"run {self.run.run_id}: the model's outputs are not numbers (NaN); the weights are damaged"
                    )
        return results

    def _check_reach(self, sequences: list[np.ndarray]) -> None:
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        length = len(sequences[longest])
        try:
            check_reach(self.run, length - 1)
        except ValueError as error:
            raise TokensError(
                f"sequence {longest} of {length} tokens is too long (the model reads all but the last): {error}"
            ) from error

    @torch.inference_mode()
    def _score(self, tokens_BT: Tensor) -> np.ndarray:
        """Log p of tokens 1 … T − 1, shape (B, T − 1), float64."""
        B, T = tokens_BT.shape
        window = self._window(B, T)
        cache: Cache | None = None if window >= T else [{} for _ in self.model.blocks]
        scores_BT = torch.empty(B, T - 1, dtype=torch.float64, device=tokens_BT.device)
        # The last token predicts no scored token, so the model does not read it.
        for start in range(0, T - 1, window):
            stop = min(start + window, T - 1)
            logits_BWV = self.model(tokens_BT[:, start:stop], cache).double()
            chosen_BW = logits_BWV.gather(-1, tokens_BT[:, start + 1 : stop + 1, None]).squeeze(-1)
            scores_BT[:, start:stop] = chosen_BW - logits_BWV.logsumexp(-1)
        return scores_BT.cpu().numpy()

    def _window(self, batch: int, length: int) -> int:
        """Tokens that the model reads at a time: all, or as many as keep logits and attention within SCRATCH_BYTES."""
        spec = self.run.model
        logits = 24 * self.vocabulary_size  # bytes per token: float32, float64, and the temporaries of logsumexp
        attention = (
            40 * spec.heads * length
        )  # bytes per token: about ten float32 copies of a row of the attention matrix
        scored = any(encoding.scores for encoding in spec.position)
        if batch * length * (logits + scored * attention) <= SCRATCH_BYTES:
            return length
        return max(1, SCRATCH_BYTES // (batch * (logits + attention)))


def _load_pyfunc(path: str) -> Predictor:
    """The checkpoint in a folder. MLflow calls this in `mlflow.pyfunc.load_model`."""
    return Predictor.load(path)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _validate_sequence(index: int, ids: TokenIds, vocabulary_size: int) -> np.ndarray:
    tokens_T = validate_token_ids(ids, vocabulary_size, f"sequence {index}")
    if len(tokens_T) < 2:
        raise TokensError(
            f"sequence {index} has {len(tokens_T)} tokens; give at least two, because the first is not scored"
        )
    return tokens_T


def validate_token_ids(ids: TokenIds, vocabulary_size: int, name: str = "the sequence") -> np.ndarray:
    """One sequence as int64, shape (T,). Raises TokensError, which names the position of the first invalid entry."""
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
    """Batches of indices, the longest sequences first: similar lengths in a batch need little padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
