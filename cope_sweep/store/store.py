"""A store: the folders of its runs, the records of its sweeps, and the index over both.

    <root>/runs/<run_id>/             the files of a run, see `artifacts`
    <root>/sweeps/<sweep_id>.json     the record of a sweep, see `sweeps`
    <root>/submissions/<sweep_id>.json what a job executes, see `sweeps`
    <root>/index.db                   the index, unless it is in another database
    <root>/logs/                      output of workers, one folder per sweep

The root is a folder that all machines share, or the URL of an object store.

The folders are the truth about each run. The index can be made again from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from cope_sweep.store.artifacts import RUN_ID, RunFolder
from cope_sweep.store.errors import StoreError
from cope_sweep.store.event import Status
from cope_sweep.store.files import read_bytes, write_bytes
from cope_sweep.store.index import Index, IndexUnusable
from cope_sweep.store.objects import ObjectFolder, is_object_url
from cope_sweep.store.reading import read_run
from cope_sweep.store.rebuild import rebuild
from cope_sweep.store.sweeps import SweepRecord, parse_sweep, sweep_members

INDEX_VARIABLE = "COPE_SWEEP_INDEX"
CACHE_VARIABLE = "COPE_SWEEP_CACHE"
MEMORY = "sqlite://"


class Store:
    """A store of runs."""

    def __init__(self, location: Path | str, *, index: str | Index | None = None, create: bool = False) -> None:
        """Open a store; with `create`, make its folder and check that it can be written.

        Args:
            location: The folder, or `s3://bucket/prefix` or `gs://bucket/prefix`.
            index: The URL of the index's database; None: $COPE_SWEEP_INDEX, else SQLite in the folder. Or the index.
            create: Whether to make the folder.

        Raises:
            StoreError: With `create`, if the store cannot be made or written; or if the URL cannot be used.
        """
        url = str(location)
        self.objects = ObjectFolder(url.rstrip("/")) if is_object_url(url) else None
        self.root = _working_folder(url) if self.objects else Path(location).expanduser().absolute()
        """The store's folder. Of a store in an object store: a folder of this machine for logs and working copies."""
        if index is None or isinstance(index, str):
            self._index_url = index or os.environ.get(INDEX_VARIABLE)
        else:
            self.index = index  # in place of the cached property
        if create:
            self._create()

    @property
    def location(self) -> str:
        """Name of the store on every machine: its folder, or its URL."""
        return self.objects.url if self.objects else str(self.root)

    @property
    def index_url(self) -> str:
        """The URL of the index's database. Raises StoreError if it has to be named and was not."""
        if self._index_url is None and self.objects:
            raise StoreError(
                f"the store {self.location} needs a database for its index, which no object store can hold: name it "
                "with --index or COPE_SWEEP_INDEX, as postgresql://USER:PASSWORD@HOST/NAME, or, for one machine, "
                "sqlite:////PATH"
            )
        return self._index_url or f"sqlite:///{self.root / 'index.db'}"

    @cached_property
    def index(self) -> Index:
        """The index. That of a store which has none is made from the run folders, which takes 0.5 ms per run.

        Where the store does not exist, or cannot be written and has no index that can be read without writing, the
        index is in memory. Raises StoreError.
        """
        url = self.index_url
        can_be_made = (self.root / "runs").is_dir() and os.access(self.root, os.W_OK)
        if self._index_url is None and not can_be_made and not (self.root / "index.db").exists():
            url = MEMORY
        try:
            index = Index(url)
        except IndexUnusable:  # SQLite has to write to read a write-ahead log
            if self._index_url is not None or os.access(self.root, os.W_OK):
                raise
            index = Index(MEMORY)
        if not index.is_built():
            rebuild(Store(self.location, index=index))
        return index

    def _create(self) -> None:
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

    # -- runs ----------------------------------------------------------------------------------------------------

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

    def status(self, run_id: str) -> Status:
        """The status of one run, from the index; `pending` if it was never begun."""
        return self.index.statuses([run_id]).get(run_id, "pending")

    def end_expired(self) -> list[str]:
        """End the runs whose owner died or whose lease expired, as their folders say; return their ids.

        Their rows say `running` and become what their files say: interrupted, failed, or finished.
        """
        ended = []
        for run_id, owner in self.index.expired():
            row = read_run(self.run(run_id))
            if row is None:
                continue
            if owner is None:
                self.index.write([row])
            elif not self.index.end(row, owner):
                continue
            ended.append(run_id)
        return ended

    # -- other files ---------------------------------------------------------------------------------------------

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

    # -- sweeps --------------------------------------------------------------------------------------------------

    def write_sweep(self, record: SweepRecord, owner: str | None = None) -> None:
        """Write the record of a sweep to its file, atomically, and to the index.

        `owner` is the process that executes the sweep while its status is `running`.
        """
        document = json.dumps(record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
        self.write(f"sweeps/{record.sweep_id}.json", document.encode())
        self.index.write_sweep(record.summary, sweep_members(record), owner)

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """The record of a sweep, or None. Raises StoreError for a file that cannot be read."""
        if "/" in sweep_id or sweep_id.startswith("."):
            return None
        name = f"sweeps/{sweep_id}.json"
        content = self.read(name)
        return None if content is None else parse_sweep(content, f"{self.location}/{name}")


def _working_folder(url: str) -> Path:
    """The folder of this machine for the store at `url`: below $COPE_SWEEP_CACHE, else ~/.cache/cope-sweep."""
    cache = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "cope-sweep"
    return Path(cache).expanduser().absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]
