"""Writes what the files of a store say into its index: into an empty one, or over what an index says already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection

from cope_sweep.records import RunRecord
from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.index import Index
from cope_sweep.store.index.rows import write_runs, write_sweep
from cope_sweep.store.reading import read_run
from cope_sweep.store.sweeps import SweepRecord, sweep_members

BATCH_RUNS = 2000
"""Runs that are read, and written in one statement, at a time."""
REQUESTS_AT_ONCE = 16
"""Runs that are read from an object store at the same time."""

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
"""Called with the number of runs read so far, and of all runs."""


@dataclass(frozen=True)
class StoredFiles:
    """The run folders of a store, and the sweep records that can be read, oldest first."""

    folders: Sequence[RunFolder]
    sweeps: Sequence[SweepRecord]

    def batches(self, on_progress: OnProgress) -> Iterator[list[RunRecord]]:
        """The records of the runs that have started, a few at a time."""
        last_sweep: dict[str, str] = {}
        for record in self.sweeps:
            trained = {run.run_id for run in record.runs} - set(record.reused)
            last_sweep |= dict.fromkeys(trained, record.sweep_id)

        def read(folder: RunFolder) -> RunRecord | None:
            return read_run(folder, last_sweep.get(folder.run_id))

        for start in range(0, len(self.folders), BATCH_RUNS):
            batch = self.folders[start : start + BATCH_RUNS]
            yield [record for record in for_each(batch, read) if record is not None]
            on_progress(start + len(batch), len(self.folders))


def fill_index(connection: Connection, files: StoredFiles, on_progress: OnProgress) -> None:
    """Write all runs and sweeps into an empty index, in the caller's transaction.

    Nobody holds a lease in it: what the files say is running reads as interrupted.
    """
    for sweep in files.sweeps:
        write_sweep(connection, sweep.summary, sweep_members(sweep))
    for records in files.batches(on_progress):
        write_runs(connection, records)


def refresh_index(
    index: Index, list_files: Callable[[], StoredFiles], on_progress: OnProgress = lambda done, total: None
) -> None:
    """Write all runs and sweeps into an index that others use, and remove the runs that have no folder.

    Runs and sweeps with a lease keep their rows, so that the sweeps that train them go on. Those that change meanwhile
    do, too: their rows are newer than what is read here.
    """
    since = index.revision()
    files = list_files()
    for sweep in files.sweeps:
        index.write_sweep(sweep.summary, sweep_members(sweep), since=since)
    for records in files.batches(on_progress):
        index.write(records, since=since)
    folders = {folder.run_id for folder in files.folders}
    index.delete(index.statuses().keys() - folders, since=since)


def for_each(folders: Sequence[RunFolder], read_folder: Callable[[RunFolder], T]) -> list[T]:
    """`read` of each folder, in order."""
    if any(folder.objects for folder in folders):
        # Three requests for each run. Threads gain nothing on a local disk, where parsing takes the time.
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return list(pool.map(read_folder, folders))
    return list(map(read_folder, folders))
