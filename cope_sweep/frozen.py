"""The base of every declared object: frozen, strict, literal; and a type of its fields."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class Frozen(BaseModel):
    """An immutable record of literals: an unknown key or a value of the wrong type raises `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGBT])")


def _amount(value: Any) -> Any:
    """The whole number that `300M`, `1.5B` or `3e8` means; other numbers unchanged. Raises ValueError for a text."""
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value)
        if match is None:
            raise ValueError(f"{value!r} is not an amount; write a whole number, or as in 20k, 300M, 1.5B")
        # Rounded, because 1.005 × 10⁹ is 1004999999.9999999.
        factors = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
        value = round(float(match[1]) * factors[match[2]], 6)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Amount = Annotated[
    int,
    Field(ge=1, le=10**15),
    BeforeValidator(_amount),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 1}, {"type": "string", "pattern": f"^{_AMOUNT.pattern}$"}]}
    ),
]
"""A large whole number: 300000, `300k`, `300M`, `1.5B`, `2T`."""
