"""Strict reading of text files in chunks, so that memory does not grow with their size.

The text of a split is either one document, which is its files in order, or one document per file.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cope_sweep.errors import UserError


class TextError(UserError):
    """A text or its tokenizer cannot be used. The message names the file and the cause, and says what to do."""

    default_code = "invalid_text"


READ_BYTES = 1 << 20
"""Bytes that are read at a time."""
CHUNK = 1 << 16
"""Characters in a chunk, unless the text has no place to cut; chunks are tokenised one by one."""
MAX_CHUNK = 1 << 20
"""Largest number of characters in a chunk. A text without blanks is cut at this length."""

BYTE_ORDER_MARK = "\ufeff"
"""Some editors write it at the start of a file. It is not part of the text."""

_BEFORE_LAST_BLANK = re.compile(r".*(?=[ \n][!-~])", re.DOTALL)
"""The text before the last blank that is followed by a printable ASCII character. GPT-2's pre-tokenizer always starts a
new piece there, so tokenising the two parts gives the same ids as tokenising the whole. Those of other tokenizers may
not: Llama 3's has a piece of `;` and the end of the line, which a cut divides into two tokens."""


@dataclass(frozen=True)
class Files:
    """The files of a split."""

    paths: tuple[Path, ...]
    one_document: bool = True
    """True: the files are parts of one document. False: each file is a document."""

    @property
    def documents(self) -> list[tuple[Path, ...]]:
        return [self.paths] if self.one_document else [(path,) for path in self.paths]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def digest(self) -> str:
        """SHA-256 of the contents of the files in order; names and folders do not matter. Raises TextError."""
        whole = hashlib.sha256(b"one" if self.one_document else b"each")
        for path in self.paths:
            whole.update(file_digest(path))
        return whole.hexdigest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's content. Raises TextError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise _unreadable(path, error) from error


def open_file(path: Path) -> IO[bytes]:
    """The file, open to read. Raises TextError if it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def chunks(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in chunks of about `CHUNK` characters, cut where GPT-2's pre-tokenizer starts a piece.

    Another kind of tokenizer may have a token across a cut, which is then two: the same text in other ids.
    """
    buffer = ""
    for piece in pieces:
        buffer += piece
        while len(buffer) >= CHUNK and (cut := _cut(buffer)):
            yield buffer[:cut]
            buffer = buffer[cut:]
    if buffer:
        yield buffer


def _cut(buffer: str) -> int:
    """The length of the next chunk; 0 if more text is needed."""
    # A text without a place to cut within the usual length may have one in what was read beyond it.
    for end in (CHUNK, len(buffer)):
        found = _BEFORE_LAST_BLANK.match(buffer, 0, end)
        if found and found.end():
            return found.end()
    return MAX_CHUNK if len(buffer) >= MAX_CHUNK else 0


def read_text(path: Path, *, encoding: str = "utf-8", start: int = 0, end: int | None = None) -> Iterator[str]:
    """The text of a plain file in pieces, or of its bytes `start` … `end` − 1, without a byte order mark at its start.

    Raises TextError if the file cannot be read or decoded.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    offset, is_first = start, start == 0
    try:
        with path.open("rb") as file:
            if start:
                file.seek(start)
            while True:
                data = file.read(READ_BYTES if end is None else min(READ_BYTES, end - offset))
                # Bytes of a character that the data before began: the place of an error counts from the first of them.
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise _undecodable(path, encoding, offset - pending + error.start, error.reason) from error
                if is_first and text:
                    text, is_first = text.removeprefix(BYTE_ORDER_MARK), False
                if text:
                    yield text
                if not data:
                    return
                offset += len(data)
    except OSError as error:
        raise _unreadable(path, error) from error


def _undecodable(path: Path, encoding: str, byte: int, reason: str) -> TextError:
    name = "UTF-8" if encoding == "utf-8" else encoding
    return TextError(
        f"{path}: not {name} text ({reason} at byte {byte}); convert it, "
        "for example with `iconv -f LATIN1 -t UTF-8`, or remove it",
        code="not_utf8" if encoding == "utf-8" else "wrong_encoding",
        file=str(path),
        byte=byte,
    )


def _unreadable(path: Path, error: OSError) -> TextError:
    code = "no_such_file" if isinstance(error, FileNotFoundError) else "unreadable_file"
    return TextError(f"{path}: {error.strerror}", code=code, file=str(path))
