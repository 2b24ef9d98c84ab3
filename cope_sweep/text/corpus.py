"""Tokenised corpora: a machine tokenises a text once, into memory-mapped files that are found again by content.

    <cache>/text/<key>/train.bin …     token ids, uint16 or uint32; each document starts with the end-of-text token
                       tokenizer.json
                       corpus.json     tokens, words, bytes and digest of each split; the fingerprint

The key is a digest of the source (the content of its files, or a commit of the hub), of the tokenizer (its files, or
the size of the one to train), and of this module's `VERSION`. An interrupted preparation starts again.

Hugging Face `datasets` (5.2, measured) is not used here:

- Its JSON reader takes the columns of a file from the first 10 MB: where another key or type follows, reading fails. A
  column of texts such as `2024-01-01` becomes dates, and a row without the column is an empty document.
- Its text reader changes the ends of lines, and reads a truncated `.zst` file as a shorter one.
- Fingerprints depend on the parts of a source, which its streams do not show.
- Beside torch, 10 MB of JSON lines took 200 MB and 2.0 s; the readers here take 47 MB and 0.2 s. A random context of
  1024 tokens took 212 µs instead of 7 µs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cope_sweep.text.cache import cache_dir, create_once
from cope_sweep.text.reading import TextError, chunks
from cope_sweep.text.sources import TRAIN, Limit, Split, TextDocument, TextSource
from cope_sweep.text.tokenizer import TOKENIZER_FILE, TextTokenizer, TokenizerFiles

T = TypeVar("T")

VERSION = 3
"""Increase it when the same files start to give different ids."""
CORPUS_FILE = "corpus.json"
TRAINING_BYTES = 1 << 30
"""The most text that a tokenizer is trained on."""
BYTES_PER_TOKEN = 8
"""More than a token has on average: the text that a tokenizer is trained on where a limit is in tokens."""


@dataclass(frozen=True)
class SplitTokens:
    """The token ids of a split, on disk, and the counts of its text."""

    tokens_L: np.ndarray
    """Token ids, uint16 or uint32, memory-mapped; the first is the end-of-text token."""
    words: int
    """Number of blank-separated words plus number of ends of lines, as WikiText counts words."""
    lines: int
    """Number of ends of lines."""
    size_bytes: int
    """Size of the text in UTF-8."""


@dataclass(frozen=True)
class Corpus:
    """A tokenised text: its splits and its tokenizer."""

    folder: Path
    tokenizer: TextTokenizer
    splits: Mapping[Split, SplitTokens]
    fingerprint: str
    """A digest of the text of all splits and of the tokenizer."""


def open_corpus(source: TextSource, tokenizer: TokenizerFiles | None, vocabulary: int) -> Corpus:
    """The corpus of a source; tokenised now if it is not in the cache.

    Args:
        source: Where the text is from.
        tokenizer: The files of the tokenizer. None: one is trained on the split `train`.
        vocabulary: The largest number of token ids.

    Raises:
        TextError: The source cannot be read; a split is empty; the tokenizer has more than `vocabulary` ids; the cache
            cannot be written or is damaged.
    """
    key = _digest([VERSION, source.key(), tokenizer.key() if tokenizer else ["bpe", vocabulary]])[:32]
    folder = create_once(cache_dir() / "text" / key, lambda new: _create(new, source, tokenizer, vocabulary))
    corpus = _open(folder)
    if corpus.tokenizer.ids > vocabulary:
        raise TextError(
            f"{corpus.tokenizer.name}: has {corpus.tokenizer.ids:,} ids, and task.vocabulary is {vocabulary:,}; "
            "increase task.vocabulary, or train a tokenizer: task.tokenizer=bpe",
            code="vocabulary_too_small",
            file=corpus.tokenizer.name,
            ids=corpus.tokenizer.ids,
            vocabulary=vocabulary,
        )
    return corpus


def _create(folder: Path, source: TextSource, files: TokenizerFiles | None, vocabulary: int) -> None:
    trained = files.load() if files else _train_tokenizer(source, vocabulary)
    trained.save(folder / TOKENIZER_FILE)
    # Loaded again: the text gets its ids from the file that later processes read.
    tokenizer = TextTokenizer.load(folder / TOKENIZER_FILE)
    dtype = np.dtype(np.uint16 if tokenizer.ids <= 1 << 16 else np.uint32)
    written = _tokenise(folder, source, tokenizer, dtype)
    fingerprint = _digest([{split: info["sha256"] for split, info in written.items()}, tokenizer.digest])
    document = {"dtype": dtype.name, "fingerprint": fingerprint, "splits": written}
    (folder / CORPUS_FILE).write_text(json.dumps(document, indent=1) + "\n")


def _train_tokenizer(source: TextSource, vocabulary: int) -> TextTokenizer:
    limits = [TRAINING_BYTES, source.limit.size_bytes, BYTES_PER_TOKEN * (source.limit.tokens or TRAINING_BYTES)]
    most_bytes = min(limit for limit in limits if limit is not None)

    def texts() -> Iterator[str]:
        total = 0
        for part in source.parts(()):
            for split, pieces in part.documents() if part.split == TRAIN else ():
                for text in chunks(pieces) if split == TRAIN else ():
                    yield text
                    total += len(text.encode())
                    if total >= most_bytes:
                        return

    with progress("training a tokenizer", min(source.size_bytes, most_bytes)) as advance:
        return TextTokenizer.train(_report_progress(texts(), advance), vocabulary)


def _tokenise(
    folder: Path, source: TextSource, tokenizer: TextTokenizer, dtype: np.dtype[Any]
) -> dict[Split, dict[str, Any]]:
    """Write the token ids of each split into a folder. Returns the counts of each split and the digest of its text."""
    limit = source.limit
    expected = [limit.size_bytes, limit.tokens and BYTES_PER_TOKEN * limit.tokens, source.size_bytes]
    full: set[Split] = set()
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress("tokenising", min(size for size in expected if size is not None)))
        writers: dict[Split, _Writer] = {}
        for split in source.splits:
            file = stack.enter_context((folder / f"{split}.bin").open("wb"))
            writers[split] = _Writer(file, dtype, tokenizer.end_of_text, limit)
        for part in source.parts(full):
            shown_bytes = 0
            for batch in _ahead(_batches(part.documents())):
                for chunk, ids in zip(batch, tokenizer.encode([chunk.text for chunk in batch]), strict=True):
                    writers[chunk.split].add(chunk, ids)
                read_bytes = sum(len(chunk.text.encode()) for chunk in batch)
                advance(min(read_bytes, part.size_bytes - shown_bytes))
                # A compressed part has more text than bytes, but the bar counts bytes of the source.
                shown_bytes = min(part.size_bytes, shown_bytes + read_bytes)
                if writers[part.split].is_full:
                    break
            advance(part.size_bytes - shown_bytes)
            for split, writer in writers.items():
                writer.end_part()
                if writer.is_full:
                    full.add(split)
    return {split: writer.summary(split) for split, writer in writers.items()}


@dataclass(frozen=True)
class _Chunk:
    """A piece of a document that is tokenised by itself."""

    split: Split
    is_first: bool
    text: str


class _Writer:
    """Appends chunks of documents to the file of a split, and counts their tokens, words, lines and bytes."""

    def __init__(self, file: Any, dtype: np.dtype[Any], end_of_text: int, limit: Limit) -> None:
        self.file, self.dtype, self.begin, self.limit = file, dtype, np.array([end_of_text], dtype=dtype), limit
        self.counts = {"tokens": 0, "words": 0, "lines": 0, "size_bytes": 0}
        self._digest: hashlib._Hash | None = None
        self._digests: list[str] = []
        self._in_word = False

    @property
    def is_full(self) -> bool:
        return self.limit.is_reached(self.counts["tokens"], self.counts["size_bytes"])

    def add(self, chunk: _Chunk, ids: np.ndarray) -> None:
        """Append a chunk, and the end-of-text token before the first one of a document, unless the split is full."""
        # A part with documents that are left out has a digest, too: fingerprints of limited texts depend on it.
        self._digest = self._digest or hashlib.sha256()
        if self.is_full:
            return
        if chunk.is_first:
            self.begin.tofile(self.file)
            self._digest.update(b"\xff")  # not a byte of UTF-8, so other document boundaries give another digest
            self.counts["tokens"] += 1
            self._in_word = False
        ids.astype(self.dtype).tofile(self.file)
        data = chunk.text.encode()
        self._digest.update(data)
        lines = data.count(b"\n")
        # A word that two chunks share is counted in the first of them.
        words = len(data.split()) - (self._in_word and not data[:1].isspace()) + lines
        for name, count in (("tokens", len(ids)), ("lines", lines), ("size_bytes", len(data)), ("words", words)):
            self.counts[name] += count
        if data:
            self._in_word = not data[-1:].isspace()

    def end_part(self) -> None:
        """End a part of the source; the text of each part has a digest."""
        if self._digest:
            self._digests.append(self._digest.hexdigest())
            self._digest = None

    def summary(self, split: Split) -> dict[str, Any]:
        """The counts and the digest of the text. Raises TextError if there is none."""
        if not self.counts["size_bytes"]:
            raise TextError(
                f"no text for the split {split!r}: no document has any, or none is held out; give it more documents, "
                "or increase task.validation_share and task.test_share",
                code="empty_split",
                split=split,
            )
        return {**self.counts, "sha256": self._digests[0] if len(self._digests) == 1 else _digest(self._digests)}


def _batches(documents: Iterable[TextDocument]) -> Iterator[list[_Chunk]]:
    """The chunks of documents, some at a time: of long texts few, and of short ones many."""
    batch: list[_Chunk] = []
    characters = 0
    for split, pieces in documents:
        is_first = True
        for text in chunks(pieces):
            batch.append(_Chunk(split, is_first, text))
            is_first = False
            characters += len(text)
            if characters >= 1 << 20:  # enough for several chunks, which are tokenised in parallel
                yield batch
                batch, characters = [], 0
        if is_first:  # a document without text
            batch.append(_Chunk(split, is_first, ""))
    if batch:
        yield batch


def _ahead(batches: Iterator[list[T]]) -> Iterator[list[T]]:
    """The same batches. Each is read in a thread while the one before it is used."""
    # The end of the batches, because a StopIteration from a future is a RuntimeError in a generator.
    none: list[T] = []
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as executor:
        following = executor.submit(next, batches, none)
        while batch := following.result():
            following = executor.submit(next, batches, none)
            yield batch


def _report_progress(texts: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    """The same texts; `advance` is called with the number of bytes after each."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def _open(folder: Path) -> Corpus:
    try:
        document = json.loads((folder / CORPUS_FILE).read_text())
        dtype = np.dtype(document["dtype"])
        splits = {}
        for name, info in document["splits"].items():
            path = folder / f"{name}.bin"
            # A file that was cut short would be read as a shorter text.
            if path.stat().st_size != info["tokens"] * dtype.itemsize:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
            tokens_L = np.memmap(path, dtype=dtype, mode="r")
            splits[name] = SplitTokens(tokens_L, info["words"], info["lines"], info["size_bytes"])
        tokenizer = TextTokenizer.load(folder / TOKENIZER_FILE)
        return Corpus(folder, tokenizer, splits, document["fingerprint"])
    except (OSError, ValueError, KeyError, TextError) as error:
        raise TextError(
            f"{folder}: damaged ({error}); delete this folder, and it will be created again",
            code="damaged_cache",
            file=str(folder),
            reason=str(error),
        ) from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; yields a function that advances it by a number of bytes."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda done_bytes: bar.advance(task, done_bytes)
