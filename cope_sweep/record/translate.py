"""The ledger's words in the tracker's: tags, parameters and points of a run, and back again. Pure functions.

A run there has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, …; its
parameters are the resolved spec in dotted names; its points are stamped with its first begin plus one ms a step.
"""

from __future__ import annotations

import contextlib
import getpass
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cope_sweep.record.ledger import RunFolder
from cope_sweep.record.tracking import Point, Tracked

TAG = "cope_sweep."
FACTS = f"{TAG}facts"

Record = Mapping[str, Any]
"""A JSON object of the ledger: above all what `store/sweeps/<sweep_id>.json` holds."""


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A spec in dotted names: `model.position` is `cope+relative`, `model.position.0.p_max` is `64`."""
    if isinstance(value, dict):
        items = {f"{prefix}.{key}" if prefix else key: item for key, item in value.items()}
        return {name: text for key, item in items.items() for name, text in flat(item, key).items()}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        kinds = "+".join(str(item.get("kind", "")) for item in value) or "none"
        return {prefix: kinds} | flat({str(index): item for index, item in enumerate(value)}, prefix)
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


def identity_tags(run: Record) -> dict[str, str]:
    """Which run it is, from its entry in a sweep's record."""
    axes = {f"{TAG}axis.{key}": label for key, label in run["labels"].items()}
    return {f"{TAG}kind": "run", f"{TAG}run_id": run["run_id"], f"{TAG}row": run["row"], **axes}


def origin_tags(record: Record) -> dict[str, str]:
    """Where a run comes from: sweep, ablation, code, versions, machine, user."""
    tags = {f"{TAG}sweep_id": record["sweep_id"], f"{TAG}ablation": record["ablation"]}
    tags |= {f"{TAG}{name}": value for name, value in flat({"versions": record["versions"]}).items()}
    tags |= {f"{TAG}{name}": value for name, value in flat({"machine": record["machine"]}).items()}
    tags |= {"mlflow.source.name": " ".join(record["command"]), "mlflow.source.type": "JOB"}
    if record["git_commit"]:
        tags["mlflow.source.git.commit"] = record["git_commit"]
    # A container's user may have no name.
    with contextlib.suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def state_tags(status: str, state: Record, result: Record | None) -> dict[str, str]:
    """How the run stands, and the facts of a finished one."""
    tags = {
        f"{TAG}status": status,
        f"{TAG}attempt": str(state.get("attempt", 1)),
        f"{TAG}message": state.get("message", "") if status == "failed" else "",
    }
    if result is not None:
        # As they are, to be read back; and those that are text once more, for people. Numbers become metrics.
        tags[FACTS] = json.dumps(result["facts"])
        tags |= {f"{TAG}{name}": value for name, value in result["facts"].items() if isinstance(value, str)}
    return tags


def points_after(
    have: Mapping[str, Point], curve: Sequence[Mapping[str, float]], result: Record | None, created_ms: int
) -> list[Point]:
    """Of each metric the points after its last step in `have`; of a finished run also final metrics, facts as numbers.

    A run that goes on from a checkpoint trains some steps again: their points stay as they were first sent.
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
    """When the run ended: its result's time, or its state's; of one that was killed, its curve's."""
    if status == "finished":
        return _mtime_ms(folder, "result.json")
    if state.get("status") == "running":
        return max(int(state["updated_ms"]), _mtime_ms(folder, "curve.jsonl"))
    return int(state["updated_ms"])


def reading_of(tracked: Tracked) -> dict[str, Any]:
    """What the tracker says of a run: `status`, of a finished one `metrics` and `facts`, of a failed one `message`."""
    if tracked.standing != "finished":
        failed = tracked.standing == "failed"
        return {"status": tracked.standing, "message": tracked.tags.get(f"{TAG}message") if failed else None}
    facts = json.loads(tracked.tags.get(FACTS, "{}"))
    metrics = {key: point.value for key, point in tracked.latest.items() if not key.startswith("facts/")}
    return {"status": "finished", "metrics": metrics, "facts": facts}


def _mtime_ms(folder: RunFolder, name: str) -> int:
    try:
        return int((folder.path / name).stat().st_mtime * 1000)
    except FileNotFoundError:
        return 0
