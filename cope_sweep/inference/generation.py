"""Generation of tokens, one step at a time, with a cache of keys and values.

A step reads the newest token of each sequence; all tokens before it are in the cache. Its logits equal those of a full
pass to rounding errors, for every encoding: CoPE's positions are sums of gates between a query and the cached keys,
and the others depend on the numbers of tokens.

Sequences of different lengths are decoded together without padding: the shortest prompt is read in one piece, and
where a sequence still has tokens of its prompt, those are read instead of sampled ones. So all have the same position,
and each draws from its own random generator: the same seed gives the same tokens, whatever shares the batch, unless
rounding errors change which of two tokens with nearly equal probabilities is chosen.

The model reads at most one token more than its training sequences have (`Predictor.longest_read`), or as many where an
encoding has no further position. There generation ends, with the reason `length`. So a prompt of a whole training
window, which has one token more than the model reads in training, is followed by one token.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from cope_sweep.errors import TokensError
from cope_sweep.inference.predictor import Predictor
from cope_sweep.inference.scoring import not_finite, read
from cope_sweep.model import Cache

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """The rules by which tokens are chosen, and by which generation ends."""

    max_tokens: int = 16
    temperature: float = 1.0
    """Divisor of the logits; 0 chooses the most probable token, of equal ones the one with the lowest id."""
    top_p: float = 1.0
    """Only the most probable tokens, as few as have this probability together."""
    top_k: int = 0
    """Only this many of the most probable tokens; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts before which the generated text ends."""
    top: int = 0
    """Number of most probable tokens to report with each token."""


def sample(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """A token from the softmax of float64 logits."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # Subtracting the maximum first: a tiny temperature then gives −inf, never NaN.
    with np.errstate(over="ignore"):
        scaled_V = (logits_V - logits_V.max()) / sampling.temperature
    order_V = np.argsort(-scaled_V, kind="stable")
    if sampling.top_k:
        order_V = order_V[: sampling.top_k]
    weight_V = np.exp(scaled_V[order_V])
    sum_V = np.cumsum(weight_V)
    if sampling.top_p < 1:
        within = int(np.searchsorted(sum_V, sampling.top_p * sum_V[-1])) + 1
        order_V, sum_V = order_V[:within], sum_V[:within]
    return int(order_V[min(np.searchsorted(sum_V, rng.random() * sum_V[-1], side="right"), len(order_V) - 1)])


@dataclass(frozen=True)
class Token:
    """A generated token."""

    id: int
    log_probability: float
    """Under the model itself: temperature, top_p and top_k do not change it."""
    top: list[tuple[int, float]]
    """The most probable tokens with their log-probabilities, best first."""


@dataclass
class Generation:
    """One sequence that is generated: its tokens and its text so far."""

    predictor: Predictor
    prompt_T: np.ndarray
    """int64 ids; at least one."""
    sampling: Sampling
    seed: int | tuple[int, ...] | None = None
    """None: another one each time."""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        longest_prompt, longest_read = self.predictor.context + 1, self.predictor.longest_read
        if not 1 <= len(self.prompt_T) <= longest_prompt:
            raise TokensError(
                f"the prompt has {len(self.prompt_T)} tokens; for generation give 1 … {longest_prompt}: the context of "
                f"the training is {self.predictor.context} tokens"
            )
        self.ids: list[int] = self.prompt_T[-longest_read:].tolist()
        self.limit = min(len(self.ids) + self.sampling.max_tokens, longest_read + 1)
        """Number of `ids` at which generation ends."""
        self._rng = np.random.default_rng(self.seed)
        self._text = _StoppingText(self.sampling.stop)
        if not self.sampling.max_tokens:
            self.finish_reason = "length"

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def text(self) -> str:
        """The text that is certain by now: without what may be the begin of a stop text, or of a character."""
        return self._text.text

    def choose(self, logits_V: np.ndarray) -> None:
        """Append a token that the float64 logits give, and note whether it is the last."""
        if not np.isfinite(logits_V).all():
            self.error = not_finite(self.predictor.run)
            return
        token, vocabulary = sample(logits_V, self.sampling, self._rng), self.predictor.vocabulary
        normalizer = logits_V.max() + np.log(np.exp(logits_V - logits_V.max()).sum())
        best = np.argsort(-logits_V, kind="stable")[: self.sampling.top].tolist() if self.sampling.top else []
        self.tokens.append(
            Token(token, float(logits_V[token] - normalizer), [(k, float(logits_V[k] - normalizer)) for k in best])
        )
        self.ids.append(token)
        stops = token == vocabulary.end_of_text or self._text.append(vocabulary.piece(token))
        if stops or len(self.ids) >= self.limit:
            self._text.end()
            # Last: another thread that sees the reason finds the whole text.
            self.finish_reason = "stop" if stops else "length"


class _StoppingText:
    """Text that grows by bytes, and ends before the first of some texts."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [each.encode() for each in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = b""
        self.text = ""

    def append(self, piece: bytes) -> bool:
        """Whether a stop text is complete; the text ends before it."""
        self._pending += piece
        found = [place for stop in self._stop if (place := self._pending.find(stop)) >= 0]
        if found:
            self._pending = self._pending[: min(found)]
            return True
        held = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        certain = len(self._pending) - held
        self.text += self._decoder.decode(self._pending[:certain])
        self._pending = self._pending[certain:]
        return False

    def end(self) -> None:
        """Nothing follows: the rest is text, too."""
        self.text += self._decoder.decode(self._pending, final=True)
        self._pending = b""


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Decoder:
    """Decodes generations of one model together. Few steps are wasted if their prompts have similar lengths."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = [each for each in generations if not each.ended]
        self._cache: Cache = []
        self._read = 0

    @property
    def ended(self) -> bool:
        return not self.generations

    def advance(self, seconds: float = float("inf")) -> None:
        """Decode until all have ended, or for about so long; at least one step."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            self._step()
            if time.monotonic() >= deadline:
                return

    @torch.inference_mode()
    def _step(self) -> None:
        if not self._drop_ended():
            return
        predictor = self.generations[0].predictor
        model = predictor.model
        self._cache = self._cache or [{} for _ in model.blocks]
        until = self._read + 1 if self._read else min(len(each.ids) for each in self.generations)
        tokens_BT = torch.tensor([predictor.reading(each.ids)[self._read : until] for each in self.generations])
        hidden_BTD = read(model, predictor.run, tokens_BT.to(model.embedding.weight.device), self._cache)
        logits_BV = model.logits(hidden_BTD[:, -1]).double().cpu().numpy()
        self._read = until
        for each, logits_V in zip(self.generations, logits_BV, strict=True):
            if len(each.ids) == until:  # the prompt is read
                each.choose(logits_V)
        self._drop_ended()

    def _drop_ended(self) -> bool:
        """Remove generations that have ended, and what is cached of them; whether any is left."""
        rows = [row for row, each in enumerate(self.generations) if not each.ended]
        if len(rows) < len(self.generations):
            self.generations = [self.generations[row] for row in rows]
            for layer in self._cache:
                layer.update({name: cached[rows] for name, cached in layer.items()})
        return bool(rows)


def generate(generations: Sequence[Generation]) -> None:
    """Generate all of them, which are of one model, to their ends."""
    Decoder(generations).advance()


def cache_bytes(predictor: Predictor, tokens: int) -> int:
    """Memory of the cached tensors of so many tokens."""
    spec = predictor.run.model
    tensors = 2 + any(each.rotates for each in spec.position) + len(spec.position)  # keys, values, rotated, gates' keys
    return tokens * spec.layers * spec.dim * tensors * predictor.model.embedding.weight.element_size()
