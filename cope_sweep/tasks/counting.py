"""Counting (Golovneva et al. 2024, section 5.3, and its released generator): the current value of a variable.

A sequence is a list of operations followed by a query. Each operation is drawn by weight: set a variable to zero,
increment one, or pass. The query prints a variable. The answer is the number of its increments since it was last set.
With 2 variables, 7 operations and `max_tokens: 20`, where `_` is padding:

    inputs    pass; b = 0 ; pass; b ++; a = 0 ; b ++; pass; print b _ _
    targets   .     . . . . .     . .   . . . . . .   .     .     2 . .

The released generator draws an impossible operation again (an increment if no variable is set, or if the variable is at
the maximum), both its type and its variable. It also draws a sequence again, with its length, if it sets no variable.
`pass;` and `++;` are one token each, as in the release. Of a sequence with more than `max_tokens` tokens, the answer
included, only the tail is kept; the operation that set the variable may then be cut off.

As in the paper, the training set is finite: the first `train_sequences` of an endless stream, so that a smaller
training set is a subset of a larger one. Each epoch visits it in a different order.

A run's seed changes the training set, its order, the initial weights and the dropout masks. With `data_seed` the
training set is the same for all seeds, as in the release, whose generator is run once for all of them.

Shapes: N sequences, S operations, V variables, L tokens of a sequence with its answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask, Task

NONE, PASS, SET, INCREMENT = range(4)
"""Types of operation; NONE fills the steps after the last operation of a sequence."""
TOKENS_OF = np.array([0, 1, 4, 2])
"""Type of operation → number of its tokens."""

CHUNK = 1024
"""Sequences that are drawn together: one step of numpy costs little more for a thousand sequences than for one."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Rows:
    """Sequences in compact form: small integer types, each with its answer as its last token."""

    tokens_NL: np.ndarray
    """Padded on the right; the smallest unsigned type that holds the vocabulary."""
    lengths_N: np.ndarray
    cut_N: np.ndarray

    def take(self, rows: np.ndarray | slice) -> _Rows:
        return _Rows(self.tokens_NL[rows], self.lengths_N[rows], self.cut_N[rows])

    @staticmethod
    def concatenate(parts: list[_Rows]) -> _Rows:
        if len(parts) == 1:
            return parts[0]
        return _Rows(
            np.concatenate([part.tokens_NL for part in parts]),
            np.concatenate([part.lengths_N for part in parts]),
            np.concatenate([part.cut_N for part in parts]),
        )


class Counting(GeneratedTask):
    """Count the increments of a variable since it was last set, among other variables and passes."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer", "shorter")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error", "cut")
    LENGTHS: ClassVar[tuple[str, ...]] = ("operations", "fewest_operations", "max_tokens")

    TRAINED: ClassVar[str] = "the number after `print` and a variable"

    kind: Literal["counting"] = "counting"
    variables: Annotated[int, Field(ge=1, le=10**9)] = Field(default=1, description="Number of variables.")
    operations: Annotated[int, Field(ge=1, le=10**9)] = Field(
        default=512, description="Largest number of operations in a sequence."
    )
    fewest_operations: Annotated[int, Field(ge=1, le=10**9)] = Field(
        default=3, description="Smallest number of operations; numbers up to `operations` are equally likely."
    )
    maximum: Annotated[int, Field(ge=0, le=10**9)] = Field(default=10, description="Largest value of a variable.")
    set_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1, description="Weight of setting a variable to zero."
    )
    increment_weight: Weight = Field(default=7, description="Weight of incrementing a variable.")
    pass_weight: Weight = Field(default=50, description="Weight of passing, in training and in_dist.")
    longer_pass_weight: Weight = Field(default=100, description="Weight of passing in the OOD test set `longer`.")
    shorter_pass_weight: Weight = Field(default=10, description="Weight of passing in the OOD test set `shorter`.")
    max_tokens: Annotated[int, Field(ge=3, le=10**9)] = Field(
        default=512,
        description="Largest number of tokens in a sequence, its answer included; longer ones keep their tail.",
    )
    train_sequences: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=10_000, description="Sequences in the training set, visited in epochs; null: no sequence is repeated."
    )

    @model_validator(mode="after")
    def _check_operations(self) -> Self:
        if self.fewest_operations > self.operations:
            raise ValueError(
                f"fewest_operations = {self.fewest_operations} is more than operations = {self.operations}; "
                f"lower it to {self.operations} or less"
            )
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The text of each token id. Variables come last: a, b, … z, then v26, v27, …"""
        names = [chr(ord("a") + v) if v < 26 else f"v{v}" for v in range(self.variables)]
        return (*map(str, range(self.maximum + 1)), "pass;", "=", ";", "++;", "print", "_", *names)

    @property
    def vocabulary_size(self) -> int:
        return self.maximum + 7 + self.variables

    def length(self, split: str) -> int:
        return min(self.max_tokens, 4 * self.operations + 3) - 1

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        answers = following <= self.maximum
        answers[:, :1] = False
        answers[:, 1:] &= inputs[:, :-1] == self.labels.index("print")
        return Batch(inputs, np.where(answers, following, IGNORED), answers)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        token = self.labels.index
        return {
            "set": tokens_NT == token("="),
            "increment": tokens_NT == token("++;"),
            "pass": tokens_NT == token("pass;"),
        }

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        token = self.labels.index
        last_N1 = (inputs_NT != token("_")).sum(1, keepdims=True) - 1
        asked_N1 = np.take_along_axis(inputs_NT, last_N1, axis=1)
        named_NT = np.roll(inputs_NT, 1, axis=1) == asked_N1  # the variable precedes `=` and `++;`
        increments_NT, sets_NT = inputs_NT == token("++;"), inputs_NT == token("=")
        place_T = np.arange(inputs_NT.shape[1])

        def counted(what_NT: np.ndarray, since_NT: np.ndarray) -> np.ndarray:
            start_N1 = np.where(since_NT, place_T, -1).max(1, keepdims=True)
            counts_N: np.ndarray = np.minimum((what_NT & (place_T > start_N1)).sum(1), self.maximum)
            return counts_N

        never_NT = np.zeros_like(sets_NT)
        rules = {"all increments": counted(increments_NT, never_NT)}
        if self.variables > 1:
            rules |= {
                "its increments, without resets": counted(increments_NT & named_NT, never_NT),
                "all increments since its reset": counted(increments_NT, sets_NT & named_NT),
                "all increments since the last reset of any": counted(increments_NT, sets_NT),
            }
        return rules

    def token_label(self, token: int) -> str:
        return self.labels[token]

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        self.check_split(split)
        data_seed = self.seed_of_data(split, seed)
        if split != "train" or self.train_sequences is None:
            first, last = start // CHUNK, (start + count - 1) // CHUNK
            rows = _Rows.concatenate([_chunk(self, split, data_seed, chunk) for chunk in range(first, last + 1)])
            return self._batch(rows.take(slice(start - first * CHUNK, start - first * CHUNK + count)))
        epochs, places = np.divmod(np.arange(start, start + count), self.train_sequences)
        visited = [_order(self.train_sequences, seed, int(e))[places[epochs == e]] for e in np.unique(epochs)]
        return self._batch(_training_set(self, data_seed).take(np.concatenate(visited)))

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        return self._batch(self._draw(split, rng, count))

    def _draw(self, split: str, rng: np.random.Generator, count: int) -> _Rows:
        weight = {"longer": self.longer_pass_weight, "shorter": self.shorter_pass_weight}.get(split, self.pass_weight)
        kinds_SN, variables_SN, values_VN = self._run(weight, rng, count)
        queried_N = _pick(values_VN >= 0, rng.random(count))
        return self._tokens(kinds_SN, variables_SN, queried_N, values_VN[queried_N, np.arange(count)])

    def _run(
        self, pass_weight: float, rng: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The type and variable of each operation, (S, N), and the final values, (V, N), −1 for a variable never set.

        Drawing impossible operations again is the same as drawing from the possible ones by their weights.
        """
        steps_N, first_N = self._lengths(pass_weight, rng, count)
        every_N = np.arange(count)
        values_VN = np.full((self.variables, count), -1)
        kinds_SN = np.full((self.operations, count), NONE, dtype=np.uint8)
        variables_SN = np.zeros((self.operations, count), dtype=np.min_scalar_type(self.variables))
        for step in range(self.operations):
            chance_N, which_N = rng.random((2, count))
            is_set_VN = values_VN >= 0
            free_VN = is_set_VN & (values_VN < self.maximum)
            free_share_N = free_VN.sum(0) / np.maximum(is_set_VN.sum(0), 1)
            chance_N *= self.set_weight + pass_weight + self.increment_weight * free_share_N
            sets_N = chance_N < self.set_weight
            increments_N = chance_N >= self.set_weight + pass_weight
            # Before the first set all operations are passes; `_lengths` has drawn their number.
            sets_N = np.where(step <= first_N, step == first_N, sets_N) & (step < steps_N)
            increments_N &= (step > first_N) & (step < steps_N)

            some_N = (which_N * self.variables).astype(np.int64)
            variable_N = np.where(increments_N, _pick(free_VN, which_N), some_N)
            value_N = values_VN[variable_N, every_N]
            values_VN[variable_N, every_N] = np.where(sets_N, 0, value_N + increments_N)
            kind_N = np.where(sets_N, SET, np.where(increments_N, INCREMENT, PASS))
            kinds_SN[step] = np.where(step < steps_N, kind_N, NONE)
            variables_SN[step] = variable_N
        return kinds_SN, variables_SN, values_VN

    def _lengths(self, pass_weight: float, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of operations, and the index of the first one that sets a variable; (N,) each.

        A sequence that sets no variable is drawn again, so the probability of a length is proportional to the
        probability that a sequence of that length sets a variable.
        """
        p_set = self.set_weight / (self.set_weight + pass_weight)
        p_first_S = p_set * np.cumprod([1.0, *[1 - p_set] * (self.operations - 1)])
        p_any_S = np.cumsum(p_first_S)
        likely = np.cumsum(p_any_S[self.fewest_operations - 1 :])
        chance_N, which_N = rng.random((2, count))
        index_N = np.searchsorted(likely, chance_N * likely[-1], side="right")
        steps_N = np.minimum(self.fewest_operations + index_N, self.operations)
        first_N = np.searchsorted(p_any_S, which_N * p_any_S[steps_N - 1], side="right")
        return steps_N, np.minimum(first_N, steps_N - 1)

    def _tokens(
        self, kinds_SN: np.ndarray, variables_SN: np.ndarray, queried_N: np.ndarray, answers_N: np.ndarray
    ) -> _Rows:
        """The tokens of operations, query and answer, with only the tail of long sequences."""
        passes, equals, ends, increments, prints, pad = range(self.maximum + 1, self.maximum + 7)
        names = pad + 1
        ends_SN = TOKENS_OF[kinds_SN].cumsum(0)
        full_N = ends_SN[-1] + 3
        lengths_N = np.minimum(full_N, self.max_tokens)
        starts_SN = ends_SN - TOKENS_OF[kinds_SN] - (full_N - lengths_N)
        tokens_NL = np.full((len(queried_N), self.length("train") + 1), pad, np.min_scalar_type(self.vocabulary_size))

        def write(kind: int, *tokens: int | np.ndarray) -> None:
            steps, rows = np.nonzero(kinds_SN == kind)
            for place, token in enumerate(tokens):
                columns = starts_SN[steps, rows] + place
                kept = columns >= 0
                values = token[steps, rows][kept] if isinstance(token, np.ndarray) else token
                tokens_NL[rows[kept], columns[kept]] = values

        names_SN = variables_SN.astype(np.int64) + names
        write(PASS, passes)
        write(SET, names_SN, equals, 0, ends)
        write(INCREMENT, names_SN, increments)
        for place, token in enumerate((answers_N, names + queried_N, prints), start=1):
            tokens_NL[np.arange(len(queried_N)), lengths_N - place] = token
        return _Rows(tokens_NL, lengths_N.astype(np.int32), full_N > self.max_tokens)

    def _batch(self, rows: _Rows) -> Batch:
        every_N = np.arange(len(rows.lengths_N))
        inputs_NT = rows.tokens_NL.astype(np.int64)
        targets_NT = np.full_like(inputs_NT, IGNORED)
        targets_NT[every_N, rows.lengths_N - 2] = inputs_NT[every_N, rows.lengths_N - 1]
        inputs_NT[every_N, rows.lengths_N - 1] = self.labels.index("_")
        targets_NT = targets_NT[:, :-1]
        return Batch(inputs_NT[:, :-1], targets_NT, targets_NT != IGNORED, {"cut": rows.cut_N.astype(np.int64)})


def _pick(candidates_VN: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
    """One of the true rows of each column, with equal probability; 0 for a column without any."""
    rank_N = (chance_N * candidates_VN.sum(0)).astype(np.int64)
    picked_N: np.ndarray = (candidates_VN.cumsum(0) > rank_N).argmax(0)
    return picked_N


@lru_cache(maxsize=32)
def _chunk(task: Counting, split: str, seed: int, chunk: int) -> _Rows:
    return task._draw(split, np.random.default_rng([seed, zlib.crc32(split.encode()), chunk]), CHUNK)


@lru_cache(maxsize=2)
def _training_set(task: Counting, seed: int) -> _Rows:
    size = task.train_sequences or 0
    chunks = [_chunk(task, "train", seed, chunk) for chunk in range(-(-size // CHUNK))]
    return _Rows.concatenate(chunks).take(slice(size))


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits the training set; (size,)."""
    return np.random.default_rng([seed, zlib.crc32(b"order"), epoch]).permutation(size)
