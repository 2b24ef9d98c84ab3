"""Statistics over a few seeds: mean, standard deviation, and Student's confidence interval of the mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE_LEVEL = 0.95
"""Level of the confidence intervals in tables."""


@dataclass(frozen=True)
class Summary:
    """Statistics of n values; NaN where n is too small."""

    n: int
    mean: float
    """NaN for n = 0."""
    std: float
    """Sample standard deviation (ddof 1); NaN for n < 2."""
    ci_low: float
    ci_high: float
    """Bounds of the confidence interval of the mean; NaN for n < 2."""


def summarise(values: Iterable[float], level: float = CONFIDENCE_LEVEL) -> Summary:
    """Mean x̄ = Σx / n, standard deviation s = √(Σ(x − x̄)² / (n − 1)), interval x̄ ± t(level, n − 1) · s / √n.

    NaN marks a missing value and is left out. The interval assumes normally distributed values. It is not clipped, so
    the interval of an error rate can reach below 0 or above 100.
    """
    data = [float(value) for value in values if not math.isnan(value)]
    n = len(data)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, math.nan)
    # Rounding can put the mean outside the range of the data by one unit in the last place.
    mean = min(max(math.fsum(data) / n, min(data)), max(data))
    if n == 1:
        return Summary(1, mean, math.nan, math.nan, math.nan)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in data) / (n - 1))
    half_width = student_t(level, n - 1) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half_width, mean + half_width)


@lru_cache(maxsize=1024)
def student_t(level: float, dof: int) -> float:
    """The t with P(|T| ≤ t) = `level` for Student's T with `dof` degrees of freedom: 12.706 for 0.95 and 1.

    Raises ValueError unless 0 < level < 1 and dof ≥ 1.
    """
    if not 0 < level < 1 or dof < 1:
        raise ValueError(f"expected 0 < level < 1 and dof ≥ 1, got level = {level}, dof = {dof}")
    # scipy.stats.t.ppf calls this function too, but its import takes a second.
    from scipy.special import stdtrit

    return float(stdtrit(dof, (1 + level) / 2))
