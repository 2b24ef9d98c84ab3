"""Files to text, strictly and in pieces: memory does not grow with the file.

A split's text is one document (its files in order, as if they were one), or one document for each file.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cope_sweep.text.errors import TextError

READ_BYTES = 1 << 20
CHUNK = 1 << 16
"""Characters that are tokenised at a time."""
LONGEST = 1 << 20
"""…and at most, where no place to cut comes: a text without blanks is cut anywhere."""

_BEFORE_LAST_BLANK = re.compile(r".*(?=[ \n][!-~])", re.DOTALL)
"""Up to the last blank that something stands right behind. GPT-2's pre-tokenizer always begins a piece there, so to
tokenise what is before and what is after gives the same ids as to tokenise both in one."""


@dataclass(frozen=True)
class Files:
    """What a split is read from."""

    paths: tuple[Path, ...]
    one_document: bool = True
    """The files are parts of one document; or each is a document of its own."""

    @property
    def documents(self) -> list[tuple[Path, ...]]:
        return [self.paths] if self.one_document else [(path,) for path in self.paths]

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def digest(self) -> str:
        """SHA-256 of the files, whatever they are called and wherever they lie. Raises TextError."""
        whole = hashlib.sha256(b"one" if self.one_document else b"each")
        for path in self.paths:
            whole.update(file_digest(path))
        return whole.hexdigest()


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file. Raises TextError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise TextError(f"{path}: {error.strerror}") from error


def chunks(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in chunks of about `CHUNK` characters, cut where no token can span."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) >= CHUNK and (cut := _cut(held)):
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _cut(held: str) -> int:
    """Where the next chunk ends; 0: more must come first."""
    for end in (CHUNK, len(held)):
        found = _BEFORE_LAST_BLANK.match(held, 0, end)
        if found and found.end():
            return found.end()
    return LONGEST if len(held) >= LONGEST else 0


def read_document(paths: Iterable[Path]) -> Iterator[str]:
    """The text of files, one after the other: plain UTF-8, or the `text` column of Parquet files.

    Raises TextError for a file that cannot be read, is not UTF-8, or is no such Parquet file.
    """
    for path in paths:
        yield from _parquet(path) if path.suffix == ".parquet" else _utf8(path)


def _utf8(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(READ_BYTES)
                waiting = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at = offset - waiting + error.start
                    raise TextError(
                        f"{path}: not UTF-8 text ({error.reason} at byte {at}); convert it, "
                        "as with `iconv -f LATIN1 -t UTF-8`, or leave it out"
                    ) from error
                if text:
                    yield text
                if not data:
                    return
                offset += len(data)
    except OSError as error:
        raise TextError(f"{path}: {error.strerror}") from error


def _parquet(path: Path) -> Iterator[str]:
    """Lines, as the hub has them: a blank line was emptied there, and is a blank and an end of line in WikiText."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise TextError(f"{path}: no column `text` in this Parquet file; it has {names}")
            for batch in file.iter_batches(batch_size=4096, columns=["text"]):
                lines = (line or " " for line in batch.column(0).to_pylist())
                yield "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    except (OSError, pa.ArrowException) as error:
        raise TextError(f"{path}: not a whole Parquet file ({error})") from error
