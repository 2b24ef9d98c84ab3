"""Multi-query associative recall (Arora et al. 2023, "Zoology"; its `multiquery_ar.py`), and recall of reassigned keys.

A sequence is a list of slots of two tokens. A slot that assigns holds a key and a value; a slot that asks holds a key,
whose value is to be predicted. Ids: 0 is the filler `_`, 1 … V/2 − 1 are keys, V/2 … V − 1 values, for a vocabulary of
V.

`mqar`: the first `pairs` slots assign, with different keys and values. Then every key is asked once. The slots that ask
are drawn without replacement with probability ∝ r^(power_a − 1), r = 1, 2, … being the slots after the pairs, so that
early ones are likely. With `pairs: 2, tokens: 16`, where a is a key and 1 a value:

    inputs    a 1 b 2 _ _ b _ _ _ _ _ a _ _ _
    targets   . . . . . . 2 . . . . . 1 . . .

`mqrar`: a variable, which is a key, is assigned a new value again and again, and a query asks for its N-th last
assignment (N = `n_back`). N = 1 is MQRAR (Tan et al. 2024, "Scaling Stick-Breaking Attention"); N > 1 is MQRAR-N-back
(Yang et al. 2025, "PaTH Attention", section 4.1), which has 32 variables and 768 tokens, the defaults here. With
`variables: 2, tokens: 16, n_back: 2`:

    inputs    a 1 a 2 b 3 a _ a 4 a _ b 5 b _
    targets   . . . . . . 1 . . . 2 . . . 3 .

Each slot takes one of the variables, all with the same probability. It assigns where the variable has fewer than N
assignments; else, it asks with probability ½. The last slot that may ask, asks. Values are not repeated in a sequence:
it has no more slots than the vocabulary has values.

PaTH's form is another one (version 2 of its text): every slot assigns a new value, and its key asks for the N-th last
value before that one, if there is any. In `A 1 B 2 C 3 D 4 A 5 B 6 A 7`, with N = 2, the third A has the label 1. There
all slots of a variable after its N-th ask; here, about half of them ask, and the others assign.

The targets of this package are next tokens, and the answer to a key is its next token: the label stands at the query's
position, as in the released code. The inputs hold `_` in its place, so no value can be copied from an earlier answer.

Shapes: N sequences, S slots, P pairs, T tokens, L tokens of a sequence with its answers.
"""

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask, by_token

FILLER = 0


class AssociativeRecall(GeneratedTask):
    """Slots of a key and a value, and the queries among them."""

    LENGTHS: ClassVar[tuple[str, ...]] = ("tokens",)
    TRAINED: ClassVar[str] = "the value after a key, in slots whose key and value both occur in earlier slots"

    vocabulary: Annotated[int, Field(ge=4, le=10**9)] = Field(
        default=8192, description="Number of token ids: a filler, keys (to half of the ids) and values."
    )
    tokens: Annotated[int, Field(ge=4, le=10**9, multiple_of=2)] = Field(
        default=64, description="Number of tokens in a sequence: twice its slots."
    )

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    @property
    def _first_value(self) -> int:
        return self.vocabulary // 2

    def length(self, split: str) -> int:
        return self.tokens

    def longer(self, times: int) -> Self:
        # `model_copy` does not validate.
        return super().longer(times)._checked()

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self._checked()

    def _checked(self) -> Self:
        """The task. Raises ValueError if its sequences cannot be generated."""
        return self

    def _check_keys(self, field: str, number: int) -> None:
        keys = self._first_value - 1
        if number > keys:
            raise InvalidValue(
                f"{field} = {number} is more than the {keys} keys of vocabulary = {self.vocabulary}",
                key=field,
                value=number,
                largest=keys,
            )

    def _keys(self, rng: np.random.Generator, count: int, size: int) -> np.ndarray:
        return 1 + _distinct(rng, count, size, self._first_value - 1)

    def _values(self, rng: np.random.Generator, count: int, size: int) -> np.ndarray:
        return self._first_value + _distinct(rng, count, size, self.vocabulary - self._first_value)

    def _asks(self, keys_NS: np.ndarray, values_NS: np.ndarray) -> np.ndarray:
        """A slot of a sequence with its answers asks where both its key and its value occur in earlier slots."""
        return (values_NS >= self._first_value) & (occurrences(keys_NS) > 0) & (occurrences(values_NS) > 0)

    def _batch(self, keys_NS: np.ndarray, values_NS: np.ndarray) -> Batch:
        tokens_NT = np.stack((keys_NS, values_NS), axis=2).reshape(len(keys_NS), -1)
        return self.with_targets(np.pad(tokens_NT, ((0, 0), (0, 1)), constant_values=FILLER))

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        values_NS = tokens_NL[:, 1::2]
        asks_NS = self._asks(tokens_NL[:, : 2 * values_NS.shape[1] : 2], values_NS)
        inputs_NT = tokens_NL[:, :-1].copy()
        answers_NS = inputs_NT[:, 1::2]
        answers_NS[asks_NS[:, : answers_NS.shape[1]]] = FILLER
        targets_NT = np.full_like(inputs_NT, IGNORED)
        targets_NT[:, ::2] = np.where(asks_NS, values_NS, IGNORED)
        return Batch(inputs_NT, targets_NT, targets_NT != IGNORED)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        filler_NT, value_NT = tokens_NT == FILLER, tokens_NT >= self._first_value
        return {"key": ~(filler_NT | value_NT), "value": value_NT, "filler": filler_NT}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        place_T = np.arange(inputs_NT.shape[1])
        last_NT = np.maximum.accumulate(np.where(inputs_NT >= self._first_value, place_T, 0), axis=1)
        return {"the last value, of any key": np.take_along_axis(inputs_NT, last_NT, axis=1)}

    def token_label(self, token: int) -> str:
        if token == FILLER:
            return "_"
        return f"k{token}" if token < self._first_value else f"v{token - self._first_value}"


class MQAR(AssociativeRecall):
    """Recall the values of keys that were each assigned once."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "more_pairs")

    kind: Literal["mqar"] = "mqar"
    pairs: Positive = Field(default=4, description="Number of keys, in training and in_dist.")
    more_pairs: Positive = Field(default=16, description="Number of keys in the OOD test set `more_pairs`.")
    power_a: Annotated[float, Field(allow_inf_nan=False)] = Field(
        default=0.01, description="The r-th slot after the pairs asks with a weight of r^(power_a − 1); 1: uniform."
    )
    random_non_queries: bool = Field(
        default=False,
        description="Content of the slots that neither assign nor ask. false: the filler, as in the configuration of "
        "the paper's figure 2; true: random ids, the default of the released function. The token after a query is the "
        "filler in both readings.",
    )

    def _checked(self) -> Self:
        for field, number in (("pairs", self.pairs), ("more_pairs", self.more_pairs)):
            self._check_keys(field, number)
            if 4 * number > self.tokens:
                raise InvalidValue(
                    f"{field} = {number} needs at least {4 * number} tokens, two for each key and two for its query; "
                    f"tokens = {self.tokens}",
                    key=field,
                    value=number,
                    tokens=self.tokens,
                )
        return self

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        pairs, slots = self.more_pairs if split == "more_pairs" else self.pairs, self.tokens // 2
        keys_NP, values_NP = self._keys(rng, count, pairs), self._values(rng, count, pairs)
        asking_NP = asking_slots(rng, count, pairs, slots, pairs, self.power_a)

        keys_NS, values_NS = np.full((2, count, slots), FILLER, dtype=np.int64)
        if self.random_non_queries:
            keys_NS, values_NS = rng.integers(0, self.vocabulary, (2, count, slots))
        keys_NS[:, :pairs], values_NS[:, :pairs] = keys_NP, values_NP
        values_NS[self._asks(keys_NS, values_NS)] = FILLER  # random ids that would be taken for a query
        np.put_along_axis(keys_NS, asking_NP, keys_NP, axis=1)
        np.put_along_axis(values_NS, asking_NP, values_NP, axis=1)
        return self._batch(keys_NS, values_NS)


class MQRAR(AssociativeRecall):
    """Recall the N-th last value of variables that are assigned again and again."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "more_variables")

    kind: Literal["mqrar"] = "mqrar"
    tokens: Annotated[int, Field(ge=4, le=10**9, multiple_of=2)] = Field(
        default=768, description="Number of tokens in a sequence: twice its slots."
    )
    variables: Positive = Field(default=32, description="Number of variables, in training and in_dist.")
    more_variables: Positive = Field(
        default=64, description="Number of variables in the OOD test set `more_variables`."
    )
    n_back: Positive = Field(default=1, description="N: a query asks for the N-th last assignment of its variable.")

    def _checked(self) -> Self:
        slots, values = self.tokens // 2, self.vocabulary - self._first_value
        for field, number in (("variables", self.variables), ("more_variables", self.more_variables)):
            self._check_keys(field, number)
            if slots <= number * self.n_back:  # a sequence might have no query
                raise InvalidValue(
                    f"{field} = {number} with n_back = {self.n_back} needs at least {2 * number * self.n_back + 2} "
                    f"tokens; tokens = {self.tokens}",
                    key=field,
                    value=number,
                    n_back=self.n_back,
                    tokens=self.tokens,
                )
        if slots > values:
            raise InvalidValue(
                f"sequences of {self.tokens} tokens may assign {slots} different values, but vocabulary = "
                f"{self.vocabulary} has {values}; raise it to {self.tokens} or more",
                key="vocabulary",
                value=self.vocabulary,
                smallest=self.tokens,
            )
        return self

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        rules = super().shortcuts(inputs_NT)
        if self.n_back > 1:
            keys_NS, values_NS = inputs_NT[:, ::2], inputs_NT[:, 1::2]
            latest_NS = _assigned_before(keys_NS, values_NS >= self._first_value, 1)
            rules["the latest value of the variable"] = np.repeat(
                np.take_along_axis(values_NS, latest_NS, axis=1), 2, 1
            )
        return rules

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        variables = self.more_variables if split == "more_variables" else self.variables
        slots = self.tokens // 2
        chosen_NS = rng.integers(0, variables, (count, slots))
        keys_NS = np.take_along_axis(self._keys(rng, count, variables), chosen_NS, axis=1)
        values_NS = self._values(rng, count, slots)

        # A variable's first N slots assign, so its later ones may ask, whichever of them do.
        may_ask_NS = occurrences(keys_NS) >= self.n_back
        asks_NS = may_ask_NS & (rng.random((count, slots)) < 0.5)
        asks_NS[np.arange(count), slots - 1 - may_ask_NS[:, ::-1].argmax(axis=1)] = True
        assigned_NS = _assigned_before(keys_NS, ~asks_NS, self.n_back)
        return self._batch(keys_NS, np.where(asks_NS, np.take_along_axis(values_NS, assigned_NS, axis=1), values_NS))


def asking_slots(
    rng: np.random.Generator, count: int, first: int, slots: int, queries: int, power_a: float
) -> np.ndarray:
    """`queries` different slots from `first` on; the r-th of them has a weight of r^(power_a − 1). (count, queries)."""
    weights = np.arange(1, slots - first + 1) ** (power_a - 1)
    # Sorting exponential times with these rates draws without replacement.
    times_NS = rng.exponential(size=(count, slots - first)) / weights
    asking_NP: np.ndarray = first + times_NS.argsort(axis=1)[:, :queries]
    return asking_NP


def _distinct(rng: np.random.Generator, count: int, size: int, choices: int) -> np.ndarray:
    """`size` different numbers below `choices` for each of `count` sequences, in random order: (count, size)."""
    numbers_CN = np.repeat(np.arange(choices)[:, None], count, axis=1)
    every_N = np.arange(count)
    swaps = rng.integers(np.arange(size)[:, None], choices, (size, count))
    for place, other_N in enumerate(swaps):  # the first steps of a Fisher–Yates shuffle
        numbers_N = numbers_CN[other_N, every_N]
        numbers_CN[other_N, every_N] = numbers_CN[place]
        numbers_CN[place] = numbers_N
    return numbers_CN[:size].T


def occurrences(tokens_NS: np.ndarray) -> np.ndarray:
    """The number of earlier occurrences of each token in its sequence, (N, S)."""
    order_NS, first_NS = by_token(tokens_NS)
    counts_NS = np.empty_like(order_NS)
    np.put_along_axis(counts_NS, order_NS, np.arange(tokens_NS.shape[1]) - first_NS, axis=1)
    return counts_NS


def _assigned_before(keys_NS: np.ndarray, assigns_NS: np.ndarray, back: int) -> np.ndarray:
    """The slot of the `back`-th last assignment of each slot's key, (N, S); any slot where there is none."""
    order_NS, _ = by_token(keys_NS)
    sorted_NS = np.take_along_axis(assigns_NS, order_NS, axis=1)
    earlier_NS = sorted_NS.cumsum(axis=1) - sorted_NS  # assignments earlier in the order of keys
    assignments_NS = (~sorted_NS).argsort(axis=1, kind="stable")  # their places in it come first
    place_NS = np.take_along_axis(assignments_NS, np.maximum(earlier_NS - back, 0), axis=1)
    slots_NS = np.empty_like(order_NS)
    np.put_along_axis(slots_NS, order_NS, np.take_along_axis(order_NS, place_NS, axis=1), axis=1)
    return slots_NS
