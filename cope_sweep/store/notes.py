"""Markdown notes about ablations and sweeps, which MLflow shows on its pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cope_sweep.store.event import Status

MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note lists. The artifact reused.json lists all of them."""


def experiment_note(record: Mapping[str, Any]) -> str:
    """The note of an experiment: title and hypothesis of the ablation in a sweep's record."""
    return "\n\n".join(part for part in (f"**{record['title']}**", record["hypothesis"].strip()) if part)


def sweep_note(record: Mapping[str, Any], counts: Mapping[Status, int], links: Mapping[str, str]) -> str:
    """The note of a sweep: its progress, its table once there is one, and links to the runs that it reused.

    `counts` is the number of runs by status; `links` maps the id of a reused run to its page.
    """
    order: tuple[Status, ...] = ("finished", "running", "failed", "interrupted", "pending")
    progress = ", ".join(f"{counts[status]} {status}" for status in order if counts.get(status))
    head = f"{experiment_note(record)}\n\n{len(record['runs'])} runs: {progress}."
    tail = ""
    if links:
        names = {run["run_id"]: f"{run['row']} · seed {run['seed']}" for run in record["runs"]}
        tail = f"\n\n{len(links)} runs were trained by earlier sweeps and are listed there:\n\n"
        tail += "\n".join(f"- [{names[run_id]}]({links[run_id]})" for run_id in list(links)[:MAX_LINKS])
        if len(links) > MAX_LINKS:
            tail += f"\n- {len(links) - MAX_LINKS} more: see the artifact reused.json"
    table = f"\n\n{record['table']['markdown']}" if record["table"] else ""
    if len(head + table + tail) > MAX_NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:MAX_NOTE_CHARACTERS]
