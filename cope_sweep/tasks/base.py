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
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from cope_sweep.registry import Kind

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
    """int64, by name: what else to count of each sequence (`words` and `bytes` of its targets, whether it is `cut`)."""

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


class Windows(Protocol):
    """The windows over a split's text, in order: as many as `len` says, any slice of them at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, windows: slice) -> Batch: ...


class Task(Kind):
    """A task. Subclasses set `kind`, name their test sets, and generate."""

    TESTS: ClassVar[tuple[str, ...]]
    """The test sets, beside `train`."""

    METRICS: ClassVar[tuple[str, ...]] = ("token_error", "sequence_error", "loss")
    """What every test set is measured by: errors in percent, loss in nats per target."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids, from 0."""

    @abstractmethod
    def length(self, split: str) -> int:
        """Tokens in an input sequence of this split."""

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        """`count` sequences of this split, all randomness from `rng`. A task whose sequences are read needs none."""
        raise NotImplementedError(f"{self.kind} generates nothing: it overrides `sequences`")

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        """The tokens worth counting, by name, bool of any shape of token ids: what probes compare gates with."""
        return {}

    def token_label(self, token: int) -> str:
        """A token id as people write it, in few letters."""
        return str(token)

    @property
    def context(self) -> int:
        """Tokens in the longest sequence of any split."""
        return max(self.length(split) for split in ("train", *self.TESTS))

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        """Sequences `start` … `start + count − 1` of a split.

        Past the end of a test set that has one (a text's), fewer come, down to a batch of none: no sequence is ever
        counted twice. Raises ValueError for a split that the task does not have.
        """
        self.check_split(split)
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        key = zlib.crc32(split.encode())
        blocks = [
            self.generate(split, np.random.default_rng([seed, key, block]), BLOCK) for block in range(first, last + 1)
        ]
        offset = start - first * BLOCK
        return Batch.concatenate(blocks)[offset : offset + count]

    def check_split(self, split: str) -> None:
        """Raise ValueError for a split that the task does not have."""
        if split not in ("train", *self.TESTS):
            raise ValueError(f"unknown split {split!r}; this task has {', '.join(('train', *self.TESTS))}")

    # -- tasks that read a text ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Have ready what is read and not generated (download, tokenise), showing progress.

        Training calls this before it builds a model. Raises UserError where the data cannot be used.
        """

    def fingerprint(self) -> str | None:
        """A digest of what is read: equal where text and tokenizer are. None where everything is generated."""
        return None

    @property
    def tokenizer_json(self) -> Path | None:
        """The file that turns text into this task's token ids, to be kept with a checkpoint; None where there is none.

        Raises UserError, as `prepare`.
        """
        return None

    @property
    def has_windows(self) -> bool:
        """Whether there is a text to slide windows over."""
        return type(self).windows is not Task.windows

    def windows(self, split: str, context: int, stride: int) -> Windows:
        """The whole text of a split in windows of `context` tokens, each `stride` after the one before.

        Every token is scored exactly once: where a window overlaps the one before it, targets are `IGNORED`, so that a
        scored token has at least `context − stride` tokens before it in its window (but in the first). The last window
        is filled up with tokens that have no target. `units_N` counts the scored targets only.

        Raises ValueError for an unknown split, for a stride that is not 1 … `context`, and where the task has no text;
        UserError where the text is shorter than one window.
        """
        raise ValueError(f"the task {self.kind} has no running text to slide a window over")
