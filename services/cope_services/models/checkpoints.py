"""The checkpoint files of finished runs, for downloads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from urllib.parse import quote

from cachetools import LRUCache, cached

from cope_sweep.api.answers import Checkpoint, CheckpointFile
from cope_sweep.read.queries import NotFoundError
from cope_sweep.store import RunFolder

MAX_DIGESTS = 1024
"""Digests in the cache."""

FileState = tuple[int, int, int]


@dataclass(frozen=True)
class StoredFile:
    """A file and its status when the folder was listed."""

    path: Path
    stat: os.stat_result

    @property
    def state(self) -> FileState:
        """Modification time, size and inode: they change when the content changes."""
        return self.stat.st_mtime_ns, self.stat.st_size, self.stat.st_ino


class Checkpoints:
    """Lists checkpoint folders. A client's file name is only compared with a listing; it never becomes a path."""

    def __init__(self) -> None:
        self._digest: Callable[[Path, FileState], str] = cached(LRUCache(MAX_DIGESTS), condition=Condition())(_sha256)

    def files(self, folder: RunFolder) -> list[StoredFile]:
        """The regular, visible files by name, without links and folders. Raises NotFoundError if there are none."""
        try:
            checkpoint = folder.fetch_checkpoint()
            with os.scandir(checkpoint) as entries:
                regular = [e for e in entries if e.is_file(follow_symlinks=False) and not e.name.startswith(".")]
                files = [StoredFile(checkpoint / e.name, e.stat(follow_symlinks=False)) for e in regular]
        except (FileNotFoundError, NotADirectoryError):
            files = []
        if not files:
            raise NotFoundError(f"the checkpoint of run {folder.run_id} was deleted: its folder has no files")
        return sorted(files, key=lambda file: file.path.name)

    def file(self, folder: RunFolder, name: str) -> StoredFile:
        """The file with this name. Raises NotFoundError."""
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
                    sha256=self._digest(file.path, file.state),
                    url=f"/api/v1/runs/{folder.run_id}/checkpoint/{quote(file.path.name)}",
                )
                for file in self.files(folder)
            ],
        )


def _sha256(path: Path, state: FileState) -> str:
    """The digest in hexadecimal; `state` is part of the cache key, so a changed file is read again."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
