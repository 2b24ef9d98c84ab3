"""Where the files of a store are: in a folder, or in an object store with a working folder on each machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cope_sweep.store.artifacts import RUN_ID, RunFolder
from cope_sweep.store.errors import StoreError
from cope_sweep.store.files import read_bytes, write_bytes
from cope_sweep.store.objects import ObjectFolder, is_object_url

CACHE_VARIABLE = "COPE_SWEEP_CACHE"


class StoreFiles:
    """The files of a store: run folders, sweep records, and marks by which machines recognise the same store."""

    def __init__(self, location: Path | str) -> None:
        """Name the files; nothing is read or made.

        Args:
            location: A folder, or `s3://bucket/prefix` or `gs://bucket/prefix`.

        Raises:
            StoreError: The URL is not one of an object store, or cannot be used.
        """
        url = str(location)
        self.objects = ObjectFolder(url.rstrip("/")) if is_object_url(url) else None
        self.root = _working_folder(url) if self.objects else Path(location).expanduser().absolute()
        """The store's folder. Of a store in an object store: a folder of this machine for logs and working copies."""

    @property
    def location(self) -> str:
        """Name of the store on every machine: its folder, or its URL."""
        return self.objects.url if self.objects else str(self.root)

    def create(self) -> None:
        """Make the folders and check that they can be written. Raises StoreError."""
        try:
            for name in ("runs", "sweeps"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(
                f"the store {self.root} cannot be written ({error.strerror}); "
                "choose another with --store, or set COPE_SWEEP_STORE"
            ) from error
        if self.objects:
            self.objects.write("store.txt", b"A store of cope-sweep.\n")

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run; it need not exist. Raises StoreError for what is not a run id."""
        if not RUN_ID.fullmatch(run_id):
            raise StoreError(f"{run_id!r} is not a run id: 16 hexadecimal digits, as `cope-sweep status` lists them")
        return RunFolder(self.root / "runs" / run_id, objects=self.objects)

    def run_folders(self) -> list[RunFolder]:
        """The folders of all runs that were begun, ordered by id. Raises OSError, except for a missing store."""
        if self.objects:
            names = self.objects.names("runs")
        else:
            try:
                names = sorted(entry.name for entry in os.scandir(self.root / "runs"))
            except FileNotFoundError:
                names = []
        runs = self.root / "runs"
        return [RunFolder(runs / name, objects=self.objects) for name in names if RUN_ID.fullmatch(name)]

    def read(self, name: str) -> bytes | None:
        """The content of another file; None if there is none. Raises StoreError."""
        return self.objects.read(name) if self.objects else read_bytes(self.root / name)

    def write(self, name: str, content: bytes) -> None:
        """Write another file, atomically. Raises StoreError."""
        if self.objects:
            self.objects.write(name, content)
            return
        try:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.root / name, content)
        except OSError as error:
            raise StoreError(f"{self.root / name}: cannot be written ({error.strerror})") from error

    def delete(self, name: str) -> None:
        """Delete another file, if there is one. Raises StoreError."""
        if self.objects:
            self.objects.delete(name)
        else:
            (self.root / name).unlink(missing_ok=True)

    def names(self, folder: str) -> Iterator[str]:
        """The names of the files directly below a folder, sorted."""
        if self.objects:
            yield from self.objects.names(folder)
        elif (self.root / folder).is_dir():
            yield from sorted(path.name for path in (self.root / folder).iterdir())


def _working_folder(url: str) -> Path:
    """The folder of this machine for the store at `url`: below $COPE_SWEEP_CACHE, else ~/.cache/cope-sweep."""
    cache = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "cope-sweep"
    return Path(cache).expanduser().absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]
