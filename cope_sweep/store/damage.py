"""Finds what is damaged in a store, or that its index does not say, and mends it.

A damaged file is renamed to `<name>.damaged`, and its run reads as interrupted: the same `cope-sweep run` trains again
what is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cope_sweep.records import RunRecord
from cope_sweep.redaction import redacted_url
from cope_sweep.store.artifacts import CURVE_FILE, RESULT_FILE, RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import IndexDamagedError, InTrainingError
from cope_sweep.store.indexing import BATCH_RUNS, OnProgress, for_each, refresh_index
from cope_sweep.store.reading import printable, read_run
from cope_sweep.store.store import Store

REPAIR = "cope-sweep store check --repair"
TRAIN_AGAIN = "cope-sweep store check{} --repair; then the same `cope-sweep run` trains again what is lost"
RESTORE = "restore the file from a copy, or delete it"


@dataclass(frozen=True)
class StoreDifference:
    """A run or sweep that is damaged, or whose index entry and files do not agree."""

    item: str
    """Run id, sweep id, or path of a sweep's record."""
    problem: str
    way_out: str = REPAIR
    file: str | None = None
    """The damaged file in the run's folder."""


def find_differences(
    store: Store, *, checksums: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Iterator[StoreDifference]:
    """Compare the index with the files; with `checksums`, also curves and checkpoints.

    Raises StoreError: IndexDamagedError where the index cannot be compared, see `mend_index`.
    """
    index = store.index
    index.database.check_file()
    # What sweeps do between two lines is no difference: a row is written after its file.
    records, damaged = store.sweep_records()
    known_sweeps = {sweep.sweep_id for sweep in index.sweeps()}
    yield from (StoreDifference(path, problem, RESTORE) for path, problem in damaged.items())
    for record in records:
        if record.sweep_id not in known_sweeps:
            yield StoreDifference(record.sweep_id, "the sweep is not in the index")
    known_ids = {run_id for run_id, status in index.statuses().items() if status != "running"}
    folders = store.run_folders()
    missing = known_ids - {folder.run_id for folder in folders}
    yield from (StoreDifference(run_id, "in the index, but without a folder") for run_id in sorted(missing))
    for start in range(0, len(folders), BATCH_RUNS):
        batch = folders[start : start + BATCH_RUNS]
        known = index.records(folder.run_id for folder in batch)
        for folder in batch:
            indexed = known.get(folder.run_id)
            found = _differences(folder, indexed, checksums=checksums)
            if found:
                # A sweep may have trained the run since: the checksums of a batch take minutes.
                latest = index.records([folder.run_id]).get(folder.run_id)
                found = found if latest == indexed else _differences(folder, latest, checksums=checksums)
            yield from found
        on_progress(start + len(batch), len(folders))


def mend_index(store: Store) -> list[StoreDifference]:
    """Make the index again if its SQLite file is damaged, and say so; the file is kept as `<name>.damaged`."""
    try:
        store.index.database.check_file()
    except IndexDamagedError as error:
        store.put_index_aside()
        return [StoreDifference(redacted_url(store.index_url), str(error))]
    return []


def _differences(folder: RunFolder, indexed: RunRecord | None, *, checksums: bool) -> list[StoreDifference]:
    """What is damaged in a run's folder, or differs from what the index says of it; nothing of a run in training."""
    if indexed is not None and indexed.status == "running":
        return []
    way_out = TRAIN_AGAIN.format(" --checksums" if checksums else "")
    damage = find_damage(folder, checksums=checksums)
    found = [StoreDifference(folder.run_id, problem, way_out, file) for file, problem in damage.items()]
    row = read_run(folder)
    if row is None:
        return found
    if indexed is None:
        found.append(StoreDifference(folder.run_id, f"{row.status} by its files, and not in the index"))
    elif row.status != indexed.status:
        found.append(StoreDifference(folder.run_id, f"{row.status} by its files, {indexed.status} in the index"))
    elif (dict(row.metrics), dict(row.facts)) != (dict(indexed.metrics), dict(indexed.facts)):
        found.append(StoreDifference(folder.run_id, "the index has other metrics or facts than its files"))
    return found


def repair(
    store: Store, differences: Iterable[StoreDifference], on_progress: OnProgress = lambda done, total: None
) -> None:
    """Put the damaged files aside that `find_differences` has found, and make the index again."""
    damaged: dict[str, set[str]] = {}
    for difference in differences:
        if difference.file is not None:
            damaged.setdefault(difference.item, set()).add(difference.file)
    for run_id, files in damaged.items():
        folder, since = store.run(run_id), store.index.revision()
        # Again: a sweep may have trained the run since, and its files are good now. Not within the transaction, when
        # no lease can be renewed: a checkpoint takes a second for each gigabyte.
        problems = find_damage(folder, checksums=True)
        # A link only its owner can replace.
        with contextlib.suppress(DamagedError, InTrainingError), store.index.untrained(run_id, since=since):
            folder.interrupt({file: problem for file, problem in problems.items() if file in files})
    refresh_index(store.index, store.files, on_progress)


def note_lost(store: Store, run_ids: Iterable[str]) -> dict[str, str]:
    """Note in the index which finished runs have lost their result or another file: they read as interrupted.

    Their files are opened, and nothing but the result is read: 0.1 ms per run on a local disk. A file whose content has
    changed is noticed by `find_differences` only. The files stay as they are: whether the loss is real is decided by
    `RunFolder.begin`, and a run that has its files after all is finished again without being trained.

    Returns:
        Run id → what is wrong. Raises StoreError.
    """
    since = store.index.revision()
    statuses = store.index.statuses(run_ids)
    folders = [store.run(run_id) for run_id, status in statuses.items() if status == "finished"]
    problems = zip(folders, for_each(folders, RunFolder.lost_files), strict=True)
    lost = {folder: next(iter(found.values())) for folder, found in problems if found}
    rows, without_spec = [], []
    for (folder, problem), row in zip(lost.items(), for_each(list(lost), read_run), strict=True):
        if row is None:
            without_spec.append(folder.run_id)
        else:
            changes = {"status": "interrupted", "message": printable(problem), "metrics": {}, "facts": {}}
            rows.append(row.model_copy(update=changes))
    if lost:
        store.index.write(rows, since=since)
        store.index.delete(without_spec, since=since)  # as if they had never started
    return {folder.run_id: problem for folder, problem in lost.items()}


def find_damage(folder: RunFolder, *, checksums: bool = False) -> dict[str, str]:
    """File → what is wrong with it, in one line; with `checksums`, the content of curve and checkpoint, too."""
    problems = folder.unreadable()
    try:
        folder.curve()
    except DamagedError as error:
        problems[CURVE_FILE] = str(error)
    is_finished = RESULT_FILE not in problems and folder.result is not None
    return folder.lost_files(checksums=checksums) | problems if is_finished else problems
