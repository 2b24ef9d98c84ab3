"""A finished run's checkpoint as files to download."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cope_services.errors import NotFoundError
from cope_services.kept import Kept
from cope_services.schemas import Checkpoint, CheckpointFile
from cope_sweep.record import RunFolder


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed."""

    path: Path
    stat: os.stat_result

    @property
    def state(self) -> tuple[int, int, int]:
        """What differs when the content does."""
        return self.stat.st_mtime_ns, self.stat.st_size, self.stat.st_ino


class Checkpoints:
    """Lists checkpoint folders. A name from outside only picks from a listing: it never becomes a path."""

    def __init__(self) -> None:
        self._digests: Kept[str] = Kept(1024)

    def files(self, folder: RunFolder) -> list[StoredFile]:
        """The plain files, by name: no links, no hidden ones, no folders. Raises NotFoundError where there are none."""
        try:
            with os.scandir(folder.checkpoint) as entries:
                plain = [e for e in entries if e.is_file(follow_symlinks=False) and not e.name.startswith(".")]
                listed = [StoredFile(folder.checkpoint / e.name, e.stat(follow_symlinks=False)) for e in plain]
        except (FileNotFoundError, NotADirectoryError):
            listed = []
        if not listed:
            raise NotFoundError(f"the checkpoint of run {folder.run_id} is gone: its folder has no files")
        return sorted(listed, key=lambda file: file.path.name)

    def file(self, folder: RunFolder, name: str) -> StoredFile:
        """Raises NotFoundError."""
        files = self.files(folder)
        for file in files:
            if file.path.name == name:
                return file
        known = ", ".join(file.path.name for file in files)
        raise NotFoundError(f"the checkpoint of run {folder.run_id} has no file {name[:80]!r}; it has {known}")

    def listing(self, folder: RunFolder) -> Checkpoint:
        """The files with their sizes and digests. Raises NotFoundError."""
        return Checkpoint(
            run_id=folder.run_id,
            files=[
                CheckpointFile(
                    name=file.path.name,
                    size_bytes=file.stat.st_size,
                    sha256=self.sha256(file),
                    url=f"/api/v1/runs/{folder.run_id}/checkpoint/{quote(file.path.name)}",
                )
                for file in self.files(folder)
            ],
        )

    def sha256(self, file: StoredFile) -> str:
        """In hexadecimal; computed once for each state of the file."""

        def digest() -> str:
            with file.path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()

        return self._digests.get(file.path, file.state, digest)
