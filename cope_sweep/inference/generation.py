"""Generation of tokens with a cache of keys and values.

A step reads the newest token of each sequence; all tokens before it are in the cache. Its logits equal a full pass's
to rounding errors, for every encoding: CoPE's positions are sums of gates between a query and the cached keys,
and the others depend on the numbers of tokens.

Sequences with prompts of the same length are decoded together. Each draws from its own random generator: the same seed
gives the same tokens, whatever shares the batch, unless rounding errors change which of two tokens with nearly equal
probabilities is chosen.

The model reads at most one token more than its training sequences have (`Predictor.longest_read`), or as many where an
encoding has no further position. There generation ends, with the reason `length`. So a prompt of a whole training
window, which has one token more than the model reads in training, is followed by one token.

A model of a task whose inputs depend on the answers after them (`Task.LOOKS_AHEAD`) generates nothing.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from cope_sweep.errors import TokensError
from cope_sweep.inference.predictor import Predictor
from cope_sweep.inference.scoring import batch_tokens, batches, not_finite, read
from cope_sweep.model import Cache


@dataclass(frozen=True)
class Sampling:
    """The rules by which tokens are chosen, and by which generation ends."""

    max_tokens: int = 16
    temperature: float = 1.0
    """Divisor of the logits; 0 chooses the most probable token, of equal ones the one with the lowest id."""
    stop: tuple[str, ...] = ()
    """Texts before which the generated text ends."""
    top: int = 0
    """Number of most probable tokens to report with each token."""


def sample(logits_V: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """A token from the softmax of float64 logits."""
    if temperature == 0:
        return int(logits_V.argmax())
    # Subtracting the maximum first: a tiny temperature then gives −inf, never NaN.
    with np.errstate(over="ignore"):
        sum_V = np.exp((logits_V - logits_V.max()) / temperature).cumsum()
    # Rounding may lead to the sum itself, which is behind the last token.
    return min(int(np.searchsorted(sum_V, rng.random() * sum_V[-1], side="right")), len(sum_V) - 1)


@dataclass(frozen=True)
class Token:
    """A generated token."""

    id: int
    log_probability: float
    """Under the model itself: the temperature does not change it."""
    top: list[tuple[int, float]]
    """The most probable tokens with their log-probabilities, best first."""


@dataclass
class Generation:
    """One sequence that is generated: its tokens and its text."""

    predictor: Predictor
    prompt_T: np.ndarray
    """int64 ids; at least one."""
    sampling: Sampling
    seed: int | tuple[int, ...] | None = None
    """None: another one each time."""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    def __post_init__(self) -> None:
        task = self.predictor.run.task
        if self.sampling.max_tokens and task.LOOKS_AHEAD:
            raise TokensError(
                f"a model of the task {task.kind} generates no tokens, because each input depends on the answer after "
                "it; ask for the perplexity of tokens that contain the answers",
                code="no_generation",
                task=task.kind,
            )
        longest_prompt, longest_read = self.predictor.context + 1, self.predictor.longest_read
        if self.sampling.max_tokens and not 1 <= len(self.prompt_T) <= longest_prompt:
            raise TokensError(
                f"the prompt has {len(self.prompt_T)} tokens; for generation give 1 … {longest_prompt}: the context of "
                f"the training is {self.predictor.context} tokens",
                code="prompt_length",
                tokens=len(self.prompt_T),
                largest=longest_prompt,
            )
        self.ids: list[int] = self.prompt_T[-longest_read:].tolist()
        self.limit = min(len(self.ids) + self.sampling.max_tokens, longest_read + 1)
        """Number of `ids` at which generation ends."""
        self._rng = np.random.default_rng(self.seed)
        self.text_bytes = b""
        """The generated text, which ends before a stop text, but may end inside a character."""
        if not self.sampling.max_tokens:
            self.finish_reason = "length"

    @property
    def text(self) -> str:
        """`text_bytes` as text."""
        return self.text_bytes.decode(errors="replace")

    def choose(self, logits_V: np.ndarray) -> None:
        """Append a token that the float64 logits give, and note whether it is the last. Raises NotFiniteError."""
        if not np.isfinite(logits_V).all():
            raise not_finite(self.predictor.run)
        token, vocabulary = sample(logits_V, self.sampling.temperature, self._rng), self.predictor.vocabulary
        normalizer = logits_V.max() + np.log(np.exp(logits_V - logits_V.max()).sum())
        # A stable sort puts the lowest id first among equal tokens.
        best = np.argsort(-logits_V, kind="stable")[: self.sampling.top].tolist() if self.sampling.top else []
        self.tokens.append(
            Token(token, float(logits_V[token] - normalizer), [(k, float(logits_V[k] - normalizer)) for k in best])
        )
        self.ids.append(token)
        if token == vocabulary.end_of_text or self._stops_with(vocabulary.piece(token)):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"

    def _stops_with(self, piece: bytes) -> bool:
        """Append to the text; if it then contains a stop text, cut it before that, and return True."""
        self.text_bytes += piece
        stops = [stop.encode() for stop in self.sampling.stop]
        places = [self.text_bytes.index(stop) for stop in stops if stop in self.text_bytes]
        if places:
            self.text_bytes = self.text_bytes[: min(places)]
        return bool(places)


@torch.inference_mode()
def generate(generations: Sequence[Generation], is_cancelled: Callable[[], bool] = lambda: False) -> None:
    """Generate all of them, which are of one model, to their ends, or until they are cancelled.

    Raises NotFiniteError where the model's outputs are not numbers.
    """
    unfinished = sorted(
        (generation for generation in generations if generation.finish_reason is None),
        key=lambda generation: len(generation.ids),
    )
    for _, group in groupby(unfinished, key=lambda generation: len(generation.ids)):
        alike = list(group)
        for batch in batches([generation.limit for generation in alike], batch_tokens(alike[0].predictor.model)):
            _decode([alike[index] for index in batch], is_cancelled)


def _decode(generations: list[Generation], is_cancelled: Callable[[], bool]) -> None:
    """Generate sequences with as many tokens each, together."""
    predictor = generations[0].predictor
    model = predictor.model
    cache: Cache = [{} for _ in model.blocks]
    read_tokens = 0
    while generations and not is_cancelled():
        tokens_BT = torch.tensor([predictor.reading(generation.ids)[read_tokens:] for generation in generations])
        read_tokens += tokens_BT.shape[1]
        hidden_BTD = read(model, predictor.run, tokens_BT.to(model.embedding.weight.device), cache)
        logits_BV = model.logits(hidden_BTD[:, -1]).double().cpu().numpy()
        for generation, logits_V in zip(generations, logits_BV, strict=True):
            generation.choose(logits_V)
        rows = [row for row, generation in enumerate(generations) if generation.finish_reason is None]
        # Sequences that ended leave the cache, so that the others do not compute them.
        if len(rows) < len(generations):
            generations = [generations[row] for row in rows]
            for layer in cache:
                layer.update({name: cached[rows] for name, cached in layer.items()})
