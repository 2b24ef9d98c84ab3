"""The states by which `sync` sees what MLflow lacks. Imports no mlflow, which takes seconds."""

from __future__ import annotations

from cope_sweep.store import RunRecord

IN_TRASH = "in the trash"
"""The state of a run that somebody has deleted in MLflow: it stays deleted there."""


def run_state(record: RunRecord) -> str:
    """What changes whenever a run ends: its status and the number of its attempt."""
    return f"{record.status} {record.attempt}"
