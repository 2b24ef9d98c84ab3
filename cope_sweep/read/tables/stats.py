"""Statistics of a metric over the seeds of a row: mean, spread, confidence interval of the mean, and stuck seeds.

The interval is Student's, on a scale that keeps it inside the metric's range (`Bounds`): the t interval of the logit of
the mean for percentages, of its logarithm for metrics that are never negative, both by the delta method, as in R's
`survey::svyciprop(method = "logit")`; the plain t interval otherwise. With `BOOTSTRAP_FROM` seeds or more, it is the
BCa bootstrap interval (Efron, 1987), which assumes no distribution. If all values are at the same end of the range,
there is no interval.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

CONFIDENCE_LEVEL = 0.95
"""Level of the confidence intervals in tables."""
BOOTSTRAP_FROM = 20
"""Number of seeds from which the interval is bootstrapped. With fewer, BCa intervals cover too little."""
NORMAL_QUANTILE = 1.959963984540054
"""z with P(Z ≤ z) = 0.975."""
RESAMPLES = 2_000
"""Resamples of a bootstrap, drawn with a fixed seed."""

STUCK_FROM = 3
"""Smallest number of seeds in which stuck ones are looked for."""
STUCK_DEVIATIONS = 3.0
"""A stuck seed is worse than the median by more than this many standard deviations, estimated from the MAD, …"""
STUCK_RANGE_SHARE = 0.1
"""… and by more than this share of the metric's range, …"""
STUCK_MEDIAN_SHARE = 0.2
"""… or, for a metric without an upper end, by more than this share of the median."""
MAD_TO_STD = 1.4826
"""Standard deviation ÷ median absolute deviation, of a normal distribution."""

Method = Literal["t", "logit t", "log t", "bootstrap", ""]


@dataclass(frozen=True)
class Bounds:
    """The range of a metric's values."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def kind(self) -> Literal["none", "low", "both"]:
        """Which ends of the range are finite."""
        return "none" if math.isinf(self.low) else "low" if math.isinf(self.high) else "both"


UNBOUNDED, NON_NEGATIVE, PERCENT = Bounds(), Bounds(0.0), Bounds(0.0, 100.0)
NON_NEGATIVE_NAMES = ("loss", "perplexity", "bits_per")


def bounds_of(name: str, unit: str) -> Bounds:
    """The range of a metric, by its unit and name."""
    if unit == "%":
        return PERCENT
    quantity = name.rpartition("/")[2]
    return NON_NEGATIVE if name.startswith("facts.") or quantity.startswith(NON_NEGATIVE_NAMES) else UNBOUNDED


@dataclass(frozen=True)
class Summary:
    """Statistics of n values; NaN where n is too small."""

    n: int
    mean: float = math.nan
    """NaN for n = 0, as are the median and the extremes."""
    std: float = math.nan
    """Sample standard deviation (ddof 1); NaN for n < 2."""
    ci_low: float = math.nan
    ci_high: float = math.nan
    """Bounds of the confidence interval of the mean; NaN for n < 2, or if all values lie at one end of the range."""
    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """The least and the greatest value."""
    method: Method = ""
    """How the interval was computed; empty: there is none."""


def summarise(values: Iterable[float], bounds: Bounds = UNBOUNDED, level: float = CONFIDENCE_LEVEL) -> Summary:
    """The statistics of values in any order. NaN marks a missing value and is left out."""
    data = sorted(float(value) for value in values if not math.isnan(value))
    n = len(data)
    if n == 0:
        return Summary(0)
    # Rounding can put the mean outside the range of the data by one unit in the last place.
    mean = min(max(math.fsum(data) / n, data[0]), data[-1])
    median = _median(data)
    if n == 1:
        return Summary(1, mean, median=median, low=data[0], high=data[0])
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in data) / (n - 1))
    if not bounds.low <= data[0] <= data[-1] <= bounds.high:
        bounds = UNBOUNDED
    low, high, method = _interval(data, mean, std, bounds, level)
    return Summary(n, mean, std, low, high, median, data[0], data[-1], method)


def _interval(
    data: Sequence[float], mean: float, std: float, bounds: Bounds, level: float
) -> tuple[float, float, Method]:
    """The interval of the mean of sorted values inside `bounds`, and its method."""
    if mean in (bounds.low, bounds.high):
        return math.nan, math.nan, ""
    if len(data) >= BOOTSTRAP_FROM and std > 0:
        return *_bootstrap(data, level), "bootstrap"
    half = t_quantile((1 + level) / 2, len(data) - 1) * std / math.sqrt(len(data))
    if bounds.kind == "none" or std == 0:
        return mean - half, mean + half, "t"
    if bounds.kind == "low":
        above = mean - bounds.low
        factor = _exp(half / above)
        return bounds.low + above / factor, bounds.low + above * factor, "log t"
    width = bounds.high - bounds.low
    share = (mean - bounds.low) / width
    factor = _exp(half / max(width * share * (1 - share), sys.float_info.min))
    odds = share / (1 - share)
    low, high = odds / factor / (1 + odds / factor), 1 / (1 + 1 / (odds * factor))
    return bounds.low + width * low, bounds.low + width * high, "logit t"


def _exp(value: float) -> float:
    """exp(value), and a very large number where a float overflows."""
    return math.exp(min(value, 600.0))


def _bootstrap(data: Sequence[float], level: float) -> tuple[float, float]:
    import numpy as np
    from scipy import stats

    found = stats.bootstrap(
        (np.asarray(data),), np.mean, confidence_level=level, n_resamples=RESAMPLES, method="BCa",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """The t with P(T ≤ t) = `probability` for Student's T with `dof` degrees of freedom: 12.706 for 0.975 and 1."""
    # scipy.stats.t.ppf calls this function too, but its import takes a second.
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))


@dataclass(frozen=True)
class Share:
    """k of n seeds."""

    k: int
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the probability (Wilson, 1927); NaN for n = 0."""
        if self.n == 0:
            return math.nan, math.nan
        z2, p = NORMAL_QUANTILE**2, self.k / self.n
        middle = (p + z2 / (2 * self.n)) / (1 + z2 / self.n)
        half = math.sqrt(z2 * (p * (1 - p) / self.n + z2 / (4 * self.n**2))) / (1 + z2 / self.n)
        return max(0.0, middle - half), min(1.0, middle + half)


def stuck(values: Sequence[float], goal: Literal["min", "max"], bounds: Bounds = UNBOUNDED) -> list[bool]:
    """Which values are far worse than the median of all: runs that did not learn what the others of the row did.

    A value is stuck if it is worse than the median by more than `STUCK_DEVIATIONS` · 1.4826 · MAD, and by more than
    `STUCK_RANGE_SHARE` of the metric's range, or `STUCK_MEDIAN_SHARE` of the median where the range has no end.
    Less than half of the values can be stuck, and none of fewer than `STUCK_FROM`.
    """
    if len(values) < STUCK_FROM:
        return [False] * len(values)
    median = _median(sorted(values))
    worse = [value - median if goal == "min" else median - value for value in values]
    both = bounds.kind == "both"
    matters = STUCK_RANGE_SHARE * (bounds.high - bounds.low) if both else STUCK_MEDIAN_SHARE * abs(median)
    if max(worse) <= matters:
        return [False] * len(values)
    deviation = MAD_TO_STD * _median(sorted(map(abs, worse)))
    limit = max(STUCK_DEVIATIONS * deviation, matters)
    return [value > limit for value in worse]


def _median(ordered: Sequence[float]) -> float:
    """The median of sorted values, as `statistics.median`, which sorts again."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


STUCK_RULE = (
    f"stuck: worse than the median of its row by more than {STUCK_DEVIATIONS:g} standard deviations (1.4826 MAD) and "
    f"{100 * STUCK_RANGE_SHARE:g} percentage points (other units: {100 * STUCK_MEDIAN_SHARE:g} % of the median)"
)
