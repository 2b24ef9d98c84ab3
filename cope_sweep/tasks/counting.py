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

Two options that the release does not have ask for the same counting with less to learn beside it. With
`operation_tokens: one`, an operation is one token, so that no name has to be bound to the `++;` that follows it. With
`prints`, a sequence has several queries, at random places after the first set. The inputs hold `_` instead of an
answer, so that none can be read off; a query that `max_tokens` cuts in two is left out. With both, `variables: 2,
operations: 5, prints: 2, max_tokens: 11`:

    inputs    a=0 a++ print_a _ pass; b=0 b++ print_a _ _
    targets   .   .   1       . .     .   .   1       . .

A run's seed changes the training set, its order, the initial weights and the dropout masks. With `data_seed` the
training set is the same for all seeds, as in the release, whose generator is run once for all of them.

Shapes: N sequences, S operations, V variables, L tokens of a sequence with its answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Count, Positive
from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask, Task

NONE, PASS, SET, INCREMENT, PRINT = range(5)
"""Types of operation; NONE fills the steps after the last operation of a sequence."""
TOKENS_OF = {"parts": np.array([0, 1, 4, 2, 3]), "one": np.array([0, 1, 1, 1, 2])}
"""`operation_tokens` → type of operation → number of its tokens, with the answer of a print."""

CHUNK = 1024
"""Sequences that are drawn together: one step of numpy costs little more for a thousand sequences than for one."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Rows:
    """Sequences in compact form: small integer types, with their answers; the last token is always one."""

    tokens_NL: np.ndarray
    """Padded on the right; the smallest unsigned type that holds the vocabulary."""
    cut_N: np.ndarray

    def take(self, rows: np.ndarray | slice) -> _Rows:
        return _Rows(self.tokens_NL[rows], self.cut_N[rows])

    @staticmethod
    def concatenate(parts: list[_Rows]) -> _Rows:
        if len(parts) == 1:
            return parts[0]
        return _Rows(
            np.concatenate([part.tokens_NL for part in parts]),
            np.concatenate([part.cut_N for part in parts]),
        )


class Counting(GeneratedTask):
    """Count the increments of a variable since it was last set, among other variables and passes."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer", "shorter")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error", "cut")
    LENGTHS: ClassVar[tuple[str, ...]] = ("operations", "fewest_operations", "max_tokens")

    TRAINED: ClassVar[str] = "the number after `print` and a variable"

    kind: Literal["counting"] = "counting"
    variables: Positive = Field(default=1, description="Number of variables.")
    operations: Positive = Field(default=512, description="Largest number of operations in a sequence.")
    fewest_operations: Positive = Field(
        default=3, description="Smallest number of operations; numbers up to `operations` are equally likely."
    )
    maximum: Count = Field(default=10, description="Largest value of a variable.")
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
    operation_tokens: Literal["parts", "one"] = Field(
        default="parts", description="Tokens of an operation. parts: as released, `a ++;` are two; one: each is one."
    )
    prints: Positive = Field(
        default=1,
        description="Number of queries in a sequence. The last one ends it; the others are among the operations.",
    )
    train_sequences: Positive | None = Field(
        default=10_000, description="Sequences in the training set, visited in epochs; null: no sequence is repeated."
    )

    @model_validator(mode="after")
    def _check_operations(self) -> Self:
        if self.fewest_operations > self.operations:
            raise InvalidValue(
                f"fewest_operations = {self.fewest_operations} is more than operations = {self.operations}; "
                f"lower it to {self.operations} or less",
                key="fewest_operations",
                value=self.fewest_operations,
                largest=self.operations,
            )
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The text of each token id. Variables come last: a, b, … z, then v26, v27, …"""
        names = [chr(ord("a") + v) if v < 26 else f"v{v}" for v in range(self.variables)]
        if self.operation_tokens == "one":
            forms = ("{}=0", "{}++", "print_{}")
            return (
                *map(str, range(self.maximum + 1)),
                "pass;",
                "_",
                *(form.format(v) for form in forms for v in names),
            )
        return (*map(str, range(self.maximum + 1)), "pass;", "=", ";", "++;", "print", "_", *names)

    @property
    def vocabulary_size(self) -> int:
        if self.operation_tokens == "one":
            return self.maximum + 3 + 3 * self.variables
        return self.maximum + 7 + self.variables

    def length(self, split: str) -> int:
        tokens_of = TOKENS_OF[self.operation_tokens]
        return min(self.max_tokens, int(tokens_of.max()) * self.operations + int(tokens_of[PRINT]) * self.prints) - 1

    def version(self) -> int:
        # Version 1 left the end of a query that was cut in two, with its answer in the inputs. One query is the end of
        # its sequence and never cut. Of the operations, a set has the most tokens.
        tokens_of = TOKENS_OF[self.operation_tokens]
        most_tokens = int(tokens_of[SET]) * self.operations + int(tokens_of[PRINT]) * self.prints
        return 2 if self.prints > 1 and most_tokens > self.max_tokens else self.VERSION

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        kinds_NT, _ = self._parse(tokens_NL[:, :-1])
        targets_NT = np.where((kinds_NT == PRINT) & (tokens_NL[:, 1:] <= self.maximum), tokens_NL[:, 1:], IGNORED)
        answers_NT = targets_NT != IGNORED
        inputs_NT = tokens_NL[:, :-1].copy()
        inputs_NT[:, 1:][answers_NT[:, :-1]] = self.labels.index("_")
        return Batch(inputs_NT, targets_NT, answers_NT)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        kinds_NT, _ = self._parse(tokens_NT)
        return {"set": kinds_NT == SET, "increment": kinds_NT == INCREMENT, "pass": kinds_NT == PASS}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        kinds_NT, variables_NT = self._parse(inputs_NT)
        increments_NT, sets_NT = kinds_NT == INCREMENT, kinds_NT == SET
        counts_NT = increments_NT.cumsum(1)
        own_NT, since_own_NT, since_any_NT = (np.zeros_like(counts_NT) for _ in range(3))
        since_any_NT[:] = counts_NT - np.maximum.accumulate(np.where(sets_NT, counts_NT, 0), axis=1)
        for variable in np.unique(variables_NT[kinds_NT == PRINT]):
            named_NT = variables_NT == variable
            asked_NT = named_NT & (kinds_NT == PRINT)
            own_NT[asked_NT] = (increments_NT & named_NT).cumsum(1)[asked_NT]
            before_NT = np.maximum.accumulate(np.where(sets_NT & named_NT, counts_NT, 0), axis=1)
            since_own_NT[asked_NT] = (counts_NT - before_NT)[asked_NT]
        rules = {"all increments": counts_NT}
        if self.variables > 1:
            rules |= {
                "its increments, without resets": own_NT,
                "all increments since its reset": since_own_NT,
                "all increments since the last reset of any": since_any_NT,
            }
        return {name: np.minimum(answers_NT, self.maximum) for name, answers_NT in rules.items()}

    def structure(self, split: str, count: int) -> dict[str, float]:
        batch = self.sequences(split, 0, 0, count)
        kinds_NT, variables_NT = self._parse(batch.inputs_NT)
        rows_A, places_A = batch.answers_NT.nonzero()
        sets_AT = (kinds_NT[rows_A] == SET) & (variables_NT[rows_A] == variables_NT[rows_A, places_A][:, None])
        sets_AT &= np.arange(sets_AT.shape[1]) < places_A[:, None]
        last_A = np.where(sets_AT, np.arange(sets_AT.shape[1]), -1).max(1)
        answers_A = batch.targets_NT[batch.answers_NT]
        return {
            "sets of a variable in a sequence": float((kinds_NT == SET).sum(1).mean()),
            "answers whose variable was set only once (%)": 100 * float((sets_AT.sum(1) == 1).mean()),
            "tokens since the asked variable was set (median)": float(np.median(places_A - last_A)),
            "answer (mean)": float(answers_A.mean()),
            "error of the most frequent answer (%)": 100 * (1 - float(np.bincount(answers_A).max() / len(answers_A))),
        }

    def _parse(self, tokens_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Type of the operation that a token names, NONE for the others, and its variable. The shape of `tokens_NT`."""
        if self.operation_tokens == "one":
            index_NT = tokens_NT - (self.maximum + 3)
            kinds_NT = np.where(index_NT >= 0, SET + index_NT // self.variables, NONE)
            kinds_NT = np.where(tokens_NT == self.maximum + 1, PASS, kinds_NT)
            return kinds_NT, np.where(index_NT >= 0, index_NT % self.variables, -1)
        passes, equals, _, increments, prints, pad = range(self.maximum + 1, self.maximum + 7)
        before_NT = np.concatenate((np.full_like(tokens_NT[..., :1], pad), tokens_NT[..., :-1]), axis=-1)
        kinds_NT = np.select(
            [tokens_NT == passes, tokens_NT == equals, tokens_NT == increments, before_NT == prints],
            [PASS, SET, INCREMENT, PRINT],
            NONE,
        )
        named_NT = np.where(kinds_NT == PRINT, tokens_NT, before_NT)  # the variable precedes `=` and `++;`
        return kinds_NT, np.where(kinds_NT > PASS, named_NT - (pad + 1), -1)

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
        values_SN = np.zeros(kinds_SN.shape, dtype=np.int64)
        if self.prints > 1:
            kinds_SN, variables_SN, values_SN = self._with_prints(kinds_SN, variables_SN, rng)
        query = (
            np.full((1, count), PRINT, kinds_SN.dtype),
            queried_N[None],
            values_VN[queried_N, np.arange(count)][None],
        )
        return self._tokens(
            *(np.concatenate(pair) for pair in zip((kinds_SN, variables_SN, values_SN), query, strict=True))
        )

    def _with_prints(
        self, kinds_SN: np.ndarray, variables_SN: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The operations with all queries among them but the last, (S', N), and the value that each query prints.

        A query follows any operation from the first set on, and asks one of the variables that are set by then, with
        equal probability.
        """
        count = kinds_SN.shape[1]
        first_N, steps_N = (kinds_SN == SET).argmax(0), (kinds_SN != NONE).sum(0)
        place_PN = first_N + (rng.random((self.prints - 1, count)) * (steps_N - first_N)).astype(np.int64)
        which_PN = rng.random(place_PN.shape)
        printed_PN, value_PN = np.zeros((2, *place_PN.shape), dtype=np.int64)
        values_VN, every_N = np.full((self.variables, count), -1), np.arange(count)
        for step in range(len(kinds_SN)):
            kind_N, variable_N = kinds_SN[step], variables_SN[step].astype(np.int64)
            for kind, before_N in ((SET, 0), (INCREMENT, values_VN[variable_N, every_N] + 1)):
                values_VN[variable_N, every_N] = np.where(kind_N == kind, before_N, values_VN[variable_N, every_N])
            for query in np.flatnonzero((place_PN == step).any(1)):
                here_N = place_PN[query] == step
                asked_N = _pick(values_VN >= 0, which_PN[query])
                printed_PN[query, here_N] = asked_N[here_N]
                value_PN[query, here_N] = values_VN[asked_N, every_N][here_N]
        # An operation comes before the queries that follow it; what does not exist comes last.
        order_SN = np.broadcast_to(np.arange(len(kinds_SN))[:, None], kinds_SN.shape)
        order_SN = np.concatenate((order_SN, place_PN)).argsort(axis=0, kind="stable")
        parts = (
            (kinds_SN, np.full_like(place_PN, PRINT)),
            (variables_SN, printed_PN),
            (np.zeros(kinds_SN.shape, dtype=np.int64), value_PN),
        )
        kinds_SN, variables_SN, values_SN = (
            np.take_along_axis(np.concatenate(pair), order_SN, axis=0) for pair in parts
        )
        return kinds_SN, variables_SN, values_SN

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
        # Rounding may lead to the index after the last one, here and below.
        index_N = np.searchsorted(likely, chance_N * likely[-1], side="right")
        steps_N = np.minimum(self.fewest_operations + index_N, self.operations)
        first_N = np.searchsorted(p_any_S, which_N * p_any_S[steps_N - 1], side="right")
        return steps_N, np.minimum(first_N, steps_N - 1)

    def _tokens(self, kinds_SN: np.ndarray, variables_SN: np.ndarray, values_SN: np.ndarray) -> _Rows:
        """The tokens of operations and queries with their answers, with only the tail of long sequences."""
        tokens_of = TOKENS_OF[self.operation_tokens]
        ends_SN = tokens_of[kinds_SN].cumsum(0)
        full_N = ends_SN[-1]
        lengths_N = np.minimum(full_N, self.max_tokens)
        starts_SN = ends_SN - tokens_of[kinds_SN] - (full_N - lengths_N)
        shape = len(full_N), self.length("train") + 1
        tokens_NL = np.full(shape, self.labels.index("_"), np.min_scalar_type(self.vocabulary_size))

        def write(kind: int, *tokens: int | np.ndarray) -> None:
            steps, rows = np.nonzero(kinds_SN == kind)
            for place, token in enumerate(tokens):
                columns = starts_SN[steps, rows] + place
                # Of a query that is cut, nothing is kept: its end is an answer that the inputs would show.
                kept = (starts_SN[steps, rows] if kind == PRINT else columns) >= 0
                values = token[steps, rows][kept] if isinstance(token, np.ndarray) else token
                tokens_NL[rows[kept], columns[kept]] = values

        variables_SN = variables_SN.astype(np.int64)
        write(PASS, self.maximum + 1)
        if self.operation_tokens == "one":
            sets, increments, prints = (self.maximum + 3 + form * self.variables for form in range(3))
            write(SET, variables_SN + sets)
            write(INCREMENT, variables_SN + increments)
            write(PRINT, variables_SN + prints, values_SN)
        else:
            equals, ends, increments, prints, _, names = range(self.maximum + 2, self.maximum + 8)
            write(SET, variables_SN + names, equals, 0, ends)
            write(INCREMENT, variables_SN + names, increments)
            write(PRINT, prints, variables_SN + names, values_SN)
        return _Rows(tokens_NL, full_N > self.max_tokens)

    def _batch(self, rows: _Rows) -> Batch:
        batch = self.with_targets(rows.tokens_NL.astype(np.int64))
        return replace(batch, units_N={"cut": rows.cut_N.astype(np.int64)})


def _pick(candidates_VN: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
    """One of the true rows of each column, with equal probability; 0 for a column without any."""
    rank_N = (chance_N * candidates_VN.sum(0)).astype(np.int64)
    picked_N: np.ndarray = (candidates_VN.cumsum(0) > rank_N).argmax(0)
    return picked_N


# A batch is smaller than a chunk, so the next batches need the same chunk.
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
    # By the run's seed, while `data_seed` may fix the sequences: seeds then differ in their order.
    return np.random.default_rng([seed, zlib.crc32(b"order"), epoch]).permutation(size)
