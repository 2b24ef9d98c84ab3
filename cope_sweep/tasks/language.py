"""Language modelling: predict every next token of a text (Golovneva et al. 2024, sections 5.4 and 5.5).

The tokens of each split are divided into consecutive contexts of `tokens` tokens. The target of a token is the next
token. With contexts of 4 tokens and a text that starts with `the cat sat on the mat and`, in which words are tokens:

    inputs    ¶   the cat sat      on  the mat and      ¶ is the end of the previous text
    targets   the cat sat on       the mat and …

Training visits all contexts in an order that differs between epochs and is a pure function of (seed, epoch): nothing is
stored, and a data cursor is a number. Test sets are read in order, and their last context is padded with tokens without
targets, so that every token of the text is scored once. A `stride` below `tokens` gives tokens more context, and costs
more time.

Shapes: N sequences, T tokens, L tokens of a split.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import IGNORED, Batch, NamedContent, Task, next_name
from cope_sweep.text import (
    TOKENIZER_FILE,
    Corpus,
    CorpusName,
    SplitFiles,
    TextError,
    TextSource,
    TextTokenizer,
    TokenizerFiles,
    cache_dir,
    data_dir,
    fetch_tokenizer,
    open_corpus,
    permuted,
)
from cope_sweep.text.cache import CORPUS_NAME, name_of_path
from cope_sweep.text.hub import REPOSITORY, REVISION
from cope_sweep.text.reading import Files
from cope_sweep.text.tokenizer import GPT2_IDS, GPT2_REPOSITORIES, SMALLEST_VOCABULARY, find_gpt2

AUTO, GPT2, BPE = "auto", "gpt2", "bpe"


def _check_tokenizer_name(name: str) -> str:
    repository, at, revision = name.partition("@")
    is_of_hub = REPOSITORY.fullmatch(repository) and (not at or REVISION.fullmatch(revision))
    if not is_of_hub and not CORPUS_NAME.fullmatch(name):
        raise InvalidValue(
            f"{name!r} is not a tokenizer: write auto, gpt2, bpe, the name of a model of the Hugging Face hub "
            "(owner/name, or owner/name@revision), or the path of a tokenizer.json",
            code="invalid_tokenizer_name",
            key="task.tokenizer",
            value=name,
        )
    return name


Share = Annotated[float, Field(gt=0, lt=0.5)]
"""The part of a text that is held out for a split."""


class LanguageModelling(Task):
    """Language modelling of a text. Subclasses say where it is from."""

    TESTS: ClassVar[tuple[str, ...]] = ("validation", "test")
    METRICS: ClassVar[tuple[str, ...]] = ("perplexity", "word_perplexity", "bits_per_byte", "loss")
    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("tokenizer_file",)

    corpus: CorpusName
    tokens: Positive = Field(default=1024, description="Number of tokens in a context.")
    stride: Positive | None = Field(
        default=None,
        description="Tokens from the start of one test context to the next; null: `tokens`, without overlap.",
    )
    vocabulary: Annotated[int, Field(ge=SMALLEST_VOCABULARY, le=10**9)] = Field(
        default=GPT2_IDS, description="Number of token ids of the model; the tokenizer may have fewer."
    )
    tokenizer: Annotated[str, AfterValidator(_check_tokenizer_name)] = Field(
        default=AUTO,
        description="gpt2: GPT-2's, from its files. bpe: trained on the training split, with `vocabulary` ids. "
        "auto: gpt2 if `vocabulary` is at least 50257, else bpe. owner/name or owner/name@revision: a model of "
        "the Hugging Face hub. A path that ends with .json: a file; its name becomes the tokenizer's.",
    )
    tokenizer_file: str | None = Field(
        default=None,
        description="File of a `tokenizer` with another name; null: $COPE_SWEEP_DATA/<tokenizer>/tokenizer.json. Not "
        "part of a run's identity.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_tokenizer_file(cls, data: Any) -> Any:
        """A path instead of a tokenizer's name becomes `tokenizer_file`, and gives the name."""
        path = data.get("tokenizer") if isinstance(data, dict) else None
        if not isinstance(path, str) or not path.endswith(".json"):
            return data
        if data.get("tokenizer_file") is not None:
            raise InvalidValue(
                f"task.tokenizer = {path} is a file, and task.tokenizer_file is set; remove one of them",
                key="task.tokenizer",
                value=path,
            )
        return data | {"tokenizer": name_of_path(path, not_named=TOKENIZER_FILE), "tokenizer_file": path}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.stride is not None and self.stride > self.tokens:
            raise InvalidValue(
                f"task.stride = {self.stride} leaves out tokens; set it to at most task.tokens = {self.tokens}",
                key="task.stride",
                value=self.stride,
                largest=self.tokens,
            )
        if self.tokenizer_file is not None and (self.tokenizer in (AUTO, GPT2, BPE) or "/" in self.tokenizer):
            raise InvalidValue(
                f"task.tokenizer_file is set, and task.tokenizer is {self.tokenizer}; give the tokenizer "
                "another name, for example task.tokenizer=mine",
                key="task.tokenizer_file",
                value=self.tokenizer,
            )
        if self.tokenizer == GPT2 and self.vocabulary < GPT2_IDS:
            raise InvalidValue(
                f"task.vocabulary = {self.vocabulary} is too small for GPT-2's tokenizer, which has {GPT2_IDS} ids",
                key="task.vocabulary",
                value=self.vocabulary,
                smallest=GPT2_IDS,
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
        corpus = self.open_corpus()
        tokens_L = corpus.splits["train"].tokens_L
        # The last token of the text is a target only.
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
            raise InvalidValue(
                f"a stride of {stride} does not fit windows of {context} tokens; use 1 … {context}",
                key="stride",
                value=stride,
                largest=context,
            )
        corpus = self.open_corpus()
        tokens_L = corpus.splits[split].tokens_L
        if len(tokens_L) - 1 < context:
            raise self._too_short(split, corpus, context)
        return TextWindows(corpus.tokenizer, tokens_L, context, stride)

    def covered(self, split: str, sequences: int) -> int:
        return self.tokens + (sequences - 1) * (self.stride or self.tokens)

    def prepare(self) -> None:
        self.open_corpus()

    def fingerprint(self) -> str:
        return self.open_corpus().fingerprint

    def tokenizer_name(self) -> str:
        name = self.tokenizer
        if name == AUTO:
            name = GPT2 if self._uses_gpt2 else BPE
        return f"{name} {self.open_corpus().tokenizer.digest[:12]}"

    def save_tokenizer(self, folder: Path) -> None:
        # From memory: the cache may have been deleted since training began.
        self.open_corpus().tokenizer.save(folder / TOKENIZER_FILE)

    def open_corpus(self) -> Corpus:
        """The tokenised corpus; tokenised now if it is not in the cache. Raises UserError."""
        return _opened(self, cache_dir(), data_dir())

    @abstractmethod
    def text_source(self) -> TextSource:
        """Where the text is from. Raises UserError if it is missing."""

    @property
    def places(self) -> dict[str, str]:
        return super().places | ({"tokenizer": self.tokenizer} if "/" in self.tokenizer else {})

    def named_content(self) -> dict[str, NamedContent]:
        if not self._has_named_tokenizer:
            return {}
        path = str(self._tokenizer_path)
        return {"tokenizer": NamedContent(path, {"tokenizer": next_name(self.tokenizer), "tokenizer_file": path})}

    def check_place(self) -> None:
        if self._has_named_tokenizer:
            self._named_tokenizer()

    def check_corpus(self, corpus: Corpus) -> None:
        """Raise UserError if this is not the corpus that the spec names."""

    @property
    def _has_named_tokenizer(self) -> bool:
        """The tokenizer is a file of this machine with a name of the user's."""
        return self.tokenizer not in (AUTO, GPT2, BPE) and "/" not in self.tokenizer

    @property
    def _tokenizer_path(self) -> Path:
        if self.tokenizer_file is not None:
            return Path(self.tokenizer_file).expanduser().absolute()
        return data_dir() / self.tokenizer / TOKENIZER_FILE

    @property
    def _uses_gpt2(self) -> bool:
        return self.tokenizer == GPT2 or (self.tokenizer == AUTO and self.vocabulary >= GPT2_IDS)

    def _tokenizer_files(self) -> TokenizerFiles | None:
        """The files of the tokenizer; None if it is to be trained.

        The spec alone decides, not the files that a machine has: two tokenizers never have one run id.
        """
        if self._uses_gpt2:
            return TokenizerFiles(self._gpt2(), is_gpt2=True)
        if self.tokenizer in (AUTO, BPE):
            return None
        if "/" in self.tokenizer:
            repository, _, revision = self.tokenizer.partition("@")
            return TokenizerFiles((fetch_tokenizer(repository, revision or None, TOKENIZER_FILE),))
        return TokenizerFiles((self._named_tokenizer(),))

    def _named_tokenizer(self) -> Path:
        """The file of a tokenizer of this machine. Raises TextError if there is none."""
        path = self._tokenizer_path
        if not path.is_file():
            raise TextError(
                f"no tokenizer {self.tokenizer!r}: {path} does not exist; put it there, set task.tokenizer_file, or "
                "choose auto, gpt2, bpe or a model of the Hugging Face hub (owner/name)",
                code="no_tokenizer",
                tokenizer=self.tokenizer,
                file=str(path),
            )
        return path

    def _tokenizer_folders(self) -> list[Path]:
        return [data_dir() / GPT2]

    def _gpt2(self) -> tuple[Path, ...]:
        """GPT-2's tokenizer files, of this machine or from the hub. Raises TextError."""
        folders = self._tokenizer_folders()
        found = find_gpt2(folders)
        if found is not None:
            return tuple(found)
        try:
            return (fetch_tokenizer(GPT2_REPOSITORIES[0], None, TOKENIZER_FILE),)
        except TextError as error:
            raise TextError(
                f"GPT-2's tokenizer (tokenizer.json, or vocab.json and merges.txt) is neither in "
                f"{', '.join(map(str, folders))} nor in the Hugging Face cache, and cannot be downloaded "
                f"({error.data['reason']}); put it there, or train a tokenizer: task.tokenizer=bpe",
                code="no_tokenizer",
                folders=[str(folder) for folder in folders],
            ) from error

    def _too_short(self, split: str, corpus: Corpus, context: int) -> TextError:
        tokens = len(corpus.splits[split].tokens_L) - 1
        return TextError(
            f"the corpus {self.corpus!r}: its split {split!r} has {tokens:,} tokens, fewer than one context of "
            f"{context:,}; use a longer text or a shorter context",
            code="text_too_short",
            corpus=self.corpus,
            split=split,
            tokens=tokens,
            context=context,
        )


class FolderTask(LanguageModelling):
    """Language modelling of the files of a folder. Subclasses name the files of each split."""

    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("folder", "tokenizer_file")

    folder: str | None = Field(
        default=None,
        description="Folder of the files; null: $COPE_SWEEP_DATA/<corpus>. Not part of a run's identity.",
    )

    @abstractmethod
    def files(self) -> Mapping[str, Files]:
        """The files of each split. Raises UserError if they are missing."""

    def text_source(self) -> TextSource:
        return SplitFiles(self.files())

    def named_content(self) -> dict[str, NamedContent]:
        folder = self.text_folder()
        if folder is None:  # a download, whose words are counted
            return super().named_content()
        renamed = {"corpus": next_name(self.corpus)} | ({} if self.folder else {"folder": str(folder)})
        return super().named_content() | {"data": NamedContent(str(folder), renamed)}

    def check_place(self) -> None:
        super().check_place()
        folder = self.data_folder()
        if folder is not None and folder.is_file():
            raise TextError(
                f"{folder} is a file, and the task {self.kind} reads a folder of files; for a text in one file write "
                f"task: {{kind: text, path: {folder.name}}}",
                code="not_a_folder",
                file=str(folder),
                corpus=self.corpus,
            )

    def data_folder(self) -> Path | None:
        """The folder of this corpus: `folder`, else $COPE_SWEEP_DATA/<corpus> if it exists, else None."""
        if self.folder is not None:
            return Path(self.folder).expanduser().absolute()
        found = data_dir() / self.corpus
        return found if found.is_dir() else None

    def text_folder(self) -> Path | None:
        """The folder of this machine that the text is read from; None: it is downloaded, or missing."""
        return self.data_folder()

    def _tokenizer_folders(self) -> list[Path]:
        folder = self.data_folder()
        return [*([] if folder is None else [folder]), *super()._tokenizer_folders()]


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
    """Contexts of `length` tokens that start at `begin_N`, (N,).

    Tokens beyond the end of the text and those before `scored_from_N` in a context have no target.
    """
    # One token more than a context has: inputs and targets are the same tokens, one place apart.
    both_NT = np.full((len(begin_N), length + 1), tokenizer.end_of_text, dtype=np.int64)
    for both_T, begin in zip(both_NT, begin_N.tolist(), strict=True):
        part = tokens_L[begin : begin + length + 1]
        both_T[: len(part)] = part
    inputs_NT, tokens_NT = both_NT[:, :-1], both_NT[:, 1:]
    offset_T = np.arange(length)
    scored_NT = begin_N[:, None] + 1 + offset_T < len(tokens_L)
    if scored_from_N is not None:
        scored_NT &= offset_T >= scored_from_N[:, None]
    targets_NT = np.where(scored_NT, tokens_NT, IGNORED)
    return Batch(
        np.ascontiguousarray(inputs_NT), targets_NT, scored_NT, tokenizer.units(inputs_NT, tokens_NT, scored_NT)
    )


@functools.lru_cache(maxsize=16)
def _opened(task: LanguageModelling, cache: Path, data: Path) -> Corpus:
    """The task's corpus, opened once per process and per pair of folders from the environment."""
    task.check_place()
    corpus = open_corpus(task.text_source(), task._tokenizer_files(), task.vocabulary)
    task.check_corpus(corpus)
    for split, read in corpus.splits.items():
        if len(read.tokens_L) - 1 < task.tokens:
            raise task._too_short(split, corpus, task.tokens)
    return corpus
