"""A run in a tracker, as data, and the translation of store contents to its tags, parameters, points and inputs.

A run in the tracker has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, …,
and `cope_sweep.sweep.<sweep id>` = row for every sweep that contains it. Its parameters are the resolved spec under
dotted names. A point has the time when its row was written. Rows of older versions have none: there it is the time when
the run was first begun, plus 1 ms per step. So sending a point twice gives the same point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.errors import UserError
from cope_sweep.store.artifacts import TIME_KEY
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership
from cope_sweep.store.index.model import leaves
from cope_sweep.store.sweeps import SweepRecord

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
    """A run in the tracker. The methods of a tracker that write to it also update this object."""

    id: str
    """The tracker's id of the run."""
    experiment: str
    """The id of its experiment."""
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

    def update_latest(self, point: Point) -> None:
        """Update `latest` after a point was logged."""
        known = self.latest.get(point.key)
        if known is None or (point.step, point.timestamp_ms) >= (known.step, known.timestamp_ms):
            self.latest[point.key] = point


TAG = "cope_sweep."
FACTS = f"{TAG}facts"
TRACKED_STATUS: dict[Status, TrackedStatus] = {
    "running": "running",
    "finished": "finished",
    "failed": "failed",
    "damaged": "failed",
    "interrupted": "killed",
    "stopped": "killed",
}
"""Only what is finished in the store is finished in the tracker: a filter on its status gives the runs of the table.
The tag `cope_sweep.status` tells a run that a scheduler stopped from one that was interrupted."""


def flat(value: Mapping[str, Any]) -> dict[str, str]:
    """A spec under dotted names, see `leaves`; what is no text is JSON."""
    return {name: _text(leaf) for name, leaf in leaves(value)}


def identity_tags(run_id: str, place: Membership | None) -> dict[str, str]:
    """Tags that identify a run: its id, and its row and the labels of its axes in the sweep that first trained it."""
    tags = {f"{TAG}kind": "run", f"{TAG}run_id": run_id}
    if place is not None:
        tags |= {f"{TAG}row": place.row, f"{TAG}sweep_id": place.sweep_id, f"{TAG}ablation": place.ablation}
        tags |= {f"{TAG}axis.{key}": label for key, label in place.labels.items()}
    return tags


def sweep_tag(sweep_id: str) -> str:
    """The tag that a run has for each sweep that contains it; its value is the run's row there."""
    return f"{TAG}sweep.{sweep_id}"


def sweep_tags(places: Iterable[Membership]) -> dict[str, str]:
    """The tags of all sweeps that contain a run."""
    return {sweep_tag(place.sweep_id): place.row for place in places}


def origin_tags(record: SweepRecord) -> dict[str, str]:
    """Tags that say where a sweep and its runs come from: ablation, commit, versions, machine."""
    tags = {f"{TAG}sweep_id": record.sweep_id, f"{TAG}ablation": record.ablation}
    origin = {"versions": record.versions, "machine": record.machine}
    tags |= {f"{TAG}{name}": value for name, value in flat(origin).items()}
    tags |= {"mlflow.source.name": " ".join(record.command), "mlflow.source.type": "JOB"}
    if record.git_commit:
        tags["mlflow.source.git.commit"] = record.git_commit
    return tags


def state_tags(record: RunRecord) -> dict[str, str]:
    """Tags with the status of a run, why it ended, and the facts that are known of it."""
    tags = {
        f"{TAG}status": record.status,
        f"{TAG}attempt": str(record.attempt),
        f"{TAG}message": record.message or "",
    }
    if record.worker_id:
        tags[f"{TAG}worker_id"] = record.worker_id
    if record.parent_id:
        tags[f"{TAG}parent_id"] = record.parent_id
    if record.facts:
        # One tag holds all facts as JSON, for programs; each fact also has a tag of its own, for people.
        tags[FACTS] = json.dumps(dict(record.facts))
        tags |= {f"{TAG}{name}": _text(value) for name, value in record.facts.items()}
    return tags


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def curve_points(have: Mapping[str, Point], curve: Sequence[Mapping[str, float]], created_ms: int) -> list[Point]:
    """The points of each metric after its last step in `have`, each (metric, step) once.

    A run that resumes from a checkpoint trains some steps again. The points that were sent first stay.

    Args:
        have: Metric → the last point that the tracker has.
        curve: The logged rows of the run, each with its `step` and, unless it is old, its time of day.
        created_ms: When the run was first begun.
    """
    last = {key: point.step for key, point in have.items()}
    points = []
    for row in curve:
        step = int(row["step"])
        timestamp_ms = int(row.get(TIME_KEY, created_ms + step))
        for key, value in row.items():
            if key not in ("step", TIME_KEY) and step > last.get(key, -1):
                points.append(Point(key, float(value), step, timestamp_ms))
                last[key] = step
    return points


def final_points(record: RunRecord, curve: Sequence[Mapping[str, float]], created_ms: int) -> list[Point]:
    """The final metrics of a finished run, as the points of the curve where they are there, and its measured facts.

    MLflow shows metrics under `system/` on a page of their own, so that a chart of one point is not among the learning
    curves. Facts that say how the run was executed (threads, workers) are tags only.
    """
    logged = {point.key: point for point in curve_points({}, curve, created_ms)}
    ended_ms = max((point.timestamp_ms for point in logged.values()), default=record.ended_ms or created_ms)
    points = []
    for key, value in record.metrics.items():
        known = logged.get(key)
        same = known is not None and known.value == value
        points.append(known if same and known else Point(key, float(value), record.step, ended_ms))
    for name in NUMERIC_FACTS:
        fact = record.facts.get(name)
        if isinstance(fact, (int, float)) and not isinstance(fact, bool):
            points.append(Point(f"system/{name}", float(fact), record.step, ended_ms))
    return points


def points_after(have: Mapping[str, Point], points: Iterable[Point]) -> list[Point]:
    """The points of each metric after its last step in `have`."""
    return [point for point in points if point.key not in have or point.step > have[point.key].step]


def datasets(record: RunRecord, spec: Mapping[str, Any]) -> list[Dataset]:
    """The data that a finished run read: the training set, and each test set that it has metrics of.

    The digest is the fingerprint of the text that the task reads, or, where the task generates its sequences, that of
    the task's spec.
    """
    task = spec.get("task", {})
    source = json.dumps({"task": task}, sort_keys=True)
    digest = str(record.facts.get("data") or hashlib.sha256(source.encode()).hexdigest()[:16])[:36]
    tests = dict.fromkeys(key.partition("/")[0] for key in record.metrics if "/" in key)
    kind = task.get("kind", "task")
    splits = ("train", *(name for name in tests if name != "train"))
    return [Dataset(f"{kind}/{split}", digest, split, source) for split in splits]
