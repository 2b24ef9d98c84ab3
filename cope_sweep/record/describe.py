"""What people read about a sweep in MLflow: notes in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cope_sweep.record.event import Status

NOTE_CHARACTERS = 7800
"""MLflow cuts a run's note at 8000."""
LINKS = 40
"""Reused runs that a note lists; all of them are in the artifact reused.json."""


def about(record: Mapping[str, Any]) -> str:
    """An ablation: what an experiment's page says."""
    return "\n\n".join(part for part in (f"**{record['title']}**", record["hypothesis"].strip()) if part)


def note(record: Mapping[str, Any], counts: Mapping[Status, int], links: Mapping[str, str]) -> str:
    """A sweep: how far it is, its table once there is one, and (run id → link) the runs that it found trained."""
    order: tuple[Status, ...] = ("finished", "running", "failed", "interrupted", "pending")
    progress = ", ".join(f"{counts[status]} {status}" for status in order if counts.get(status))
    head = f"{about(record)}\n\n{len(record['runs'])} runs: {progress}."
    tail = ""
    if links:
        names = {run["run_id"]: f"{run['row']} · seed {run['seed']}" for run in record["runs"]}
        tail = f"\n\n{len(links)} of them were trained before, and stay where they were first recorded:\n\n"
        tail += "\n".join(f"- [{names[run_id]}]({links[run_id]})" for run_id in list(links)[:LINKS])
        if len(links) > LINKS:
            tail += f"\n- and {len(links) - LINKS} more: see the artifact reused.json"
    table = f"\n\n{record['table']['markdown']}" if record["table"] else ""
    if len(head + table + tail) > NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:NOTE_CHARACTERS]
