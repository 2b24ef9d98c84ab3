"""What a task is: a frozen spec that generates sequences, purely, from (spec, split, seed, index).

Sequences come in blocks of `BLOCK`, each block from its own generator, keyed by (split, seed, block). So any range of
any split can be had at once, by any worker, in any order: a data cursor is a number, and there is nothing to store.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from cope_sweep.frozen import Frozen

IGNORED = -100
"""The target of a token that has none: no loss is taken there (torch's own convention)."""

BLOCK = 64


@dataclass(frozen=True)
class Batch:
    """Sequences, what is to be predicted at each token, and which of the predictions are the task's answers."""

    inputs_NT: np.ndarray
    """int64 token ids."""
    targets_NT: np.ndarray
    """int64 token ids, or `IGNORED` where no loss is taken."""
    answers_NT: np.ndarray
    """bool: the target is an answer, which the error rates count."""
    units_N: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64, by name: what else to count of each sequence (`words` and `bytes` of its targets, whether it was `cut`)."""

    def __len__(self) -> int:
        return len(self.inputs_NT)

    def __getitem__(self, rows: slice) -> Batch:
        units_N = {name: counts[rows] for name, counts in self.units_N.items()}
        return Batch(self.inputs_NT[rows], self.targets_NT[rows], self.answers_NT[rows], units_N)

    @staticmethod
    def concatenate(batches: list[Batch]) -> Batch:
        if len(batches) == 1:
            return batches[0]
        return Batch(
            np.concatenate([b.inputs_NT for b in batches]),
            np.concatenate([b.targets_NT for b in batches]),
            np.concatenate([b.answers_NT for b in batches]),
            {name: np.concatenate([b.units_N[name] for b in batches]) for name in batches[0].units_N},
        )


class Task(Frozen):
    """A task. Subclasses set `kind`, name their test sets, and generate."""

    VERSION: ClassVar[int] = 1
    """Bump it when the same spec comes to generate other sequences: every run on it gets a new id."""

    TESTS: ClassVar[tuple[str, ...]]
    """The test sets, beside `train`."""

    kind: str

    METRICS: ClassVar[tuple[str, ...]] = ("token_error", "sequence_error", "loss")
    """What every test set is measured by: errors in percent, loss in nats per target."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids, from 0."""

    @abstractmethod
    def length(self, split: str) -> int:
        """Tokens in an input sequence of this split."""

    @abstractmethod
    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        """`count` sequences of this split, all randomness from `rng`."""

    @property
    def context(self) -> int:
        """Tokens in the longest sequence of any split."""
        return max(self.length(split) for split in ("train", *self.TESTS))

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        """Sequences `start` … `start + count − 1` of a split.

        Raises ValueError for a split that the task does not have.
        """
        if split not in ("train", *self.TESTS):
            raise ValueError(f"unknown split {split!r}; this task has {', '.join(('train', *self.TESTS))}")
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        key = zlib.crc32(split.encode())
        blocks = [
            self.generate(split, np.random.default_rng([seed, key, block]), BLOCK) for block in range(first, last + 1)
        ]
        offset = start - first * BLOCK
        return Batch.concatenate(blocks)[offset : offset + count]
