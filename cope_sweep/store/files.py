"""Files that are replaced as a whole, and read with errors that name them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from cope_sweep.store.errors import DamagedError


def _allow() -> None:
    """Raise no error."""


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[], None] = _allow) -> Iterator[Path]:
    """A temporary path in the same folder, which replaces `path` when the block ends.

    `check` is called immediately before that. If it or the block raises, the temporary file is deleted and `path` is
    unchanged. The umask decides who may read and write the file, whatever the block has written it with.
    """
    temporary = _beside(path)
    temporary.touch(exist_ok=False)
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        # A file system may write the rename before the content: after a power failure the new name would hold nothing.
        to_disk(temporary)
        temporary.chmod(mode)
        check()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def overwriting(path: Path) -> Iterator[IO[bytes]]:
    """A file for the new content of `path`, a file of the user's, which gets the content when the block ends.

    Links are followed, and permissions stay. Where the block raises, the file is unchanged. It never holds a part of
    the content, unless it has several names (hard links), is mounted, or lies in a folder that cannot be written: then
    it is written in place. Devices and pipes get the content as it is made. Raises OSError.
    """
    before = path.stat() if path.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with path.open("wb") as device:
            yield device
        return
    target = Path(os.path.realpath(path))
    is_in_place = before is not None and (before.st_nlink > 1 or not os.access(target.parent, os.W_OK))
    temporary = _beside(target)
    with contextlib.ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        file: IO[bytes] = tempfile.TemporaryFile() if is_in_place else temporary.open("x+b")  # noqa: SIM115
        stack.callback(file.close)
        yield file
        file.flush()
        if not is_in_place:
            if before is not None:
                temporary.chmod(stat.S_IMODE(before.st_mode))
            to_disk(temporary)
            try:
                temporary.replace(target)
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EXDEV):  # else a file that is mounted by itself
                    raise
            else:
                return
        file.seek(0)
        with target.open("wb") as written:
            shutil.copyfileobj(file, written)


@contextlib.contextmanager
def replacing_folder(path: Path, check: Callable[[], None] = _allow) -> Iterator[Path]:
    """A temporary folder beside `path`, which must not exist, and which it becomes when the block ends.

    `check` is called immediately before that. If it or the block raises, the temporary folder is deleted. Umask and the
    folder around it decide who may read and write it.
    """
    temporary = _beside(path)
    temporary.mkdir()
    try:
        yield temporary
        check()
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A new name in the same folder. Unlike a name of `tempfile`, it is created for all whom the umask allows."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


LEAST_FREE_BYTES = 1 << 16
"""A database needs this much for another transaction, with its shared memory."""


def is_disk_full(folder: Path) -> bool:
    """The disk of the folder, or the user's quota there, has no room for another file.

    SQLite calls both "disk I/O error". No number that the system gives counts quotas, so this writes a file.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            return probe.write(bytes(LEAST_FREE_BYTES)) < LEAST_FREE_BYTES
    except OSError as reason:
        return reason.errno in (errno.ENOSPC, errno.EDQUOT)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with all that is in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def create_database_file(path: Path) -> None:
    """Create an empty SQLite file for all whom the umask allows, if there is none; SQLite lets only its owner write."""
    with contextlib.suppress(OSError):
        path.touch(exist_ok=False)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, atomically. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def check_no_link(*folders: Path) -> None:
    """Raise DamagedError if one of the folders is a link, which may lead out of the store."""
    for folder in folders:
        if folder.is_symlink():
            raise DamagedError(
                f"{folder}: a link; move the folder itself into the store", code="link", file=str(folder)
            )


def check_checkpoint(folder: Path) -> None:
    """Raise DamagedError if a checkpoint or its run folder is a link, or if its files are not regular.

    Libraries open its files by their paths: a link may lead out of the store, and a pipe blocks its reader forever.
    """
    check_no_link(folder.parent, folder)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in ("config.json", "model.safetensors") and not entry.is_file(follow_symlinks=False):
                raise _not_regular(folder / entry.name)


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, unbuffered, for reading.

    A link is refused, because it may name a file outside the store, and so are a pipe and a device, which could block
    the reader forever.

    Raises:
        DamagedError: The path is something else than a regular file.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise _not_regular(path) from error
        raise
    # The open file is asked, not the path, which could be replaced between the two calls.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        if path.is_dir():
            raise DamagedError(f"{path}: {os.strerror(errno.EISDIR)}", code="not_a_file", file=str(path))
        raise _not_regular(path)
    return os.fdopen(descriptor, "rb", 0)  # a buffer would cost four more system calls


def _not_regular(path: Path) -> DamagedError:
    return DamagedError(f"{path}: not a regular file; replace it by a file", code="not_a_file", file=str(path))


def to_disk(path: Path) -> None:
    """Return when the content of a regular file survives a power failure. Raises DamagedError, OSError."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def read_bytes(path: Path, size: int = -1) -> bytes | None:
    """The content of a regular file, or its first `size` bytes; None if there is none. Raises DamagedError."""
    try:
        with open_regular(path) as file:
            return file.read() if size < 0 else _read_exactly(file, size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}", code="unreadable_file", file=str(path)) from error


def read_tail(path: Path, size: int) -> tuple[bytes, bool] | None:
    """The last `size` bytes of a regular file, and whether there are more before them; None if there is no file.

    Raises DamagedError.
    """
    try:
        with open_regular(path) as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            return _read_exactly(file, size), length > size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}", code="unreadable_file", file=str(path)) from error


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    """`size` bytes, or all up to the end of the file. One read of an unbuffered file may give fewer."""
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def parse_json(content: bytes, name: Path | str) -> dict[str, Any]:
    """The JSON object in `content`, the content of the file `name`. Raises DamagedError."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise DamagedError(f"{name}: not valid JSON ({error})", code="invalid_json", file=str(name)) from error
    except RecursionError as error:
        raise DamagedError(f"{name}: nested too deeply", code="invalid_json", file=str(name)) from error
    if not isinstance(value, dict):
        raise DamagedError(f"{name}: not a JSON object", code="invalid_json", file=str(name))
    return value


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
