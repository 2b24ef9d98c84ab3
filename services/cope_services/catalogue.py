"""The ablation files of a folder, and their plans: parsed when they change, not when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cope_services.errors import InvalidError, NotFoundError
from cope_sweep.plan import Plan, expand
from cope_sweep.spec import RunSpec, SpecError, load_ablation, with_overrides

SUFFIXES = (".yaml", ".yml")

Stamp = tuple[str, int, int]


@dataclass(frozen=True)
class Planned:
    """A plan, the runs in its order, and what tells this state of its file from others."""

    plan: Plan
    runs: dict[str, RunSpec]
    stamp: Stamp
    scale: str | None


@dataclass(frozen=True)
class Place:
    """Where a run belongs: an ablation (at a scale), and a row."""

    ablation: str
    row: str
    spec: RunSpec


class Catalogue:
    """Ablations by name, which is their file's. Names come from a listing of the folder: no name becomes a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plans: dict[tuple[str, str | None], tuple[Stamp, Planned | SpecError]] = {}
        self._places: tuple[frozenset[Stamp], dict[str, list[Place]]] = (frozenset(), {})
        self._lock = threading.RLock()

    def files(self) -> dict[str, Path]:
        """Name → file, by name."""
        paths = [path for path in self.folder.iterdir() if path.suffix in SUFFIXES and path.is_file()]
        # Of a.yaml and a.yml, the former counts.
        return {path.stem: path for path in sorted(paths, key=lambda path: (path.stem, path.suffix == ".yaml"))}

    def file(self, name: str) -> Path:
        """Raises NotFoundError."""
        files = self.files()
        if name not in files:
            raise NotFoundError(f"no ablation {name!r}; there are: {', '.join(files) or 'none'}")
        return files[name]

    def planned(self, name: str, scale: str | None = None) -> Planned:
        """The plan of an ablation, at a scale. Raises NotFoundError, InvalidError (the scale), SpecError (the file)."""
        path = self.file(name)
        try:
            stat = path.stat()
        except OSError as error:
            raise NotFoundError(f"no ablation {name!r}") from error
        stamp = (str(path), stat.st_mtime_ns, stat.st_size)
        with self._lock:
            known = self._plans.get((name, scale))
            if known is None or known[0] != stamp:
                known = (stamp, _plan(path, scale, stamp))
                self._plans[name, scale] = known
        if isinstance(known[1], SpecError):
            raise known[1]
        return known[1]

    def places(self) -> Mapping[str, list[Place]]:
        """Run id → the rows, of all ablations at all their scales, that hold the run."""
        every = []
        for name in self.files():
            try:
                base = self.planned(name)
                every += [base, *(self.planned(name, scale) for scale in base.plan.ablation.content.scales)]
            except (SpecError, NotFoundError):
                continue
        stamps = frozenset(planned.stamp for planned in every)
        with self._lock:
            if self._places[0] != stamps:
                places: dict[str, list[Place]] = {}
                for planned in every:
                    for row in planned.plan.rows:
                        for run in row.runs:
                            places.setdefault(run.run_id, []).append(Place(planned.plan.name, row.name, run))
                self._places = (stamps, places)
            return self._places[1]


def _plan(path: Path, scale: str | None, stamp: Stamp) -> Planned | SpecError:
    try:
        loaded = load_ablation(path)
        if scale is not None and scale not in loaded.content.scales:
            known = ", ".join(loaded.content.scales) or "none: it has one size"
            raise InvalidError(f"{path.stem} has no scale {scale!r}; it has {known}")
        plan = expand(with_overrides(loaded, scale=scale))
    except SpecError as error:
        return error.with_traceback(None)
    except RecursionError:
        return SpecError(f"{path}: nested too deeply")
    return Planned(plan, {run.run_id: run for run in plan.runs}, stamp, scale)
