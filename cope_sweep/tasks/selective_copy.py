"""Selective copy (Gu & Dao 2023; Golovneva et al. 2024, section 5.2): repeat the data tokens without the blanks.

A sequence has `tokens` data tokens at random slots, blanks in the other slots, and then the copy. With 3 data tokens,
5 blanks and `copy_from: markers`, where `_` is the blank and `>` the marker that starts the copy:

    inputs    _ D _ _ B _ D _  >  >  >
    targets   . . . . . . . .  D  B  D

and with `copy_from: outputs`, where the inputs are the correct outputs so far (teacher forcing):

    inputs    _ D _ _ B _ D _  >  D  B
    targets   . . . . . . . .  D  B  D

The published error of 100.0 for RoPE must be per sequence, because guessing gets 1 token in 14 right. Both errors are
reported.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask


class SelectiveCopy(GeneratedTask):
    """Copy the data tokens of a sequence in order, without its blanks."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "dense", "sparse")
    LENGTHS: ClassVar[tuple[str, ...]] = ("tokens", "blanks", "dense_blanks", "sparse_blanks")

    TRAINED: ClassVar[str] = "the data tokens after the first marker `>`"

    kind: Literal["selective_copy"] = "selective_copy"
    tokens: Annotated[int, Field(ge=1, le=10**9)] = Field(default=256, description="Number of data tokens.")
    blanks: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=256, description="Number of blanks in training and in_dist."
    )
    dense_blanks: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=128, description="Number of blanks in the OOD test set `dense`."
    )
    sparse_blanks: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=512, description="Number of blanks in the OOD test set `sparse`."
    )
    vocabulary: Annotated[int, Field(ge=4, le=10**9)] = Field(
        default=16, description="Number of token ids: data symbols, one blank and one marker."
    )
    copy_from: Literal["markers", "outputs"] = Field(
        default="markers",
        description="Inputs during the copy: a marker for each token (as in S4's code), or the correct outputs so far.",
    )

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    def length(self, split: str) -> int:
        return self.tokens + self._blanks(split) + self.tokens

    def _blanks(self, split: str) -> int:
        return {"dense": self.dense_blanks, "sparse": self.sparse_blanks}.get(split, self.blanks)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        blank = self.vocabulary - 2
        return {"data": tokens_NT < blank, "blank": tokens_NT == blank, "marker": tokens_NT > blank}

    def token_label(self, token: int) -> str:
        return {self.vocabulary - 2: "_", self.vocabulary - 1: ">"}.get(token, str(token))

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        blank, marker = self.vocabulary - 2, self.vocabulary - 1
        slots = self.tokens + self._blanks(split)
        data = rng.integers(0, blank, (count, self.tokens))
        # The first `tokens` of a random order of the slots, sorted: all subsets of slots are equally likely.
        data_slots = np.sort(rng.permuted(np.tile(np.arange(slots), (count, 1)), axis=1)[:, : self.tokens], axis=1)

        tokens = np.full((count, slots + 1 + self.tokens), blank, dtype=np.int64)
        np.put_along_axis(tokens, data_slots, data, axis=1)
        tokens[:, slots] = marker
        tokens[:, slots + 1 :] = data
        return self.with_targets(tokens)

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        blank, marker = self.vocabulary - 2, self.vocabulary - 1
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        copies = np.logical_or.accumulate(inputs == marker, axis=1)
        if self.copy_from == "markers":
            inputs = np.where(copies, marker, inputs)
        targets = np.where(copies & (following < blank), following, IGNORED)
        return Batch(inputs, targets, targets != IGNORED)
