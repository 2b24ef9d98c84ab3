"""Language modelling: predict every next token of a text (Golovneva et al. 2024, sections 5.4 and 5.5).

Of each split's tokens the contexts of `tokens` tokens are taken one after the other, disjoint; a target is the token
that follows. With contexts of 4 tokens, of a text that begins `the cat sat on the mat and`, whose words are tokens:

    inputs    ¶   the cat sat      on  the mat and      ¶ is the end of the text before
    targets   the cat sat on       the mat and …

Training goes through all contexts in an order of each epoch's own, a pure function of (seed, epoch): nothing is
stored, and a data cursor is a number. Test sets are read in order, their last context filled up with what has no
target, so that every token of the text is scored once; `stride` below `tokens` gives each more context, at a cost.

Shapes: N sequences, T tokens, L tokens of a split.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from cope_sweep.tasks.base import IGNORED, Batch, Task
from cope_sweep.text import Corpus, TextError, TextTokenizer, cache_dir, data_dir, open_corpus, permuted
from cope_sweep.text.reading import Files
from cope_sweep.text.tokenizer import GPT2_IDS, SMALLEST, find_gpt2

CORPUS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LanguageModelling(Task):
    """A text to predict. Subclasses say which files its splits are."""

    TESTS: ClassVar[tuple[str, ...]] = ("validation", "test")
    METRICS: ClassVar[tuple[str, ...]] = ("perplexity", "word_perplexity", "bits_per_byte", "loss")
    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("folder",)

    corpus: str
    folder: str | None = Field(
        default=None, description="Where its files are; null: $COPE_SWEEP_DATA/<corpus>. Not part of what a run is."
    )
    tokens: Annotated[int, Field(ge=1)] = Field(default=1024, description="Tokens in a context.")
    stride: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Tokens from one context of a test set to the next; null: `tokens`, disjoint."
    )
    vocabulary: Annotated[int, Field(ge=SMALLEST)] = Field(
        default=GPT2_IDS, description="Token ids of the model; a tokenizer may use fewer."
    )
    tokenizer: Literal["auto", "gpt2", "bpe"] = Field(
        default="auto",
        description="gpt2: GPT-2's, from its files. bpe: trained on the training split, with `vocabulary` ids. "
        "auto: GPT-2's where the vocabulary holds it and its files are found, else trained.",
    )

    @field_validator("corpus")
    @classmethod
    def _corpus_is_a_name(cls, corpus: str) -> str:
        if not CORPUS_NAME.fullmatch(corpus):
            raise ValueError(f"{corpus!r} names no corpus: letters, digits, `.`, `_` and `-`; a path goes in `folder`")
        return corpus

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.stride is not None and self.stride > self.tokens:
            raise ValueError(
                f"task.stride = {self.stride} leaves out tokens; it is at most task.tokens = {self.tokens}"
            )
        if self.tokenizer == "gpt2" and self.vocabulary < GPT2_IDS:
            raise ValueError(
                f"task.vocabulary = {self.vocabulary} is too small for GPT-2's tokenizer; it has {GPT2_IDS}"
            )
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    def length(self, split: str) -> int:
        return self.tokens

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        self.check_split(split)
        if split != "train":
            return self.windows(split, self.tokens, self.stride or self.tokens)[start : start + count]
        corpus = self._corpus()
        tokens_L = corpus.splits["train"].tokens_L
        contexts = (len(tokens_L) - 1) // self.tokens
        epoch_N, place_N = np.divmod(np.arange(start, start + count), contexts)
        context_N = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epoch_N):
            of_epoch_N = epoch_N == epoch
            context_N[of_epoch_N] = permuted(place_N[of_epoch_N], contexts, seed, int(epoch))
        return _batch(corpus.tokenizer, tokens_L, context_N * self.tokens, self.tokens)

    def windows(self, split: str, context: int, stride: int) -> TextWindows:
        self.check_split(split)
        if not 1 <= stride <= context:
            raise ValueError(f"a stride of {stride} for windows of {context} tokens; it is 1 … {context}")
        corpus = self._corpus()
        tokens_L = corpus.splits[split].tokens_L
        if len(tokens_L) - 1 < context:
            raise self._too_short(split, corpus, context)
        return TextWindows(corpus.tokenizer, tokens_L, context, stride)

    def prepare(self) -> None:
        self._corpus()

    def fingerprint(self) -> str:
        return self._corpus().fingerprint

    @property
    def tokenizer_json(self) -> Path:
        return self._corpus().tokenizer_json

    @abstractmethod
    def files(self) -> Mapping[str, Files]:
        """What each split is read from. Raises UserError where it is not there."""

    def check(self, corpus: Corpus) -> None:
        """Raise UserError where this is not the corpus that the task names."""

    def data_folder(self) -> Path | None:
        """The folder of this corpus: `folder`, else $COPE_SWEEP_DATA/<corpus> where there is one; else None."""
        if self.folder is not None:
            return Path(self.folder).expanduser().absolute()
        found = data_dir() / self.corpus
        return found if found.is_dir() else None

    def _corpus(self) -> Corpus:
        return _opened(self, cache_dir(), data_dir())

    def _gpt2(self) -> list[Path] | None:
        """GPT-2's tokenizer files, where the spec wants them."""
        if self.tokenizer == "bpe" or self.vocabulary < GPT2_IDS:
            return None
        folders = [folder for folder in (self.data_folder(), data_dir() / "gpt2") if folder is not None]
        found = find_gpt2(folders)
        if found is None and self.tokenizer == "gpt2":
            raise TextError(
                f"GPT-2's tokenizer (tokenizer.json, or vocab.json and merges.txt) is not in "
                f"{', '.join(map(str, folders))}, nor in the Hugging Face cache; put it there, "
                "or train one: task.tokenizer=bpe"
            )
        return found

    def _too_short(self, split: str, corpus: Corpus, context: int) -> TextError:
        return TextError(
            f"the corpus {self.corpus!r}: its split {split!r} has {len(corpus.splits[split].tokens_L) - 1:,} tokens, "
            f"fewer than one context of {context:,}; give it more text, or shorter contexts"
        )


@dataclass(frozen=True)
class TextWindows:
    """Windows over one split; see `Task.windows`."""

    tokenizer: TextTokenizer
    tokens_L: np.ndarray
    context: int
    stride: int

    def __len__(self) -> int:
        return 1 + -(-(len(self.tokens_L) - 1 - self.context) // self.stride)

    def __getitem__(self, windows: slice) -> Batch:
        first_N = np.arange(*windows.indices(len(self)), dtype=np.int64)
        return _batch(
            self.tokenizer,
            self.tokens_L,
            first_N * self.stride,
            self.context,
            scored_from_N=np.where(first_N == 0, 0, self.context - self.stride),
        )


def _batch(
    tokenizer: TextTokenizer,
    tokens_L: np.ndarray,
    begin_N: np.ndarray,
    length: int,
    scored_from_N: np.ndarray | None = None,
) -> Batch:
    """Contexts of `length` tokens that begin there; past the text's end, and before `scored_from_N`, no target."""
    both_NT = np.full((len(begin_N), length + 1), tokenizer.end_of_text, dtype=np.int64)
    for row_T, begin in zip(both_NT, begin_N.tolist(), strict=True):
        part = tokens_L[begin : begin + length + 1]
        row_T[: len(part)] = part
    inputs_NT, tokens_NT = both_NT[:, :-1], both_NT[:, 1:]
    place_T = np.arange(length)
    scored_NT = begin_N[:, None] + 1 + place_T < len(tokens_L)
    if scored_from_N is not None:
        scored_NT &= place_T >= scored_from_N[:, None]
    targets_NT = np.where(scored_NT, tokens_NT, IGNORED)
    return Batch(
        np.ascontiguousarray(inputs_NT), targets_NT, scored_NT, tokenizer.units(inputs_NT, tokens_NT, scored_NT)
    )


@functools.lru_cache(maxsize=16)
def _opened(task: LanguageModelling, cache: Path, data: Path) -> Corpus:
    """The task's corpus, once per process (and per place that the environment names)."""
    corpus = open_corpus(task.files(), task._gpt2(), task.vocabulary)
    task.check(corpus)
    for split, read in corpus.splits.items():
        if len(read.tokens_L) - 1 < task.tokens:
            raise task._too_short(split, corpus, task.tokens)
    return corpus
