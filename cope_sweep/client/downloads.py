"""A downloaded file: it grows beside its place, is checked, and then takes its place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from cope_sweep.client.errors import DownloadError


class Download:
    """The file while it is received. A later download of the same content continues where this one broke off."""

    def __init__(self, path: Path, sha256: str, size_bytes: int) -> None:
        """Prepare a download.

        Args:
            path: Where the file will be.
            sha256: The digest of its content, in hexadecimal.
            size_bytes: Its size.
        """
        self.path, self.sha256, self.size_bytes = path, sha256, size_bytes
        # Of another content, nothing is continued.
        self.partial = path.with_name(f".{path.name}.{sha256[:16]}.part")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.partial.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def received_bytes(self) -> int:
        """How many bytes of the content are on this machine."""
        return self._open.tell()

    @property
    def is_complete(self) -> bool:
        return self.received_bytes >= self.size_bytes

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request for the rest."""
        return {"accept-encoding": "identity"} | (
            {"range": f"bytes={self.received_bytes}-"} if self.received_bytes else {}
        )

    def start(self, status: int) -> None:
        """A response with this status begins: 206 continues, anything else has the whole content."""
        if status != 206:
            self._open.truncate(0)
            self._open.seek(0)

    def write(self, chunk: bytes) -> None:
        """Add bytes. Raises DownloadError if they are more than were announced."""
        self._open.write(chunk)
        if self.received_bytes > self.size_bytes:
            self._discard(f"more than the {self.size_bytes:,} bytes that were announced")

    def finish(self) -> Path:
        """Check the content and put the file in its place. Raises DownloadError."""
        self._open.flush()
        os.fsync(self._open.fileno())
        with self.partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            self._discard(f"its SHA-256 is {digest}, and {self.sha256} was announced")
        self.partial.replace(self.path)
        return self.path

    def _discard(self, reason: str) -> None:
        self.partial.unlink(missing_ok=True)
        raise DownloadError(f"{self.path}: {reason}; download it again")

    @property
    def _open(self) -> IO[bytes]:
        if self._file is None:
            raise DownloadError(f"{self.path}: the download was not begun")
        return self._file
