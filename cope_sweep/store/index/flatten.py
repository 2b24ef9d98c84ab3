"""A spec as flat values with dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cope_sweep.store.index.model import Value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """The values of a JSON document under dotted names.

    A list of objects gives their kinds, joined, and their own values: `model.position` is `cope+relative`, and
    `model.position.0.p_max` is 64. Other lists are joined by commas. Null gives nothing.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        yield prefix, "+".join(str(item.get("kind", "")) for item in value) or "none"
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}")
    elif isinstance(value, (list, tuple)):
        yield prefix, ",".join(map(str, value))
    elif value is not None:
        yield prefix, value


def columns(value: Value) -> tuple[float | None, str | None]:
    """A value as the columns `number` and `text`."""
    if isinstance(value, bool):
        return None, "true" if value else "false"
    if isinstance(value, (int, float)):
        return float(value), None
    return None, str(value)
