"""The user's cache folder, whose entries are created once and atomically.

$COPE_SWEEP_CACHE/text/<key>/              an entry; it is complete, or it does not exist
$COPE_SWEEP_CACHE/text/<key>.lock          locked (flock) while the entry is created; the kernel unlocks it on a crash
$COPE_SWEEP_CACHE/text/.<key>.<random>/    an entry that is being created, or that a killed process left
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from cope_sweep.errors import InvalidValue
from cope_sweep.text.reading import TextError

CORPUS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def cache_dir() -> Path:
    """$COPE_SWEEP_CACHE, else $XDG_CACHE_HOME/cope-sweep, else ~/.cache/cope-sweep."""
    if chosen := os.environ.get("COPE_SWEEP_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cope-sweep"


def _check_corpus_name(corpus: str) -> str:
    if not CORPUS_NAME.fullmatch(corpus):
        raise InvalidValue(
            f"{corpus!r} is not a corpus name: use letters, digits, `.`, `_` and `-`; a path belongs in `folder`",
            code="invalid_corpus_name",
            value=corpus,
        )
    return corpus


def name_of_path(path: str, *, not_named: str = "") -> str:
    """A corpus name for a file, a folder or a glob: `alice` for `books/alice.txt`, `books` for `books/*.jsonl.gz`.

    A file that is called `not_named` has the name of its folder.
    """
    parts = [part for part in Path(path).parts if not any(character in part for character in "*?[")]
    names = [_NO_NAME.sub("-", part).strip("-._") for part in parts if part != not_named]
    named = list(filter(None, names))
    return _SUFFIXES.sub("", named[-1]) if named else "text"


_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIXES = re.compile(r"(?<=.)(\.(txt|jsonl?|ndjson|parquet|gz|zstd?))+$", re.IGNORECASE)

CorpusName = Annotated[str, AfterValidator(_check_corpus_name)]
"""The name of a corpus, which is a folder of `data_dir()`."""


def data_dir() -> Path:
    """The folder of corpora, each under its name: $COPE_SWEEP_DATA, else `data` in the cache."""
    chosen = os.environ.get("COPE_SWEEP_DATA")
    return Path(chosen).expanduser().absolute() if chosen else cache_dir() / "data"


def create_once(folder: Path, create: Callable[[Path], None]) -> Path:
    """`folder`; if it does not exist, `create` fills it.

    Of several processes that call this at the same time, one creates the folder and the others wait. `create` receives
    a temporary folder, which is renamed to `folder` after all its files are on disk.

    Raises:
        TextError: The cache cannot be written. Exceptions of `create` are raised unchanged, except OSError.
    """
    # An entry is complete, or it does not exist: seeing one needs no lock.
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            # The process that held the lock before may have created it.
            if not folder.is_dir():
                _create(folder, create)
    except OSError as error:
        raise TextError(
            f"{error.filename or folder}: {error.strerror or error}; tokenised text is stored in {folder.parent}; "
            "set COPE_SWEEP_CACHE to another folder",
            code="unusable_cache",
            file=str(error.filename or folder),
        ) from error
    return folder


def _create(folder: Path, create: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    # Folders that killed processes left: none is in use, because this process holds the lock.
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f"{prefix}{secrets.token_hex(8)}")
    temporary.mkdir()  # unlike mkdtemp, for all whom the umask allows
    try:
        create(temporary)
        # On disk before the folder gets its name, so that a crash of the machine leaves no entry with lost files.
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The file stays: if it were deleted, a waiting process and a new one would lock two files of the same name.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
