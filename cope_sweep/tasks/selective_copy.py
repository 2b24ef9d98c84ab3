"""Selective copy (Gu & Dao 2023; Golovneva et al. 2024, section 5.2): repeat the data tokens without the blanks.

A sequence has `tokens` data tokens at random slots, blanks in the other slots, and then the copy. With 3 data tokens,
5 blanks and `copy_from: markers`, where `_` is the blank and `>` the marker that starts the copy:

    inputs    _ D _ _ B _ D _  >  >  >
    targets   . . . . . . . .  D  B  D

and with `copy_from: outputs`, where the inputs are the correct outputs so far (teacher forcing):

    inputs    _ D _ _ B _ D _  >  D  B
    targets   . . . . . . . .  D  B  D

Where the copy starts is not marked in MapFormer's version of the task (2511.19279, B.2): with `separator: false` it
follows the last slot, and a model has to know the number of data tokens. With 5 data tokens and 3 blanks:

    inputs    C F _ E A _ C _ C F E A
    targets   . . . . . . . C F E A C

The published error of 100.0 for RoPE must be per sequence, because guessing gets 1 token in 14 right. Both errors are
reported.
"""

from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Count, Positive
from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask


class SelectiveCopy(GeneratedTask):
    """Copy the data tokens of a sequence in order, without its blanks."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "dense", "sparse")
    LENGTHS: ClassVar[tuple[str, ...]] = ("tokens", "blanks", "dense_blanks", "sparse_blanks")

    TRAINED: ClassVar[str] = (
        "the data tokens after the first marker `>` (with `separator: false`, the second half of them)"
    )

    kind: Literal["selective_copy"] = "selective_copy"
    tokens: Positive = Field(default=256, description="Number of data tokens.")
    blanks: Count = Field(default=256, description="Number of blanks in training and in_dist.")
    dense_blanks: Count = Field(default=128, description="Number of blanks in the OOD test set `dense`.")
    sparse_blanks: Count = Field(default=512, description="Number of blanks in the OOD test set `sparse`.")
    vocabulary: Annotated[int, Field(ge=4, le=10**9)] = Field(
        default=16, description="Number of token ids: data symbols, one blank and, with a separator, one marker."
    )
    copy_from: Literal["markers", "outputs"] = Field(
        default="markers",
        description="Inputs during the copy: a marker for each token (as in S4's code), or the correct outputs so far.",
    )
    separator: bool = Field(
        default=True,
        description="A marker before the copy. false: none, as in MapFormer's version; needs `copy_from: outputs`.",
    )

    @model_validator(mode="after")
    def _check_separator(self) -> Self:
        if not self.separator and self.copy_from == "markers":
            message = "separator: false needs copy_from: outputs, because there are no markers"
            raise InvalidValue(message, key="copy_from", value=self.copy_from, allowed=["outputs"])
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    def length(self, split: str) -> int:
        return self.tokens + self._blanks(split) + self.tokens - (0 if self.separator else 1)

    @property
    def _blank(self) -> int:
        return self.vocabulary - (2 if self.separator else 1)

    def _blanks(self, split: str) -> int:
        return {"dense": self.dense_blanks, "sparse": self.sparse_blanks}.get(split, self.blanks)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        marks = {"data": tokens_NT < self._blank, "blank": tokens_NT == self._blank}
        return marks | ({"marker": tokens_NT > self._blank} if self.separator else {})

    def token_label(self, token: int) -> str:
        return {self._blank: "_", self._blank + 1: ">"}.get(token, str(token))

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        if self.separator:
            return {}
        # The answers start at the last slot.
        slots = inputs_NT.shape[1] - self.tokens + 1
        place_S = np.arange(slots)
        data_NS = np.where(inputs_NT[:, :slots] < self._blank, place_S, slots - 1)
        next_NS = np.minimum.accumulate(data_NS[:, ::-1], axis=1)[:, ::-1]
        answers_NT, data_answers_NT = np.zeros((2, *inputs_NT.shape), dtype=np.int64)
        place_C = ((2 * np.arange(self.tokens) + 1) * slots) // (2 * self.tokens)
        read_NC = inputs_NT[:, place_C]
        answers_NT[:, slots - 1 :] = np.where(read_NC < self._blank, read_NC, 0)
        data_answers_NT[:, slots - 1 :] = np.take_along_axis(inputs_NT, next_NS[:, place_C], axis=1)
        rule = "the input at the proportional place"
        return {f"{rule}, or a guess": answers_NT, f"{rule}, or the next one that is not blank": data_answers_NT}

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        blank, marker = self._blank, self.vocabulary - 1
        slots = self.tokens + self._blanks(split)
        data = rng.integers(0, blank, (count, self.tokens))
        # The first `tokens` of a random order of the slots, sorted: all subsets of slots are equally likely.
        data_slots = np.sort(rng.permuted(np.tile(np.arange(slots), (count, 1)), axis=1)[:, : self.tokens], axis=1)

        tokens = np.full((count, slots + self.separator + self.tokens), blank, dtype=np.int64)
        np.put_along_axis(tokens, data_slots, data, axis=1)
        if self.separator:
            tokens[:, slots] = marker
        tokens[:, slots + self.separator :] = data
        return self.with_targets(tokens)

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        blank, marker = self._blank, self.vocabulary - 1
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        if self.separator:
            copies = np.logical_or.accumulate(inputs == marker, axis=1)
        else:
            copies = (tokens_NL < blank).cumsum(axis=1)[:, 1:] > self.tokens
        if self.copy_from == "markers":
            inputs = np.where(copies, marker, inputs)
        targets = np.where(copies & (following < blank), following, IGNORED)
        return Batch(inputs, targets, targets != IGNORED)
