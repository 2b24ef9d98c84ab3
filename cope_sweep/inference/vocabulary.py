"""Token ids: their validation, and their text, from a tokenizer or the labels of a task's vocabulary.

text    "the cat"     one token may be part of a character
labels  " w 0 i 1 r"  Flip-Flop's tokens; each is written with a blank before it, and read where blanks separate it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from cope_sweep.config import RunSpec
from cope_sweep.errors import TokensError
from cope_sweep.text import END_OF_TEXT, TextTokenizer
from cope_sweep.text.reading import chunks

TokenIds = Sequence[int] | np.ndarray


def validate_sequence(ids: TokenIds, vocabulary_size: int, name: str) -> np.ndarray:
    """One sequence of at least two tokens as int64, shape (T,). Raises TokensError."""
    tokens_T = validate_token_ids(ids, vocabulary_size, name)
    if len(tokens_T) < 2:
        raise TokensError(
            f"{name} has {len(tokens_T)} tokens; give at least two, because the first is not scored",
            code="too_short",
            sequence=name,
            tokens=len(tokens_T),
        )
    return tokens_T


def validate_token_ids(ids: TokenIds, vocabulary_size: int, name: str = "the sequence") -> np.ndarray:
    """One sequence as int64, shape (T,). Raises TokensError, which names the position of the first invalid entry."""
    try:
        items: list[Any] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    except TypeError:
        raise TokensError(f"{name}: {_short(ids)} is not a list of token ids", sequence=name) from None
    # The usual case, without a loop in Python. bool is another type here.
    if set(map(type, items)) <= {int}:
        # The loop below names an id that does not fit int64.
        with suppress(OverflowError):
            tokens_T = np.array(items, dtype=np.int64)
            if not len(tokens_T) or (tokens_T.min() >= 0 and tokens_T.max() < vocabulary_size):
                return tokens_T
    for position, item in enumerate(items):  # for the message, and for numpy's integers
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise TokensError(
                f"{name}, position {position}: {_short(item)} is not a token id",
                sequence=name,
                position=position,
                value=_short(item),
            )
        if not 0 <= item < vocabulary_size:
            raise TokensError(
                f"{name}, position {position}: token id {_short(item)} is out of range; "
                f"this model's vocabulary is 0 … {vocabulary_size - 1} ({vocabulary_size} ids)",
                code="token_out_of_range",
                sequence=name,
                position=position,
                value=_short(item),
                largest=vocabulary_size - 1,
            )
    return np.array(items, dtype=np.int64)


def _short(item: Any) -> str:
    text = "of more than 60 digits" if isinstance(item, int) and abs(item) >= 10**60 else repr(item)
    return text if len(text) <= 60 else text[:59] + "…"


class Vocabulary(Protocol):
    """Conversion between text and token ids."""

    @property
    def end_of_text(self) -> int | None:
        """The token that separates documents; None if the task has none."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int64, shape (T,), without an end-of-text token. Raises TokensError."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text, not necessarily whole characters."""

    def label(self, token: int) -> str:
        """The name of a token; no other token has it."""


class TextVocabulary:
    """The vocabulary of a model that was trained on text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def end_of_text(self) -> int | None:
        return self.tokenizer.end_of_text

    def encode(self, text: str) -> np.ndarray:
        # An empty text has no chunk, and concatenate needs an array.
        return np.concatenate([np.empty(0), *self.tokenizer.encode(list(chunks([text])))]).astype(np.int64)

    def piece(self, token: int) -> bytes:
        return self.tokenizer.pieces([token])[0]

    def label(self, token: int) -> str:
        if token == self.end_of_text:
            return END_OF_TEXT
        piece = self.piece(token)
        if piece and self._tokens[piece] != token:
            return f"<{token}>"
        try:
            return piece.decode() or f"<unused {token}>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        """Piece → the token with this label. SentencePiece's `<0x61>`, which comes before `a`, has the same piece."""
        ids = range(self.tokenizer.ids)
        return dict(zip(self.tokenizer.pieces(ids), ids, strict=True))


class LabelVocabulary:
    """The vocabulary of a model whose task has no text: the labels of its tokens."""

    end_of_text: int | None = None

    def __init__(self, run: RunSpec) -> None:
        self._kind = run.task.kind
        labels = [run.task.token_label(token) for token in range(run.task.vocabulary_size)]
        self._ids = {label: token for token, label in enumerate(labels) if not label.isspace()}
        # A label that another token has, or that blanks divide, could not be read again.
        self._labels = [
            label if self._ids.get(label) == token and label.split() == [label] else f"<{token}>"
            for token, label in enumerate(labels)
        ]
        self._ids = {label: token for token, label in enumerate(self._labels)}

    def encode(self, text: str) -> np.ndarray:
        labels = text.split()
        unknown = next((label for label in labels if label not in self._ids), None)
        if unknown is not None:
            known = " ".join(self._labels[:12]) + (" …" if len(self._labels) > 12 else "")
            raise TokensError(
                f"the task {self._kind} has no text tokenizer, and {unknown[:40]!r} is not a label of its vocabulary; "
                f"give token ids, or labels with blanks between them: {known}",
                code="unknown_label",
                label=unknown[:40],
                task=self._kind,
                allowed=self._labels[:12],
            )
        return np.array([self._ids[label] for label in labels], dtype=np.int64)

    def piece(self, token: int) -> bytes:
        return f" {self._labels[token]}".encode()

    def label(self, token: int) -> str:
        return f" {self._labels[token]}"


def decode(vocabulary: Vocabulary, tokens: Iterable[int]) -> str:
    """The text of tokens; bytes that are not characters become U+FFFD."""
    return b"".join(vocabulary.piece(int(token)) for token in tokens).decode(errors="replace")
