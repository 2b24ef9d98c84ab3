"""Dyck words with several kinds of brackets, a length and a depth (MapFormer, 2511.19279, B.4).

A word is well-formed: every bracket is closed by one of its own kind, after all that were opened since. It has a length
and a largest depth, which it reaches; all ways to go up and down with this length and depth are equally likely, and the
kinds of brackets are uniform (the paper does not give its weights). `x` starts a sequence. With 8 brackets and depth 2:

    inputs    x ( [ ] [ ] ) (
    targets   ( [ ] [ ] ) ( )
    closers   . . ] . ] ) . )

All tokens are targets. The answers are the closing brackets, and a prediction is the more probable one of those: chance
is ½ for two kinds. A bracket that is closed at once only repeats its kind, so `inner_error` counts the others, after at
least one inner pair, and `distance_error@7` those whose opening bracket is 4 to 7 tokens away (distances are odd).

`f1_error` is 100 % − F1, the published score, of the probability of the tokens that may follow, and of the share of
these that are more probable than all others together. Any opening bracket may follow, and the closing one of the last
bracket that is open, whatever the length and the depth of the words. This score flatters: two rules without a stack
have an F1 of 0.83 and 0.93 at length 32 and depth 4, as `shortcut_errors` computes.

Shapes: N sequences, T tokens, L tokens of a sequence with its answers, V vocabulary, D depths.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.tasks.base import Batch, GeneratedTask, Task, ranges

PAIRS = ("()", "[]", "{}", "<>")

Length = Annotated[int, Field(ge=2, le=10**5, multiple_of=2)]
Depth = Annotated[int, Field(ge=1, le=10**4)]


class Dyck(GeneratedTask):
    """Close brackets: each by its own kind, the last one first."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer", "deeper", "longer_deeper")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "f1_error")
    LENGTHS: ClassVar[tuple[str, ...]] = ("brackets", "longer_brackets")

    kind: Literal["dyck"] = "dyck"
    kinds: Annotated[int, Field(ge=2, le=len(PAIRS))] = Field(default=2, description="Number of kinds of brackets.")
    brackets: Length = Field(default=32, description="Number of brackets in training, in_dist and `deeper`.")
    longer_brackets: Length = Field(default=128, description="Number of brackets in the OOD test sets `longer…`.")
    depth: Depth = Field(default=4, description="Largest depth, which is reached, in training, in_dist and `longer`.")
    deeper_depth: Depth = Field(default=12, description="Largest depth in the OOD test sets `…deeper`.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in ("depth", "deeper_depth"):
            if 2 * getattr(self, field) > self.brackets:
                raise InvalidValue(
                    f"{field} = {getattr(self, field)} needs at least {2 * getattr(self, field)} brackets; brackets = "
                    f"{self.brackets}",
                    key=field,
                    value=getattr(self, field),
                    largest=self.brackets // 2,
                )
        return self

    @property
    def vocabulary_size(self) -> int:
        return 2 * self.kinds + 1

    def choices(self, metric: str) -> tuple[int, ...]:
        return tuple(range(self.kinds, 2 * self.kinds))

    def partial_errors(self, split: str) -> tuple[str, ...]:
        if self._depth(split) == 1:
            return ()  # all brackets are closed at once
        return ("inner_error", *(f"distance_error@{end}" for end in self._ends(split)))

    def length(self, split: str) -> int:
        return self.longer_brackets if split.startswith("longer") else self.brackets

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "opens": tokens_NT < self.kinds,
            "closes": (tokens_NT >= self.kinds) & (tokens_NT < 2 * self.kinds),
            "start": tokens_NT == 2 * self.kinds,
        }

    def token_label(self, token: int) -> str:
        return "x" if token == 2 * self.kinds else PAIRS[token % self.kinds][token // self.kinds]

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        length = self.length(split)
        up_LDR = _probabilities_of_up(length, self._depth(split))
        chance_LN = rng.random((length, count))
        depth_N, has_reached_N = np.zeros((2, count), dtype=np.int64)
        is_open_LN = np.empty((length, count), dtype=bool)
        for place in range(length):
            is_open_N = is_open_LN[place] = chance_LN[place] < up_LDR[place, depth_N, has_reached_N]
            depth_N += 2 * is_open_N - 1
            has_reached_N |= depth_N == up_LDR.shape[1] - 1
        kinds_NL = rng.integers(0, self.kinds, (count, length))
        opened_NL = _partners(is_open_LN.T)
        tokens_NL = np.take_along_axis(kinds_NL, opened_NL, axis=1) + self.kinds * ~is_open_LN.T
        return self.with_targets(np.pad(tokens_NL, ((0, 0), (1, 0)), constant_values=2 * self.kinds))

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs_NT, targets_NT = tokens_NL[:, :-1], tokens_NL[:, 1:]
        return Batch(inputs_NT, targets_NT, (targets_NT >= self.kinds) & (targets_NT < 2 * self.kinds))

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        if not self.partial_errors(split):
            return {}
        # The closing bracket is one token after the input that it is the target of.
        distance_NT = np.arange(1, batch.inputs_NT.shape[1] + 1) - self._last_open(batch.inputs_NT)
        counted = {"inner_error": distance_NT > 1} | ranges("distance_error", distance_NT, self._ends(split))
        return {name: batch.answers_NT & counted_NT for name, counted_NT in counted.items()}

    def valid_next(self, inputs_NT: np.ndarray) -> np.ndarray:
        valid_NTV = np.zeros((*inputs_NT.shape, self.vocabulary_size), dtype=bool)
        valid_NTV[..., : self.kinds] = True
        last_NT = self._last_open(inputs_NT)
        rows, places = (last_NT >= 0).nonzero()
        valid_NTV[rows, places, self.kinds + inputs_NT[rows, last_NT[rows, places]]] = True
        return valid_NTV

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        opens_NT, counts_KNT = inputs_NT < self.kinds, self._open_counts(inputs_NT)
        seen_NT = np.maximum.accumulate(np.where(opens_NT, np.arange(inputs_NT.shape[1]), 0), axis=1)
        last_kind_NT = np.take_along_axis(inputs_NT, seen_NT, axis=1) % self.kinds
        return {
            "closes the last bracket that was opened, even if it is closed": self.kinds + last_kind_NT,
            "a counter for each kind: closes the one that is open most often": self.kinds + counts_KNT.argmax(axis=0),
        }

    def shortcut_errors(self, split: str, count: int, metric: str = "token_error") -> dict[str, float]:
        if metric != "f1_error":
            return super().shortcut_errors(split, count, metric)
        batch = self.sequences(split, 0, 0, count)
        return {rule: 100 * (1 - self._f1(batch.inputs_NT, p_NTV)) for rule, p_NTV in self._rules(batch.inputs_NT)}

    def _depth(self, split: str) -> int:
        return self.deeper_depth if split.endswith("deeper") else self.depth

    def _ends(self, split: str) -> tuple[int, ...]:
        """The largest distances of the ranges 1, 2 – 3, 4 – 7, … of a split."""
        most = self.length(split) - 1
        return tuple(min(2**power - 1, most) for power in range(1, most.bit_length() + 1))

    def _last_open(self, tokens_NT: np.ndarray) -> np.ndarray:
        """The place of the last bracket that is open after each token, (N, T); −1 if none is."""
        is_open_NT = tokens_NT < self.kinds
        depth_NT = _depths(is_open_NT, ~is_open_NT & (tokens_NT < 2 * self.kinds))
        return _last_opened(is_open_NT, depth_NT, depth_NT)

    def _open_counts(self, tokens_NT: np.ndarray) -> np.ndarray:
        """How many brackets of each kind are open after each token, if no stack is kept, (kinds, N, T)."""
        return np.stack([_depths(tokens_NT == kind, tokens_NT == kind + self.kinds) for kind in range(self.kinds)])

    def _rules(self, tokens_NT: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Rules without a stack, and the probabilities that they give to the next token, (N, T, V)."""
        opens_NTV = np.zeros((*tokens_NT.shape, self.vocabulary_size), dtype=bool)
        opens_NTV[..., : self.kinds] = True
        closes_NTV, counts_NTV = opens_NTV.copy(), opens_NTV.copy()
        for kind in range(self.kinds):
            closes_NTV[..., self.kinds + kind] = tokens_NT == kind
        counts_NTV[..., self.kinds : 2 * self.kinds] = np.moveaxis(self._open_counts(tokens_NT) > 0, 0, -1)
        for rule, may_NTV in (
            ("only opens brackets", opens_NTV),
            ("opens a bracket, or closes the one before at once", closes_NTV),
            ("a counter for each kind", counts_NTV),
        ):
            # Opening is always right: twice the weight is better than the same, and no other is much better.
            weights_NTV = may_NTV * np.where(np.arange(self.vocabulary_size) < self.kinds, 2, 1)
            yield rule, weights_NTV / weights_NTV.sum(axis=-1, keepdims=True)

    def _f1(self, tokens_NT: np.ndarray, p_NTV: np.ndarray) -> float:
        """F1 as `f1_error` has it, of probabilities of the next token."""
        valid_NTV = self.valid_next(tokens_NT)
        mass = float((p_NTV * valid_NTV).sum(axis=-1).mean())
        others_NT1 = (p_NTV * ~valid_NTV).sum(axis=-1, keepdims=True)
        beats = float((((p_NTV > others_NT1) & valid_NTV).sum(axis=-1) / valid_NTV.sum(axis=-1)).mean())
        return 2 * mass * beats / (mass + beats)


def _depths(opens_NT: np.ndarray, closes_NT: np.ndarray) -> np.ndarray:
    depths_NT: np.ndarray = opens_NT.cumsum(axis=1, dtype=np.int32) - closes_NT.cumsum(axis=1, dtype=np.int32)
    return depths_NT


def _last_opened(is_open_NT: np.ndarray, depth_NT: np.ndarray, wanted_NT: np.ndarray) -> np.ndarray:
    """The last place up to each token where a bracket was opened to a depth of `wanted_NT`, (N, T); −1: nowhere.

    If so many are open, it is still open, because another one would be the last to reach this depth.
    """
    place_T = np.arange(is_open_NT.shape[1], dtype=np.int32)
    last_NT = np.full(is_open_NT.shape, -1, dtype=np.int32)
    for depth in range(1, int(wanted_NT.max(initial=0)) + 1):
        opened_NT = np.maximum.accumulate(np.where(is_open_NT & (depth_NT == depth), place_T, np.int32(-1)), axis=1)
        np.copyto(last_NT, opened_NT, where=wanted_NT == depth)
    return last_NT.astype(np.int64)


def _partners(is_open_NL: np.ndarray) -> np.ndarray:
    """The place of the bracket that each bracket of a word closes, or its own, (N, L)."""
    depth_NL = _depths(is_open_NL, ~is_open_NL)
    return _last_opened(is_open_NL, depth_NL, depth_NL + ~is_open_NL)


@lru_cache(maxsize=32)
def _probabilities_of_up(length: int, depth: int) -> np.ndarray:
    """The probability that a word goes up at a place, from a depth, having reached the largest one or not.

    (L, D + 1, 2). All words that end at depth 0 and have reached the largest one are equally likely.
    """
    # The logarithm of how many ends of words there are: their ratios exceed 10^308 for deep words.
    words_DR = np.full((depth + 2, 2), -np.inf)
    words_DR[0, 1] = 0
    up_LDR = np.zeros((length, depth + 1, 2))
    for place in reversed(range(length)):
        up_DR, down_DR = np.full((2, depth + 1, 2), -np.inf)
        up_DR[:depth] = words_DR[1:-1]
        up_DR[depth - 1, 0] = words_DR[depth, 1]
        down_DR[1:] = words_DR[:depth]
        words_DR[:-1] = np.logaddexp(up_DR, down_DR)
        is_possible_DR = up_DR > -np.inf
        up_LDR[place, is_possible_DR] = np.exp(up_DR[is_possible_DR] - words_DR[:-1][is_possible_DR])
    return up_LDR
