"""The port through which runs reach an experiment tracker, and its twin in memory.

`cope_sweep.record.mlflow` is the real one. Both pass tests/record/test_tracking.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from cope_sweep.errors import UserError

Standing = Literal["running", "finished", "failed", "interrupted"]
"""Where a run stands that was begun."""


class TrackingError(UserError):
    """The tracker did not answer, or refused; the message says which one, why, and the way out."""


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass
class Tracked:
    """What the tracker holds of a run; whoever writes keeps it up to date."""

    id: str
    """The tracker's own name for it."""
    experiment: str
    """The id of its experiment."""
    artifacts: str
    """Where its artifacts are, as a URI."""
    standing: Standing
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    latest: dict[str, Point] = field(default_factory=dict)
    """Metric → the point of its last step."""

    @property
    def link(self) -> str:
        """The run's page, as a link inside MLflow's UI."""
        return f"#/experiments/{self.experiment}/runs/{self.id}"


class Tracking(Protocol):
    """A tracker of runs. Every method raises TrackingError."""

    def find(self, tags: Mapping[str, str]) -> Tracked | None:
        """The run with all these tags, in any experiment; the oldest, where there are several."""

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, about: str = ""
    ) -> Tracked:
        """Begin a run, in an experiment that is made, and described by `about`, where it is missing."""

    def log(
        self,
        run: Tracked,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add to a run. A point that is there already is not added again; a parameter cannot change, a tag can."""

    def set_standing(self, run: Tracked, standing: Standing, ended_ms: int | None = None) -> None:
        """Set where the run stands and, unless it goes on, when it ended."""

    def put_text(self, run: Tracked, path: str, text: str) -> None:
        """Write an artifact."""

    def put_folder(self, run: Tracked, path: str, folder: Path) -> None:
        """Write a folder's files as artifacts below `path`."""

    def history(self, run: Tracked, key: str) -> list[Point]:
        """Every point of a metric, by step."""

    def artifacts(self, run: Tracked, path: str = "") -> list[str]:
        """The artifacts and folders directly below `path`, sorted."""


class MemoryTracking:
    """A tracker that forgets, for tests."""

    def __init__(self) -> None:
        self.runs: dict[str, Tracked] = {}
        self.names: dict[str, str] = {}
        self.started_ms: dict[str, int] = {}
        self.ended_ms: dict[str, int] = {}
        self.points: dict[str, dict[Point, None]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.abouts: dict[str, str] = {}
        self._ids = itertools.count(1)

    def find(self, tags: Mapping[str, str]) -> Tracked | None:
        found = (run for run in self.runs.values() if tags.items() <= run.tags.items())
        return next(iter(sorted(found, key=lambda run: self.started_ms[run.id])), None)

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, about: str = ""
    ) -> Tracked:
        self.abouts.setdefault(experiment, about)
        key = f"run-{next(self._ids)}"
        run = self.runs[key] = Tracked(key, experiment, f"memory:/{key}", "running", dict(tags))
        self.names[key], self.started_ms[key] = name, started_ms
        self.points[key], self.files[key] = {}, {}
        return run

    def log(
        self,
        run: Tracked,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        for key, value in (params or {}).items():
            if run.params.setdefault(key, value) != value:
                raise TrackingError(f"run {run.id}: parameter {key} is {run.params[key]!r} and cannot become {value!r}")
        run.tags |= tags or {}
        for point in points:
            self.points[run.id][point] = None
            note_latest(run, point)

    def set_standing(self, run: Tracked, standing: Standing, ended_ms: int | None = None) -> None:
        run.standing = standing
        if ended_ms is not None:
            self.ended_ms[run.id] = ended_ms

    def put_text(self, run: Tracked, path: str, text: str) -> None:
        self.files[run.id][path] = text.encode()

    def put_folder(self, run: Tracked, path: str, folder: Path) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.files[run.id][f"{path}/{file.relative_to(folder).as_posix()}"] = file.read_bytes()

    def history(self, run: Tracked, key: str) -> list[Point]:
        return sorted((point for point in self.points[run.id] if point.key == key), key=lambda point: point.step)

    def artifacts(self, run: Tracked, path: str = "") -> list[str]:
        prefix = f"{path}/" if path else ""
        below = (name.removeprefix(prefix) for name in self.files[run.id] if name.startswith(prefix))
        return sorted({prefix + name.split("/")[0] for name in below})


def note_latest(run: Tracked, point: Point) -> None:
    """Keep `run.latest` true after `point` was added."""
    known = run.latest.get(point.key)
    if known is None or (point.step, point.timestamp_ms) >= (known.step, known.timestamp_ms):
        run.latest[point.key] = point
