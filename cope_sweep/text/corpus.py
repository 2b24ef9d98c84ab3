"""A text as token ids: tokenised once per machine into memory-mapped files, and found again by what it is made of.

    <cache>/text/<key>/train.bin …     ids, uint16 or uint32, a document after the other, each begun by the end of text
                       tokenizer.json
                       corpus.json     tokens, words, bytes and digest of each split; the fingerprint

The key is a digest of the files' content, of the tokenizer (its files; or that it is trained here, and how large), and
of this code's `VERSION`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cope_sweep.text.cache import cache_dir, made_once
from cope_sweep.text.errors import TextError
from cope_sweep.text.progress_bar import progress
from cope_sweep.text.reading import Files, chunks, file_digest, read_document
from cope_sweep.text.tokenizer import TOKENIZER_FILE, TextTokenizer

VERSION = 1
"""Bump it when the same files come to be other ids."""
CORPUS_FILE = "corpus.json"
TOGETHER = 16
"""Chunks that are tokenised side by side."""


@dataclass(frozen=True)
class Split:
    """One split's ids, on disk, and what they count for."""

    tokens_L: np.ndarray
    """Memory-mapped; the first is an end of text."""
    words: int
    """Blank-separated words and ends of lines."""
    lines: int
    """Ends of lines."""
    size_bytes: int
    """Of the text, in UTF-8."""


@dataclass(frozen=True)
class Corpus:
    """A tokenised text."""

    folder: Path
    tokenizer: TextTokenizer
    splits: Mapping[str, Split]
    fingerprint: str
    """Equal where every split's text is, and the tokenizer."""

    @property
    def tokenizer_json(self) -> Path:
        return self.folder / TOKENIZER_FILE


def open_corpus(splits: Mapping[str, Files], tokenizer: Sequence[Path] | None, vocabulary: int) -> Corpus:
    """The corpus of these files, tokenised now if it never was on this machine.

    `tokenizer` are GPT-2's files; None: one is trained on the split `train`. Raises TextError where a file is empty,
    unreadable or not UTF-8, and where the tokenizer has more ids than `vocabulary`.
    """
    for split, files in splits.items():
        for path in files.paths:
            if not path.stat().st_size:
                raise TextError(f"{path}: empty; the split {split!r} needs text")
    key = _digest(
        [
            VERSION,
            {split: files.digest() for split, files in splits.items()},
            [file_digest(path).hex() for path in tokenizer] if tokenizer else ["bpe", vocabulary],
        ]
    )[:32]
    folder = made_once(cache_dir() / "text" / key, lambda made: _make(made, splits, tokenizer, vocabulary))
    corpus = _opened(folder)
    if corpus.tokenizer.ids > vocabulary:
        raise TextError(
            f"{corpus.tokenizer.name}: has {corpus.tokenizer.ids:,} ids, and the task declares a vocabulary of "
            f"{vocabulary:,}; raise task.vocabulary, or train a tokenizer: task.tokenizer=bpe"
        )
    return corpus


def _make(folder: Path, splits: Mapping[str, Files], gpt2: Sequence[Path] | None, vocabulary: int) -> None:
    tokenizer = TextTokenizer.gpt2(gpt2) if gpt2 else _trained(splits["train"], vocabulary)
    tokenizer.save(folder / TOKENIZER_FILE)
    dtype = np.dtype(np.uint16 if tokenizer.ids <= 1 << 16 else np.uint32)
    written = {split: _write(folder, split, files, tokenizer, dtype) for split, files in splits.items()}
    fingerprint = _digest([{split: facts["sha256"] for split, facts in written.items()}, tokenizer.digest])
    document = {"dtype": dtype.name, "fingerprint": fingerprint, "splits": written}
    (folder / CORPUS_FILE).write_text(json.dumps(document, indent=1) + "\n")


def _trained(files: Files, vocabulary: int) -> TextTokenizer:
    with progress("training a tokenizer", files.size_bytes) as advance:
        texts = (chunk for document in files.documents for chunk in chunks(read_document(document)))
        return TextTokenizer.train(_told(texts, advance), vocabulary)


def _write(folder: Path, split: str, files: Files, tokenizer: TextTokenizer, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Tokenise a split into a file; what it counts for, and its text's digest."""
    facts = {"tokens": 0, "words": 0, "lines": 0, "size_bytes": 0}
    text_digest = hashlib.sha256()
    begin = np.array([tokenizer.end_of_text], dtype=dtype)
    with (folder / f"{split}.bin").open("wb") as file, progress(f"tokenising {split}", files.size_bytes) as advance:
        for document in files.documents:
            begin.tofile(file)
            text_digest.update(b"\xff")  # no byte of UTF-8: what is cut otherwise has another digest
            facts["tokens"] += 1
            in_word = False
            texts = _told(chunks(read_document(document)), advance)
            while batch := list(itertools.islice(texts, TOGETHER)):
                for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
                    ids.astype(dtype).tofile(file)
                    data = text.encode()
                    text_digest.update(data)
                    facts["tokens"] += len(ids)
                    facts["lines"] += data.count(b"\n")
                    facts["size_bytes"] += len(data)
                    # A word that a cut fell into was counted with the chunk that it began in.
                    facts["words"] += len(data.split()) - (in_word and not data[:1].isspace())
                    in_word = not data[-1:].isspace()
    facts["words"] += facts["lines"]
    return facts | {"sha256": text_digest.hexdigest()}


def _told(texts: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    for text in texts:
        yield text
        advance(len(text.encode()))


def _opened(folder: Path) -> Corpus:
    try:
        document = json.loads((folder / CORPUS_FILE).read_text())
        dtype = np.dtype(document["dtype"])
        splits = {}
        for name, facts in document["splits"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != facts["tokens"] * dtype.itemsize:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
            tokens_L = np.memmap(path, dtype=dtype, mode="r")
            splits[name] = Split(tokens_L, facts["words"], facts["lines"], facts["size_bytes"])
        tokenizer = TextTokenizer.load(folder / TOKENIZER_FILE)
        return Corpus(folder, tokenizer, splits, document["fingerprint"])
    except (OSError, ValueError, KeyError, TextError) as error:
        raise TextError(f"{folder}: damaged ({error}); delete this folder, and it is made again") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
