"""Translates store contents to the tags, parameters and points of a tracker's run. Pure functions.

A run in the tracker has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, ….
Its parameters are the resolved spec under dotted names. The timestamp of a point is the time when the run was first
begun, plus 1 ms per step, so that sending a point twice gives the same point.
"""

from __future__ import annotations

import contextlib
import getpass
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.tracking import Point

TAG = "cope_sweep."
FACTS = f"{TAG}facts"

Record = Mapping[str, Any]
"""A JSON object from the store, most often the content of `store/sweeps/<sweep_id>.json`."""


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A spec under dotted names: `model.position` is `cope+relative`, `model.position.0.p_max` is `64`."""
    if isinstance(value, dict):
        items = {f"{prefix}.{key}" if prefix else key: item for key, item in value.items()}
        return {name: text for key, item in items.items() for name, text in flat(item, key).items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        kinds = "+".join(str(item.get("kind", "")) for item in value) or "none"
        return {prefix: kinds} | flat({str(index): item for index, item in enumerate(value)}, prefix)
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


def identity_tags(run: Record) -> dict[str, str]:
    """Tags that identify a run, from its entry in a sweep's record: id, row and labels of the axes."""
    axes = {f"{TAG}axis.{key}": label for key, label in run["labels"].items()}
    return {f"{TAG}kind": "run", f"{TAG}run_id": run["run_id"], f"{TAG}row": run["row"], **axes}


def origin_tags(record: Record) -> dict[str, str]:
    """Tags that say where a run comes from: sweep, ablation, commit, versions, machine, user."""
    tags = {f"{TAG}sweep_id": record["sweep_id"], f"{TAG}ablation": record["ablation"]}
    tags |= {f"{TAG}{name}": value for name, value in flat({"versions": record["versions"]}).items()}
    tags |= {f"{TAG}{name}": value for name, value in flat({"machine": record["machine"]}).items()}
    tags |= {"mlflow.source.name": " ".join(record["command"]), "mlflow.source.type": "JOB"}
    if record["git_commit"]:
        tags["mlflow.source.git.commit"] = record["git_commit"]
    # The user id of a container may have no name.
    with contextlib.suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def state_tags(status: str, state: Record, result: Record | None) -> dict[str, str]:
    """Tags with the status of a run and, if it is finished, its facts."""
    tags = {
        f"{TAG}status": status,
        f"{TAG}attempt": str(state.get("attempt", 1)),
        f"{TAG}message": state.get("message", "") if status == "failed" else "",
    }
    if result is not None:
        # One tag holds all facts as JSON, for programs. Text facts also get tags of their own, for people; numeric
        # facts become metrics.
        tags[FACTS] = json.dumps(result["facts"])
        tags |= {f"{TAG}{name}": value for name, value in result["facts"].items() if isinstance(value, str)}
    return tags


def points_after(
    have: Mapping[str, Point], curve: Sequence[Mapping[str, float]], result: Record | None, created_ms: int
) -> list[Point]:
    """The points of each metric after its last step in `have`; for a finished run also final metrics and facts.

    A run that resumes from a checkpoint trains some steps again. The points that were sent first stay.

    Args:
        have: Metric → the last point that the tracker has.
        curve: The logged rows of the run, each with its `step`.
        result: The result of a finished run.
        created_ms: When the run was first begun.
    """
    rows = [(int(row["step"]), {key: value for key, value in row.items() if key != "step"}) for row in curve]
    if result is not None:
        last = {key: value for _, values in rows for key, value in values.items()}
        step = int(result["facts"].get("steps", rows[-1][0] if rows else 0))
        final = {key: value for key, value in result["metrics"].items() if last.get(key) != value}
        facts = {f"facts/{k}": float(v) for k, v in result["facts"].items() if type(v) in (int, float) and k != "steps"}
        rows.append((step, final | facts))
    return [
        Point(key, float(value), step, created_ms + step)
        for step, values in rows
        for key, value in values.items()
        if key not in have or step > have[key].step
    ]


def ended_ms(folder: RunFolder, status: str, state: Record) -> int:
    """When a run ended: the time of its result or of its last state; for a killed run, of its last logged row."""
    if status == "finished":
        return _mtime_ms(folder, "result.json")
    if state.get("status") == "running":
        return max(int(state["updated_ms"]), _mtime_ms(folder, "curve.jsonl"))
    return int(state["updated_ms"])


def _mtime_ms(folder: RunFolder, name: str) -> int:
    try:
        return int((folder.path / name).stat().st_mtime * 1000)
    except FileNotFoundError:
        return 0
