"""A folder of this machine's user where things that take long to make are kept, each made once and whole.

$COPE_SWEEP_CACHE/text/<key>/          what was made: it is there whole, or not at all
$COPE_SWEEP_CACHE/text/<key>.lock      held (flock) while it is made; the kernel frees it when its holder dies
$COPE_SWEEP_CACHE/text/.<key>.<random>/    in the making, or left by a process that was killed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cope_sweep.text.errors import TextError


def cache_dir() -> Path:
    """$COPE_SWEEP_CACHE, else $XDG_CACHE_HOME/cope-sweep, else ~/.cache/cope-sweep."""
    if chosen := os.environ.get("COPE_SWEEP_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cope-sweep"


def data_dir() -> Path:
    """The folder of corpora, each under its name: $COPE_SWEEP_DATA, else `data` in the cache."""
    chosen = os.environ.get("COPE_SWEEP_DATA")
    return Path(chosen).expanduser().absolute() if chosen else cache_dir() / "data"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` where it is not there yet; of processes that ask together one makes, the others wait.

    `make` gets a temporary folder, which becomes `folder` when all its files are on disk. Raises TextError where the
    cache cannot be written, and what `make` raises.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        raise TextError(
            f"{error.filename or folder}: {error.strerror or error}; tokenised text is kept in {folder.parent}, "
            "choose another place with COPE_SWEEP_CACHE"
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}."
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed: the lock says that none is at work
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix))
    try:
        make(temporary)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
