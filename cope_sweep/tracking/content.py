"""What MLflow shows of a run and of a sweep: points, parameters, tags, data and descriptions.

A point has the time when its row was written. Rows of older versions have none: there it is the time when the run
started, plus 1 ms per step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.config.keys import leaves
from cope_sweep.store import STATUSES, RunRecord, Status, SweepRecord
from cope_sweep.store.curve import TIME_KEY
from cope_sweep.store.index.model import SweepPlace

TAG = "cope_sweep."
MAX_LINKS = 40
"""Reused runs that a note links."""
OMITTED_FACTS = {*NUMERIC_FACTS, "steps", "data"}
"""Facts that are not tags: metrics, a parameter, and the digest of the dataset."""


def mlflow_key(key: str) -> str:
    """The name of a metric in MLflow, which does not allow `@`: `test/perplexity at 2048`."""
    return key.replace("@", " at ")


def curve_points(latest: Mapping[str, Metric], curve: Sequence[Mapping[str, float]], created_ms: int) -> list[Metric]:
    """The points of each metric after its last step in `latest`, each (metric, step) once.

    A run that resumes from a checkpoint trains some steps again. The points that were sent first stay.

    Args:
        latest: Metric → the last point that MLflow has.
        curve: The logged rows of the run, each with its `step` and, unless it is old, its time of day.
        created_ms: When the run first started.
    """
    last = {key: point.step for key, point in latest.items()}
    points = []
    for row in curve:
        step = int(row["step"])
        timestamp_ms = int(row.get(TIME_KEY, created_ms + step))
        for name, value in row.items():
            key = mlflow_key(name)
            if name not in ("step", TIME_KEY) and step > last.get(key, -1):
                points.append(Metric(key, float(value), timestamp_ms, step))
                last[key] = step
    return points


def with_final_points(
    points: Sequence[Metric],
    latest: Mapping[str, Metric],
    record: RunRecord,
    model_id: str | None,
    data: Sequence[DatasetInput],
) -> list[Metric]:
    """`points`, and the final metrics and measured facts of a finished run, also as metrics of its model and data.

    A final metric is the last point of its curve if that has its value. MLflow shows metrics under `system/` on a
    separate page, so that a chart of one point is not among the learning curves. Facts that say how the run was
    executed (threads, workers) are tags only.
    """
    known = {**latest, **{point.key: point for point in points}}
    ended_ms = max((point.timestamp for point in known.values()), default=record.ended_ms or record.created_ms or 0)
    by_split = {each.tags[0].value: each.dataset for each in data}
    facts = {f"system/{name}": record.facts.get(name) for name in NUMERIC_FACTS}
    final = {}
    for name, value in (*record.metrics.items(), *facts.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            key = mlflow_key(name)
            last = known.get(key)
            if last is None or (last.value != value and last.step < record.step):
                last = Metric(key, float(value), ended_ms, record.step)
            read = by_split.get(key.partition("/")[0]) if model_id else None
            final[key] = Metric(
                key, last.value, last.timestamp, last.step, model_id=model_id,
                dataset_name=read.name if read else None, dataset_digest=read.digest if read else None,
            )  # fmt: skip
    earlier = [point for point in points if point.key not in final or final[point.key].step != point.step]
    return [*earlier, *final.values()]


def datasets(record: RunRecord, spec: Mapping[str, Any]) -> list[DatasetInput]:
    """The data that a finished run read: the training set, and each test set that it has metrics of.

    The digest is the fingerprint of the text that the task reads, or, if it generates its sequences, of its spec. Its
    context is its use: `train`, or the name of the test set.
    """
    task = spec.get("task", {})
    source = json.dumps({"task": task}, sort_keys=True)
    digest = str(record.facts.get("data") or hashlib.sha256(source.encode()).hexdigest()[:16])[:36]
    splits = dict.fromkeys(["train", *(key.partition("/")[0] for key in record.metrics if "/" in key)])
    return [
        DatasetInput(
            Dataset(f"{task.get('kind', 'task')}/{split}", digest, source_type="cope_sweep", source=source),
            [InputTag("mlflow.data.context", split)],
        )
        for split in splits
    ]


# -- the texts that MLflow shows: tags, parameters and notes -----------------------------------------------------------


def flat(value: Mapping[str, Any]) -> dict[str, str]:
    """A spec under dotted names, see `leaves`; what is not a text is JSON."""
    return {name: _text(leaf) for name, leaf in leaves(value)}


def run_tags(record: RunRecord, sweep: SweepRecord | None, place: SweepPlace | None) -> dict[str, str]:
    """The tags of a run that may change while it is trained, and by the sweep that trains it again."""
    tags = {f"{TAG}message": record.message or "", f"{TAG}worker_id": record.worker_id or ""}
    tags |= {f"{TAG}{key}": _text(value) for key, value in record.facts.items() if key not in OMITTED_FACTS}
    if sweep is not None:
        tags |= source_tags(sweep)
    if place is not None:
        tags[f"{TAG}row"] = place.row
        tags |= {f"{TAG}axis.{key}": label for key, label in place.labels.items()}
    return {key: value for key, value in tags.items() if value or key == f"{TAG}message"}


def source_tags(record: SweepRecord) -> dict[str, str]:
    """Tags of a sweep and of each of its runs: ablation, command and commit."""
    tags = {
        f"{TAG}sweep_id": record.sweep_id,
        f"{TAG}ablation": record.ablation,
        "mlflow.source.name": " ".join(record.command),
        "mlflow.source.type": "JOB",
    }
    return tags | ({"mlflow.source.git.commit": record.git_commit} if record.git_commit else {})


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def sweep_params(record: SweepRecord) -> dict[str, str]:
    """The parameters of a sweep that has ended; a search adds runs until then."""
    return {
        "executor": record.executor,
        "rows": str(len({run.row for run in record.runs})),
        "seeds": json.dumps(sorted({run.seed for run in record.runs})),
        "runs": str(len(record.runs)),
        "metrics": ", ".join(metric["name"] for metric in record.metrics),
    }


def experiment_note(record: SweepRecord) -> str:
    """The note of an experiment: title and hypothesis of the ablation in a sweep's record."""
    return "\n\n".join(part for part in (f"**{record.title}**", record.hypothesis.strip()) if part)


def sweep_points(record: SweepRecord, trained: Iterable[RunRecord]) -> list[Metric]:
    """The number of the runs that a sweep has finished, over time: a step is a second since its start.

    Metrics are those of single runs: a line through different rows would look like a learning curve.
    """
    points: dict[int, Metric] = {}
    finished = sorted((run.ended_ms or 0, run.run_id) for run in trained if run.status == "finished")
    for number, (ended_ms, _) in enumerate(finished, start=1):
        second = max(0, ended_ms - record.started_ms) // 1000
        points[second] = Metric("runs/finished", float(number), ended_ms, second)
    return list(points.values())


def sweep_note(
    record: SweepRecord, counts: Mapping[Status, int], linked: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The note of a sweep: its progress, and links to the runs that it reused.

    Args:
        record: The sweep.
        counts: Status → the number of its runs.
        linked: Id of a reused run → its id in MLflow.
    """
    progress = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts.get(status))
    parts = [experiment_note(record), f"{len(record.runs)} runs: {progress}.", *record.notes]
    if linked:
        names = {run.run_id: f"{run.row} · seed {run.seed}" for run in record.runs}
        parts.append(f"{len(record.reused)} runs were trained by earlier sweeps and are listed there:")
        links = [f"- [{names[run_id]}](#/runs/{found})" for run_id, found in linked.items()]
        more = len(record.reused) - len(links)
        parts.append("\n".join([*links, *([f"- and {more} more"] if more else [])]))
    return "\n\n".join(filter(None, parts))
