"""Reads a run's folder into the row that the index keeps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRow


def read_run(folder: RunFolder, sweep_id: str | None = None) -> RunRow | None:
    """The row of a run that nobody trains, from its files; None if it was never begun.

    A run whose last attempt died is interrupted. One whose files cannot be read is damaged, and its message says why.
    """
    try:
        return _read(folder, sweep_id)
    except DamagedError as error:
        spec: Mapping[str, Any] = {}
        attempt = 0
        with contextlib.suppress(DamagedError):
            spec = (folder.spec or {}).get("spec", {})
        with contextlib.suppress(DamagedError):
            attempt = folder.state.get("attempt", 0)
        return RunRow(folder.run_id, "damaged", spec, attempt=attempt, message=str(error), sweep_id=sweep_id)


def _read(folder: RunFolder, sweep_id: str | None) -> RunRow | None:
    result, document = folder.result, folder.spec
    if document is None:
        if result is not None:
            raise DamagedError(f"{folder.path / 'spec.json'}: missing")
        return None
    spec: Mapping[str, Any] = document["spec"]
    created_ms = document.get("created_ms")
    if result is not None:
        state: dict[str, Any] = {}
        with contextlib.suppress(DamagedError):  # what it says has no influence any more
            state = folder.state
        facts = result["facts"]
        steps = facts.get("steps")
        return RunRow(
            folder.run_id,
            "finished",
            spec,
            attempt=state.get("attempt", 1),
            step=steps if isinstance(steps, int) else spec.get("train", {}).get("steps", 0),
            worker_id=facts.get("worker_id") or state.get("worker_id"),
            sweep_id=sweep_id,
            parent_id=facts.get("parent_id"),
            created_ms=created_ms,
            updated_ms=state.get("updated_ms"),
            ended_ms=result.get("ended_ms") or _mtime_ms(folder, "result.json"),  # older results have no time
            metrics=result["metrics"],
            facts=facts,
        )
    state = folder.state
    curve = folder.curve()
    status: Status = state.get("status", "interrupted")
    return RunRow(
        folder.run_id,
        "interrupted" if status in ("running", "finished", "pending", "damaged") else status,
        spec,
        attempt=state.get("attempt", 0),
        step=int(curve[-1]["step"]) if curve else 0,
        worker_id=state.get("worker_id"),
        message=state.get("message"),
        sweep_id=sweep_id,
        created_ms=created_ms,
        updated_ms=state.get("updated_ms"),
        ended_ms=_ended_ms(folder, state),
    )


def _ended_ms(folder: RunFolder, state: Mapping[str, Any]) -> int | None:
    """When an unfinished attempt ended: by its last state, or, where it died, its last logged row."""
    updated_ms = state.get("updated_ms")
    if state.get("status") != "running":
        return updated_ms
    return max(int(updated_ms or 0), _mtime_ms(folder, "curve.jsonl") or 0) or None


def _mtime_ms(folder: RunFolder, name: str) -> int | None:
    with contextlib.suppress(OSError):
        return int((folder.path / name).stat().st_mtime * 1000)
    return None
