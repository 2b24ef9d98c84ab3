"""The rows of a learning curve: one line of JSON for each logged step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from cope_sweep.frozen import current_metric_name

TIME_KEY = "time_ms"
"""The key of a row that holds the time of day, in milliseconds since 1970. Old rows have none."""
LARGEST = 10**308
"""Greater whole numbers are not exact as floats."""


def parse_curve(content: bytes, *, times: bool = False) -> list[dict[str, float]]:
    """The rows of a curve's file in order of steps; metrics have their current names. `times` keeps the key `time_ms`.

    A line that was cut off when its process was killed, or is not a row, is left out; of two rows of a step that
    hold the same metric, the first counts.
    """
    rows: list[dict[str, float]] = []
    seen: set[tuple[float, str]] = set()
    for line in content.splitlines():
        row = _row(line)
        if row is None:
            continue
        time_ms = row.pop(TIME_KEY, None)
        step = row["step"]
        fresh = {key: value for key, value in row.items() if key == "step" or (step, key) not in seen}
        if len(fresh) == 1 and len(row) > 1:
            continue
        seen |= {(step, key) for key in fresh}
        rows.append(fresh | ({TIME_KEY: time_ms} if times and time_ms is not None else {}))
    return rows


def _row(line: bytes) -> dict[str, float] | None:
    """A line of a curve; None if it is not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(map(is_number, row.values())) or "step" not in row:
        return None
    if not math.isfinite(row["step"]) or not all(map(is_unicode, row)):
        return None
    return current_names(row)


def is_unicode(text: str) -> bool:
    """The text is Unicode: JSON can have halves of surrogate pairs, which no answer can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def is_number(value: object) -> bool:
    """Whether a value of a JSON document is a number that a float can hold."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their current names, whatever they were called when they were written."""
    return {current_metric_name(name): value for name, value in metrics.items()}
