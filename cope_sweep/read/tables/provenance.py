"""Facts that must be equal for rows to be comparable and are not part of a spec: data, tokenizer, precision."""

from __future__ import annotations

from collections.abc import Iterable

from cope_sweep.config import RunSpec
from cope_sweep.store import RunRecord

COMPARED = {"data": "data fingerprint", "tokenizer": "tokenizer", "precision": "precision"}
"""Fact of a finished run → what a warning calls it."""
SHOWN_ROWS = 3
"""Rows that a warning names for each value."""


def differences(runs: Iterable[tuple[str, RunSpec, RunRecord]]) -> tuple[str, ...]:
    """One sentence for each fact in which finished runs of a table differ; `runs` has their rows' names.

    The data of runs whose tasks differ may differ. Runs that lack a fact are not compared: older versions did not
    record all of them.
    """
    rows: dict[tuple[str, object], dict[str, dict[str, None]]] = {}
    for row, run, record in runs:
        if record.status != "finished":
            continue
        for fact in COMPARED:
            value = record.facts.get(fact)
            if value is not None:
                task = repr(run.task) if fact == "data" else None
                rows.setdefault((fact, task), {}).setdefault(str(value), {})[row] = None
    return tuple(
        f"Rows differ in {COMPARED[fact]}, so they are not comparable: "
        + "; ".join(f"{value} ({_listed(list(names))})" for value, names in by_value.items())
        for (fact, _), by_value in rows.items()
        if len(by_value) > 1
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_ROWS])
    return shown if len(names) <= SHOWN_ROWS else f"{shown} and {len(names) - SHOWN_ROWS} more"
