"""Distributions of a search space: what a key of a run is drawn from."""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, Strict, model_validator

from cope_sweep.config.labels import default_label
from cope_sweep.config.source import Json
from cope_sweep.frozen import Frozen

SIGNIFICANT_DIGITS = 4
"""Digits of drawn numbers that are not whole, so that the names of rows are short."""

Floats = Annotated[tuple[float, float], Strict(False)]
Ints = Annotated[tuple[int, int], Strict(False)]


class Distribution(Frozen):
    """One of `uniform`, `log_uniform`, `int_uniform`, `log_int_uniform` and `choice`. Both bounds are included."""

    uniform: Floats | None = Field(default=None, description="[low, high]: a number, each equally likely.")
    log_uniform: Floats | None = Field(
        default=None, description="[low, high]: a positive number whose logarithm is uniform, as for learning rates."
    )
    int_uniform: Ints | None = Field(default=None, description="[low, high]: a whole number, each equally likely.")
    log_int_uniform: Ints | None = Field(
        default=None, description="[low, high]: a positive whole number whose logarithm is uniform, as for sizes."
    )
    choice: Annotated[list[Json], Field(min_length=1)] | None = Field(
        default=None, description="One of these values, each equally likely."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = ", ".join(type(self).model_fields)
            raise ValueError(f"{' and '.join(given) or 'no distribution'} given; give exactly one of {kinds}")
        if self.choice is not None:
            labels = [default_label(value) for value in self.choice]
            twice = next((label for label in labels if labels.count(label) > 1), None)
            if twice is not None:
                raise ValueError(f"choice has {twice} twice; list each value once")
            return self
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"{self.kind}: [{low}, {high}] is empty; write the lower bound first")
        if self.is_log and low <= 0:
            raise ValueError(f"{self.kind}: the lower bound {low} must be greater than 0, as it has a logarithm")
        return self

    @cached_property
    def kind(self) -> str:
        """The name of the distribution: `log_uniform`."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def is_log(self) -> bool:
        """Whether the logarithm is uniform."""
        return self.kind in ("log_uniform", "log_int_uniform")

    @property
    def is_int(self) -> bool:
        """Whether the values are whole numbers."""
        return self.kind in ("int_uniform", "log_int_uniform")

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest number; of whole numbers for the distributions of such."""
        bounds: tuple[float, float] = getattr(self, self.kind)
        return bounds

    def value_at(self, share: float) -> Json:
        """The value below which `share` in [0, 1) of the distribution lies."""
        if self.choice is not None:
            return self.choice[int(share * len(self.choice))]
        low, high = self.bounds
        # A whole number owns the interval of length 1 around it.
        margin = 0.5 if self.is_int else 0.0
        if self.is_log:
            start, end = math.log(low - margin), math.log(high + margin)
            return self.rounded(math.exp(start + share * (end - start)))
        return self.rounded(low - margin + share * (high - low + 2 * margin))

    def rounded(self, number: float) -> float:
        """The number as it is used in a run: whole, or of four significant digits, and within the bounds."""
        low, high = self.bounds
        number = round(number) if self.is_int else float(f"{number:.{SIGNIFICANT_DIGITS}g}")
        return min(max(number, low), high)

    def value_of(self, label: str) -> Json:
        """The value with the label that tables show. Raises ValueError where the distribution does not have it."""
        if self.choice is not None:
            values = {default_label(value): value for value in self.choice}
            if label not in values:
                raise ValueError(f"{label!r} is none of {', '.join(values)}")
            return values[label]
        number: Any = json.loads(label)
        low, high = self.bounds
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not low <= number <= high:
            raise ValueError(f"{label} is no number in [{low}, {high}]")
        if self.is_int and number != int(number):
            raise ValueError(f"{label} is no whole number")
        return int(number) if self.is_int else float(number)

    @property
    def extremes(self) -> tuple[Json, ...]:
        """Values that show whether all are valid in a run: the bounds, or all choices."""
        return tuple(self.choice) if self.choice is not None else self.bounds
