"""Reads a run's folder: the row that the index keeps of it.

A file with a value that no database can hold is read like one that cannot be read. Without this check one such run
would fail every answer about many.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_sweep.records import RunRecord, Status
from cope_sweep.store.artifacts import (
    CURVE_FILE,
    RESULT_FILE,
    SPEC_FILE,
    STATE_FILE,
    RunFolder,
)
from cope_sweep.store.curve import is_unicode
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index.tables import MAX_INTEGER, SECTIONS

MAX_ATTEMPT = 2**31 - 1
MAX_SWEEP_ID = 64
"""Characters, as in the index."""
MAX_DEPTH = 100
"""Nested values of a spec or a fact."""
TEXTS = ("worker_id", "message")
INTEGERS = ("attempt", "step", "created_ms", "updated_ms", "ended_ms")
FILES = dict.fromkeys(("spec", "created_ms", "seed", "steps"), SPEC_FILE) | dict.fromkeys(
    ("step", "ended_ms", "metrics", "facts"), RESULT_FILE
)
"""Field of a row → the file it is read from; all others are in state.json."""


def read_run(folder: RunFolder, sweep_id: str | None = None) -> RunRecord | None:
    """The row of a run that nobody trains, from its files; None if it never started.

    `sweep_id` is the sweep that has trained it if its files do not say that: those of older versions do not.

    A run whose last attempt died is interrupted. So is one whose files cannot be read: its message says which, and the
    next attempt trains it again.
    """
    try:
        row = _read_row(folder, sweep_id)
        return None if row is None else checked_row(row, folder.path)
    except DamagedError as error:
        named = {"message": printable(str(error)), "sweep_id": sweep_id}
        unread = RunRecord.of(folder.run_id, "interrupted", {}, **named)
        with contextlib.suppress(DamagedError):
            spec = (folder.spec or {}).get("spec", {})
            unread = checked_row(RunRecord.of(folder.run_id, "interrupted", spec, **named), folder.path)
        with contextlib.suppress(DamagedError):
            unread = checked_row(unread.model_copy(update={"attempt": folder.state.get("attempt", 0)}), folder.path)
        return unread


def is_readable(folder: RunFolder) -> bool:
    """Whether the files of a run can be read, and the index can hold what they say."""
    try:
        row = _read_row(folder, None)
        if row is not None:
            checked_row(row, folder.path)
    except DamagedError:
        return False
    return True


def _read_row(folder: RunFolder, sweep_id: str | None) -> RunRecord | None:
    result, document = folder.result, folder.spec
    if document is None:
        if result is not None:
            raise DamagedError(f"{folder.path / SPEC_FILE}: missing", file=str(folder.path / SPEC_FILE))
        return None
    spec: Mapping[str, Any] = document["spec"]
    check_sections(spec, folder.path)
    created_ms = document.get("created_ms")
    if result is not None:
        state: dict[str, Any] = {}
        with contextlib.suppress(DamagedError):  # what it says has no influence any more
            state = folder.state
        facts = result["facts"]
        steps = facts.get("steps")
        return RunRecord.of(
            folder.run_id,
            "finished",
            spec,
            attempt=state.get("attempt", 1),
            step=steps if isinstance(steps, int) else spec.get("train", {}).get("steps", 0),
            worker_id=facts.get("worker_id") or state.get("worker_id"),
            sweep_id=_sweep_id(result, sweep_id),
            created_ms=created_ms,
            updated_ms=state.get("updated_ms"),
            ended_ms=result.get("ended_ms") or _mtime_ms(folder, RESULT_FILE),  # older results have no time
            metrics=result["metrics"],
            facts=facts,
        )
    state = folder.state
    status: Status = state.get("status", "interrupted")
    return RunRecord.of(
        folder.run_id,
        "interrupted" if status in ("running", "finished", "pending") else status,
        spec,
        attempt=state.get("attempt", 0),
        step=_last_step(folder, folder.curve()),
        worker_id=state.get("worker_id"),
        message=state.get("message"),
        sweep_id=_sweep_id(state, sweep_id),
        created_ms=created_ms,
        updated_ms=state.get("updated_ms"),
        ended_ms=_ended_ms(folder, state),
    )


def _sweep_id(document: Mapping[str, Any], otherwise: str | None) -> str | None:
    """The sweep that a state or a result names."""
    # A result names the sweep that has finished the run: the state, one that has tried to train it again since.
    named = document.get("sweep_id")
    return named if isinstance(named, str) and len(named) <= MAX_SWEEP_ID else otherwise


def _last_step(folder: RunFolder, curve: Sequence[Mapping[str, float]]) -> int:
    """The step of the last row; 0 without one. Raises DamagedError."""
    try:
        return int(curve[-1]["step"]) if curve else 0
    except (ValueError, OverflowError) as error:
        raise DamagedError(
            f"{folder.path / CURVE_FILE}: step: {curve[-1]['step']} is not a number of steps",
            file=str(folder.path / CURVE_FILE),
            key="step",
        ) from error


def _ended_ms(folder: RunFolder, state: Mapping[str, Any]) -> int | None:
    """The time at which an unfinished attempt ended: of its last state, or, where it died, of its last logged row."""
    updated_ms = state.get("updated_ms")
    if state.get("status") != "running":
        return updated_ms
    known_ms = updated_ms if isinstance(updated_ms, int) else 0
    return max(known_ms, _mtime_ms(folder, CURVE_FILE) or 0) or None


def _mtime_ms(folder: RunFolder, name: str) -> int | None:
    with contextlib.suppress(OSError):
        return int((folder.path / name).stat().st_mtime * 1000)
    return None


def check_sections(spec: Mapping[str, Any], folder: Path) -> None:
    """Raise DamagedError unless the sections of a spec are objects."""
    for section in SECTIONS:
        if not isinstance(spec.get(section), Mapping):
            raise DamagedError(
                f"{folder / SPEC_FILE}: spec.{section}: missing, or not an object",
                file=str(folder / SPEC_FILE),
                key=f"spec.{section}",
            )


def checked_row(row: RunRecord, folder: Path) -> RunRecord:
    """The row, if the index can hold it. Raises DamagedError with file and key."""
    for name in ("seed", "steps"):
        if abs(getattr(row, name)) > MAX_INTEGER:
            raise _error(folder, FILES[name], name, "too large")
    for name in RunRecord.model_fields:
        value, file = getattr(row, name), FILES.get(name, STATE_FILE)
        if name in TEXTS and not isinstance(value, str | None):
            raise _error(folder, file, name, "no text")
        limit = MAX_ATTEMPT if name == "attempt" else MAX_INTEGER
        if name in INTEGERS and value is not None and not (_is_integer(value) and abs(value) <= limit):
            raise _error(folder, file, name, "not a whole number, or too large")
        _check_value(value, folder, file, name, 0)
    return row


def check_document(document: Any, path: Path) -> None:
    """Raise DamagedError unless every value of a JSON document can be held by a database, and by another document."""
    _check_value(document, path.parent, path.name, "", 0)


def printable(text: str) -> str:
    """A text that every database and JSON document can hold."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _check_value(value: Any, folder: Path, file: str, key: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _error(folder, file, key[:MAX_DEPTH], "nested too deeply")
    if isinstance(value, str):
        if not is_unicode(value):
            raise _error(folder, file, key, "contains a lone surrogate, which is not Unicode text")
        if "\0" in value:
            raise _error(folder, file, key, "contains a null character")
    elif isinstance(value, (int, float)):
        if not _is_finite(value):
            raise _error(folder, file, key, "not a finite number")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _check_value(name, folder, file, key, depth + 1)
            _check_value(item, folder, file, f"{key}.{name}".lstrip("."), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_value(item, folder, file, f"{key}.{index}".lstrip("."), depth + 1)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _error(folder: Path, file: str, key: str, problem: str) -> DamagedError:
    message = printable(f"{folder / file}: {key}: {problem}; train the run again")
    return DamagedError(message, file=str(folder / file), key=printable(key))
