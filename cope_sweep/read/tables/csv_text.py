"""CSV whose texts no spreadsheet takes for formulas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FORMULA = r"^[=+\-@\t\r]"
_FORMULA, _NUMBER = re.compile(FORMULA), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def without_formula(text: Any) -> Any:
    """The value; a text that begins like a formula, and is no number, with an apostrophe before it."""
    if isinstance(text, str) and _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def csv_text(frame: pd.DataFrame) -> str:
    """A frame as CSV."""
    frame = frame.copy(deep=False)
    for name in frame.columns[[dtype in ("str", "object") for dtype in frame.dtypes]]:
        frame[name] = frame[name].map(without_formula)
    return frame.to_csv(index=False, lineterminator="\n")


def csv_column(column: pa.Array) -> pa.Array:
    """A column of Arrow as `csv_text` writes it: lists are joined by blanks."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_list(column.type):
        column = compute.binary_join(column, " ")
    if pa.types.is_string(column.type) and compute.any(compute.match_substring_regex(column, FORMULA)).as_py():
        return pa.array(map(without_formula, column.to_pylist()), pa.string())
    return column
