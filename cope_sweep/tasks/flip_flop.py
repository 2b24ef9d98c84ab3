"""Flip-Flop language modelling (Liu et al. 2024, "Exposing attention glitches"; Golovneva et al. 2024, section 5.1).

A sequence of pairs of an instruction and a bit: `w` writes the bit, `i` means that it is ignored, and `r` reads the bit
last written. The first instruction is `w` and the last `r`. Those between are `i` with probability p, else `w` or `r`
with equal probability. Bits are uniform, except those after `r`. With 8 pairs and `loss: reads`:

    inputs    w 0 i 1 r 0 w 1 i 0 i 1 i 1 r
    targets   . . . . 0 . . . . . . . . . 1
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask

WRITE, IGNORE, READ = 2, 3, 4
"""Token ids of the instructions; 0 and 1 are the bits."""

Probability = Annotated[float, Field(ge=0, le=1)]


class FlipFlop(GeneratedTask):
    """Recall the bit last written, past any number of ignored ones."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "sparse", "dense")
    LENGTHS: ClassVar[tuple[str, ...]] = ("pairs",)

    TRAINED: ClassVar[str] = "the bit after each `r` (with `loss: all` every token)"

    kind: Literal["flip_flop"] = "flip_flop"
    pairs: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=256, description="Number of pairs of an instruction and a bit."
    )
    p_ignore: Probability = Field(default=0.8, description="Probability of `i`, in training and in_dist.")
    sparse_p_ignore: Probability = Field(default=0.98, description="Probability of `i` in the OOD test set `sparse`.")
    dense_p_ignore: Probability = Field(default=0.1, description="Probability of `i` in the OOD test set `dense`.")
    loss: Literal["reads", "all"] = Field(
        default="reads", description="Targets: only the bits that are read, or every token."
    )

    @property
    def vocabulary_size(self) -> int:
        return 5

    def length(self, split: str) -> int:
        return 2 * self.pairs - 1

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {"w": tokens_NT == WRITE, "i": tokens_NT == IGNORE, "r": tokens_NT == READ, "bit": tokens_NT < WRITE}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        before_NT = np.roll(inputs_NT, 1, axis=1)  # an instruction follows the bit of the pair before
        return {"the last bit, ignored or not": before_NT}

    def token_label(self, token: int) -> str:
        return "01wir"[token]

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        p = {"sparse": self.sparse_p_ignore, "dense": self.dense_p_ignore}.get(split, self.p_ignore)
        u = rng.random((count, self.pairs))
        instructions = np.where(u < p, IGNORE, np.where(u < (1 + p) / 2, WRITE, READ))
        instructions[:, 0], instructions[:, -1] = WRITE, READ

        bits = rng.integers(0, 2, (count, self.pairs))
        pair = np.arange(self.pairs)
        last_write = np.maximum.accumulate(np.where(instructions == WRITE, pair, 0), axis=1)
        written = np.take_along_axis(bits, last_write, axis=1)
        bits = np.where(instructions == READ, written, bits)

        return self.with_targets(np.stack((instructions, bits), axis=2).reshape(count, -1).astype(np.int64))

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        answers = inputs == READ
        targets = following.copy() if self.loss == "all" else np.where(answers, following, IGNORED)
        return Batch(inputs, targets, answers)
