"""A store: the folders of its runs, the records of its sweeps, and the index over both.

    <root>/runs/<run_id>/             the files of a run, see `artifacts`
    <root>/sweeps/<sweep_id>.json     the record of a sweep, see `sweeps`
    <root>/submissions/<sweep_id>.json what a job executes, see `submissions`
    <root>/index.db                   the index, unless it is in another database
    <root>/logs/                      output of workers, one folder per sweep

The root is a folder that all machines share, or the URL of an object store.

The folders are the truth about each run. The index can be made again from them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import StoreError
from cope_sweep.store.event import Status
from cope_sweep.store.index import Index, IndexUnusable, RunRow
from cope_sweep.store.layout import StoreFiles
from cope_sweep.store.reading import read_run
from cope_sweep.store.rebuild import mark_lost, rebuild
from cope_sweep.store.sweeps import SweepRecord, parse_sweep, sweep_members

INDEX_VARIABLE = "COPE_SWEEP_INDEX"
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
        self.files = StoreFiles(location)
        if index is None or isinstance(index, str):
            self._index_url = index or os.environ.get(INDEX_VARIABLE)
        else:
            self.index = index  # in place of the cached property
        if create:
            self.files.create()

    @property
    def root(self) -> Path:
        """The store's folder; of a store in an object store, its working folder on this machine."""
        return self.files.root

    @property
    def location(self) -> str:
        """Name of the store on every machine: its folder, or its URL."""
        return self.files.location

    @property
    def index_url(self) -> str:
        """The URL of the index's database. Raises StoreError if it has to be named and was not."""
        if self._index_url is None and self.files.objects:
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
            rebuild(self.files, index)
        return index

    # -- runs ----------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run; it need not exist.

        Raises:
            StoreError: `run_id` is not 16 hexadecimal digits.
        """
        return self.files.run(run_id)

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
            if row is not None and self._end_if_expired(row, owner):
                ended.append(run_id)
        return ended

    def mark_lost(self, run_ids: Iterable[str]) -> dict[str, str]:
        """Mark those of the runs as damaged that were finished and have lost a file; run id → what. Raises StoreError.

        A file whose content has changed is found by `rebuild.check` only.
        """
        statuses = self.index.statuses(run_ids)
        return mark_lost(
            self.files, self.index, [run_id for run_id, status in statuses.items() if status == "finished"]
        )

    def _end_if_expired(self, row: RunRow, owner: str | None) -> bool:
        if owner is None:
            self.index.write([row])
            return True
        return self.index.end(row, owner)

    # -- sweeps --------------------------------------------------------------------------------------------------

    def write_sweep(self, record: SweepRecord, owner: str | None = None) -> None:
        """Write the record of a sweep to its file, atomically, and to the index.

        `owner` is the process that executes the sweep while its status is `running`.
        """
        document = json.dumps(record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
        self.files.write(f"sweeps/{record.sweep_id}.json", document.encode())
        self.index.write_sweep(record.summary, sweep_members(record), owner)

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """The record of a sweep, or None. Raises StoreError for a file that cannot be read."""
        if "/" in sweep_id or sweep_id.startswith("."):
            return None
        name = f"sweeps/{sweep_id}.json"
        content = self.files.read(name)
        return None if content is None else parse_sweep(content, f"{self.location}/{name}")

    def request_stop(self, sweep_id: str) -> None:
        """Ask a sweep to stop, on whatever machine it runs. Raises StoreError."""
        self.index.request_stop(sweep_id)

    def stop_requested(self, sweep_id: str) -> bool:
        """Whether a sweep was asked to stop."""
        return "" in self.index.stops(sweep_id)

    def forget_stop(self, sweep_id: str) -> None:
        """Forget the requests to stop a sweep, which has ended, or its runs."""
        self.index.forget_stops(sweep_id)
