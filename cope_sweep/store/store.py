"""A store: the folders of its runs, the records of its sweeps, and the index over both.

    <root>/runs/<run_id>/             the files of a run, see `artifacts`
    <root>/sweeps/<sweep_id>.json     the record of a sweep, see `sweeps`
    <root>/submissions/<sweep_id>.json what a job executes, see `submissions`
    <root>/index.db                   the index, unless it is in another database
    <root>/optuna.db                  the studies of searches, unless the index is in PostgreSQL
    <root>/logs/                      output of workers, one folder per sweep

The root is a folder that all machines share, or the URL of an object store.

The folders are the truth about each run. The index can be made again from them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sqlalchemy import Connection
from sqlalchemy.engine import make_url

from cope_sweep.config import Plan
from cope_sweep.records import RunRecord, Status
from cope_sweep.redaction import redacted_url
from cope_sweep.store.artifacts import RUN_ID, RunFolder
from cope_sweep.store.errors import DamagedError, StoreError
from cope_sweep.store.files import read_bytes, remove, write_bytes
from cope_sweep.store.index import Index, IndexUnusable
from cope_sweep.store.index.database import sqlite_url
from cope_sweep.store.indexing import OnProgress, StoredFiles, fill_index
from cope_sweep.store.objects import OUTAGE_S, ObjectFolder, is_object_url
from cope_sweep.store.reading import read_run
from cope_sweep.store.sweeps import SweepRecord, parse_sweep, sweep_members

if TYPE_CHECKING:
    from cope_sweep.store.results_file import ResultsFile

STUDY_FILE = "optuna.db"
"""The file of the studies of searches."""
DEFAULT_FOLDER = "store"
"""The store of commands without `--store`."""
INDEX_VARIABLE = "COPE_SWEEP_INDEX"
STORE_VARIABLE = "COPE_SWEEP_STORE"
CACHE_VARIABLE = "COPE_SWEEP_CACHE"
MEMORY = "sqlite://"
DELETED = ".deleted"
"""Suffix of the folder of a run that is being deleted."""

log = logging.getLogger(__name__)


class Store:
    """A store of runs."""

    read_only: ClassVar[bool] = False
    """Nothing can be written, because the store is a folder of results (`parquet`)."""

    def __init__(
        self,
        location: Path | str,
        *,
        index: str | None = None,
        create: bool = False,
        on_indexing: OnProgress = lambda done, total: None,
    ) -> None:
        """Open a store; with `create`, make its folder and check that it can be written.

        Args:
            location: The folder, or `s3://bucket/prefix` or `gs://bucket/prefix`.
            index: The URL of the index's database; None: $COPE_SWEEP_INDEX, else SQLite in the folder.
            create: Whether to make the folder.
            on_indexing: Called with the number of runs read so far, and of all runs, while the index is made again.

        Raises:
            StoreError: With `create`, if the store cannot be made or written; or if the URL cannot be used.
        """
        url = str(location)
        self.objects = ObjectFolder(url.rstrip("/")) if is_object_url(url) else None
        self.root = _working_folder(url) if self.objects else Path(location).expanduser().absolute()
        """The store's folder. Of a store in an object store: a folder of this machine for logs and working copies."""
        self._index_url = index or os.environ.get(INDEX_VARIABLE)
        self._on_indexing = on_indexing
        if create:
            self._create()

    def wait_out_outages(self) -> None:
        """Wait up to `OUTAGE_S` for an object store that does not answer any more, as a sweep does.

        Else a request fails after 6 s: whoever asks a question, or names a wrong address, would rather have the error.
        """
        if self.objects:
            self.objects.patience_s = OUTAGE_S

    @property
    def location(self) -> str:
        """Name of the store on every machine: its folder, or its URL."""
        return self.objects.url if self.objects else str(self.root)

    @property
    def option(self) -> list[str]:
        """The options that name the store to a command in this folder, for people: without secrets.

        None for the store and the index that commands use without options.
        """
        is_default = not self.objects and self.root == Path(DEFAULT_FOLDER).absolute()
        options = [] if is_default else ["--store", redacted_url(self.location)]
        if self._index_url is not None and self._index_url != os.environ.get(INDEX_VARIABLE):
            options += ["--index", redacted_url(self._index_url)]
        return options

    @property
    def index_url(self) -> str:
        """The URL of the index's database. Raises StoreError if it has to be named and was not."""
        if self._index_url is None and self.objects:
            raise StoreError(
                f"the store {self.location} needs a database for its index, which no object store can hold: name it "
                "with --index or COPE_SWEEP_INDEX, as postgresql://HOST/NAME, or, for one machine, "
                "sqlite:////PATH",
                code="index_not_named",
                store=str(self.location),
            )
        return self._index_url or sqlite_url(self.root / "index.db")

    @cached_property
    def index(self) -> Index:
        """The index, which is opened when it is used first.

        One that is missing, or of an older version, is made again from the run folders, which takes 0.5 ms per run:
        other processes wait meanwhile. A store that does not exist, or that cannot be written and has no index that can
        be read, has an index in memory, to which nothing can be written.

        Raises:
            OtherFormatError: Programs of another version may be using the index.
            StoreError: It cannot be opened.
        """
        is_writable = os.access(self.root, os.W_OK)
        can_be_made = (self.root / "runs").is_dir() and is_writable
        if self._index_url is None and not self.objects and not can_be_made and not (self.root / "index.db").exists():
            return self._index_in_memory()
        try:
            return Index(self.index_url, self._fill)
        except IndexUnusable:  # SQLite has to write to read a write-ahead log
            if self._index_url is not None or is_writable:
                raise
            return self._index_in_memory()

    def put_index_aside(self) -> None:
        """Rename the damaged SQLite file of the index to `<name>.damaged`: it is made again when it is used next."""
        opened: Index | None = vars(self).pop("index", None)
        if opened is not None:
            opened.close()
        path = Path(make_url(self.index_url).database or "")
        path.replace(f"{path}.damaged")
        for suffix in ("-wal", "-shm"):
            # SQLite would apply the log of the damaged file to the new one.
            Path(f"{path}{suffix}").unlink(missing_ok=True)

    def _index_in_memory(self) -> Index:
        """An index of this process, which nobody can write to."""
        if (self.root / "runs").is_dir():
            log.warning("the store %s cannot be written: its index is made in memory, again by each command", self.root)
        index = Index(MEMORY, self._fill)
        index.database.refusal = f"the store {redacted_url(self.location)} does not exist, or cannot be written"
        return index

    def _fill(self, connection: Connection, *, replaces: bool = False) -> None:
        """Fill an empty index. Raises StoreError where it `replaces` one, and the files are not there."""
        if replaces and not self.objects and not (self.root / "runs").is_dir():
            raise StoreError(
                f"the index is of an older version and can only be rebuilt from its store; {self.root} is not a store: "
                "name the store with --store",
                code="no_store",
                store=str(self.root),
            )
        files = self.files()
        if files.folders:
            log.info("making the index of %s from %d run folders", self.location, len(files.folders))
        fill_index(connection, files, self._on_indexing)

    def files(self) -> StoredFiles:
        """The files from which the index is made. Raises OSError, StoreError."""
        return StoredFiles(self.run_folders(), self.sweep_records()[0])

    def _create(self) -> None:
        """Make the folders and check that they can be written. Raises StoreError."""
        try:
            for name in ("runs", "sweeps"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            # Permissions alone do not tell: root may write anywhere, but not on a read-only or a full disk.
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(
                f"the store {self.root} cannot be written ({error.strerror}); "
                "choose another with --store, or set COPE_SWEEP_STORE",
                code="not_writable",
                store=str(self.root),
            ) from error
        if self.objects:
            self.objects.write("store.txt", b"A store of cope-sweep.\n")

    def state(self) -> tuple[object, ...]:
        """A value that changes with every change of what the store says. Raises StoreError."""
        return self.index.state()

    # -- what belongs to a plan ----------------------------------------------------------------------------------

    def records(self, plan: Plan) -> dict[str, RunRecord]:
        """Run id → record, of the runs of a plan that have started. Raises StoreError.

        A folder of results raises NotFoundError and NotFinishedError for what is not the plan of its results.
        """
        return self.index.records(run.run_id for run in plan.runs)

    def kept(self, plan: Plan) -> ResultsFile | None:
        """What a folder of results has about a plan, such as figures and measures of heads; None in other stores."""
        return None

    def only_scale(self, ablation: str) -> str | None:
        """The only scale at which a folder of results has an ablation; None in other stores."""
        return None

    # -- runs ----------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run; it need not exist. Raises StoreError for what is not a run id."""
        if not RUN_ID.fullmatch(run_id):
            raise StoreError(
                f"{run_id!r} is not a run id: 16 hexadecimal digits, as `cope-sweep status` lists them",
                code="invalid_run_id",
                run_id=run_id,
            )
        return RunFolder(self.root / "runs" / run_id, objects=self.objects)

    def run_folders(self) -> list[RunFolder]:
        """The folders of all runs that have started, ordered by id. Raises OSError, except for a missing store."""
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
        """The status of one run, from the index; `pending` if it never started."""
        return self.index.statuses([run_id]).get(run_id, "pending")

    def end_expired(self) -> list[str]:
        """Write how the runs whose lease has expired ended, as their folders say; return their ids.

        Their rows say `running` and become what their files say: interrupted, failed, or finished. Runs that have no
        folder never started, and are pending again.
        """
        records = {run_id: read_run(self.run(run_id)) for run_id in self.index.expired()}
        return self.index.end_expired(records) if records else []

    def delete_run(self, run_id: str, *, since: int | None = None) -> None:
        """Delete a run: its folder, and its row in the index.

        A folder is renamed first, which takes no time, so that whoever is interrupted has deleted the run or has not.
        Objects of an object store are deleted before the row: called again, this deletes the rest.

        Raises StoreError, also for a run that a sweep trains, or that has changed since the index's revision `since`.
        """
        folder = self.run(run_id).path
        aside = folder.with_name(f".{run_id}{DELETED}")
        remove(aside)  # left behind by an earlier call
        with self.index.deleting(run_id, since=since):
            if self.objects:
                self.objects.delete_folder(f"runs/{run_id}")
            with contextlib.suppress(FileNotFoundError):
                folder.replace(aside)
        remove(aside)

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
            raise StoreError(
                f"{self.root / name}: cannot be written ({error.strerror})",
                code="not_writable",
                file=str(self.root / name),
            ) from error

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

    def write_sweep(self, record: SweepRecord, *, ttl_s: float | None = None) -> None:
        """Write the record of a sweep to its file, atomically, and to the index.

        With `ttl_s`, this process executes the sweep, whose lease ends in `ttl_s`.
        """
        self.write_record(record)
        self.index.write_sweep(record.summary, sweep_members(record), ttl_s=ttl_s)

    @contextlib.contextmanager
    def adding_sweep(self, record: SweepRecord) -> Iterator[Callable[[], None]]:
        """Add a sweep by calling what is yielded. Nobody else adds one during the block.

        Its file is written before its row is seen: who finds the row finds the file.
        """
        with self.index.adding_sweep() as add:

            def add_record() -> None:
                self.write_record(record)
                add(record.summary, sweep_members(record))

            yield add_record

    def write_record(self, record: SweepRecord) -> None:
        """Write the record of a sweep to its file alone, atomically. Takes 0.02 ms per run. Raises StoreError."""
        document = json.dumps(record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
        self.write(f"sweeps/{record.sweep_id}.json", document.encode())

    def delete_sweep(self, sweep_id: str) -> None:
        """Delete the record and the submission of a sweep, and its entry in the index. Raises StoreError."""
        # First the row: a record without a row comes back with the next `store check`, a row without its record stays
        # broken.
        self.index.delete_sweep(sweep_id)
        for folder in ("sweeps", "submissions"):
            self.delete(f"{folder}/{sweep_id}.json")

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """The record of a sweep, or None. Raises StoreError for a file that cannot be read."""
        if "/" in sweep_id or sweep_id.startswith("."):
            return None
        name = f"sweeps/{sweep_id}.json"
        content = self.read(name)
        return None if content is None else parse_sweep(content, f"{self.location}/{name}")

    def sweep_records(self) -> tuple[list[SweepRecord], dict[str, str]]:
        """The records of all sweeps, oldest first; and path → what is wrong with it, of those that cannot be read."""
        records: list[SweepRecord] = []
        damaged: dict[str, str] = {}
        for name in self.names("sweeps"):
            if not name.endswith(".json") or not name[0].isdigit():
                continue
            path = f"{self.location}/sweeps/{name}"
            try:
                content = self.read(f"sweeps/{name}")
                if content is not None:
                    records.append(parse_sweep(content, path))
            except DamagedError as error:
                damaged[path] = str(error)
        return records, damaged


def _working_folder(url: str) -> Path:
    """The folder of this machine for the store at `url`: below $COPE_SWEEP_CACHE, else ~/.cache/cope-sweep."""
    cache = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "cope-sweep"
    return Path(cache).expanduser().absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]
