"""Conditions as people write them: `model.layers>=4`, `model.position=cope`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from cope_sweep.errors import InvalidValue

Operator = Literal["=", "!=", "<", "<=", ">", ">="]
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Operators of two characters first, or `>=4` would be `>` with the value `=4`.
CONDITION = re.compile(r"(?P<key>[^<>=!]+?)\s*(?P<operator><=|>=|!=|==|=|<|>)\s*(?P<value>.*)", re.DOTALL)
# float() would also read nan, inf and 1_0, which are texts here.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Filter:
    """A condition on a run: `model.layers >= 4`, `test/perplexity < 20`, `status = finished`."""

    key: str
    operator: Operator
    value: bool | int | float | str
    typed: str | None = field(default=None, compare=False)
    """The value as it was typed, with its quotes: a label may look like a number. None: it was not typed."""


def parse_filter(text: str) -> Filter:
    """The condition in a text such as `model.layers>=4`. Raises InvalidValue.

    A value that looks like a number, or `true` or `false`, is one, unless it is quoted. Other values are texts.
    """
    match = CONDITION.fullmatch(text.strip())
    if match is None or not match["value"]:
        raise InvalidValue(
            f"{text!r} is not a condition; write KEY, an operator and a value, as in model.layers>=4",
            code="invalid_condition",
            condition=text,
        )
    operator = "=" if match["operator"] == "==" else match["operator"]
    key = match["key"].strip()
    text = match["value"].strip()
    return Filter(key, operator, _value(key, text), text)  # type: ignore[arg-type]  # matched


def _value(key: str, text: str) -> bool | int | float | str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    if not NUMBER.fullmatch(text):
        return text
    if not re.fullmatch(r"[+-]?\d+", text):
        return float(text)
    try:
        return int(text)
    except ValueError as error:  # Python reads at most 4,300 digits
        raise InvalidValue(
            f"{key}: a number of {len(text):,} digits is too large", code="invalid_value", key=key
        ) from error
