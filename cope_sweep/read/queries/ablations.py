"""The ablation files of a folder and their plans. A file is parsed when it has changed, not for each query.

Plans are made under a lock per file: while one of many runs is made, which takes seconds, those of other files answer,
and of several threads that need the same plan one makes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cope_sweep.config import Plan, RunSpec, SpecError, expand, load_ablation, with_overrides
from cope_sweep.config.loading import SUFFIXES
from cope_sweep.errors import NotFoundError
from cope_sweep.store import QueryError

RESULTS = "results"
"""The folder beside the ablation files with the reports that are kept with them."""
SETTLED_NS = 100_000_000
"""A folder that was changed longer ago than this has another time of change after its next change."""

FileStamp = tuple[str, int, int]
"""Path, modification time and size; both −1 for a file that is missing."""


@dataclass(frozen=True)
class LoadedPlan:
    """The plan of an ablation at a scale, its runs by id in the plan's order, and the state of its files."""

    plan: Plan
    runs: dict[str, RunSpec]
    stamp: tuple[FileStamp, ...]
    """State of its file, and of those that it inherits from."""


@dataclass(frozen=True)
class Place:
    """A run in the plan of an ablation, or in a sweep of it."""

    ablation: str
    row: str
    spec: RunSpec | None = None


Known = tuple[tuple[FileStamp, ...], LoadedPlan | SpecError]
"""Facts about an ablation at a scale, and the state of the files from which it was made."""


class AblationFiles:
    """Ablations by file name, without suffix. A client's name is only compared with a listing, never made a path."""

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
        self.made = 0
        """Plans that were made."""
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
            raise NotFoundError(f"no ablation {name!r}; the ablations are: {', '.join(files) or 'none'}")
        return files[name]

    def load(self, name: str, scale: str | None = None) -> LoadedPlan:
        """The plan of an ablation at a scale. Raises NotFoundError, QueryError (the scale), SpecError (the file)."""
        path = self.file(name)
        found = self._current(name, scale, path)
        if found is None:
            with self._locks.setdefault(name, threading.Lock()):  # setdefault is atomic
                found = self._current(name, scale, path) or self._make(name, scale, path)
        if isinstance(found, SpecError):
            raise found.with_traceback(None)  # the error is kept, and each raise adds frames
        return found

    def committed(self, name: str) -> list[str]:
        """The scales of an ablation whose results are kept with the files; "" is its own size."""
        found = (path.stem.partition(".") for path in (self.folder / RESULTS).glob("*.parquet"))
        return sorted(scale for own, _, scale in found if own == name and scale.rpartition(".")[2] != "curves")

    def _current(self, name: str, scale: str | None, path: Path) -> LoadedPlan | SpecError | None:
        """Facts about an ablation at a scale, if its files have not changed since."""
        known = self._plans.get((name, scale))
        if known is None or known[0][0][0] != str(path) or known[0] != _stamps(each[0] for each in known[0]):
            return None
        return known[1]

    def _make(self, name: str, scale: str | None, path: Path) -> LoadedPlan | SpecError:
        """Parse a file and make its plan. Raises QueryError for an unknown scale."""
        self.made += 1
        # What a faulty file depends on is not known: any file of the folder.
        everything = _stamps([path, *(other for other in self.files().values() if other != path)])
        own_size = None
        if scale is not None:
            own_size = self._current(name, None, path) or self._make(name, None, path)
        parsed = _parse(path, scale, own_size if isinstance(own_size, LoadedPlan) else None, self._max_runs)
        if isinstance(parsed, SpecError):
            parsed = SpecError(self._error_text(str(parsed)))
        self._plans[name, scale] = (parsed.stamp if isinstance(parsed, LoadedPlan) else everything, parsed)
        return parsed

    def places(self, run_ids: Iterable[str]) -> dict[str, list[Place]]:
        """Run id → where it is in the plans of all valid ablations at all scales."""
        wanted = list(run_ids)
        found: dict[str, list[Place]] = {}
        for each in self.all():
            for run_id in wanted:
                if (spec := each.runs.get(run_id)) is not None:
                    place = Place(each.plan.name, each.plan.row_name(run_id), spec)
                    found.setdefault(run_id, []).append(place)
        return found

    def state(self) -> tuple[object, ...]:
        """A value that changes when a file changes."""
        kept = (self.folder / RESULTS).glob("*.parquet")
        paths = {str(path): None for path in (*self.files().values(), self.folder / RESULTS, *kept)}
        paths |= {stamp[0]: None for stamps, _ in list(self._plans.values()) for stamp in stamps}
        return _stamps(paths)

    def all(self) -> list[LoadedPlan]:
        """The plans of all valid ablations at all scales."""
        found: list[LoadedPlan] = []
        for name in self.files():
            with contextlib.suppress(SpecError, NotFoundError):
                own_size = self.load(name)
                found.append(own_size)
                for scale in own_size.plan.ablation.content.scales:
                    found.append(self.load(name, scale))  # noqa: PERF401 - a faulty scale leaves those before it
        return found


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


def _parse(path: Path, scale: str | None, own_size: LoadedPlan | None, max_runs: int | None) -> LoadedPlan | SpecError:
    """The plan of a file, which is read unless `own_size` holds it.

    Its stamp is taken before it is read, so that a later change is noticed.
    """
    before = _stamps([path])
    try:
        ablation = load_ablation(path) if own_size is None else own_size.plan.ablation
        if scale is not None and scale not in ablation.content.scales:
            known = ", ".join(ablation.content.scales) or "none"
            raise QueryError(f"{path.stem} has no scale {scale!r}; its scales are: {known}")
        plan = expand(with_overrides(ablation, scale=scale), max_runs=max_runs)
    except SpecError as error:
        return error.with_traceback(None)
    except RecursionError:
        return SpecError(f"{path}: nested too deeply")
    plan.row_of("")  # makes the table of rows now, not during a request
    stamp = before + _stamps(ablation.source.parents) if own_size is None else own_size.stamp
    return LoadedPlan(plan, {run.run_id: run for run in plan.runs}, stamp)
