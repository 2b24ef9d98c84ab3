"""The ablation files of a folder and their plans. A file is parsed when it has changed, not for each query.

Plans are made under a lock per file: while one of many runs is made, which takes seconds, those of other files answer,
and of several threads that need the same plan one makes it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cope_sweep.config import LoadedAblation, Plan, RunSpec, SpecError, expand, load_ablation, with_overrides
from cope_sweep.config.loading import SUFFIXES
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries.recorded import Recorded
from cope_sweep.store import QueryError

RESULTS = "results"
"""The folder beside the ablation files with the reports that are kept with them."""
SETTLED_NS = 100_000_000
"""A folder that was changed longer ago than this has another time of change after its next change."""

FileStamp = tuple[str, int, int]
"""Path, modification time and size; both −1 for a file that is missing."""


@dataclass(frozen=True)
class Place:
    """A run in the plan of an ablation, or in a sweep of it."""

    ablation: str
    row: str
    spec: RunSpec | None = None


Known = tuple[tuple[FileStamp, ...], Plan | SpecError]
"""The plan of an ablation at a scale, or why there is none, and the state of the files from which that was made."""


class AblationFiles:
    """Ablations by file name, without suffix. A client's name is only compared with a listing, never made a path."""

    IMPORTS_RECORDED: ClassVar[bool] = False
    """Whether plugins are imported that an ablation names which is in no file of the folder, only in the store."""

    def __init__(
        self,
        folder: Path,
        *,
        max_runs: int | None = None,
        error_text: Callable[[str], str] = str,
    ) -> None:
        """Name the folder.

        Args:
            folder: The folder of the files.
            max_runs: A file whose plan has more runs counts as faulty; None: any number.
            error_text: What is told of the message of a faulty file: a service leaves out where its files are.
        """
        self.folder = folder
        self._error_text = error_text
        self._max_runs = max_runs
        self._plans: dict[tuple[str, str | None], Known] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._listed: tuple[int, dict[str, Path]] | None = None

    def files(self) -> dict[str, Path]:
        """Name → file, sorted by name: regular files whose links do not lead out of the folder. Raises OSError."""
        changed_ns = self.folder.stat().st_mtime_ns
        if self._listed is not None and self._listed[0] == changed_ns:
            return self._listed[1]
        inside = self.folder.resolve()
        paths = [path for path in self.folder.iterdir() if path.suffix in SUFFIXES and _is_inside(path, inside)]
        # If both a.yaml and a.yml exist, a.yaml wins.
        found = {path.stem: path for path in sorted(paths, key=lambda path: (path.stem, path.suffix == ".yaml"))}
        if time.time_ns() - changed_ns > SETTLED_NS:
            self._listed = changed_ns, found
        return found

    def file(self, name: str) -> Path:
        """The file of an ablation. Raises NotFoundError."""
        files = self.files()
        if name not in files:
            raise NotFoundError(
                f"no ablation {name!r}; the ablations are: {', '.join(files) or 'none'}",
                name=name,
                allowed=list(files),
            )
        return files[name]

    def load(self, name: str, scale: str | None = None) -> Plan:
        """The plan of an ablation at a scale. Raises NotFoundError, QueryError (the scale), SpecError (the file)."""
        path = self.file(name)
        known = self._current(name, scale, path)
        if known is None:
            with self._locks.setdefault(name, threading.Lock()):  # setdefault is atomic
                known = self._current(name, scale, path) or self._make(name, scale, path)
        if isinstance(known[1], SpecError):
            raise copy.copy(known[1])  # threads raise the same kept error, and each would add its frames to it
        return known[1]

    def expanded(self, recorded: Recorded, scale: str | None = None) -> Plan:
        """The plan of an ablation that is in no file, at a scale. Raises QueryError (the scale), SpecError."""
        _check_scale(recorded.ablation, scale)
        return expand(with_overrides(recorded.ablation, scale=scale), max_runs=self._max_runs)

    def committed(self, name: str) -> list[str]:
        """The scales of an ablation whose results are kept with the files; "" is its own size."""
        found = (path.stem.partition(".") for path in (self.folder / RESULTS).glob("*.parquet"))
        return sorted(scale for own, _, scale in found if own == name and scale.rpartition(".")[2] != "curves")

    def _current(self, name: str, scale: str | None, path: Path) -> Known | None:
        """The known plan of an ablation at a scale; None if its files have changed since."""
        known = self._plans.get((name, scale))
        if known is None or known[0][0][0] != str(path) or known[0] != _stamps(each[0] for each in known[0]):
            return None
        return known

    def _make(self, name: str, scale: str | None, path: Path) -> Known:
        """Parse a file, unless its own size is known, and make its plan. Raises QueryError for an unknown scale."""
        # What a faulty file depends on is not known: any file of the folder.
        everything = _stamps([path, *(other for other in self.files().values() if other != path)])
        stamp, own_size = everything[:1], None  # taken before the file is read, so that a later change is noticed
        if scale is not None:
            own_stamp, own_size = self._current(name, None, path) or self._make(name, None, path)
        found: Plan | SpecError
        try:
            if isinstance(own_size, Plan):
                stamp, ablation = own_stamp, own_size.ablation
            else:
                ablation = load_ablation(path)
                stamp += _stamps(ablation.source.parents)
            _check_scale(ablation, scale)
            found = expand(with_overrides(ablation, scale=scale), max_runs=self._max_runs)
            found.row_of("")  # makes the table of rows now, not during a request
        except SpecError as error:
            data = error.shown_data(self._error_text)
            stamp, found = everything, SpecError(self._error_text(str(error)), code=error.code, **data)
        except RecursionError:
            text = self._error_text(f"{path}: nested too deeply")
            stamp, found = everything, SpecError(text, code="too_large", place=self._error_text(str(path)))
        self._plans[name, scale] = stamp, found
        return stamp, found

    def places(self, run_id: str) -> list[Place]:
        """The places of a run in the plans of all valid ablations at all scales: these plans are made, if need be."""
        found = (place_in(plan, run_id) for plan in self.all())
        return [place for place in found if place is not None]

    def state(self) -> tuple[object, ...]:
        """A value that changes when a file changes."""
        kept = (self.folder / RESULTS).glob("*.parquet")
        paths = {str(path): None for path in (*self.files().values(), self.folder / RESULTS, *kept)}
        paths |= {stamp[0]: None for stamps, _ in list(self._plans.values()) for stamp in stamps}
        return _stamps(paths)

    def all(self) -> list[Plan]:
        """The plans of all valid ablations at all scales."""
        found: list[Plan] = []
        for name in self.files():
            with contextlib.suppress(SpecError, NotFoundError):
                own_size = self.load(name)
                found.append(own_size)
                for scale in own_size.ablation.content.scales:
                    found.append(self.load(name, scale))  # noqa: PERF401 - a faulty scale leaves those before it
        return found


def _check_scale(loaded: LoadedAblation, scale: str | None) -> None:
    """Raise QueryError for a scale that an ablation does not have."""
    if scale is not None and scale not in loaded.content.scales:
        scales = list(loaded.content.scales)
        raise QueryError(
            f"{loaded.name} has no scale {scale!r}; its scales are: {', '.join(scales) or 'none'}",
            code="unknown_scale",
            ablation=loaded.name,
            scale=scale,
            allowed=scales,
        )


def place_in(plan: Plan, run_id: str) -> Place | None:
    """The place of a run in a plan, if it is in there."""
    row = plan.row_of(run_id)
    if row is None:
        return None
    return Place(plan.name, row.name, next(run for run in row.runs if run.run_id == run_id))


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is, or leads to, a regular file in a folder."""
    with contextlib.suppress(OSError, RuntimeError):
        return path.is_file() and path.resolve().is_relative_to(folder)
    return False


def _stamps(paths: Iterable[Path | str]) -> tuple[FileStamp, ...]:
    """The state of files, in order."""
    stamps = []
    for path in map(Path, paths):
        try:
            stat = path.stat()
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        except OSError:
            stamps.append((str(path), -1, -1))
    return tuple(stamps)
