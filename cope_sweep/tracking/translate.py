"""Translates store contents to the tags, parameters, points and inputs of a tracker's run. Pure functions.

A run in the tracker has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, …,
and `cope_sweep.sweep.<sweep id>` = row for every sweep that contains it. Its parameters are the resolved spec under
dotted names. A point has the time when its row was written. Rows of older versions have none: there it is the time when
the run was first begun, plus 1 ms per step. So sending a point twice gives the same point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.store.artifacts import TIME_KEY
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership
from cope_sweep.store.sweeps import SweepRecord
from cope_sweep.tracking.port import Dataset, Point, TrackedStatus

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


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A spec under dotted names: `model.position` is `cope+relative`, `model.position.0.p_max` is `64`."""
    if isinstance(value, Mapping):
        items = {f"{prefix}.{key}" if prefix else key: item for key, item in value.items()}
        return {name: text for key, item in items.items() for name, text in flat(item, key).items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        kinds = "+".join(str(item.get("kind", "")) for item in value) or "none"
        return {prefix: kinds} | flat({str(index): item for index, item in enumerate(value)}, prefix)
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


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
    tags |= {f"{TAG}{name}": value for name, value in flat({"versions": record.versions}).items()}
    tags |= {f"{TAG}{name}": value for name, value in flat({"machine": record.machine}).items()}
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
