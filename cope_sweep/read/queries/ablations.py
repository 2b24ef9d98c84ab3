"""The ablation files of a folder and their plans. A file is parsed again only after it has changed.

Plans are made under one lock per file. A large plan takes seconds: meanwhile, other plans stay available, and threads
that need the same plan wait for one thread to make it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlencode

from cachetools import LRUCache

from cope_sweep.config import LoadedAblation, Plan, RunSpec, SpecError, expand, load_ablation, with_overrides
from cope_sweep.config.loading import ablation_files
from cope_sweep.config.paths import check_paths
from cope_sweep.config.source import spelled_as
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries.recorded import RecordedAblation
from cope_sweep.store import QueryError
from cope_sweep.store.results_file import run_files

RESULTS = "results"
"""The folder beside the ablation files that has their results: a store that is only read."""
SETTLED_NS = 100_000_000
"""If a folder's last change is older than this, its next change is sure to get a different modification time."""

MAX_VARIANTS = 16
"""Plans with values of `--set` that are kept."""
VariantKey = tuple[str, str | None, tuple[str, ...]]
"""Name, scale and values of `--set`."""

FileStamp = tuple[str, int, int]
"""Path, modification time and size; the last two are −1 for a missing file."""


@dataclass(frozen=True)
class Place:
    """A run in the plan of an ablation, or in a sweep of it."""

    ablation: str
    row: str
    spec: RunSpec | None = None


CachedPlan = tuple[tuple[FileStamp, ...], Plan | SpecError]
"""The stamps of the files that were read, and the plan of an ablation at a scale or the error in these files."""


class AblationFiles:
    """Ablations by file name, without suffix. A client's name is only compared, and never becomes part of a path."""

    IMPORTS_RECORDED: ClassVar[bool] = False
    """Whether to import the plugins of ablations that are in the store only, and not in the folder."""

    def __init__(
        self,
        folder: Path,
        *,
        max_runs: int | None = None,
        error_text: Callable[[str], str] = str,
    ) -> None:
        """Create the object; nothing is read.

        Args:
            folder: The folder of the files.
            max_runs: A file with more runs counts as invalid; None: no limit.
            error_text: Changes the message about an invalid file: a service hides the folders of its files.
        """
        self.folder = folder
        self._error_text = error_text
        self._max_runs = max_runs
        self._plans: dict[tuple[str, str | None], CachedPlan] = {}
        self._variants: LRUCache[VariantKey, tuple[Plan, Plan]] = LRUCache(MAX_VARIANTS)
        """The plan of a file, and that plan with values of `--set`, which clients choose: only the latest are kept."""
        self._variants_lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._listed: tuple[int, dict[str, Path]] | None = None

    def files(self) -> dict[str, Path]:
        """Name → file, sorted by name. Links that lead out of the folder are ignored. Raises OSError."""
        changed_ns = self.folder.stat().st_mtime_ns
        if self._listed is not None and self._listed[0] == changed_ns:
            return self._listed[1]
        inside = self.folder.resolve()
        files = {name: path for name, path in ablation_files(self.folder).items() if _is_inside(path, inside)}
        if time.time_ns() - changed_ns > SETTLED_NS:
            self._listed = changed_ns, files
        return files

    def file(self, name: str) -> Path:
        """The file of an ablation. Raises NotFoundError."""
        files = self.files()
        name = spelled_as(name, files)
        if name not in files:
            raise NotFoundError(
                f"no ablation {name!r}; choose one of: {', '.join(files) or 'none'}",
                name=name,
                allowed=list(files),
            )
        return files[name]

    def load(self, name: str, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation at a scale, with values of `--set`.

        Raises NotFoundError, QueryError (the scale, the values), SpecError (the file).
        """
        if sets:
            return self._variant(self.load(name).ablation, self.load(name, scale), sets)
        path = self.file(name)
        cached = self._cached(name, scale, path)
        if cached is None:
            with self._locks.setdefault(name, threading.Lock()):  # setdefault is atomic
                cached = self._cached(name, scale, path) or self._make_plan(name, scale, path)
        if isinstance(cached[1], SpecError):
            raise copy.copy(cached[1])  # a copy: every thread that raises an error adds its frames to it
        return cached[1]

    def expand_recorded(self, recorded: RecordedAblation, scale: str | None = None, sets: Sequence[str] = ()) -> Plan:
        """The plan of an ablation without a file, at a scale, with values of `--set`.

        Raises QueryError (the scale, the values), SpecError.
        """
        _check_scale(recorded.ablation, scale)
        plan = expand(with_overrides(recorded.ablation, scale=scale), max_runs=self._max_runs)
        return self._variant(recorded.ablation, plan, sets) if sets else plan

    @staticmethod
    def written(scale: str | None, sets: Sequence[str]) -> str:
        """A scale and values of `--set` as parameters of a request: `scale=small&set=train.steps=100`."""
        return urlencode([*([("scale", scale)] if scale else []), *(("set", text) for text in sets)], safe="=[],.+")

    def _variant(self, ablation: LoadedAblation, plan: Plan, sets: Sequence[str]) -> Plan:
        """The plan with values as after `--set`. `ablation` is the plan's, before its scale. The latest are kept."""
        key = plan.name, plan.ablation.scale, tuple(sets)
        with self._variants_lock:
            cached = self._variants.get(key)
        if cached is not None and cached[0] is plan:  # else its file has changed
            return cached[1]
        try:
            changed = with_overrides(ablation, scale=plan.ablation.scale, assignments=sets)
            variant = expand(changed, max_runs=self._max_runs)
            check_paths(variant, plan)
        except SpecError as error:
            data = error.shown_data(self._error_text)
            raise QueryError(self._error_text(str(error)), code=error.code, **data) from error
        except RecursionError as error:
            raise QueryError("set: a value is nested too deeply; use fewer levels", code="too_large") from error
        with self._variants_lock:
            self._variants[key] = plan, variant
        return variant

    def committed(self, name: str) -> list[str]:
        """The scales of an ablation with results beside the files; "" means: without a scale."""
        parts = [path.stem.partition(".") for path in run_files(self.folder / RESULTS)]
        return sorted(scale for ablation, _, scale in parts if ablation == name)

    def _cached(self, name: str, scale: str | None, path: Path) -> CachedPlan | None:
        """The cached plan of an ablation at a scale; None if its files have changed since."""
        cached = self._plans.get((name, scale))
        if cached is None:
            return None
        stamps = cached[0]
        is_current = stamps[0][0] == str(path) and stamps == _file_stamps(stamp[0] for stamp in stamps)
        return cached if is_current else None

    def _make_plan(self, name: str, scale: str | None, path: Path) -> CachedPlan:
        """Make the plan of a file, which is parsed at most once for all scales. Raises QueryError (unknown scale)."""
        # An invalid file may depend on any file of the folder.
        all_stamps = _file_stamps([path, *(other for other in self.files().values() if other != path)])
        stamps, unscaled = all_stamps[:1], None  # taken before the file is read, so that a later change is noticed
        if scale is not None:
            unscaled_stamps, unscaled = self._cached(name, None, path) or self._make_plan(name, None, path)
        plan: Plan | SpecError
        try:
            if isinstance(unscaled, Plan):
                stamps, ablation = unscaled_stamps, unscaled.ablation
            else:
                ablation = load_ablation(path)
                stamps += _file_stamps(ablation.source.parents)
            _check_scale(ablation, scale)
            plan = expand(with_overrides(ablation, scale=scale), max_runs=self._max_runs)
            plan.row_of("")  # makes the table of rows now, not during a request
        except SpecError as error:
            data = error.shown_data(self._error_text)
            stamps, plan = all_stamps, SpecError(self._error_text(str(error)), code=error.code, **data)
        except RecursionError:
            text = self._error_text(f"{path}: nested too deeply; use fewer levels")
            stamps, plan = all_stamps, SpecError(text, code="too_large", place=self._error_text(str(path)))
        self._plans[name, scale] = stamps, plan
        return stamps, plan

    def places(self, run_id: str) -> list[Place]:
        """The places of a run in the plans of all valid ablations at all scales. May have to make these plans."""
        places = (place_in(plan, run_id) for plan in self.all())
        return [place for place in places if place is not None]

    def state(self) -> tuple[object, ...]:
        """A value that changes when a file changes."""
        paths = {str(path): None for path in (*self.files().values(), self.folder / RESULTS)}
        paths |= {stamp[0]: None for stamps, _ in list(self._plans.values()) for stamp in stamps}
        return _file_stamps(paths)

    def all(self) -> list[Plan]:
        """The plans of all valid ablations at all scales."""
        plans: list[Plan] = []
        for name in self.files():
            with contextlib.suppress(SpecError, NotFoundError):
                unscaled = self.load(name)
                plans.append(unscaled)
                for scale in unscaled.ablation.content.scales:
                    plans.append(self.load(name, scale))  # noqa: PERF401 - keeps the scales before an invalid one
        return plans


def _check_scale(loaded: LoadedAblation, scale: str | None) -> None:
    """Raise QueryError for a scale that an ablation does not have."""
    if scale is not None and scale not in loaded.content.scales:
        scales = list(loaded.content.scales)
        raise QueryError(
            f"{loaded.name} has no scale {scale!r}; choose one of its scales: {', '.join(scales) or 'none'}",
            code="unknown_scale",
            ablation=loaded.name,
            scale=scale,
            allowed=scales,
        )


def place_in(plan: Plan, run_id: str) -> Place | None:
    """The place of a run in a plan; None if the plan does not contain it."""
    row = plan.row_of(run_id)
    if row is None:
        return None
    return Place(plan.name, row.name, next(run for run in row.runs if run.run_id == run_id))


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with links resolved, is a regular file in a folder."""
    with contextlib.suppress(OSError, RuntimeError):
        return path.is_file() and path.resolve().is_relative_to(folder)
    return False


def _file_stamps(paths: Iterable[Path | str]) -> tuple[FileStamp, ...]:
    """The stamps of files, in order."""
    stamps = []
    for path in map(Path, paths):
        try:
            stat = path.stat()
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        except OSError:
            stamps.append((str(path), -1, -1))
    return tuple(stamps)
