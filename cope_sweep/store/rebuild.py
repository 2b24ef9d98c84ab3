"""Makes the index again from the files of a store, compares both, and marks runs whose files are damaged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import RunRecord
from cope_sweep.store.reading import find_damage, find_lost, read_run
from cope_sweep.store.sweeps import SweepRecord, parse_sweep, sweep_members

if TYPE_CHECKING:
    from cope_sweep.store.store import Store

BATCH_RUNS = 2000
"""Runs that are written in one transaction."""
REQUESTS_AT_ONCE = 16
"""Runs that are read from an object store at the same time."""

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
"""Called with the number of runs read so far, and of all runs."""


@dataclass(frozen=True)
class RebuildReport:
    """Counts of what was read from the store."""

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
    file: str | None = None
    """The damaged file in the run's folder."""


TRAIN_AGAIN = "cope-sweep store check{} --repair; then the same `cope-sweep run` trains again what is lost"
RESTORE = "restore the file from a copy, or delete it"


def rebuild(store: Store, on_progress: OnProgress = lambda done, total: None) -> RebuildReport:
    """Write every run and every sweep of a store's files into its index, and remove what has no store.

    Runs that somebody trains at the moment keep their row. Raises StoreError.
    """
    index = store.index
    damaged: dict[str, str] = {}
    sweeps = 0
    last_sweep: dict[str, str] = {}
    for path, record in _sweep_records(store):
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
    folders = store.run_folders()
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


def _rows(folders: Sequence[RunFolder], last_sweep: Mapping[str, str]) -> list[RunRecord]:
    """The rows of the runs that were begun."""

    def read(folder: RunFolder) -> RunRecord | None:
        return read_run(folder, last_sweep.get(folder.run_id))

    return [row for row in _each(folders, read) if row is not None]


def _each(folders: Sequence[RunFolder], read: Callable[[RunFolder], T]) -> list[T]:
    if any(folder.objects for folder in folders):
        # Three requests for each run. Threads gain nothing on a local disk, where parsing takes the time.
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return list(pool.map(read, folders))
    return list(map(read, folders))


def mark_lost(store: Store, run_ids: Iterable[str]) -> dict[str, str]:
    """Mark those of the runs as damaged that the index has as finished and that have lost their result or another file.

    Their files are opened, and nothing but the result is read: 0.1 ms per run on a local disk. A file whose content has
    changed is found by `check` only.

    Returns:
        Run id → what is wrong. Raises StoreError.
    """
    statuses = store.index.statuses(run_ids)
    folders = [store.run(run_id) for run_id, status in statuses.items() if status == "finished"]
    seem_lost = [folder for folder, problems in zip(folders, _each(folders, find_lost), strict=True) if problems]
    lost = {folder: problems for folder in seem_lost if (problems := _lost_at_second_look(folder))}
    for folder, problems in lost.items():
        _mark(folder, problems)
        if (row := read_run(folder)) is None:
            store.index.delete([folder.run_id])  # it is as if it had never been begun
        else:
            store.index.write([row])
    return {folder.run_id: next(iter(problems.values())) for folder, problems in lost.items()}


def _lost_at_second_look(folder: RunFolder) -> dict[str, str]:
    """`find_lost`, after the folders were listed.

    A client of a network file system remembers that a file was missing, also when another machine has written it since.
    Listing a folder makes it ask again.
    """
    for path in (folder.path.parent, folder.path, folder.checkpoint):
        with contextlib.suppress(OSError):
            os.listdir(path)  # noqa: PTH208 - `iterdir` lists nothing before it is used
    return find_lost(folder)


def _mark(folder: RunFolder, problems: Mapping[str, str]) -> None:
    with contextlib.suppress(DamagedError):  # a link, which only its owner can replace
        folder.mark_damaged(problems)


def repair(store: Store, found: Iterable[Difference]) -> None:
    """Put the damaged files aside that `check` has found, mark their runs, and make the index again."""
    damaged: dict[str, dict[str, str]] = {}
    for each in found:
        if each.file is not None:
            damaged.setdefault(each.item, {})[each.file] = each.problem
    for run_id, problems in damaged.items():
        _mark(store.run(run_id), problems)
    rebuild(store)


def check(
    store: Store, *, checksums: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Iterator[Difference]:
    """Compare the index with the files; with `checksums`, also curves and checkpoints. Raises StoreError."""
    index = store.index
    for path, record in _sweep_records(store):
        if isinstance(record, DamagedError):
            yield Difference(path, str(record), RESTORE)
        elif index.sweep(record.sweep_id) is None:
            yield Difference(record.sweep_id, "the sweep is not in the index")
    folders = store.run_folders()
    known_ids = {run_id for run_id, status in index.statuses().items() if status != "running"}
    missing = known_ids - {folder.run_id for folder in folders}
    yield from (Difference(run_id, "in the index, but without a folder") for run_id in sorted(missing))
    for start in range(0, len(folders), BATCH_RUNS):
        batch = folders[start : start + BATCH_RUNS]
        known = index.records(folder.run_id for folder in batch)
        for folder in batch:
            indexed = known.get(folder.run_id)
            if indexed is not None and indexed.status == "running":
                continue
            for file, problem in find_damage(folder, checksums=checksums).items():
                way_out = TRAIN_AGAIN.format(" --checksums" if checksums else "")
                yield Difference(folder.run_id, problem, way_out, file)
            row = read_run(folder)
            if row is None:
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


def _sweep_records(store: Store) -> Iterator[tuple[str, SweepRecord | DamagedError]]:
    """The records of all sweeps, oldest first, each with the name of its file; of a damaged one, the error."""
    for name in store.names("sweeps"):
        if not name.endswith(".json") or not name[0].isdigit():
            continue
        path = f"{store.location}/sweeps/{name}"
        try:
            content = store.read(f"sweeps/{name}")
            if content is not None:
                yield path, parse_sweep(content, path)
        except DamagedError as error:
            yield path, error
