"""Makes the index again from the files of a store, and compares both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import Index, RunRow
from cope_sweep.store.layout import StoreFiles
from cope_sweep.store.reading import RunContents, read_run
from cope_sweep.store.sweeps import SweepRecord, parse_sweep, sweep_members

BATCH_RUNS = 2000
"""Runs that are written in one transaction."""
REQUESTS_AT_ONCE = 16
"""Runs that are read from an object store at the same time."""

OnProgress = Callable[[int, int], None]
"""Called with the number of runs read so far, and of all runs."""


@dataclass(frozen=True)
class RebuildReport:
    """Counts of what was read from the files."""

    runs: int
    sweeps: int
    damaged: dict[str, str]
    """Run id, or path of a sweep's record → what is wrong with it."""
    removed: int = 0
    """Runs of the former index that have no folder."""


@dataclass(frozen=True)
class Difference:
    """A run or sweep of which the index and the files do not say the same, or that is damaged."""

    item: str
    """Run id, or path of a sweep's record."""
    problem: str
    way_out: str = "cope-sweep store rebuild"


TRAIN_AGAIN = "the same `cope-sweep run` trains it again"
RESTORE = "restore the file from a copy, or delete it"


def rebuild(files: StoreFiles, index: Index, on_progress: OnProgress = lambda done, total: None) -> RebuildReport:
    """Write every run and every sweep of a store's files into its index, and remove what has no files.

    Runs that somebody trains at the moment keep their row. Raises StoreError.
    """
    damaged: dict[str, str] = {}
    sweeps = 0
    last_sweep: dict[str, str] = {}
    for path, record in _sweep_records(files):
        if isinstance(record, DamagedError):
            damaged[path] = str(record)
            continue
        sweeps += 1
        known = index.sweep(record.sweep_id)
        if known is None or known.ended_ms != record.ended_ms:
            status = "interrupted" if record.status == "running" else record.status
            index.write_sweep(replace(record.summary, status=status), sweep_members(record), None)
        trained = {run.run_id for run in record.runs} - set(record.reused)
        last_sweep |= dict.fromkeys(trained, record.sweep_id)
    folders = files.run_folders()
    training = {run_id for run_id, status in index.statuses().items() if status == "running"}
    for start in range(0, len(folders), BATCH_RUNS):
        batch = folders[start : start + BATCH_RUNS]
        rows = _rows([folder for folder in batch if folder.run_id not in training], last_sweep)
        damaged |= {row.run_id: row.message or "" for row in rows if row.status == "damaged"}
        index.write(rows)
        on_progress(start + len(batch), len(folders))
    seen = {folder.run_id for folder in folders}
    gone = [run_id for run_id in index.statuses() if run_id not in seen and run_id not in training]
    index.delete(gone)
    index.mark_built()
    return RebuildReport(len(folders), sweeps, damaged, len(gone))


def _rows(folders: Sequence[RunFolder], last_sweep: Mapping[str, str]) -> list[RunRow]:
    """The rows of the runs that were begun."""

    def read(folder: RunFolder) -> RunRow | None:
        return read_run(folder, last_sweep.get(folder.run_id))

    if any(folder.objects for folder in folders):
        # Three requests for each run. Threads gain nothing on a local disk, where parsing takes the time.
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return [row for row in pool.map(read, folders) if row is not None]
    return [row for row in map(read, folders) if row is not None]


def check(
    files: StoreFiles, index: Index, *, checksums: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Iterator[Difference]:
    """Compare the index with the files; with `checksums`, also curves and checkpoints. Raises StoreError."""
    for path, record in _sweep_records(files):
        if isinstance(record, DamagedError):
            yield Difference(path, str(record), RESTORE)
        elif index.sweep(record.sweep_id) is None:
            yield Difference(record.sweep_id, "the sweep is not in the index")
    folders = files.run_folders()
    missing = set(index.statuses()) - {folder.run_id for folder in folders}
    yield from (Difference(run_id, "in the index, but without a folder") for run_id in sorted(missing))
    for start in range(0, len(folders), BATCH_RUNS):
        batch = folders[start : start + BATCH_RUNS]
        known = index.records(folder.run_id for folder in batch)
        for folder in batch:
            contents = RunContents(folder)
            for problem in contents.damage(checksums=checksums):
                yield Difference(folder.run_id, problem, TRAIN_AGAIN)
            row, indexed = contents.row(), known.get(folder.run_id)
            if row is None or (indexed is not None and indexed.status == "running"):
                continue
            if indexed is None:
                yield Difference(folder.run_id, f"{row.status} by its files, and not in the index")
            elif (row.status, dict(row.metrics), dict(row.facts)) != (
                indexed.status,
                dict(indexed.metrics),
                dict(indexed.facts),
            ):
                what = f"{row.status} by its files, {indexed.status} in the index"
                if row.status == indexed.status:
                    what = "the index has other metrics or facts than its files"
                yield Difference(folder.run_id, what)
        on_progress(min(start + BATCH_RUNS, len(folders)), len(folders))


def _sweep_records(files: StoreFiles) -> Iterator[tuple[str, SweepRecord | DamagedError]]:
    """The records of all sweeps, oldest first, each with the name of its file; of a damaged one, the error."""
    for name in files.names("sweeps"):
        if not name.endswith(".json") or not name[0].isdigit():
            continue
        path = f"{files.location}/sweeps/{name}"
        try:
            content = files.read(f"sweeps/{name}")
            if content is not None:
                yield path, parse_sweep(content, path)
        except DamagedError as error:
            yield path, error
