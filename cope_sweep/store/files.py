"""Files that are replaced as a whole, and read with errors that name them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cope_sweep.store.errors import DamagedError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, which replaces `path` when the block ends.

    If the block raises, the temporary file is deleted and `path` is unchanged.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, atomically. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically.

    Raises:
        ValueError: `value` contains NaN or an infinity.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None if there is no such file.

    Raises:
        DamagedError: The file cannot be read, or does not hold a JSON object.
    """
    content = read_bytes(path)
    return None if content is None else parse_json(content, path)


def read_bytes(path: Path, size: int = -1) -> bytes | None:
    """The content of a file, or its first `size` bytes; None if there is none. Raises DamagedError."""
    try:
        with path.open("rb", buffering=0 if size < 0 else -1) as file:  # a buffer would cost four more system calls
            return file.read(size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error


def parse_json(content: bytes, name: Path | str) -> dict[str, Any]:
    """The JSON object in `content`, which is that of the file `name`. Raises DamagedError."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise DamagedError(f"{name}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{name}: not a JSON object")
    return value


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
