"""Statistics of a metric over the seeds of a row, and the test of the difference between two rows.

The interval of a mean is Student's, on a scale that keeps it inside the metric's range (`Bounds`): the t interval of
the logit of the mean for percentages, of its logarithm for metrics that are never negative, both by the delta method,
as in R's `survey::svyciprop(method = "logit")`; the plain t interval otherwise. If all values are at the same end of
the range, there is no interval.

The test of two rows is the exact permutation test of the difference of their means. One rule for all rows, which no
data switch: under the null hypothesis any of the runs could have belonged to either row, so p is the share of all ways
to divide the runs into two rows of these sizes whose means differ at least as much. No distribution is assumed: errors
of tasks that a seed learns or does not learn are 0 or 60, and a t test of such values gives wrong verdicts. With n and
m runs, p is at least 1 / C(n + m, n), or twice that for n = m: 0.1 for 3 and 3 runs, 0.008 for 5 and 5.

An ablation may declare that its runs are paired (`paired: true`): runs of the same seed start from the same weights and
see the same batches, so that most of what differs between seeds is the same in both rows. Then sign flips are
tested: under the null hypothesis each difference between two runs of the same seed could as well have the other sign. p
is at least 2 / 2ⁿ: 0.06 for 5 seeds, 0.008 for 8. Where seeds have nothing in common, this test is the weaker one.

The interval of a difference inverts the same test: the shifts of a row that the test does not reject at 5 % (Lehmann
2006, 2.6). It excludes 0 where p is at most 0.05, and it is unbounded, here NaN, where p cannot be so small.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

LEVEL = 0.95
"""Level of the confidence intervals in tables."""
TELLS = 1 - LEVEL
"""The largest p with which rows differ."""
NORMAL_QUANTILE = 1.959963984540054
"""z with P(Z ≤ z) = 0.975."""

POWER = 0.8
"""Power of the smallest detectable difference."""
MOST_DIVISIONS = 20_000
"""If there are more divisions, or sign flips, than this, some are drawn at random: 8 and 8 runs have 12,870."""
RANDOM_DIVISIONS = 9_999
"""Besides the true division, or the true signs (Phipson & Smyth 2010)."""
ROUNDING = 1e-12
"""Relative difference below which two statistics are equal."""

Method = Literal["t", "logit t", "log t", ""]


@dataclass(frozen=True)
class Bounds:
    """The range of a metric's values."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def kind(self) -> Literal["none", "low", "both"]:
        """The finite ends of the range."""
        if math.isinf(self.low):
            return "none"
        return "low" if math.isinf(self.high) else "both"


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
    """Method of the interval; empty: there is none."""


def summarise(values: Iterable[float], bounds: Bounds = UNBOUNDED) -> Summary:
    """The statistics of values in any order. NaN marks a missing value and is left out."""
    data = sorted(float(value) for value in values if not math.isnan(value))
    n = len(data)
    if n == 0:
        return Summary(0)
    # Rounding can put the mean outside the range of the data by one unit in the last place.
    mean = min(max(statistics.fmean(data), data[0]), data[-1])
    median = statistics.median(data)
    if n == 1:
        return Summary(1, mean, median=median, low=data[0], high=data[0])
    std = _std(data)
    if not bounds.low <= data[0] <= data[-1] <= bounds.high:
        bounds = UNBOUNDED
    low, high, method = _interval(data, mean, std, bounds)
    return Summary(n, mean, std, low, high, median, data[0], data[-1], method)


def _interval(data: Sequence[float], mean: float, std: float, bounds: Bounds) -> tuple[float, float, Method]:
    """The interval of the mean of sorted values inside `bounds`, and its method."""
    if mean in (bounds.low, bounds.high):
        return math.nan, math.nan, ""
    half = t_quantile((1 + LEVEL) / 2, len(data) - 1) * std / math.sqrt(len(data))
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


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """The t with P(T ≤ t) = `probability` for Student's T with `dof` degrees of freedom: 12.706 for 0.975 and 1."""
    return float(_special().stdtrit(dof, probability))


def t_tail(t: float, dof: float) -> float:
    """P(|T| ≥ |t|) for Student's T."""
    return 2 * float(_special().stdtr(dof, -abs(t)))


def _special() -> Any:
    """Scipy's special functions: `scipy.stats` calls them too. Runs are trained, and their table shown, without scipy.

    The import takes 0.4 s.
    """
    from scipy import special

    return special


@dataclass(frozen=True)
class Proportion:
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


@dataclass(frozen=True)
class Difference:
    """A row minus the row that it is compared with; NaN where there are too few runs."""

    difference: float
    """Difference of the means."""
    ci_low: float = math.nan
    ci_high: float = math.nan
    """95 % interval of the difference."""
    p: float = math.nan
    """Two-sided, not corrected. 1 if nothing differs."""
    smallest_p: float = math.nan
    """The smallest p possible with this number of runs."""
    effect: float = math.nan
    """Hedges' g: the difference in pooled standard deviations, unbiased; NaN where no row varies."""
    effect_low: float = math.nan
    effect_high: float = math.nan
    detectable: float = math.nan
    """The smallest true difference that a t test at this n and spread finds with a probability of 80 %."""
    n: tuple[int, int] = (0, 0)


def two_rows(row: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Compare two rows; each maps seeds to values. Only the difference is known where a row has one run only."""
    a, b = list(row.values()), list(other.values())
    n = (len(a), len(b))
    if not a or not b:
        return Difference(math.nan, n=n)
    difference = statistics.fmean(a) - statistics.fmean(b)
    if min(n) < 2:
        return Difference(difference, n=n)
    p, low, high = _permuted(tuple(a), tuple(b))
    effect, detectable = _effect(a, b)
    return Difference(difference, low, high, p, smallest_p(*n), *effect, detectable, n)


def paired_rows(row: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Compare two rows by the seeds that both have; each maps seeds to values."""
    differences = [row[seed] - other[seed] for seed in sorted(row.keys() & other.keys())]
    n = len(differences)
    if n == 0:
        return Difference(math.nan, n=(len(row), len(other)))
    difference = statistics.fmean(differences)
    if n == 1:
        return Difference(difference, n=(1, 1))
    p, low, high = _flipped(tuple(differences))
    floor = 2 / 2**n if 2**n <= MOST_DIVISIONS else 1 / (RANDOM_DIVISIONS + 1)
    std, dof = _std(differences), n - 1
    effect, detectable = (math.nan, math.nan, math.nan), math.nan
    if std > 0:
        t, scale = difference / std * math.sqrt(n), scale_of_g(dof) / math.sqrt(n)
        low_g, high_g = noncentrality(t, dof)
        effect = (scale * t, scale * low_g, scale * high_g)
        detectable = detectable_t(dof) * std / math.sqrt(n)
    return Difference(difference, low, high, p, floor, *effect, detectable, (n, n))


@lru_cache(maxsize=4096)
def smallest_p(n: int, m: int) -> float:
    """The least p of two rows of n and m runs."""
    divisions = math.comb(n + m, n)
    if divisions > MOST_DIVISIONS:
        return 1 / (RANDOM_DIVISIONS + 1)
    return (2 if n == m else 1) / divisions


@lru_cache(maxsize=16_384)
def _permuted(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float, float]:
    """p, and the ends of the interval, of all ways to divide the runs."""
    is_in_a = _divisions(len(a), len(b))
    values = np.array(a + b) - math.fsum(a + b) / len(a + b)  # centred, so that sums of large values keep their digits
    weights = np.where(is_in_a, 1 / len(a), -1 / len(b))
    return _exact(weights @ values, weights @ np.array([1.0] * len(a) + [0.0] * len(b)), float(np.abs(values).max()))


@lru_cache(maxsize=16_384)
def _flipped(differences: tuple[float, ...]) -> tuple[float, float, float]:
    """p, and the ends of the interval, of all flips of the signs of paired differences."""
    signs, values = _signs(len(differences)), np.array(differences)
    return _exact(signs @ values / len(values), signs.mean(axis=1), float(np.abs(values).max()))


def _exact(t: Any, c: Any, scale: float) -> tuple[float, float, float]:
    """p, and the ends of the interval, from a statistic of all rearrangements of the data, the true one first.

    Let T be the statistic, a mean or a difference of means, and c the statistic of data that are 1 where a shift of δ
    acts, and 0 elsewhere, so that the rearranged data, less the shift, have the statistic T − δc. As |c| ≤ 1, it is at
    least as large as the true one, |T − δc| ≥ |d − δ|, from a threshold of δ to d, and from d to another threshold. The
    share of the rearrangements at a shift δ is p, so that the interval is between quantiles of the thresholds.

    Args:
        t: T of each rearrangement.
        c: c of each rearrangement; 1 of the true one.
        scale: The largest absolute value of the data, to which equality is relative.
    """
    d = t[0]
    slack = ROUNDING * scale
    p = float(np.mean(np.abs(t) >= abs(d) - slack))

    def thresholds(end: float) -> Any:
        # A division with c = ±1 has the difference of the true one, whatever δ is.
        with np.errstate(divide="ignore", invalid="ignore"):
            same = np.where(c > 1 - ROUNDING, end, (d - t) / (1 - c))
            opposite = np.where(c < ROUNDING - 1, end, (d + t) / (1 + c))
        return same, opposite

    low, high = np.sort(np.minimum(*thresholds(-np.inf))), -np.sort(-np.maximum(*thresholds(np.inf)))
    rejected = int(TELLS * len(t) + 1e-9)  # at the next threshold, p is above 5 %
    if rejected >= len(t) or not math.isfinite(low[rejected]):
        return p, math.nan, math.nan
    return p, float(low[rejected]), float(high[rejected])


@lru_cache(maxsize=64)
def _divisions(n: int, m: int) -> Any:
    """Divisions of n + m runs into two rows, all or random ones; the first is the true one.

    Boolean, shape (divisions, n + m): whether a run is in the first row.
    """
    total = math.comb(n + m, n)
    if total <= MOST_DIVISIONS:
        chosen = np.array(list(itertools.combinations(range(n + m), n)))
    else:
        orders = np.random.default_rng(0).permuted(np.tile(np.arange(n + m), (RANDOM_DIVISIONS, 1)), axis=1)
        chosen = np.concatenate([np.arange(n)[None, :], orders[:, :n]])
    is_in_a = np.zeros((len(chosen), n + m), dtype=bool)
    np.put_along_axis(is_in_a, chosen, True, axis=1)
    return is_in_a


@lru_cache(maxsize=32)
def _signs(n: int) -> Any:
    """Signs of n differences, all or random ones; the first are the true ones. ±1, shape (flips, n)."""
    if 2**n <= MOST_DIVISIONS:
        return np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    drawn = np.random.default_rng(0).choice((1.0, -1.0), (RANDOM_DIVISIONS, n))
    return np.concatenate([np.ones((1, n)), drawn])


def _effect(a: Sequence[float], b: Sequence[float]) -> tuple[tuple[float, float, float], float]:
    """Hedges' g with its interval, and the smallest detectable difference; NaN where no row varies."""
    n, m = len(a), len(b)
    dof = n + m - 2
    pooled = math.sqrt(((n - 1) * _std(a) ** 2 + (m - 1) * _std(b) ** 2) / dof)
    if pooled == 0:
        return (math.nan, math.nan, math.nan), math.nan
    unit = math.sqrt(1 / n + 1 / m)
    t, scale = (statistics.fmean(a) - statistics.fmean(b)) / (pooled * unit), scale_of_g(dof) * unit
    low, high = noncentrality(t, dof)
    parts = [(_std(each) ** 2 / len(each), len(each) - 1) for each in (a, b)]
    variance = sum(part for part, _ in parts)
    welch_dof = variance**2 / sum(part**2 / each for part, each in parts)
    return (scale * t, scale * low, scale * high), detectable_t(welch_dof) * math.sqrt(variance)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p: for the i-th smallest of m, the greatest (m − j + 1) · p_j of all j ≤ i, at most 1.

    NaN means not tested: it is not counted and stays NaN.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, greatest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        greatest = max(greatest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = greatest
    return adjusted


@lru_cache(maxsize=1024)
def scale_of_g(dof: float) -> float:
    """Hedges' (1981) factor J = Γ(ν/2) / (√(ν/2) Γ((ν − 1)/2)), which makes an effect size unbiased: ν ≥ 2."""
    return math.exp(math.lgamma(dof / 2) - math.lgamma((dof - 1) / 2)) / math.sqrt(dof / 2)


@lru_cache(maxsize=65_536)
def noncentrality(t: float, dof: float) -> tuple[float, float]:
    """The 95 % interval of the noncentrality parameter of a t statistic (Steiger & Fouladi, 1997)."""
    ends = ((1 + LEVEL) / 2, (1 - LEVEL) / 2)
    low, high = (float(_special().nctdtrinc(dof, probability, abs(t))) for probability in ends)
    return (low, high) if t >= 0 else (-high, -low)


@lru_cache(maxsize=4096)
def detectable_t(dof: float) -> float:
    """The noncentrality at which a two-sided t test at 5 % has a power of `POWER`: 5.653 for 2 degrees of freedom.

    Times the standard error of a difference, it is the smallest difference that is found this often.
    """
    # The probability of a significant difference in the wrong direction is below 1e-4 at this power.
    return float(_special().nctdtrinc(dof, 1 - POWER, t_quantile((1 + LEVEL) / 2, dof)))


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 if all values are equal, whatever rounding does to their mean."""
    if len(set(values)) == 1:
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def finite(value: float) -> float | None:
    """The value; None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
