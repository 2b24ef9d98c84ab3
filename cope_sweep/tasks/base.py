"""The interface of a task: a frozen spec whose sequences are a pure function of (spec, split, seed, index).

Sequences are generated in blocks of `BLOCK`. Each block has its own random generator, keyed by (split, seed, block). So
any worker can generate any range of any split in any order: a data cursor is a number, and nothing is stored.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.registry import Kind

IGNORED = -100
"""The target of a token without a target; the loss skips it (torch's convention, `ignore_index`)."""

VALIDATION = "validation"
"""The split of generated tasks that searches and schedules choose by: further sequences of the training ones' kind."""

BLOCK = 64
"""Sequences that are generated together."""


@dataclass(frozen=True)
class Batch:
    """Sequences, the target of each token, and which targets are the task's answers."""

    inputs_NT: np.ndarray
    """int64 token ids."""
    targets_NT: np.ndarray
    """int64 token ids, or `IGNORED` where there is no target."""
    answers_NT: np.ndarray
    """bool: the target is an answer. Error rates count answers only."""
    units_N: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64 counts per sequence, by name: `words` and `bytes` of its targets; `cut`, 1 if it was truncated."""

    def __len__(self) -> int:
        return len(self.inputs_NT)

    def __getitem__(self, rows: slice) -> Batch:
        units_N = {name: counts[rows] for name, counts in self.units_N.items()}
        return Batch(self.inputs_NT[rows], self.targets_NT[rows], self.answers_NT[rows], units_N)

    def whole(self) -> np.ndarray:
        """The sequences with their answers, (N, T + 1), as `Task.with_targets` takes them."""
        following_NT = np.concatenate((self.inputs_NT[:, 1:], self.inputs_NT[:, -1:]), axis=1)
        next_NT = np.where(self.targets_NT != IGNORED, self.targets_NT, following_NT)
        return np.concatenate((self.inputs_NT[:, :1], next_NT), axis=1)

    @staticmethod
    def concatenate(batches: list[Batch]) -> Batch:
        """One batch of all sequences, in order."""
        if len(batches) == 1:
            return batches[0]
        return Batch(
            np.concatenate([b.inputs_NT for b in batches]),
            np.concatenate([b.targets_NT for b in batches]),
            np.concatenate([b.answers_NT for b in batches]),
            {name: np.concatenate([b.units_N[name] for b in batches]) for name in batches[0].units_N},
        )


def ranges(name: str, value: np.ndarray, ends: Sequence[int]) -> dict[str, np.ndarray]:
    """`name@END` → bool: the value is at most this end, and above the one before it, which for the first end is 0."""
    return {f"{name}@{end}": (before < value) & (value <= end) for before, end in zip((0, *ends), ends, strict=False)}


@dataclass(frozen=True)
class NamedContent:
    """What a task reads under a name. The name is a part of a run's id, and the content is not."""

    place: str
    """The file, the folder or the glob of this machine, or the dataset of the hub."""
    renamed: Mapping[str, str]
    """Field of the task → value with which the present content has another name, and so its runs have other ids."""
    is_local: bool = True
    """False: it is downloaded."""


def next_name(name: str) -> str:
    """Another name of the same kind: `alice-2` for `alice`, then `alice-3`."""
    stem, dash, number = name.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else f"{name}-2"


class Windows(Protocol):
    """The windows over the text of a split, in order: a sequence of known length that is read by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, windows: slice) -> Batch: ...


class Task(Kind):
    """A task. Subclasses set `kind`, `TESTS` and the sizes, and override `generate` or `sequences`."""

    TESTS: ClassVar[tuple[str, ...]]
    """The names of the test sets; `train` is not one of them."""

    METRICS: ClassVar[tuple[str, ...]] = ("token_error", "sequence_error", "loss")
    """The metrics of every test set: errors in percent, loss in nats per target. `partial_errors` are added."""

    LENGTHS: ClassVar[tuple[str, ...]] = ()
    """The fields that make sequences longer: `longer` multiplies them. Empty where a task has no longer sequences."""

    TRAINED: ClassVar[str] = "every token but the first"
    """The tokens of a sequence that are targets in training, in words. Perplexity is meaningful for them only."""

    LOOKS_AHEAD: ClassVar[bool] = False
    """`with_targets` makes the input at a place from a later token: no model of this task can generate tokens."""

    MOST_FREQUENT: ClassVar[str] = "the most frequent answer"
    """The rule that is first in `shortcut_errors`, if the first test set has any answers."""

    def partial_errors(self, split: str) -> tuple[str, ...]:
        """Further metrics of a split: errors on some of its targets, in percent: `last_error`, `distance_error@8`.

        The number after `@` is the end of a range that the metric counts, such as the last of some places. Only tests
        at the trained length have these.
        """
        return ()

    def metrics(self, split: str) -> tuple[str, ...]:
        """The metrics of a test set: `METRICS` and `partial_errors`."""
        return (*self.METRICS, *self.partial_errors(split))

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        """The targets of sequences of a split that each of `partial_errors` counts: bool, (N, T)."""
        return {}

    def choices(self, metric: str) -> tuple[int, ...]:
        """The token ids that a metric chooses its answer from, by probability; empty: all tokens.

        `token_error` stands for `sequence_error`, too.
        """
        return ()

    def valid_next(self, inputs_NT: np.ndarray) -> np.ndarray | None:
        """The tokens that may follow each token, bool, (N, T, V), for the metric `f1_error`; None without it."""
        return None

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids; ids are 0 … vocabulary_size − 1."""

    @abstractmethod
    def length(self, split: str) -> int:
        """Number of tokens in an input sequence of this split."""

    def version(self) -> int:
        """The `VERSION` of what this spec generates; it is part of a run's identity.

        Override it where a change of the code changes the sequences of some specs only: the other runs keep their ids.
        """
        return self.VERSION

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        """`count` sequences of this split, with all randomness from `rng`. Not needed if `sequences` is overridden."""
        raise NotImplementedError(f"the task {self.kind} has no `generate`; call `sequences`")

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        """Inputs and targets, (N, L − 1), of sequences that contain their answers, as in training.

        Here each token is the target of the token before it. Tasks that train fewer override this and `TRAINED`.
        """
        return Batch(tokens_NL[:, :-1], tokens_NL[:, 1:], np.ones_like(tokens_NL[:, 1:], dtype=bool))

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        """Sets of tokens that a head may count, by name, for probes to compare with gates.

        Each is a bool array with the shape of `tokens_NT`, which may have any number of dimensions.
        """
        return {}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        """The answers of simple rules that do not solve the task, by the rules' names: (N,) or (N, T) token ids.

        A model that errs as often as one of them may follow it.
        """
        return {}

    def shortcut_errors(self, split: str, count: int, metric: str = "token_error") -> dict[str, float]:
        """Rule → its error in percent on the first `count` sequences of a test set. Raises as `sequences`.

        The first rule gives the answer that is the most frequent one in the first test set, if that has any, and the
        others are `shortcuts`. `metric` is the token error or one of `partial_errors`; other metrics have no rules, so
        the result is empty, as it is where nothing is counted.
        """
        return dict(_shortcut_errors(self, split, count, metric))

    def structure(self, split: str, count: int) -> dict[str, float]:
        """What makes the first `count` sequences of a test set hard, by name, for reports. Raises as `sequences`."""
        return {}

    def token_label(self, token: int) -> str:
        """A short name of a token id, for tables and figures."""
        return str(token)

    @property
    def context(self) -> int:
        """Number of tokens in the longest sequence of any split."""
        return max(self.length(split) for split in ("train", *self.TESTS))

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        """Sequences `start` … `start + count − 1` of a split.

        A test set can be finite, as for a text. Past its end the batch has fewer sequences, or none, so that no
        sequence is counted twice. Raises ValueError for a split that the task does not have.
        """
        self.check_split(split)
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        # Not Python's hash, which differs between processes.
        key = zlib.crc32(split.encode())
        blocks = [
            self.generate(split, np.random.default_rng([seed, key, block]), BLOCK) for block in range(first, last + 1)
        ]
        offset = start - first * BLOCK
        return Batch.concatenate(blocks)[offset : offset + count]

    @property
    def splits(self) -> tuple[str, ...]:
        """All splits."""
        return ("train", *self.TESTS)

    def longer(self, times: int) -> Self:
        """The task with sequences `times` times as long, with the same tokens. Raises ValueError."""
        if not self.LENGTHS:
            raise InvalidValue(
                f"the task {self.kind} has no longer sequences (`LENGTHS`)", code="no_lengths", task=self.kind
            )
        return self.model_copy(update={name: times * getattr(self, name) for name in self.LENGTHS})

    def check_split(self, split: str) -> None:
        """Raise ValueError for a split that the task does not have."""
        if split not in self.splits:
            raise InvalidValue(
                f"unknown split {split!r}; this task has {', '.join(self.splits)}",
                code="unknown_split",
                split=split,
                allowed=list(self.splits),
            )

    # -- tasks that read a text

    @property
    def places(self) -> dict[str, str]:
        """Field → what it names outside of the run: a file or a folder of the machine, or a download."""
        named = {name: getattr(self, name) for name in self.NON_IDENTITY_FIELDS}
        return {name: str(value) for name, value in named.items() if value is not None}

    def named_content(self) -> dict[str, NamedContent]:
        """Fact of a result, `data` or `tokenizer` → what the task reads under a name. Opens nothing of this machine.

        Empty where all sequences are generated.
        """
        return {}

    def check_place(self) -> None:
        """Raise UserError where the spec names files of this machine that the task cannot read. Opens none of them."""

    def prepare(self) -> None:
        """Download and tokenise the data that the task reads, and show progress. Generated tasks do nothing.

        Training calls this before it builds a model. Raises UserError if the data cannot be used.
        """

    def fingerprint(self) -> str | None:
        """A digest of the data that the task reads: of its text and tokenizer. None if all sequences are generated."""
        return None

    def data_source(self) -> str | None:
        """Where the data were downloaded from, with the commit; None if they are files, or generated.

        Raises UserError if the data cannot be used.
        """
        return None

    def tokenizer_name(self) -> str | None:
        """Kind and digest of the task's tokenizer: `gpt2 3f2a91c0d4e5`; None if it has none. Raises UserError."""
        return None

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's file into a checkpoint. Nothing if the task has no tokenizer.

        Raises UserError if the data cannot be used.
        """

    @property
    def has_windows(self) -> bool:
        """The task implements `windows`."""
        return type(self).windows is not Task.windows

    @property
    def reads_text(self) -> bool:
        """The sequences are of a text, which another machine may not have. Opens nothing."""
        return self.has_windows or bool(self.named_content())

    def windows(self, split: str, context: int, stride: int) -> Windows:
        """The whole text of a split in windows of `context` tokens, each `stride` tokens after the previous one.

        Every token is scored exactly once: the targets that a window shares with the previous one are `IGNORED`. So,
        except in the first window, a scored token has at least `context − stride` tokens before it. The last window is
        padded with tokens without targets. `units_N` counts the scored targets only.

        Raises:
            ValueError: The split is unknown, the stride is not in 1 … `context`, or the task reads no text.
            UserError: The text is shorter than one window.
        """
        raise InvalidValue(f"the task {self.kind} reads no text, so it has no windows", code="no_text", task=self.kind)

    def covered(self, split: str, sequences: int) -> int:
        """Number of tokens of a split's text that its first `sequences` sequences cover, which may overlap."""
        return sequences * self.length(split)


class GeneratedTask(Task):
    """A task whose sequences are generated. The run's seed or `data_seed` decides the training sequences.

    Test sets and the validation set depend on neither: they are the same sequences for all runs of a task. Those of
    the validation set are of the kind of the training sequences.
    """

    data_seed: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None,
        description="Seed of the training sequences, so that runs with different seeds train on the same ones; null: "
        "the run's seed.",
    )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().splits, VALIDATION)))

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        return super().sequences(split, self.seed_of_data(split, seed), start, count)

    def seed_of_data(self, split: str, seed: int) -> int:
        """The seed with which the sequences of a split are generated in a run with this seed."""
        return seed if split != "train" or self.data_seed is None else self.data_seed


def by_token(tokens_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of each sequence sorted by token, then by place, (N, S); and where in this order each token begins."""
    # Narrow integers are sorted many times as fast.
    narrow_NS = tokens_NS.astype(np.min_scalar_type(tokens_NS.max(initial=0)))
    order_NS = narrow_NS.argsort(axis=1, kind="stable")
    sorted_NS = np.take_along_axis(narrow_NS, order_NS, axis=1)
    is_first_NS = np.ones(tokens_NS.shape, dtype=bool)
    is_first_NS[:, 1:] = sorted_NS[:, 1:] != sorted_NS[:, :-1]
    return order_NS, np.maximum.accumulate(np.where(is_first_NS, np.arange(tokens_NS.shape[1]), 0), axis=1)


# All runs of a task have the same test sets, and so the same rules.
@lru_cache(maxsize=256)
def _shortcut_errors(task: Task, split: str, count: int, metric: str) -> tuple[tuple[str, float], ...]:
    if metric != "token_error" and metric not in task.partial_errors(split):
        return ()
    batch = task.sequences(split, 0, 0, count)
    counted_NT = batch.answers_NT if metric == "token_error" else task.counted(batch, split)[metric]
    if not counted_NT.any():
        return ()
    first = task.sequences(task.TESTS[0], 0, 0, count)
    counts_V = np.bincount(first.targets_NT[first.answers_NT])
    answers: dict[str, Any] = {task.MOST_FREQUENT: counts_V.argmax()} if len(counts_V) else {}
    answers |= {name: a if a.ndim == 2 else a[:, None] for name, a in task.shortcuts(batch.inputs_NT).items()}
    is_wrong = {name: (answer != batch.targets_NT)[counted_NT] for name, answer in answers.items()}
    return tuple((name, 100 * float(wrong.mean())) for name, wrong in is_wrong.items())
