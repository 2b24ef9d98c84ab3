"""The interface to an experiment tracker.

`cope_sweep.tracking.mlflow` implements it with MLflow, and `tests.store.memory` in memory. tests/store/test_tracking.py
tests both implementations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from cope_sweep.errors import UserError

TrackedStatus = Literal["running", "finished", "failed", "killed"]
"""The status of a run in the tracker. Pending runs are not sent to it."""


class TrackingError(UserError):
    """The tracker did not answer or refused a request. The message says which tracker, why, and what to do."""


@dataclass(frozen=True)
class Point:
    """One value of a metric."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class Dataset:
    """The data of one split, as an input of a run."""

    name: str
    """Task and split: `selective_copy/train`."""
    digest: str
    """Equal digests mean the same data, or the same generator of it. At most 36 characters."""
    context: str
    """Its use: `train`, or the name of the test set."""
    source: str
    """The task of the spec, as JSON."""


@dataclass(frozen=True)
class Model:
    """The trained model of a run."""

    name: str
    folder: Path
    """Its files."""
    step: int
    """The training steps after which it was written."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: Sequence[Point] = ()
    """Its metrics."""


@dataclass
class TrackedRun:
    """A run in the tracker. The methods of `Tracking` that write to it also update this object."""

    id: str
    """The tracker's id of the run."""
    experiment: str
    """The id of its experiment."""
    artifacts: str
    """The URI of its artifact folder."""
    status: TrackedStatus
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    latest: dict[str, Point] = field(default_factory=dict)
    """Metric → the point of its last step."""
    datasets: list[Dataset] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """The tracker's ids of the models that the run has produced; such a model is complete."""
    deleted: bool = False
    """Whether somebody has put it into the tracker's trash."""
    created_now: bool = False
    """Whether this client has created it and not read it again: nobody else can have written to it."""

    @property
    def link(self) -> str:
        """A link to the run's page that works inside MLflow's UI."""
        return f"#/experiments/{self.experiment}/runs/{self.id}"


class Tracking(Protocol):
    """An experiment tracker. Every method raises TrackingError."""

    def find(self, tags: Mapping[str, str]) -> TrackedRun | None:
        """The run that has all these tags, in any experiment; the oldest one if there are several."""

    def get(self, tracked_id: str) -> TrackedRun | None:
        """The run with the tracker's id `tracked_id`, or None."""

    def find_all(self, tag: str, limit: int) -> dict[str, str] | None:
        """Value of `tag` → the tracker's id, of all runs that have the tag; None if those are more than `limit`."""

    def settle(self) -> None:
        """Return when what was written survives a power failure."""

    def close(self) -> None:
        """Release what the client holds."""

    def create(
        self, experiment: str, name: str, *, tags: Mapping[str, str], started_ms: int, note: str = ""
    ) -> TrackedRun:
        """Create a run with the status running. The experiment is created, with `note`, if it does not exist."""

    def log(
        self,
        run: TrackedRun,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        model: Model | None = None,
    ) -> None:
        """Log points, parameters and tags. Logging an entry again changes nothing; a parameter cannot change.

        With a model, upload it and link it to the run, unless the run has one. Its metrics are also the run's. A metric
        belongs to the dataset of the run whose context is the metric's prefix.
        """

    def log_datasets(self, run: TrackedRun, datasets: Sequence[Dataset]) -> None:
        """Note the data that a run read. Logging them again changes nothing."""

    def set_status(self, run: TrackedRun, status: TrackedStatus, ended_ms: int | None = None) -> None:
        """Set the status of a run and, unless it is running, when it ended."""

    def put_text(self, run: TrackedRun, path: str, text: str) -> None:
        """Write `text` to the artifact `path`."""

    def artifacts(self, run: TrackedRun, path: str = "") -> list[str]:
        """The artifacts and folders directly below `path`, sorted."""


def update_latest(run: TrackedRun, point: Point) -> None:
    """Update `run.latest` after `point` was logged."""
    known = run.latest.get(point.key)
    if known is None or (point.step, point.timestamp_ms) >= (known.step, known.timestamp_ms):
        run.latest[point.key] = point
