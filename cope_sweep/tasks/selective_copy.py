"""Selective copy (Gu & Dao 2023; Golovneva et al. 2024, section 5.2): repeat the data tokens, leave out the blanks.

A sequence is `tokens` data tokens scattered over slots, the other slots blank, and then the copy. With 3 data tokens,
5 blanks and `copy_from: markers`, where
`_` is the blank and `>` says "copy now":

    inputs    _ D _ _ B _ D _  >  >  >
    targets   . . . . . . . .  D  B  D

and with `copy_from: outputs`, where the model is fed its own (correct) outputs:

    inputs    _ D _ _ B _ D _  >  D  B
    targets   . . . . . . . .  D  B  D

The published error of 100.0 for RoPE can only be per sequence (guessing gets 1 token in 14 right): both are reported.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.tasks.base import IGNORED, Batch, Task


class SelectiveCopy(Task):
    """Copy the data tokens of a sequence in order, past its blanks."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "dense", "sparse")

    kind: Literal["selective_copy"] = "selective_copy"
    tokens: Annotated[int, Field(ge=1)] = Field(default=256, description="Data tokens to copy.")
    blanks: Annotated[int, Field(ge=0)] = Field(default=256, description="Blanks in training and in-distribution.")
    dense_blanks: Annotated[int, Field(ge=0)] = Field(default=128, description="Blanks in the dense OOD test set.")
    sparse_blanks: Annotated[int, Field(ge=0)] = Field(default=512, description="Blanks in the sparse OOD test set.")
    vocabulary: Annotated[int, Field(ge=4)] = Field(
        default=16, description="All symbols: data, one blank, and one 'copy now' marker."
    )
    copy_from: Literal["markers", "outputs"] = Field(
        default="markers",
        description="What the model is fed while it copies: a marker for each token (S4's reading), or its outputs.",
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
        # The first `tokens` places of a random order of the slots, sorted: every choice of places is equally likely.
        places = np.sort(rng.permuted(np.tile(np.arange(slots), (count, 1)), axis=1)[:, : self.tokens], axis=1)

        inputs = np.full((count, slots + self.tokens), blank, dtype=np.int64)
        np.put_along_axis(inputs, places, data, axis=1)
        inputs[:, slots:] = marker
        if self.copy_from == "outputs":
            inputs[:, slots + 1 :] = data[:, :-1]
        targets = np.full_like(inputs, IGNORED)
        targets[:, slots:] = data
        return Batch(inputs, targets, targets != IGNORED)
