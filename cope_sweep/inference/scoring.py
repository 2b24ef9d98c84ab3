"""Log-probabilities of the tokens of a sequence of any length, by windows, in batches; and perplexity, which follows.

    perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)

Every token but the first is scored in exactly one window. With context 4, stride 2 and the tokens a … h, of which
capitals are scored:

    a B C D E       the model reads `context` tokens and predicts as many
    c d e F G
    e f g H         the last window may be shorter

Attention is causal, so padding on the right does not change the results on its left, whatever the encoding: windows of
different lengths share a batch. Only attention computes the padding. The memory of a batch is bounded: logits are
computed for some tokens at a time, and where attention needs arrays of all pairs of tokens, the model reads some tokens
at a time with a cache of keys.

Shapes: L tokens of a sequence, B windows, T tokens of one or of the longest, W tokens that are read at a time, R tokens
that are read in all windows, N scored tokens, D model dim, K most probable tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.errors import NotFiniteError, TokensError
from cope_sweep.model import Cache, Packing, Transformer, perplexity
from cope_sweep.sizes import MIN_BLOCKED_KEYS


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads in one piece, and the first of them that is scored."""

    tokens_T: np.ndarray
    """int64 token ids."""
    inputs_T: np.ndarray | None = None
    """The model's input in their places; None: the tokens."""
    first: int = 1
    """Tokens `first` … T − 1 are scored."""
    read_last: bool = False
    """The model reads the last token, too, which predicts the token after the window."""

    @property
    def reads(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens_T) - (not self.read_last)


def windows(tokens_L: np.ndarray, context: int, stride: int, inputs_L: np.ndarray) -> Iterator[Window]:
    """The windows over a sequence of at least two tokens, as views. The model reads `inputs_L` in their places."""
    for begin in window_begins(len(tokens_L), context, stride):
        part = slice(begin, begin + context + 1)
        yield Window(tokens_L[part], inputs_L[part], 1 + (context - stride if begin else 0))


def window_begins(length: int, context: int, stride: int) -> range:
    """The first token of each window. Raises TokensError for a stride that would leave out tokens."""
    if not 1 <= stride <= context:
        raise TokensError(
            f"the stride is {stride}, but windows have {context} tokens; choose a stride of 1 … {context}",
            code="invalid_stride",
            stride=stride,
            largest=context,
        )
    return range(0, max(1, length - 1 - context + stride), stride)


def tokens_read(length: int, context: int, stride: int) -> int:
    """Number of tokens that the model reads in all windows together. Raises as `window_begins`."""
    begins = window_begins(length, context, stride)
    last = min(context, length - 1 - begins[-1])
    return (len(begins) - 1) * context + last


BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Limit for the tokens of a batch by device, including padding. A longer window is a batch by itself.

On a CPU, larger batches are slower: their activations do not fit its caches.
"""
MAX_PADDING = 0.3
"""Padding of a batch as a share of its tokens. Only attention computes it."""
FREE_PADDING = 256
"""Padding of a batch, in tokens, that costs less than another batch."""
SCRATCH_BYTES = 256 << 20
"""Approximate memory for logits, and for attention."""


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of the scored tokens of a window, in nats, float64."""

    log_probabilities_N: np.ndarray
    top_ids_NK: np.ndarray
    """int64: the most probable tokens at the place of each scored token, best first."""
    top_log_probabilities_NK: np.ndarray
    """Their log-probabilities, computed like the scored tokens', so equal tokens have the same float."""
    next_logits_V: np.ndarray | None = None
    """The logits of the token after the window, float64; None without `read_last`."""

    def check(self, run: RunSpec) -> Scores:
        """Itself. Raises NotFiniteError where a number is NaN or infinite."""
        arrays = [self.log_probabilities_N, *([] if self.next_logits_V is None else [self.next_logits_V])]
        if not all(np.isfinite(array).all() for array in arrays):
            raise not_finite(run)
        return self


def not_finite(run: RunSpec) -> NotFiniteError:
    """The error of a model whose outputs are not numbers."""
    return NotFiniteError(
        f"run {run.run_id}: the model's outputs are not numbers (NaN or infinite); its training diverged, or the "
        "weights are damaged",
        run_id=run.run_id,
    )


def score(model: Transformer, run: RunSpec, windows: Sequence[Window], *, top: int = 0) -> list[Scores]:
    """The scores of each window, with the `top` most probable tokens. No number is checked (`Scores.check`)."""
    results: list[Scores | None] = [None] * len(windows)
    for batch in batches([len(window.tokens_T) for window in windows], batch_tokens(model)):
        scored = _score_batch(model, run, [windows[index] for index in batch], top)
        for index, scores in zip(batch, scored, strict=True):
            results[index] = scores
    return [scores for scores in results if scores is not None]


def batch_tokens(model: Transformer) -> int:
    """Limit for the tokens of a batch on the model's device."""
    return BATCH_TOKENS["cuda" if model.embedding.weight.is_cuda else "cpu"]


def fitting(length: int, shorter: Sequence[int], model: Transformer) -> list[int]:
    """The indices of the `shorter` windows that join a batch with a window of `length` tokens.

    They are the nearest in length, as far as padding costs less than another batch. `shorter` has lengths.
    """
    limit = batch_tokens(model)
    chosen: list[int] = []
    longest = total = length
    for index in sorted(range(len(shorter)), key=lambda index: abs(shorter[index] - length)):
        longest, total = max(longest, shorter[index]), total + shorter[index]
        padded = longest * (len(chosen) + 2)
        if padded > limit or padded - total > max(FREE_PADDING, MAX_PADDING * total):
            break
        chosen.append(index)
    return chosen


def batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Batches of indices, the longest windows first: similar lengths in a batch need little padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def _score_batch(model: Transformer, run: RunSpec, windows: Sequence[Window], top: int) -> list[Scores]:
    hidden_RD = _hidden(model, run, windows)
    device = hidden_RD.device
    ends = np.cumsum([window.reads for window in windows])
    # Reading token t predicts token t + 1.
    predicting = [
        np.arange(end - window.reads + window.first - 1, end - window.read_last)
        for window, end in zip(windows, ends, strict=True)
    ]
    targets = [window.tokens_T[window.first :] for window in windows]
    predicting_N = torch.from_numpy(np.concatenate(predicting)).to(device)
    targets_N = torch.from_numpy(np.concatenate(targets)).to(device)
    top = min(top, model.vocabulary_size)
    scored_N, ids_NK, tops_NK = _log_probabilities(model, hidden_RD[predicting_N], targets_N, top)
    cuts = np.cumsum([len(target) for target in targets])[:-1]
    scored, ids, tops = (np.split(array, cuts) for array in (scored_N, ids_NK, tops_NK))
    results = []
    for number, (window, end) in enumerate(zip(windows, ends, strict=True)):
        next_V = model.logits(hidden_RD[end - 1]).double().cpu().numpy() if window.read_last else None
        results.append(Scores(scored[number], ids[number], tops[number], next_V))
    return results


def _hidden(model: Transformer, run: RunSpec, windows: Sequence[Window]) -> Tensor:
    """The model's hidden states of the tokens that it reads, (R, D): of the first window, the second, …"""
    lengths = [window.reads for window in windows]
    tokens_BT = np.zeros((len(windows), max(lengths)), dtype=np.int64)
    for row, window in enumerate(windows):
        inputs_T = window.tokens_T if window.inputs_T is None else window.inputs_T
        tokens_BT[row, : window.reads] = inputs_T[: window.reads]
    device = model.embedding.weight.device
    return read(model, run, torch.from_numpy(tokens_BT).to(device), packing=Packing(lengths, device))[0]


def read(
    model: Transformer, run: RunSpec, tokens_BT: Tensor, cache: Cache | None = None, packing: Packing | None = None
) -> Tensor:
    """The model's hidden states of all tokens, (B, T, D). Attention needs about SCRATCH_BYTES at a time.

    With a `packing` of the tokens, the states without padding, (1, R, D). With a `cache`, which is empty at first, the
    keys and values of all tokens are in it afterwards. Raises NotFiniteError where attention cannot be computed because
    positions are NaN.
    """
    window = _window(run, *tokens_BT.shape)
    whole = window >= tokens_BT.shape[1]
    if not whole and cache is None:
        cache = [{} for _ in model.blocks]
    try:
        if whole and cache is None:
            return model.hidden(tokens_BT, packing=packing)
        hidden_BTD = torch.cat([model.hidden(part_BW, cache) for part_BW in torch.split(tokens_BT, window, 1)], dim=1)
        return hidden_BTD if packing is None else packing.pack(hidden_BTD)
    except RuntimeError as error:
        # A position that is NaN becomes an index, and gather checks its range.
        if "out of bounds" in str(error):
            raise not_finite(run) from error
        raise


def _log_probabilities(
    model: Transformer, hidden_ND: Tensor, targets_N: Tensor, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of the targets, (N,), and ids and log-probabilities of the `top` most probable, (N, K)."""
    rows = max(1, SCRATCH_BYTES // (24 * model.vocabulary_size))  # float32, float64, and what logsumexp needs
    scored: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    # At least once, so that no scored token gives empty arrays.
    for start in range(0, max(1, len(targets_N)), rows):
        logits_NV = model.logits(hidden_ND[start : start + rows]).double()
        normalizer_N1 = logits_NV.logsumexp(-1, keepdim=True)
        chosen_N = (logits_NV.gather(-1, targets_N[start : start + rows, None]) - normalizer_N1).squeeze(-1)
        tops_NK, ids_NK = logits_NV.topk(top, dim=-1)
        scored.append((chosen_N.cpu().numpy(), ids_NK.cpu().numpy(), (tops_NK - normalizer_N1).cpu().numpy()))
    values_N, ids_NK_, tops_NK_ = (np.concatenate(arrays) for arrays in zip(*scored, strict=True))
    return values_N, ids_NK_, tops_NK_


def _window(run: RunSpec, batch: int, length: int) -> int:
    """Tokens that the model reads at a time: all, or as many as keep attention within SCRATCH_BYTES."""
    spec = run.model
    if not spec.hard_attention and not any(encoding.scores or encoding.weighs for encoding in spec.position):
        return length
    # About ten float32 copies of a row of the attention matrix.
    row_bytes = 40 * spec.heads * min(length, MIN_BLOCKED_KEYS)
    return length if batch * length * row_bytes <= SCRATCH_BYTES else max(1, SCRATCH_BYTES // (batch * row_bytes))


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
        # fsum rounds once, so the sum does not depend on the order of the tokens.
        nll_sum = -math.fsum(scored)
        mean = nll_sum / len(scored)
        return Perplexity(nll_sum, len(scored), positions, perplexity(mean), mean / math.log(2))


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
        return perplexity(self.nll_sum / self.size_bytes)

    @staticmethod
    def per_unit(total: Perplexity, words: int, size_bytes: int) -> TextPerplexity:
        """The perplexity of a text with this number of words and bytes."""
        return TextPerplexity(
            **vars(total),
            words=words,
            size_bytes=size_bytes,
            word_perplexity=perplexity(total.nll_sum / words) if words else math.inf,
            bits_per_byte=total.nll_sum / math.log(2) / size_bytes,
        )
