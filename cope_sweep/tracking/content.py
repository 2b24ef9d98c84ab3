"""What MLflow shows of a run and of a sweep: points, parameters, tags, data and descriptions.

A point has the time when its row was written. Rows of older versions have none: there it is the time when the run
started, plus 1 ms per step.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from cope_sweep.config import NUMERIC_FACTS
from cope_sweep.config.keys import leaves
from cope_sweep.store import STATUSES, RunRecord, Status, SweepRecord
from cope_sweep.store.curve import TIME_KEY
from cope_sweep.store.index.model import SweepPlace

TAG = "cope_sweep."
MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
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


def final_points(record: RunRecord, latest: Mapping[str, Metric]) -> list[Metric]:
    """The final metrics of a finished run and its measured facts, as the points in `latest` where they are there.

    MLflow shows metrics under `system/` on a separate page, so that a chart of one point is not among the learning
    curves. Facts that say how the run was executed (threads, workers) are tags only.
    """
    ended_ms = max((point.timestamp for point in latest.values()), default=record.ended_ms or record.created_ms or 0)
    facts = {f"system/{name}": record.facts.get(name) for name in NUMERIC_FACTS}
    points = []
    for name, value in (*record.metrics.items(), *facts.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            key = mlflow_key(name)
            known = latest.get(key)
            is_known = known is not None and (known.value == value or known.step >= record.step)
            points.append(known if is_known and known else Metric(key, float(value), ended_ms, record.step))
    return points


def of_model(point: Metric, model_id: str, by_split: Mapping[str, Dataset]) -> Metric:
    """A point as a metric of a model, too, and of the data that its name begins with."""
    data = by_split.get(point.key.partition("/")[0])
    return Metric(
        point.key, point.value, point.timestamp, point.step, model_id=model_id,
        dataset_name=data.name if data else None, dataset_digest=data.digest if data else None,
    )  # fmt: skip


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


def primary_metric(record: SweepRecord) -> tuple[str, str]:
    """Name and goal (`min` or `max`) of the primary metric of a sweep's ablation."""
    first = [*record.metrics, {"name": "train/loss", "goal": "min"}][0]
    metric = next((metric for metric in record.metrics if metric["name"] == record.primary), first)
    return metric["name"], metric["goal"]


def sweep_points(record: SweepRecord, runs: Sequence[RunRecord]) -> list[Metric]:
    """The number of the runs that a sweep has finished, and their best primary metric, over time.

    A step is a second since the start of the sweep.
    """
    name, goal = primary_metric(record)
    best_of = max if goal == "max" else min
    points: dict[tuple[str, int], Metric] = {}
    values: list[float] = []
    finished = sorted((run.ended_ms or 0, run.run_id, run) for run in runs if run.status == "finished")
    for number, (ended_ms, _, run) in enumerate(finished, start=1):
        second = max(0, ended_ms - record.started_ms) // 1000
        points["runs/finished", second] = Metric("runs/finished", float(number), ended_ms, second)
        value = run.value(name)
        if value is not None and value == best_of([*values[-1:], value]) and value not in values[-1:]:
            values.append(value)
            points[name, second] = Metric(mlflow_key(name), float(value), ended_ms, second)
    return list(points.values())


def sweep_note(
    record: SweepRecord, statuses: Mapping[str, Status], best: RunRecord | None, reused: Mapping[str, str]
) -> str:
    """The note of a sweep: its progress, its best run, and links to the runs that it reused.

    `statuses`: run id → status. `reused`: id of a reused run → its id in MLflow.
    """
    counts = Counter(statuses.get(run.run_id, "pending") for run in record.runs)
    progress = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    text = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    if best is not None:
        name, _ = primary_metric(record)
        place = next((f"{run.row} · seed {run.seed}" for run in record.runs if run.run_id == best.run_id), best.run_id)
        text += f"\n\nBest {name}: {best.value(name):.6g} ({place})"
    text += "".join(f"\n\n{note}" for note in record.notes)
    if linked := [run for run in record.runs if run.run_id in reused][:MAX_LINKS]:
        text += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        text += "\n".join(f"- [{run.row} · seed {run.seed}](#/runs/{reused[run.run_id]})" for run in linked)
        if len(record.reused) > len(linked):
            text += f"\n- and {len(record.reused) - len(linked)} more"
    return text[:MAX_NOTE_CHARACTERS]
