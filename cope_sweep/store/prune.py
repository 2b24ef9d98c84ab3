"""Finds the files that a store can do without: resume files, damaged and temporary files, copies, old logs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cope_sweep.records import Status
from cope_sweep.store.artifacts import CHECKPOINT_FOLDER, RESUME_FILE
from cope_sweep.store.files import remove
from cope_sweep.store.index import InTrainingError
from cope_sweep.store.store import DELETED, Store
from cope_sweep.store.tokens import left_tokens

TEMPORARY_AGE_S = 3600.0
"""A temporary file that nobody has touched for this long belongs to a process that died."""


@dataclass(frozen=True)
class Waste:
    """A file or folder that can be deleted."""

    path: Path
    reason: str
    size_bytes: int
    run_id: str | None = None
    """The run that it belongs to, or is."""
    since: int | None = None
    """The index's revision before it was found, for files of runs."""


def waste(
    store: Store, *, older_than_s: float, statuses: Iterable[Status], planned_runs: set[str] | None
) -> Iterator[Waste]:
    """Files that can be deleted from a store. In an object store, only whole runs are; other files on this machine.

    Args:
        store: The store.
        older_than_s: Nothing younger is included, except whole runs.
        statuses: The training states of runs with these statuses. Such a run starts at its first step if it is trained
            again.
        planned_runs: The ids of the runs to keep; other runs can be deleted as a whole. None: all runs are kept.
    """
    now_s = time.time()
    since = store.index.revision()
    known = store.index.statuses()
    ablations = {} if planned_runs is None else _ablations(store)
    for run_id, status in known.items():
        folder = store.run(run_id).path
        if status == "running":
            continue
        if planned_runs is not None and run_id not in planned_runs:
            of = f" of {ablations[run_id]}" if run_id in ablations else ""
            yield Waste(folder, f"{status} run{of} that no ablation file contains", _size(folder), run_id, since)
            continue
        for path in _entries(folder):
            if path.name == RESUME_FILE and status == "finished":
                # Its process was killed after it had written the result.
                yield from _old(path, "resume file of a finished run", now_s - older_than_s, run_id, since)
            elif path.name == RESUME_FILE and status in statuses:
                yield from _old(path, f"to continue a run that is {status}", now_s - older_than_s, run_id, since)
            elif path.name == CHECKPOINT_FOLDER and store.objects:
                yield from _old(path, "copy of the object store's", now_s - older_than_s, run_id, since)
            elif path.name.endswith(".damaged"):
                yield from _old(path, "damaged, and renamed", now_s - older_than_s, run_id, since)
            elif path.name.startswith("."):
                yield from _old(path, "temporary", now_s - max(older_than_s, TEMPORARY_AGE_S), run_id, since)
    for path in _entries(store.root / "runs"):
        if path.name.endswith(DELETED):
            yield from _old(path, "rest of a deleted run", now_s - older_than_s)
    running = store.index.sweeps({"running"})
    for path in _entries(store.root / "logs"):
        if not any(sweep.sweep_id in path.name for sweep in running):
            yield from _old(path, "log of a sweep that ended", now_s - older_than_s)
    for name in left_tokens(store):
        yield from _old(store.root / name, "token of a sweep that was killed", now_s - older_than_s)


def delete(store: Store, items: Iterable[Waste]) -> list[Waste]:
    """Delete what `waste` found, except of runs that have changed since. Returns what is deleted."""
    deleted = []
    for item in items:
        with suppress(InTrainingError):
            if item.run_id is None:
                remove(item.path)
            elif item.run_id == item.path.name:
                store.delete_run(item.run_id, since=item.since)
            else:
                with store.index.untrained(item.run_id, since=item.since):
                    remove(item.path)
            deleted.append(item)
    return deleted


def _ablations(store: Store) -> dict[str, str]:
    """Run id → the ablation whose sweep has it: the newest where several have."""
    sweeps = sorted(store.index.sweeps(), key=lambda sweep: sweep.started_ms)
    return {run_id: sweep.ablation for sweep in sweeps for run_id in store.index.sweep_rows(sweep.sweep_id)}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _old(
    path: Path, reason: str, before_s: float, run_id: str | None = None, since: int | None = None
) -> Iterator[Waste]:
    try:
        # Of a folder also what is in it: a log that grows does not change the folder's own time.
        if max(entry.lstat().st_mtime for entry in _tree(path)) < before_s:
            yield Waste(path, reason, _size(path), run_id, since)
    except FileNotFoundError:
        return


def _size(path: Path) -> int:
    return sum(entry.lstat().st_size for entry in _tree(path) if entry.is_file())


def _tree(path: Path) -> list[Path]:
    """A file, or a folder and all that is in it."""
    return [path, *path.rglob("*")] if path.is_dir() else [path]
