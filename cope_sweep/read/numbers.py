"""Numbers of results as texts. Tables, figures, reports and lines of progress round here, and nowhere else.

A number is rounded once, when its text is made, and nothing computes with rounded numbers. JSON and CSV have both: the
number as it is, and in JSON the text that all other formats show.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Protocol

MISSING = "–"
MAX_DECIMALS = 6


class Printed(Protocol):
    """How values of a metric are printed: a metric of an ablation file, or a column of a table."""

    @property
    def scale(self) -> float:
        """Factor by which values are multiplied before printing."""

    @property
    def decimals(self) -> int:
        """Digits after the decimal point, at least."""


def metric_text(metric: Printed, value: float | None, decimals: int | None = None, *, signed: bool = False) -> str:
    """A value in the metric's unit: `3.40`, or with its sign `+3.40`; `–` without a value or for NaN.

    `decimals`: digits after the decimal point, where a cell has decided for all its numbers; None: as the value needs.
    """
    if value is None:
        return MISSING
    printed = value * metric.scale
    return fixed(printed, decimals_for(printed, metric.decimals) if decimals is None else decimals, signed=signed)


def decimals_for(printed: float, least: int) -> int:
    """Digits after the decimal point for a number: `least`, or as many as show its first digit, up to MAX_DECIMALS.

    With two digits, 0.003 would be 0.00, which reads as zero.
    """
    size = abs(printed)
    if 0 < size < 0.5 * 10.0**-least:
        least = math.ceil(-math.log10(size))
    return min(least, MAX_DECIMALS)


def decimal_places(value: float, scale: float = 1.0) -> int:
    """Digits after the decimal point of a published number, which was printed as `scale` times its value.

    1 for 16.9 and 100.0, 3 for 0.004; with a scale of 1e-6, 1 for 124400000.
    """
    if scale != 1.0:
        # Decimal numbers: in binary ones, 124400000 times 1e-6 is 124.39999999999999.
        exponent = (Decimal(repr(value)) * Decimal(repr(scale))).normalize().as_tuple().exponent
        return max(0, -int(exponent))
    mantissa, _, power = repr(float(value)).partition("e")
    return max(0, len(mantissa.partition(".")[2]) - int(power or 0))


def fixed(value: float | None, decimals: int, *, signed: bool = False) -> str:
    """With this many digits after the decimal point; `–` without a value or for NaN."""
    if value is None or math.isnan(value):
        return MISSING
    # z: what rounds to zero is 0.00 and +0.00, never -0.00.
    return f"{value:+z.{decimals}f}" if signed else f"{value:z.{decimals}f}"


def significant(value: float, digits: int = 4, *, signed: bool = False) -> str:
    """With this many significant digits, for values whose metric does not say how they are printed."""
    return f"{value:+.{digits}g}" if signed else f"{value:.{digits}g}"


def interval_text(value: float, low: float, high: float, decimals: int = 2) -> str:
    """An estimate with its interval: `0.42 [0.31, 0.50]`."""
    return f"{fixed(value, decimals)} [{fixed(low, decimals)}, {fixed(high, decimals)}]"


def percent_range(low: float, high: float) -> str:
    """An interval of a share: `34–100 %`."""
    return f"{fixed(100 * low, 0)}–{fixed(100 * high, 0)} %"


def integer(value: float | None) -> str:
    """`1,234`; `–` without a value."""
    return MISSING if value is None else f"{value:,.0f}"


def p_text(p: float) -> str:
    """`0.042`, or `0.0004` if three digits would be 0; above 0.05, never 0.050, as if it were significant."""
    if p < 0.0995 / 100:
        return f"{p:.1g}"
    return f"{max(p, 0.0501):.4f}" if 0.05 + 1e-12 < p < 0.0505 else f"{p:.3f}"
