"""Markdown notes about ablations and sweeps, which MLflow shows on its pages."""

from __future__ import annotations

from collections.abc import Mapping

from cope_sweep.store.event import Status
from cope_sweep.store.sweeps import SweepRecord
from cope_sweep.tracking.translate import sweep_tag

MAX_NOTE_CHARACTERS = 7800
"""MLflow cuts the note of a run at 8000 characters."""
MAX_LINKS = 40
"""Reused runs that a note links. The artifact reused.json lists all of them."""
ORDER: tuple[Status, ...] = ("finished", "running", "failed", "stopped", "damaged", "interrupted", "pending")


def experiment_note(record: SweepRecord) -> str:
    """The note of an experiment: title and hypothesis of the ablation in a sweep's record."""
    return "\n\n".join(part for part in (f"**{record.title}**", record.hypothesis.strip()) if part)


def sweep_note(record: SweepRecord, counts: Mapping[Status, int], links: Mapping[str, str]) -> str:
    """The note of a sweep: its progress, its table once there is one, and links to the runs that it reused.

    `counts` is the number of runs by status; `links` maps the ids of at most MAX_LINKS reused runs to their pages.
    """
    progress = ", ".join(f"{counts[status]} {status}" for status in ORDER if counts.get(status))
    head = f"{experiment_note(record)}\n\n{len(record.runs)} runs: {progress}."
    head += "".join(f"\n\n{note}" for note in record.notes)
    tail = f"\n\nAll runs of this sweep, in any experiment: tags.`{sweep_tag(record.sweep_id)}` != ''"
    if links:
        names = {run.run_id: f"{run.row} · seed {run.seed}" for run in record.runs}
        tail += f"\n\n{len(record.reused)} runs were trained by earlier sweeps and are listed there:\n\n"
        tail += "\n".join(f"- [{names[run_id]}]({link})" for run_id, link in links.items())
        if len(record.reused) > len(links):
            tail += f"\n- {len(record.reused) - len(links)} more: see the artifact reused.json"
    table = f"\n\n{record.table['markdown']}" if record.table else ""
    if len(head + table + tail) > MAX_NOTE_CHARACTERS:
        table = "\n\nThe table is too long for a note: see the artifact table.md."
    return (head + table + tail)[:MAX_NOTE_CHARACTERS]
