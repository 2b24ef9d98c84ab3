"""Checks what a run's files say before it goes into the index: types and ranges that a database can hold.

A run whose files hold anything else is damaged. Without the check one such run would fail every answer about many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cope_sweep.store.errors import DamagedError
from cope_sweep.store.index import RunRow
from cope_sweep.store.index.tables import SECTIONS

MAX_INTEGER = 2**63 - 1
MAX_ATTEMPT = 2**31 - 1
MAX_DEPTH = 100
"""Nested values of a spec or a fact."""
TEXTS = {"worker_id": "state.json", "message": "state.json", "parent_id": "result.json"}
INTEGERS = {
    "attempt": "state.json", "step": "result.json", "created_ms": "spec.json", "updated_ms": "state.json",
    "ended_ms": "result.json",
}  # fmt: skip
"""Fields of a row and the files that they are read from."""


def check_sections(spec: Mapping[str, Any], folder: Path) -> None:
    """Raise DamagedError unless the sections of a spec are objects."""
    for section in SECTIONS:
        if not isinstance(spec.get(section), Mapping):
            raise DamagedError(f"{folder / 'spec.json'}: spec.{section}: missing, or no object")


def checked_row(row: RunRow, folder: Path) -> RunRow:
    """The row, if the index can hold it. Raises DamagedError with file and key."""
    for name, file in TEXTS.items():
        value = getattr(row, name)
        if value is not None and not isinstance(value, str):
            raise _error(folder, file, name, "no text")
    for name, file in INTEGERS.items():
        value = getattr(row, name)
        limit = MAX_ATTEMPT if name == "attempt" else MAX_INTEGER
        if value is not None and not (_is_integer(value) and abs(value) <= limit):
            raise _error(folder, file, name, "no whole number of this size")
    for name in ("seed", "steps"):
        if abs(getattr(row, name)) > MAX_INTEGER:
            raise _error(folder, "spec.json", name, "too large")
    for field in fields(row):
        file = {"spec": "spec.json", "metrics": "result.json", "facts": "result.json"}.get(field.name, "state.json")
        _check_value(getattr(row, field.name), folder, file, field.name, 0)
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
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise _error(folder, file, key, "no Unicode text: it has half of a surrogate pair")
        if "\0" in value:
            raise _error(folder, file, key, "a text with a null character")
    elif isinstance(value, (int, float)):
        if not _is_finite(value):
            raise _error(folder, file, key, "no finite number")
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
    return DamagedError(printable(f"{folder / file}: {key}: {problem}; train the run again"))
