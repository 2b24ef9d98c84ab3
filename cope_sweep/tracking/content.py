"""The texts that MLflow shows of a run and of a sweep: tags, parameters and notes.

A run has the tags `cope_sweep.run_id`, `.sweep_id`, `.ablation`, `.row`, `.axis.<key>`, `.device`, …, and
`cope_sweep.sweep.<sweep id>` = row for every sweep that contains it. Its parameters are the resolved spec under dotted
names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRecord
from cope_sweep.store.index.mirroring import Membership
from cope_sweep.store.index.model import leaves
from cope_sweep.store.sweeps import SweepRecord

TAG = "cope_sweep."
FACTS = f"{TAG}facts"
MLFLOW_STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "damaged": "FAILED",
    "interrupted": "KILLED",
    "stopped": "KILLED",
}
"""Only what is finished in the store is finished in MLflow: a filter on its status gives the runs of the table.
The tag `cope_sweep.status` tells a run that a scheduler stopped from one that was interrupted. Pending runs are not
sent."""
MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note links. The artifact reused.json lists all of them."""
STATUSES: tuple[Status, ...] = ("finished", "running", "failed", "stopped", "damaged", "interrupted", "pending")


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


def trained_by(places: Sequence[Membership], last_sweep: str | None, created_ms: int) -> Membership | None:
    """The sweep that first trained a run: the last one with this run that started before the run was begun.

    Where the run is older than all of them: the one that trained it last, else the first one.
    """
    before = [place for place in places if place.started_ms <= created_ms]
    last = [place for place in places if place.sweep_id == last_sweep]
    return next(iter([*before[-1:], *last, *places]), None)


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


def sweep_note(record: SweepRecord, counts: Mapping[Status, int], reused: Mapping[str, str]) -> str:
    """The note of a sweep: its progress, its table once there is one, and links to the runs that it reused.

    `counts` is the number of runs by status; `reused` maps the ids of reused runs to those that they have in MLflow.
    """
    progress = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts.get(status))
    head = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    head += "".join(f"\n\n{note}" for note in record.notes)
    tail = f"\n\nAll runs of this sweep, in any experiment: tags.`{sweep_tag(record.sweep_id)}` != ''"
    if linked := [run for run in record.runs if run.run_id in reused][:MAX_LINKS]:
        tail += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        tail += "\n".join(f"- [{run.row} · seed {run.seed}](#/runs/{reused[run.run_id]})" for run in linked)
        if len(record.reused) > len(linked):
            tail += f"\n- {len(record.reused) - len(linked)} more: see the artifact reused.json"
    table = f"\n\n{record.table['markdown']}" if record.table else ""
    if len(head + table + tail) > MAX_NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:MAX_NOTE_CHARACTERS]
