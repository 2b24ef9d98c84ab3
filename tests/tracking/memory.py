"""A tracker that keeps everything in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from cope_sweep.tracking.translate import Dataset, Model, Point, TrackedRun, TrackedStatus, TrackingError


class MemoryTracking:
    """A tracker that keeps everything in memory, for tests."""

    def __init__(self) -> None:
        self.runs: dict[str, TrackedRun] = {}
        self.names: dict[str, str] = {}
        self.started_ms: dict[str, int] = {}
        self.ended_ms: dict[str, int] = {}
        self.points: dict[str, dict[Point, None]] = {}
        """Run id → its distinct points in the order of logging."""
        self.files: dict[str, dict[str, str]] = {}
        self.models: dict[str, Model] = {}
        self.experiment_notes: dict[str, str] = {}
        self._ids = itertools.count(1)

    def find(self, tags: Mapping[str, str]) -> TrackedRun | None:
        found = (run for run in self.runs.values() if tags.items() <= run.tags.items() and not run.deleted)
        return min(found, key=lambda run: self.started_ms[run.id], default=None)

    def get(self, tracked_id: str) -> TrackedRun | None:
        return self.runs.get(tracked_id)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, note: str = ""
    ) -> TrackedRun:
        self.experiment_notes.setdefault(experiment, note)
        key = f"run-{next(self._ids)}"
        run = self.runs[key] = TrackedRun(key, experiment, "running", dict(tags))
        self.names[key], self.started_ms[key] = name, started_ms
        self.points[key], self.files[key] = {}, {}
        return run

    def log(
        self,
        run: TrackedRun,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        model: Model | None = None,
    ) -> None:
        for key, value in (params or {}).items():
            if run.params.setdefault(key, value) != value:
                raise TrackingError(f"run {run.id}: parameter {key} is {run.params[key]!r} and cannot become {value!r}")
        run.tags |= tags or {}
        for point in [*points, *(model.points if model else ())]:
            self.points[run.id][point] = None
            run.update_latest(point)
        if model is not None and not run.models:
            key = f"model-{next(self._ids)}"
            self.models[key] = model
            run.models.append(key)

    def log_datasets(self, run: TrackedRun, datasets: Sequence[Dataset]) -> None:
        run.datasets += [dataset for dataset in datasets if dataset not in run.datasets]

    def set_status(self, run: TrackedRun, status: TrackedStatus, ended_ms: int | None = None) -> None:
        run.status = status
        if ended_ms is not None:
            self.ended_ms[run.id] = ended_ms

    def put_text(self, run: TrackedRun, path: str, text: str) -> None:
        self.files[run.id][path] = text
