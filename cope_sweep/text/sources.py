"""Sources of documents: files of splits, any text files, JSON lines and Parquet files, and how documents are divided.

A source is read in parts, and the text of each part has a digest, on which the fingerprint of the whole depends.
Documents that no split names are divided by hash: a row, a line or a short file belongs to one split; of a longer file,
two neighbouring stretches are held out, at a place that its hash chooses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from cope_sweep.errors import JsonValue
from cope_sweep.text.cache import cache_dir, create_once
from cope_sweep.text.reading import BYTE_ORDER_MARK, Files, TextError, file_digest, open_file, read_text

TRAIN, VALIDATION, TEST = "train", "validation", "test"
Split = str
TextDocument = tuple[Split, Iterator[str]]
"""The split of a document, and its text in pieces."""

LONG_FILE_BYTES = 1 << 14
"""A text file of this size gives each split a part of it; a shorter one belongs to a split as a whole."""
LARGE_FILE_BYTES = 64 << 20
"""The digest of a file of this size is kept: every process that trains needs it."""
GROUP_BYTES = 32 << 20
"""Text of a Parquet file that is read as one part, or one group of rows if that is larger."""
ROWS = 1024
"""Rows that are read at a time."""
LINE_BYTES = 64 << 20
"""Longest line of a JSON file. It stops files that are not JSON lines from filling the memory."""

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
FORMATS = ".txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet"

SPLIT_WORDS = {
    "train": TRAIN, "training": TRAIN, "valid": VALIDATION, "validation": VALIDATION, "dev": VALIDATION, "test": TEST,
}  # fmt: skip
"""Word in a file's name → split."""
_SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d{3,})-of-(?P<total>\d{3,})(?P<after>.*)")


@dataclass(frozen=True)
class SourcePart:
    """A piece of a source: a file, or some groups of rows of a Parquet file."""

    split: Split
    """The split that it is for. Some of its documents may be held out for others."""
    size_bytes: int
    """Its share of the source's size."""
    documents: Callable[[], Iterator[TextDocument]]


@dataclass(frozen=True)
class Limit:
    """How much each split has: it ends with the first piece of text by which it has so much. None: no limit."""

    tokens: int | None = None
    size_bytes: int | None = None

    def is_reached(self, tokens: int, size_bytes: int) -> bool:
        """A split with this content is complete."""
        return (self.tokens is not None and tokens >= self.tokens) or (
            self.size_bytes is not None and size_bytes >= self.size_bytes
        )


NO_LIMIT = Limit()


class TextSource(Protocol):
    """Where a corpus is from."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that it has to have."""

    @property
    def limit(self) -> Limit: ...

    @property
    def size_bytes(self) -> int:
        """Size of all files."""

    def key(self) -> JsonValue:
        """What decides its text: digests of files, or names and a commit. Raises TextError."""

    def parts(self, full: Collection[Split]) -> Iterator[SourcePart]:
        """The parts in order. Those of splits that are in `full` by then are left out. Raises TextError."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of each split."""

    files: Mapping[Split, Files]
    limit: Limit = NO_LIMIT

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(self.files)

    @property
    def size_bytes(self) -> int:
        return sum(files.size_bytes for files in self.files.values())

    def key(self) -> JsonValue:
        for split, files in self.files.items():
            for path in files.paths:
                if not path.stat().st_size:
                    raise TextError(
                        f"{path}: empty; the split {split!r} needs text", code="empty_text", file=str(path), split=split
                    )
        return {split: files.digest() for split, files in self.files.items()}

    def parts(self, full: Collection[Split]) -> Iterator[SourcePart]:
        for split, files in self.files.items():
            yield SourcePart(split, files.size_bytes, partial(_documents_of, split, files))


def _documents_of(split: Split, files: Files) -> Iterator[TextDocument]:
    return ((split, read_document(document)) for document in files.documents)


# -- the division into splits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """The shares of documents that are held out, by the hash of their content; 0: the split has its own files."""

    validation: float
    test: float

    def split_of(self, digest: bytes) -> Split:
        """The split of a document with this SHA-256. Copies of a document are in the same one."""
        place = _place(digest)
        if place < self.validation:
            return VALIDATION
        return TEST if place < self.validation + self.test else TRAIN

    def divide(self, split: Split, texts: Iterable[str]) -> Iterator[TextDocument]:
        """The documents of a split's files, without blank ones. Of the training files, some are of other splits."""
        for text in texts:
            # Half of a surrogate pair, which JSON can hold, is not a character.
            data = text.encode("utf-8", "replace")
            if data and not data.isspace():
                own = self.split_of(hashlib.sha256(data).digest()) if split == TRAIN else split
                yield own, iter((data.decode("utf-8"),))


def _place(digest: bytes) -> float:
    """A number in [0, 1) that a hash chooses."""
    return int.from_bytes(digest[:8]) / 2**64


def splits_in_name(name: str) -> set[Split]:
    """The splits whose words a file's name has."""
    return {SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_WORDS}


def splits_by_name(names: Sequence[str]) -> dict[Split, list[str]] | None:
    """The files of each split, where every name has the word of one (`train-00000-of-00002.parquet`); None if none has.

    Raises TextError if some files have one of these words and others none, or several.
    """
    names_by_split: dict[str, set[Split]] = {}
    for name in names:
        names_by_split[name] = splits_in_name(name.rpartition("/")[2])
    named = set().union(*names_by_split.values()) if names_by_split else set()
    # If all files are called train, none is held out: a hash chooses what is.
    if TRAIN not in named or len(named) == 1:
        return None
    for name, splits in names_by_split.items():
        if len(splits) != 1:
            raise TextError(
                f"{name}: its name has {'several words' if splits else 'no word'} of train, validation and test, and "
                "other files have one each; rename it, or choose files with a glob, as in task.path='folder/*.jsonl'",
                code="ambiguous_split",
                file=name,
                splits=sorted(splits),
            )
    by_split: dict[Split, list[str]] = {}
    for name, splits in names_by_split.items():
        by_split.setdefault(min(splits), []).append(name)
    return by_split


def check_shards(names: Iterable[str]) -> None:
    """Raise TextError where one of several numbered files is missing, as `train-00001-of-00003.parquet`."""
    shards: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match["before"], match["total"], match["after"]), set()).add(int(match["number"]))
    for (before, total, after), numbers in shards.items():
        # Numbers start at 0 or at 1.
        first = 1 if int(total) in numbers else 0
        missing = sorted(set(range(first, int(total) + first)) - numbers)
        if missing:
            name = f"{before}{missing[0]:0{len(total)}}-of-{total}{after}"
            raise TextError(
                f"{name}: missing, and {len(numbers)} of {total} such files are there; bring it back, or choose files "
                "with a glob without `*`, as in part-0000[0-3]-of-00014.parquet",
                code="missing_shard",
                file=name,
                missing=missing[:10],
                total=int(total),
            )


# -- formats -----------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> Literal["text", "json", "parquet"] | None:
    """The format of a file by its name; JSON's suffixes may be followed by `.gz` or `.zst`; None: another one."""
    lower = name.lower()
    for suffix in COMPRESSIONS:
        if lower.endswith(suffix):
            return "json" if lower.removesuffix(suffix).endswith(JSON_SUFFIXES) else None
    if lower.endswith(JSON_SUFFIXES):
        return "json"
    if lower.endswith(".parquet"):
        return "parquet"
    return "text" if lower.endswith(".txt") else None


@dataclass(frozen=True)
class RowReader:
    """A file of documents, one for each line or row: JSON lines or Parquet, here or at a distance."""

    name: str
    """Its path, for messages."""
    size_bytes: int
    open: Callable[[], IO[bytes]]
    """Opens it; the file can seek if it is Parquet."""
    column: str

    def parts(self, split: Split, shares: Shares) -> Iterator[SourcePart]:
        """The parts of the file: all JSON lines, or some groups of rows. Raises TextError."""
        if kind_of(self.name) == "json":
            yield SourcePart(split, self.size_bytes, lambda: shares.divide(split, self.json_lines()))
            return
        groups = self._groups()
        for group in groups:
            documents = partial(self._documents_of_groups, group, split, shares)
            yield SourcePart(split, self.size_bytes // len(groups), documents)

    def _documents_of_groups(self, groups: Sequence[int], split: Split, shares: Shares) -> Iterator[TextDocument]:
        return shares.divide(split, self.rows(groups))

    def json_lines(self) -> Iterator[str]:
        """The texts of a file of JSON lines. Raises TextError for a line that has none."""
        name = self.name.lower()
        compression = next((kind for suffix, kind in COMPRESSIONS.items() if name.endswith(suffix)), None)
        number = 0
        try:
            with self.open() as file:
                for number, line in enumerate(_lines(file, compression), start=1):
                    if text := line.strip():
                        yield self._text_of(text, number)
        except (EOFError, ValueError, OSError) as error:
            if not _is_damage(error):
                raise
            raise TextError(
                f"{self.name}:{number + 1}: damaged ({error}); bring the file back, or leave it out",
                code="damaged_file",
                file=self.name,
                line=number + 1,
                reason=str(error),
            ) from error

    def _text_of(self, line: bytes, number: int) -> str:
        place = f"{self.name}:{number}"
        try:
            data: Any = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise TextError(
                f"{place}: not a line of JSON ({error}); each line is an object, as in "
                f'{{"{self.column}": "a document"}}',
                code="not_json",
                file=self.name,
                line=number,
            ) from error
        if not isinstance(data, dict) or self.column not in data:
            known = sorted(map(str, data)) if isinstance(data, dict) else []
            raise self._no_column(place, known, line=number)
        text = data[self.column]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise self._no_text(place, type(text).__name__, line=number)
        return text

    def _groups(self) -> list[list[int]]:
        """The numbers of the groups of rows of each part."""
        groups: list[list[int]] = []
        with _parquet_file(self) as file:
            total = 0
            for number in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(number).total_byte_size
                if not groups or total + size > GROUP_BYTES:
                    groups.append([])
                    total = 0
                groups[-1].append(number)
                total += size
        return groups

    def rows(self, groups: Sequence[int] | None = None) -> Iterator[str]:
        """The texts of some groups of rows of a Parquet file, or of all; empty for null. Raises TextError."""
        with _parquet_file(self) as file:
            self._check_column(file.schema_arrow)
            for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    yield text or ""

    def _check_column(self, schema: Any) -> None:
        import pyarrow.types as types

        if self.column not in schema.names:
            raise self._no_column(self.name, list(schema.names))
        dtype = schema.field(self.column).type
        # Writers may store texts that repeat as a dictionary.
        value = dtype.value_type if types.is_dictionary(dtype) else dtype
        if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
            raise self._no_text(self.name, str(dtype))

    def _no_column(self, place: str, columns: list[str], **data: JsonValue) -> TextError:
        known = ", ".join(columns[:20]) or "none"
        return TextError(
            f"{place}: no column {self.column!r}; its columns are {known}; set task.column to one of them",
            code="no_text_column",
            file=self.name,
            column=self.column,
            columns=columns,
            **data,
        )

    def _no_text(self, place: str, type_name: str, **data: JsonValue) -> TextError:
        return TextError(
            f"{place}: the column {self.column!r} is not text ({type_name}); set task.column to the column of the text",
            code="column_not_text",
            file=self.name,
            column=self.column,
            type=type_name,
            **data,
        )


def _is_damage(error: BaseException) -> bool:
    """The error of reading means that a file is damaged, and not that it cannot be reached."""
    import pyarrow as pa

    # pyarrow raises OSError itself for damaged content. Systems and networks raise subclasses of it.
    return isinstance(error, (EOFError, ValueError, pa.ArrowException)) or type(error) is OSError


def _lines(file: IO[bytes], compression: Literal["gzip", "zstd"] | None) -> Iterator[bytes]:
    """The lines of a file. Raises ValueError for one that is longer than LINE_BYTES, EOFError or OSError if damaged."""
    import pyarrow as pa

    stream = pa.CompressedInputStream(file, compression) if compression else file
    pending, is_first = b"", True
    while data := stream.read(1 << 20):
        if is_first:
            data, is_first = data.removeprefix(BYTE_ORDER_MARK.encode()), False
        *lines, pending = (pending + data).split(b"\n")
        if len(pending) > LINE_BYTES:
            raise ValueError(f"a line has more than {LINE_BYTES >> 20} MiB")
        yield from lines
    if pending:
        yield pending


@contextlib.contextmanager
def _parquet_file(rows: RowReader) -> Iterator[Any]:
    """The opened Parquet file of some rows. Raises TextError where it is damaged."""
    import pyarrow.parquet as pq

    try:
        with rows.open() as file:
            yield pq.ParquetFile(file)
    except Exception as error:
        if not _is_damage(error):
            raise
        raise TextError(
            f"{rows.name}: not a valid Parquet file ({error}); bring it back, or leave it out",
            code="not_parquet",
            file=rows.name,
        ) from error


def rows_of_file(path: Path, column: str) -> RowReader:
    """The documents of a file of this machine. Raises TextError if it cannot be opened."""
    with open_file(path) as file:
        size_bytes = file.seek(0, io.SEEK_END)
    return RowReader(str(path), size_bytes, lambda: open_file(path), column)


def read_document(paths: Iterable[Path]) -> Iterator[str]:
    r"""The text of files, in order and in pieces: plain UTF-8, or the column `text` of Parquet files. Raises TextError.

    Rows are lines. A blank line of WikiText, ` \n`, is an empty string in the hub's files.
    """
    for path in paths:
        if kind_of(path.name) == "parquet":
            lines = (line or " " for line in rows_of_file(path, "text").rows())
            yield from (line if line.endswith("\n") else f"{line}\n" for line in lines)
        else:
            yield from read_text(path)


# -- texts of this machine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalTexts:
    """Text files, JSON lines and Parquet files of this machine."""

    files: Mapping[Split, tuple[Path, ...]]
    """The files of each split that has some."""
    column: str
    encoding: str
    shares: Shares
    """What is held out of the training files."""
    limit: Limit = NO_LIMIT

    splits: tuple[Split, ...] = (TRAIN, VALIDATION, TEST)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for paths in self.files.values() for path in paths)

    def key(self) -> JsonValue:
        digests = {split: [_known_digest(path) for path in paths] for split, paths in self.files.items()}
        formats = {split: [kind_of(path.name) or "text" for path in paths] for split, paths in self.files.items()}
        shares = [self.shares.validation, self.shares.test]
        return {
            "files": digests, "formats": formats, "column": self.column, "encoding": self.encoding, "shares": shares,
            "limit": [self.limit.tokens, self.limit.size_bytes],
        }  # fmt: skip

    def parts(self, full: Collection[Split]) -> Iterator[SourcePart]:
        for split, path in ((split, path) for split, paths in self.files.items() for path in paths):
            if split in full:
                continue
            if kind_of(path.name) in ("json", "parquet"):
                yield from rows_of_file(path, self.column).parts(split, self.shares)
            elif size := path.stat().st_size:
                yield SourcePart(split, size, partial(self._texts, split, path))

    def _texts(self, split: Split, path: Path) -> Iterator[TextDocument]:
        size, digest = path.stat().st_size, file_digest(path)
        if split != TRAIN or size < LONG_FILE_BYTES:
            split = self.shares.split_of(digest) if split == TRAIN else split
            yield split, read_text(path, encoding=self.encoding)
            return
        held_out = self.shares.validation + self.shares.test
        start = _place(digest) * (1 - held_out) * size
        # One stretch, at a place that depends on the content alone, so that copies of a file are divided alike.
        ends = [start, start + self.shares.validation * size, start + held_out * size]
        first, middle, last = _borders(path, [int(end) for end in ends])
        # What is held out comes first, so that a limit of the training text does not leave it out.
        for stretch, begin, end in (
            (VALIDATION, first, middle), (TEST, middle, last), (TRAIN, 0, first), (TRAIN, last, size),
        ):  # fmt: skip
            if begin < end:
                yield stretch, read_text(path, encoding=self.encoding, start=begin, end=end)


def _known_digest(path: Path) -> str:
    """SHA-256 of a file. For large files it is cached until their size or time of change differs."""
    state = path.stat()
    if state.st_size < LARGE_FILE_BYTES:
        return file_digest(path).hex()
    # The inode, too: another file may take its place with the same size and time.
    key = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ino}".encode()).hexdigest()[:32]

    def create(folder: Path) -> None:
        (folder / "sha256").write_text(file_digest(path).hex())

    return (create_once(cache_dir() / "digests" / key, create) / "sha256").read_text()


def _borders(path: Path, places: Sequence[int]) -> list[int]:
    """The start of the first line at or after each place; of the first character where no line starts nearby.

    Of different places that have the same next line, all but the last get a character: no stretch between is empty.
    """
    borders: dict[int, int] = {}
    following = path.stat().st_size + 1
    with path.open("rb") as file:
        for place in sorted(set(places), reverse=True):
            file.seek(place)
            data = file.read(LONG_FILE_BYTES // 4)
            skipped = data.find(b"\n") + 1
            if not (place and skipped and place + skipped < following):
                # A byte of UTF-8 that starts a character is none of 0x80 … 0xBF.
                skipped = next((i for i, byte in enumerate(data) if not 0x80 <= byte < 0xC0), 0)
            borders[place] = following = place + skipped
    return [borders[place] for place in places]


def find_files(path: str) -> tuple[Path, ...]:
    """The files that a path names: a file, a folder's files with a known suffix, or a glob's. Raises TextError."""
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        candidates = [
            candidate
            for candidate in place.rglob("*")
            if kind_of(candidate.name) and not any(part.startswith(".") for part in candidate.relative_to(place).parts)
        ]
        nothing = f"no file with a name that ends with {FORMATS}"
    elif place.exists():
        return (place,)
    elif any(character in path for character in "*?["):
        root, pattern = _glob_root(place)
        candidates, nothing = list(root.glob(pattern)), "no file matches"
    else:
        candidates, nothing = [], "no such file or folder"
    files = tuple(sorted(candidate for candidate in candidates if candidate.is_file()))
    if not files:
        raise TextError(
            f"{place}: {nothing}; set task.path to a file, a folder or a glob, as in 'texts/*.jsonl.gz'",
            code="no_such_file",
            file=str(place),
        )
    return files


def _glob_root(place: Path) -> tuple[Path, str]:
    """The folder before the first part with a wildcard, and the rest."""
    parts = place.parts
    first = next(index for index, part in enumerate(parts) if any(character in part for character in "*?["))
    return Path(*parts[:first]), "/".join(parts[first:])
