"""Indirect indexing (PoPE, 2509.10534, B.1 – B.3): the letter a given number of places from a given letter.

A string of 20 to 40 different letters of 52, one of them, and a shift of at most 15 places; the answer is the letter at
that shift. Letters and digits are tokens of their own, and `_` is padding, so that all inputs have the same length.
With a string of 9 letters and `max_letters: 10`, where the shift of 4 from N leads to I:

    inputs    N Z T U I G W k X , N , + 4 , _ _
    targets   . . . . . . . . . . . . . . I . .

Only the answer is a target. If a shift is 0, or leaves the string, the letter and the shift are drawn again; the paper
does not say how it treats these. `distance_error@8` counts the answers at shifts of 5 to 8 places, left or right.

Shapes: N sequences, T tokens, L tokens of a sequence with its answer, D distances.
"""

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask, ranges

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIGIT = len(LETTERS)
COMMA, PLUS, MINUS, PAD = range(DIGIT + 10, DIGIT + 14)
LABELS = LETTERS + "0123456789,+-_"

Letters = Annotated[int, Field(ge=2, le=len(LETTERS))]
Shift = Annotated[int, Field(ge=1, le=len(LETTERS) - 1)]


class IndirectIndexing(GeneratedTask):
    """Find a letter by its content, and from there another one by its distance."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer", "farther")

    TRAINED: ClassVar[str] = "the letter after the last comma"

    kind: Literal["indirect_indexing"] = "indirect_indexing"
    min_letters: Letters = Field(default=20, description="Smallest number of letters in a string.")
    max_letters: Letters = Field(default=40, description="Largest number of letters, in training and in_dist.")
    longer_letters: Letters = Field(
        default=52, description="Number of letters of all strings in the OOD test set `longer`."
    )
    max_shift: Shift = Field(default=15, description="Largest shift, in training and in_dist.")
    farther_shift: Shift = Field(
        default=19, description="Largest shift in the OOD test set `farther`, whose shifts are all above `max_shift`."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, smaller in (
            ("max_letters", "min_letters"),
            ("farther_shift", "max_shift"),
            ("min_letters", "farther_shift"),
            ("longer_letters", "max_letters"),
        ):
            value, bound = getattr(self, field), getattr(self, smaller)
            smallest = bound if field in ("max_letters", "longer_letters") else bound + 1
            if value < smallest:
                raise InvalidValue(
                    f"{field} = {value}, but {smaller} = {bound} needs {smallest} or more",
                    key=field,
                    value=value,
                    smallest=smallest,
                )
        return self

    @property
    def vocabulary_size(self) -> int:
        return len(LABELS)

    def partial_errors(self, split: str) -> tuple[str, ...]:
        return tuple(f"distance_error@{end}" for end in self._ends(split))

    def length(self, split: str) -> int:
        # A letter, three commas, a sign and two digits follow the string.
        return (self.longer_letters if split == "longer" else self.max_letters) + 7

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "letter": tokens_NT < DIGIT,
            "digit": (tokens_NT >= DIGIT) & (tokens_NT < COMMA),
            "comma": tokens_NT == COMMA,
            "sign": (tokens_NT == PLUS) | (tokens_NT == MINUS),
        }

    def token_label(self, token: int) -> str:
        return LABELS[token]

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        letters_NL = rng.random((count, len(LETTERS))).argsort(axis=1)
        fewest = most = self.longer_letters
        if split != "longer":
            fewest, most = self.min_letters, self.max_letters
        size_N = rng.integers(fewest, most, count, endpoint=True)
        # All pairs of a place and a shift within the string are equally likely: a string has size − d with distance d.
        distances_D = np.arange(*self._distances(split))
        pairs_ND = np.maximum(size_N[:, None] - distances_D, 0).cumsum(axis=1)
        chance_2N = rng.random((2, count))
        which_N = (pairs_ND <= (chance_2N[0] * pairs_ND[:, -1])[:, None]).sum(axis=1)
        distance_N = distances_D[np.minimum(which_N, len(distances_D) - 1)]
        place_N = (chance_2N[1] * (size_N - distance_N)).astype(np.int64)
        is_left_N = rng.random(count) < 0.5
        every_N = np.arange(count)
        low_N, high_N = letters_NL[every_N, place_N], letters_NL[every_N, place_N + distance_N]

        tokens_NL = np.full((count, self.length(split) + 1), PAD)
        columns_L = np.arange(most)
        tokens_NL[:, :most] = np.where(columns_L < size_N[:, None], letters_NL[:, :most], PAD)
        two_digits_N = distance_N >= 10
        tail = [
            np.full(count, COMMA),
            np.where(is_left_N, high_N, low_N),
            np.full(count, COMMA),
            np.where(is_left_N, MINUS, PLUS),
            DIGIT + np.where(two_digits_N, distance_N // 10, distance_N),
            np.where(two_digits_N, DIGIT + distance_N % 10, COMMA),
        ]
        answer_N = np.where(is_left_N, low_N, high_N)
        tail += [np.where(two_digits_N, COMMA, answer_N), np.where(two_digits_N, answer_N, PAD)]
        for column, token_N in enumerate(tail):
            tokens_NL[every_N, size_N + column] = token_N
        return self.with_targets(tokens_NL)

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs_NT, following_NT = tokens_NL[:, :-1].copy(), tokens_NL[:, 1:]
        asks_NT = ((inputs_NT == COMMA).cumsum(axis=1) == 3) & (inputs_NT == COMMA)
        targets_NT = np.where(asks_NT & (following_NT < DIGIT), following_NT, IGNORED)
        inputs_NT[:, 1:][targets_NT[:, :-1] != IGNORED] = PAD  # the answer
        return Batch(inputs_NT, targets_NT, targets_NT != IGNORED)

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        _, _, distance_N = self._parse(batch.inputs_NT)
        counted = ranges("distance_error", distance_N[:, None], self._ends(split))
        return {name: batch.answers_NT & counted_N1 for name, counted_N1 in counted.items()}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        size_N, place_N, distance_N = self._parse(inputs_NT)
        rng, most = (
            np.random.default_rng(0),
            self.farther_shift if (distance_N > self.max_shift).all() else self.max_shift,
        )
        is_left_N = (inputs_NT == MINUS).any(axis=1)
        last_N = size_N - 1
        first_N, end_N = np.maximum(place_N - most, 0), np.minimum(place_N + most, last_N)
        nearby_N = first_N + (rng.random(len(size_N)) * (end_N - first_N)).astype(np.int64)
        nearby_N += nearby_N >= place_N  # any but the letter itself
        first_N, end_N = np.where(is_left_N, first_N, place_N + 1), np.where(is_left_N, place_N - 1, end_N)
        on_side_N = first_N + (rng.random(len(size_N)) * (end_N - first_N + 1)).astype(np.int64)
        of_string_N = (rng.random(len(size_N)) * size_N).astype(np.int64)
        rules = {
            "any letter of the string": of_string_N,
            f"a letter within {most} places": nearby_N,
            f"a letter within {most} places on the right side": on_side_N,
        }
        return {name: inputs_NT[np.arange(len(size_N)), place] for name, place in rules.items()}

    def _distances(self, split: str) -> tuple[int, int]:
        """The smallest distance of a split, and the one after its largest."""
        return (self.max_shift + 1, self.farther_shift + 1) if split == "farther" else (1, self.max_shift + 1)

    def _ends(self, split: str) -> tuple[int, ...]:
        """The largest distances of the ranges 1, 2, 3 – 4, 5 – 8, … that a split has."""
        first, after = self._distances(split)
        return tuple(
            min(2**power, after - 1) for power in range((first - 1).bit_length(), (after - 2).bit_length() + 1)
        )

    def _parse(self, inputs_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number of letters of each string, the place of the given letter in it, and the distance, (N,) each."""
        size_N = (inputs_NT == COMMA).argmax(axis=1)
        every_N = np.arange(len(size_N))
        given_N = inputs_NT[every_N, size_N + 1]
        place_N = (inputs_NT == given_N[:, None]).argmax(axis=1)
        first_N, second_N = inputs_NT[every_N, size_N + 4] - DIGIT, inputs_NT[every_N, size_N + 5] - DIGIT
        return size_N, place_N, np.where(second_N < 10, 10 * first_N + second_N, first_N)
