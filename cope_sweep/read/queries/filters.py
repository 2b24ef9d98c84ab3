"""Conditions on runs as text: `model.layers>=4`, `model.position=cope+relative`, `test/perplexity<20`."""

from __future__ import annotations

import re

from cope_sweep.store import Filter, QueryError

CONDITION = re.compile(r"(?P<key>[^<>=!]+?)\s*(?P<operator><=|>=|!=|==|=|<|>)\s*(?P<value>.*)", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_filter(text: str) -> Filter:
    """The condition in a text.

    A value is a number or `true`/`false` if it reads like one, else a text; quotes make it a text in any case.

    Raises:
        QueryError: The text is no condition.
    """
    match = CONDITION.fullmatch(text.strip())
    if match is None or not match["value"]:
        raise QueryError(f"{text!r} is no condition; write KEY, an operator and a value, as in model.layers>=4")
    operator = "=" if match["operator"] == "==" else match["operator"]
    return Filter(match["key"].strip(), operator, _value(match["value"].strip()))  # type: ignore[arg-type]


def _value(text: str) -> bool | int | float | str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return text
