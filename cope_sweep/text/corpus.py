"""Tokenised corpora: a machine tokenises a text once, into memory-mapped files that are found again by content.

    <cache>/text/<key>/train.bin …     token ids, uint16 or uint32; each document starts with the end-of-text token
                       tokenizer.json
                       corpus.json     tokens, words, bytes and digest of each split; the fingerprint

The key is a digest of the content of the files, of the tokenizer (its files, or the size of the one to train), and of
this module's `VERSION`.

Hugging Face `datasets` is not used here. For 12 MB of source files (3.4 M tokens) it needed 157 MB of memory instead of
27 MB, 26 MB on disk instead of 7 MB, and 212 µs instead of 7 µs to read a random context of 1024 tokens. Its import
takes 2 s and 144 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cope_sweep.text.cache import cache_dir, create_once
from cope_sweep.text.reading import Files, TextError, chunks, file_digest, read_document
from cope_sweep.text.tokenizer import TOKENIZER_FILE, TextTokenizer

VERSION = 1
"""Increase it when the same files start to give different ids."""
CORPUS_FILE = "corpus.json"
BATCH_CHUNKS = 16
"""Chunks that are tokenised in parallel."""


@dataclass(frozen=True)
class Split:
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
    splits: Mapping[str, Split]
    fingerprint: str
    """A digest of the text of all splits and of the tokenizer."""

    @property
    def tokenizer_json(self) -> Path:
        return self.folder / TOKENIZER_FILE


def open_corpus(splits: Mapping[str, Files], tokenizer: Sequence[Path] | None, vocabulary: int) -> Corpus:
    """The corpus of these files; tokenised now if it is not in the cache.

    Args:
        splits: The files of each split.
        tokenizer: The files of GPT-2's tokenizer. None: a tokenizer is trained on the split `train`.
        vocabulary: The largest number of token ids.

    Raises:
        TextError: A file is empty, unreadable or not UTF-8; the tokenizer has more than `vocabulary` ids; the cache
            cannot be written or is damaged.
    """
    for split, files in splits.items():
        for path in files.paths:
            if not path.stat().st_size:
                raise TextError(
                    f"{path}: empty; the split {split!r} needs text", code="empty_text", file=str(path), split=split
                )
    key = _digest(
        [
            VERSION,
            {split: files.digest() for split, files in splits.items()},
            [file_digest(path).hex() for path in tokenizer] if tokenizer else ["bpe", vocabulary],
        ]
    )[:32]
    folder = create_once(cache_dir() / "text" / key, lambda new: _create(new, splits, tokenizer, vocabulary))
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


def _create(folder: Path, splits: Mapping[str, Files], gpt2: Sequence[Path] | None, vocabulary: int) -> None:
    tokenizer = TextTokenizer.gpt2(gpt2) if gpt2 else _train_tokenizer(splits["train"], vocabulary)
    tokenizer.save(folder / TOKENIZER_FILE)
    dtype = np.dtype(np.uint16 if tokenizer.ids <= 1 << 16 else np.uint32)
    written = {split: _write(folder, split, files, tokenizer, dtype) for split, files in splits.items()}
    fingerprint = _digest([{split: info["sha256"] for split, info in written.items()}, tokenizer.digest])
    document = {"dtype": dtype.name, "fingerprint": fingerprint, "splits": written}
    (folder / CORPUS_FILE).write_text(json.dumps(document, indent=1) + "\n")


def _train_tokenizer(files: Files, vocabulary: int) -> TextTokenizer:
    with progress("training a tokenizer", files.size_bytes) as advance:
        texts = (chunk for document in files.documents for chunk in chunks(read_document(document)))
        return TextTokenizer.train(_report_progress(texts, advance), vocabulary)


def _write(folder: Path, split: str, files: Files, tokenizer: TextTokenizer, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Tokenise a split into a file; returns the counts and the digest of its text."""
    counts = {"tokens": 0, "words": 0, "lines": 0, "size_bytes": 0}
    text_digest = hashlib.sha256()
    begin = np.array([tokenizer.end_of_text], dtype=dtype)
    with (folder / f"{split}.bin").open("wb") as file, progress(f"tokenising {split}", files.size_bytes) as advance:
        for document in files.documents:
            begin.tofile(file)
            text_digest.update(b"\xff")  # not a byte of UTF-8, so other document boundaries give another digest
            counts["tokens"] += 1
            in_word = False
            texts = _report_progress(chunks(read_document(document)), advance)
            while batch := list(itertools.islice(texts, BATCH_CHUNKS)):
                for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
                    ids.astype(dtype).tofile(file)
                    data = text.encode()
                    text_digest.update(data)
                    counts["tokens"] += len(ids)
                    counts["lines"] += data.count(b"\n")
                    counts["size_bytes"] += len(data)
                    # A word that two chunks share is counted in the first of them.
                    counts["words"] += len(data.split()) - (in_word and not data[:1].isspace())
                    in_word = not data[-1:].isspace()
    counts["words"] += counts["lines"]
    return counts | {"sha256": text_digest.hexdigest()}


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
            if path.stat().st_size != info["tokens"] * dtype.itemsize:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
            tokens_L = np.memmap(path, dtype=dtype, mode="r")
            splits[name] = Split(tokens_L, info["words"], info["lines"], info["size_bytes"])
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
