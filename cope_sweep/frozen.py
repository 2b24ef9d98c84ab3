"""The base of every declared object: frozen, strict, literal."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable record of literals: an unknown key or a value of the wrong type raises `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)
