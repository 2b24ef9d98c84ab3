"""Statistics of a few seeds: mean, standard deviation, and Student's confidence interval of the mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95
"""Confidence that tables report."""


@dataclass(frozen=True)
class Summary:
    """What n values say together; NaN for what n is too small for."""

    n: int
    mean: float
    """NaN for n = 0."""
    std: float
    """Sample standard deviation (ddof 1); NaN for n < 2."""
    ci_low: float
    ci_high: float
    """Bounds of the confidence interval of the mean; NaN for n < 2."""


def summarise(values: Iterable[float], level: float = LEVEL) -> Summary:
    """Mean x̄ = Σx / n, standard deviation s = √(Σ(x − x̄)² / (n − 1)), interval x̄ ± t(level, n − 1) · s / √n.

    NaN stands for a missing value and is left out. The interval assumes that seeds are drawn from a normal
    distribution; it is not clipped, so that of an error rate can reach below 0 or above 100.
    """
    data = [float(value) for value in values if not math.isnan(value)]
    n = len(data)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, math.nan)
    # Kept inside the data's range, which rounding can leave by one unit in the last place.
    mean = min(max(math.fsum(data) / n, min(data)), max(data))
    if n == 1:
        return Summary(1, mean, math.nan, math.nan, math.nan)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in data) / (n - 1))
    half = student_t(level, n - 1) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


@lru_cache(maxsize=1024)
def student_t(level: float, dof: int) -> float:
    """The t with P(|T| ≤ t) = `level` for Student's T with `dof` degrees of freedom: 12.706 for 0.95 and 1.

    Raises ValueError unless 0 < level < 1 and dof ≥ 1.
    """
    if not 0 < level < 1 or dof < 1:
        raise ValueError(f"needs 0 < level < 1 and dof ≥ 1, not level = {level}, dof = {dof}")
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _probability(middle, dof) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(dof) * math.tan(high)


def _probability(theta: float, dof: int) -> float:
    """P(|T| ≤ √dof · tan θ): the finite sums of Abramowitz & Stegun, 26.7.3 (odd dof) and 26.7.4 (even dof)."""
    sin, cos = math.sin(theta), math.cos(theta)
    odd = dof % 2
    term, total = (cos if odd else 1.0), 0.0
    for k in range(dof // 2):
        total += term
        term *= cos * cos * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (theta + sin * total) if odd else sin * total
