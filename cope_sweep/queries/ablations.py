"""The ablation files of a folder and their plans. A file is parsed when it has changed, not for each query."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cope_sweep.plan import Plan, expand
from cope_sweep.queries.errors import NotFoundError
from cope_sweep.spec import RunSpec, SpecError, load_ablation, with_overrides
from cope_sweep.store import QueryError

SUFFIXES = (".yaml", ".yml")

FileStamp = tuple[str, int, int]
"""Path, modification time and size; both −1 for a file that is missing."""


@dataclass(frozen=True)
class LoadedPlan:
    """The plan of an ablation at a scale, its runs by id in the plan's order, and the state of its files."""

    plan: Plan
    runs: dict[str, RunSpec]
    stamp: tuple[FileStamp, ...]
    """Of its file, and of those that it inherits from."""
    scale: str | None


@dataclass(frozen=True)
class Place:
    """A run in the plan of an ablation, or in a sweep of it."""

    ablation: str
    row: str
    spec: RunSpec | None = None


class AblationFiles:
    """Ablations by file name, without suffix. A client's name is only compared with a listing, never made a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plans: dict[tuple[str, str | None], tuple[tuple[FileStamp, ...], LoadedPlan | SpecError]] = {}
        self._lock = threading.RLock()

    def files(self) -> dict[str, Path]:
        """Name → file, sorted by name. Raises OSError."""
        paths = [path for path in self.folder.iterdir() if path.suffix in SUFFIXES and path.is_file()]
        # If both a.yaml and a.yml exist, a.yaml wins.
        return {path.stem: path for path in sorted(paths, key=lambda path: (path.stem, path.suffix == ".yaml"))}

    def file(self, name: str) -> Path:
        """The file of an ablation. Raises NotFoundError."""
        files = self.files()
        if name not in files:
            raise NotFoundError(f"no ablation {name!r}; the ablations are: {', '.join(files) or 'none'}")
        return files[name]

    def load(self, name: str, scale: str | None = None) -> LoadedPlan:
        """The plan of an ablation at a scale. Raises NotFoundError, QueryError (the scale), SpecError (the file)."""
        path = self.file(name)
        with self._lock:
            known = self._plans.get((name, scale))
            if known is None or known[0][0][0] != str(path) or known[0] != _stamps(each[0] for each in known[0]):
                # What a faulty file depends on is not known: any file of the folder.
                everything = _stamps([path, *(other for other in self.files().values() if other != path)])
                parsed = _parse(path, scale, self._own_size(name) if scale is not None else None)
                known = (parsed.stamp if isinstance(parsed, LoadedPlan) else everything, parsed)
                self._plans[name, scale] = known
        if isinstance(known[1], SpecError):
            raise known[1].with_traceback(None)  # the error is kept, and each raise adds frames
        return known[1]

    def _own_size(self, name: str) -> LoadedPlan | None:
        """The plan without scale, whose parsed file the scales share; None where it is faulty."""
        with contextlib.suppress(SpecError):
            return self.load(name)
        return None

    def places(self, run_ids: Iterable[str]) -> dict[str, list[Place]]:
        """Run id → where it is in the plans of all valid ablations at all scales."""
        wanted = list(run_ids)
        found: dict[str, list[Place]] = {}
        for each in self._all():
            for run_id in wanted:
                if (spec := each.runs.get(run_id)) is not None:
                    place = Place(each.plan.name, each.plan.row_name(run_id), spec)
                    found.setdefault(run_id, []).append(place)
        return found

    def _all(self) -> Iterator[LoadedPlan]:
        for name in self.files():
            try:
                base = self.load(name)
                yield base
                for scale in base.plan.ablation.content.scales:
                    yield self.load(name, scale)
            except (SpecError, NotFoundError):
                continue


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


def _parse(path: Path, scale: str | None, own_size: LoadedPlan | None) -> LoadedPlan | SpecError:
    """The plan of a file, which is read unless `own_size` holds it.

    Its stamp is taken before it is read, so that a later change is noticed.
    """
    before = _stamps([path])
    try:
        ablation = load_ablation(path) if own_size is None else own_size.plan.ablation
        if scale is not None and scale not in ablation.content.scales:
            known = ", ".join(ablation.content.scales) or "none"
            raise QueryError(f"{path.stem} has no scale {scale!r}; its scales are: {known}")
        plan = expand(with_overrides(ablation, scale=scale))
    except SpecError as error:
        return error.with_traceback(None)
    except RecursionError:
        return SpecError(f"{path}: nested too deeply")
    stamp = before + _stamps(ablation.source.parents) if own_size is None else own_size.stamp
    return LoadedPlan(plan, {run.run_id: run for run in plan.runs}, stamp, scale)
