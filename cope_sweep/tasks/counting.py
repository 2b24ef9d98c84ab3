"""Counting (Golovneva et al. 2024, section 5.3, and its released generator): how much is the variable now?

A sequence of operations, each drawn by weight: set a variable to zero, increment one, or pass; then the question, which
prints a variable. The answer is the number of its increments since it was last set. With 2 variables, 7 operations and
`max_tokens: 20`, where `_` pads:

    inputs    pass; b = 0 ; pass; b ++; a = 0 ; b ++; pass; print b _ _
    targets   .     . . . . .     . .   . . . . . .   .     .     2 . .

An operation that cannot be (an increment where no variable is set, or of one that stands at the maximum) is drawn
anew, kind and variable; so is a sequence, with its length, that sets no variable. `pass;` and `++;` are one token each,
as in the release. A sequence of more than `max_tokens` tokens, the answer counted, keeps its tail: what it is asked
may then have been set in what was cut off.

Training sequences are finitely many, as in the paper: the first `train_sequences` of an endless stream (so that a
smaller set is a part of a larger one), visited in another order in each epoch.

Shapes: N sequences, S operations, V variables, L tokens of a sequence with its answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.tasks.base import IGNORED, Batch, Task

NONE, PASS, SET, INCREMENT = range(4)
"""Kinds of operation; NONE follows a sequence's last one."""
TOKENS_OF = np.array([0, 1, 4, 2])
"""Kind → how many tokens it is."""

CHUNK = 1024
"""Sequences that are drawn at once: a step of the interpreter costs little more for a thousand than for one."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Rows:
    """Sequences as they are kept: small types, the answer at its place."""

    tokens_NL: np.ndarray
    """Padded right, in the smallest unsigned type that holds the vocabulary."""
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


class Counting(Task):
    """Count a variable's increments since it was last set, among other variables and many a pass."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer", "shorter")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error", "cut")

    kind: Literal["counting"] = "counting"
    variables: Annotated[int, Field(ge=1)] = 1
    operations: Annotated[int, Field(ge=1)] = Field(default=512, description="Most operations of a sequence.")
    fewest_operations: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Fewest; each number from here to `operations` is as likely."
    )
    maximum: Annotated[int, Field(ge=0)] = Field(default=10, description="Largest value of a variable.")
    set_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1
    increment_weight: Weight = 7
    pass_weight: Weight = Field(default=50, description="In training and in-distribution.")
    longer_pass_weight: Weight = Field(default=100, description="In the OOD test set of longer contexts.")
    shorter_pass_weight: Weight = Field(default=10, description="In the OOD test set of shorter contexts.")
    max_tokens: Annotated[int, Field(ge=3)] = Field(
        default=512, description="Tokens of a sequence, its answer counted; a longer one keeps its tail."
    )
    train_sequences: Annotated[int, Field(ge=1)] | None = Field(
        default=10_000, description="Sequences in the training set, visited in epochs; null: never one twice."
    )

    @model_validator(mode="after")
    def _fewest_is_not_more(self) -> Self:
        if self.fewest_operations > self.operations:
            raise ValueError(
                f"fewest_operations = {self.fewest_operations} is more than operations = {self.operations}; "
                f"lower it to {self.operations} or less"
            )
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """Token id → what it says. Variables come last: a, b, … z, then v26, v27, …"""
        names = [chr(ord("a") + v) if v < 26 else f"v{v}" for v in range(self.variables)]
        return (*map(str, range(self.maximum + 1)), "pass;", "=", ";", "++;", "print", "_", *names)

    @property
    def vocabulary_size(self) -> int:
        return self.maximum + 7 + self.variables

    def length(self, split: str) -> int:
        return min(self.max_tokens, 4 * self.operations + 3) - 1

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        token = self.words.index
        return {
            "set": tokens_NT == token("="),
            "increment": tokens_NT == token("++;"),
            "pass": tokens_NT == token("pass;"),
        }

    def token_label(self, token: int) -> str:
        return self.words[token]

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        self.check_split(split)
        if split != "train" or self.train_sequences is None:
            first, last = start // CHUNK, (start + count - 1) // CHUNK
            rows = _Rows.concatenate([_chunk(self, split, seed, chunk) for chunk in range(first, last + 1)])
            return self._batch(rows.take(slice(start - first * CHUNK, start - first * CHUNK + count)))
        epochs, places = np.divmod(np.arange(start, start + count), self.train_sequences)
        visited = [_order(self.train_sequences, seed, int(e))[places[epochs == e]] for e in np.unique(epochs)]
        return self._batch(_training_set(self, seed).take(np.concatenate(visited)))

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        return self._batch(self._draw(split, rng, count))

    def _draw(self, split: str, rng: np.random.Generator, count: int) -> _Rows:
        weight = {"longer": self.longer_pass_weight, "shorter": self.shorter_pass_weight}.get(split, self.pass_weight)
        kinds_SN, variables_SN, values_VN = self._run(weight, rng, count)
        asked_N = _pick(values_VN >= 0, rng.random(count))
        return self._tokens(kinds_SN, variables_SN, asked_N, values_VN[asked_N, np.arange(count)])

    def _run(
        self, pass_weight: float, rng: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each operation's kind and variable, (S, N), and what the variables are in the end, (V, N), −1 if never set.

        To draw anew what cannot be is to draw from what can, by its weights.
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
            # Before the first variable is set there are passes only, and `_lengths` has drawn how many.
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
        """Numbers of operations, and how many of them come before the first that sets.

        A length is as likely as it is to set any variable, for a sequence that sets none is drawn anew.
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
        self, kinds_SN: np.ndarray, variables_SN: np.ndarray, asked_N: np.ndarray, answers_N: np.ndarray
    ) -> _Rows:
        passes, equals, ends, increments, prints, pad = range(self.maximum + 1, self.maximum + 7)
        names = pad + 1
        ends_SN = TOKENS_OF[kinds_SN].cumsum(0)
        whole_N = ends_SN[-1] + 3
        lengths_N = np.minimum(whole_N, self.max_tokens)
        starts_SN = ends_SN - TOKENS_OF[kinds_SN] - (whole_N - lengths_N)
        tokens_NL = np.full((len(asked_N), self.length("train") + 1), pad, np.min_scalar_type(self.vocabulary_size))

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
        for place, token in enumerate((answers_N, names + asked_N, prints), start=1):
            tokens_NL[np.arange(len(asked_N)), lengths_N - place] = token
        return _Rows(tokens_NL, lengths_N.astype(np.int32), whole_N > self.max_tokens)

    def _batch(self, rows: _Rows) -> Batch:
        every_N = np.arange(len(rows.lengths_N))
        inputs_NT = rows.tokens_NL.astype(np.int64)
        targets_NT = np.full_like(inputs_NT, IGNORED)
        targets_NT[every_N, rows.lengths_N - 2] = inputs_NT[every_N, rows.lengths_N - 1]
        inputs_NT[every_N, rows.lengths_N - 1] = self.words.index("_")
        targets_NT = targets_NT[:, :-1]
        return Batch(inputs_NT[:, :-1], targets_NT, targets_NT != IGNORED, {"cut": rows.cut_N.astype(np.int64)})


def _pick(among_VN: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
    """One of each column's true rows, each as likely; 0 where there is none."""
    rank_N = (chance_N * among_VN.sum(0)).astype(np.int64)
    picked_N: np.ndarray = (among_VN.cumsum(0) > rank_N).argmax(0)
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
    """The order in which an epoch visits the training set."""
    return np.random.default_rng([seed, zlib.crc32(b"order"), epoch]).permutation(size)
