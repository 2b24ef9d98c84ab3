"""Statistics of a metric over the seeds of a row, and the test of the difference between two rows.

The interval of a mean is Student's, on a scale that keeps it inside the metric's range (`Bounds`): for percentages the
t interval of the logit of the mean, for metrics that are never negative the t interval of its logarithm, both by the
delta method, as in R's `survey::svyciprop(method = "logit")`; otherwise the plain t interval. If all values are at the
same end of the range, there is no interval.

The test of two rows is the exact permutation test of the difference of their means, for all rows and whatever the data
look like. Under the null hypothesis, any of the runs could have belonged to either row, so p is the share of all ways
to divide the runs into two rows of these sizes whose means differ at least as much. The test assumes no distribution:
errors of tasks that a seed either learns or does not learn are 0 or 60, and a t test of such values gives wrong
verdicts. With n and m runs, p is at least 1 / C(n + m, n), or twice that for n = m: 0.1 for 3 and 3 runs, 0.008 for 5
and 5.

An ablation may declare that its runs are paired (`paired: true`): runs of the same seed start from the same weights and
see the same batches, so most of what differs between seeds is the same in both rows. Then the test flips signs: under
the null hypothesis, each difference between two runs of the same seed could as well have the other sign. p is at least
2 / 2ⁿ: 0.06 for 5 seeds, 0.008 for 8. If runs of the same seed have nothing in common, this test is the weaker one.

The interval of a difference inverts the same test: it contains the shifts of a row that the test does not reject at 5 %
(Lehmann 2006, 2.6). It excludes 0 if p is at most 0.05. If p cannot be that small, the interval is unbounded, here NaN.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from cope_sweep.frozen import STEPS_UNTIL

LEVEL = 0.95
"""Level of the confidence intervals in tables."""
SIGNIFICANT_P = 1 - LEVEL
"""The largest p of a significant difference."""
NORMAL_QUANTILE = 1.959963984540054
"""z with P(Z ≤ z) = 0.975."""
RESAMPLES, TAILS = 9_999, (0.025, 0.975)
"""Of a bootstrap interval: the number of samples, and the quantiles at its ends."""

POWER = 0.8
"""Power of the test for the smallest detectable difference."""
MOST_DIVISIONS = 100_000
"""If there are more divisions, or sign flips, than this, a random sample is tested. Of rows of the same size, and of
signs, half are enough: the other half are their mirror images. 10 and 10 runs have 92,378."""
RANDOM_DIVISIONS = 19_999
"""The size of the sample, besides the true division or the true signs (Phipson & Smyth 2010)."""
ROUNDING = 1e-12
"""Statistics with a smaller relative difference are equal."""
TIE = 8 * sys.float_info.epsilon
"""Values and means whose difference is a smaller share of their size are equal: 2e-9 of values near 1e6. Each value has
been rounded, by up to half of `epsilon`, so that sums of 0.1 and 0.4 and of 0.2 and 0.3 above 1e6 differ."""

LARGEST = 1e150
"""Larger values, and infinite ones, have no standard deviation and no test: their squares are no floats."""

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


def bounds_of(name: str, unit: str) -> Bounds:
    """The range of a metric with this name and unit."""
    metric, _, context = name.partition("@")
    is_perplexity = metric.endswith("perplexity")
    if ".." in context and not is_perplexity:  # from one context to another: a difference
        return UNBOUNDED
    if unit == "%":
        return PERCENT
    is_count = name.startswith(("facts.", STEPS_UNTIL))
    quantity = metric.rpartition("/")[2]
    return NON_NEGATIVE if is_perplexity or is_count or quantity.startswith(("loss", "bits_per")) else UNBOUNDED


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
    """The 95 % interval of the mean; NaN for n < 2, or if all values are at one end of the range."""
    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """The smallest and the largest value."""
    method: Method = ""
    """Method of the interval; empty without one."""


def summarise(values: Iterable[float], bounds: Bounds = UNBOUNDED) -> Summary:
    """The statistics of values in any order, without NaN, which marks a missing value."""
    data = sorted(float(value) for value in values if not math.isnan(value))
    n = len(data)
    if n == 0:
        return Summary(0)
    # Rounding can put the mean outside the range of the data by one unit in the last place.
    mean = min(max(mean_of(data), data[0]), data[-1])
    median = statistics.median(data)
    if n == 1:
        return Summary(1, mean, median=median, low=data[0], high=data[0])
    if not _are_testable(data):
        return Summary(n, mean, median=median, low=data[0], high=data[-1])
    std = _std(data)
    if not bounds.low <= data[0] <= data[-1] <= bounds.high:
        bounds = UNBOUNDED
    low, high, method = _interval(data, mean, std, bounds)
    return Summary(n, mean, std, low, high, median, data[0], data[-1], method)


def _interval(data: Sequence[float], mean: float, std: float, bounds: Bounds) -> tuple[float, float, Method]:
    """The interval of the mean of sorted values, inside `bounds`, and its method."""
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
    if share in (0.0, 1.0):  # rounded
        return math.nan, math.nan, ""
    factor = _exp(half / max(width * share * (1 - share), sys.float_info.min))
    odds = share / (1 - share)
    low, high = odds / factor / (1 + odds / factor), 1 / (1 + 1 / (odds * factor))
    return bounds.low + width * low, bounds.low + width * high, "logit t"


def _exp(value: float) -> float:
    """exp(value); a very large number instead of an overflow."""
    return math.exp(min(value, 600.0))


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """The t with P(T ≤ t) = `probability` for Student's T with `dof` degrees of freedom: 12.706 for 0.975 and 1."""
    return float(_special().stdtrit(dof, probability))


def t_tail(t: float, dof: float) -> float:
    """P(|T| ≥ |t|) for Student's T."""
    return 2 * float(_special().stdtr(dof, -abs(t)))


def _special() -> Any:
    """Scipy's special functions, imported when they are first needed: the import takes 0.4 s."""
    from scipy import special

    return special


@dataclass(frozen=True)
class Proportion:
    """A number of successes, k of n seeds."""

    k: int
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the success rate (Wilson, 1927); NaN for n = 0."""
        if self.n == 0:
            return math.nan, math.nan
        z2, p = NORMAL_QUANTILE**2, self.k / self.n
        middle = (p + z2 / (2 * self.n)) / (1 + z2 / self.n)
        half = math.sqrt(z2 * (p * (1 - p) / self.n + z2 / (4 * self.n**2))) / (1 + z2 / self.n)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Difference:
    """A row minus the row that it is compared with. Values that need more runs are NaN."""

    difference: float
    """Difference of the means."""
    ci_low: float = math.nan
    ci_high: float = math.nan
    """95 % interval of the difference."""
    p: float = math.nan
    """Two-sided and not corrected; 1 if nothing differs."""
    smallest_p: float = math.nan
    """The smallest p possible with this number of runs."""
    effect: float = math.nan
    """Hedges' g: the difference in pooled standard deviations, unbiased; NaN if no row varies."""
    detectable: float = math.nan
    """The smallest true difference that a t test at this n and spread finds with a probability of 80 %."""
    n: tuple[int, int] = (0, 0)
    """Number of runs of both rows; of pairs, twice, if runs are paired."""

    def reversed(self) -> Difference:
        """The other row minus this one."""
        n, m = self.n
        return replace(
            self, difference=-self.difference, ci_low=-self.ci_high, ci_high=-self.ci_low, effect=-self.effect, n=(m, n)
        )


def two_rows(row: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Compare two rows; each maps seeds to values. If a row has a single run, only the difference is known."""
    a, b = list(row.values()), list(other.values())
    n = (len(a), len(b))
    if not a or not b:
        return Difference(math.nan, n=n)
    difference = mean_of(a) - mean_of(b)
    if min(n) < 2 or not _are_testable([*a, *b]):
        return Difference(difference, n=n)
    effect, detectable = _effect(a, b)
    # A sample of the divisions depends on the order of the runs: one order, so that A − B has the p of B − A.
    first, second = sorted((tuple(sorted(a)), tuple(sorted(b))))
    p, low, high = _permuted(first, second)
    if first != tuple(sorted(a)):
        low, high = -high, -low
    return Difference(difference, low, high, p, smallest_p(*n), effect, detectable, n)


def paired_rows(row: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Compare two rows by the seeds that both have; each maps seeds to values."""
    seeds = sorted(row.keys() & other.keys())
    size = max((abs(values[seed]) for values in (row, other) for seed in seeds), default=0.0)
    differences = [row[seed] - other[seed] for seed in seeds]
    n = len(differences)
    if n == 0:
        return Difference(math.nan)
    if n == 1 or not _are_testable(differences):
        return Difference(mean_of(differences), n=(n, n))
    differences = with_ties(differences, size)
    difference = mean_of(differences)
    p, low, high = _flipped(tuple(differences), size)
    std, dof = _std(differences), n - 1
    effect = detectable = math.nan
    if std > 0:
        effect = difference / std * scale_of_g(dof)
        detectable = detectable_t(dof) * std / math.sqrt(n)
    return Difference(difference, low, high, p, smallest_p_of_pairs(n), effect, detectable, (n, n))


@lru_cache(maxsize=4096)
def smallest_p(n: int, m: int) -> float:
    """The smallest possible p of two rows of n and m runs."""
    return _least_share(_number_of_divisions(n, m))


def _number_of_divisions(n: int, m: int) -> int:
    """Of n + m runs into two rows; of rows of the same size, those with the first run in the first row."""
    return math.comb(n + m, n) // (2 if n == m else 1)


def smallest_p_of_pairs(n: int) -> float:
    """The smallest possible p of n pairs of runs."""
    return _least_share(2 ** (n - 1))


def _least_share(divisions: int) -> float:
    """The share of the true one among so many divisions, or in the sample that is drawn of more."""
    return 1 / (divisions if divisions <= MOST_DIVISIONS else RANDOM_DIVISIONS + 1)


def least_seeds(comparisons: int, *, is_paired: bool) -> int | None:
    """The smallest number of seeds of two rows with which one of so many comparisons can be significant.

    None: no number can, because of more divisions a sample is tested. So it is with some thousands of comparisons.
    """
    for n in range(2, 2 + MOST_DIVISIONS.bit_length()):
        floor = smallest_p_of_pairs(n) if is_paired else smallest_p(n, n)
        if comparisons * floor <= SIGNIFICANT_P:
            return n
    return None


@lru_cache(maxsize=16_384)
def _permuted(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float, float]:
    """The p and the ends of the interval, by all ways to divide the runs."""
    is_in_a = _divisions(len(a), len(b))
    values = np.array(a + b) - math.fsum(a + b) / len(a + b)  # centred, so that sums of large values keep their digits
    weights = np.where(is_in_a, 1 / len(a), -1 / len(b))
    c = weights @ np.array([1.0] * len(a) + [0.0] * len(b))
    return _exact_test(weights @ values, c, float(np.abs(values).max()), max(map(abs, a + b)))


@lru_cache(maxsize=16_384)
def _flipped(differences: tuple[float, ...], size: float) -> tuple[float, float, float]:
    """The p and the ends of the interval, by all flips of the signs of differences between values up to `size`."""
    signs, values = _signs(len(differences)), np.array(differences)
    return _exact_test(signs @ values / len(values), signs.mean(axis=1), float(np.abs(values).max()), size)


def _exact_test(t: Any, c: Any, scale: float, size: float) -> tuple[float, float, float]:
    """The p and the ends of the interval, from a statistic of all rearrangements of the data.

    Let T be the statistic, a mean or a difference of means, and d its value for the true arrangement. Let c be the same
    statistic of data that are 1 where a shift δ acts and 0 elsewhere. Then T − δc is the statistic of the rearranged
    data after the shift is subtracted. Because |c| ≤ 1, it is at least as large as the true one, |T − δc| ≥ |d − δ|,
    for all δ between one threshold below d and one above. The share of rearrangements for which this holds at δ is the
    p of δ, so the ends of the interval are quantiles of the thresholds.

    Args:
        t: T of each rearrangement, the true one first.
        c: c of each rearrangement; 1 for the true one.
        scale: The largest absolute value of the data. Statistics are equal if they differ by less than a tiny share.
        size: The same before the data were centred or subtracted from each other, which decides how they were rounded.
    """
    d = t[0]
    slack = max(ROUNDING * scale, TIE * size)
    # Ties that were rounded would put thresholds beside 0 instead of on it: the interval would disagree with p.
    t = np.where(np.abs(t - d) <= slack, d, np.where(np.abs(t + d) <= slack, -d, t))
    p = float(np.mean(np.abs(t) >= abs(d) - slack))

    def thresholds(end: float) -> Any:
        # With c = ±1, the statistic equals the one of the true arrangement for every δ, up to its sign.
        with np.errstate(divide="ignore", invalid="ignore"):
            same = np.where(c > 1 - ROUNDING, end, (d - t) / (1 - c))
            opposite = np.where(c < ROUNDING - 1, end, (d + t) / (1 + c))
        return same, opposite

    rejected = int(SIGNIFICANT_P * len(t) + 1e-9)  # at the next threshold, p is above 5 %
    if rejected >= len(t):
        return p, math.nan, math.nan
    low = np.partition(np.minimum(*thresholds(-np.inf)), rejected)[rejected]
    high = -np.partition(-np.maximum(*thresholds(np.inf)), rejected)[rejected]
    return (p, float(low), float(high)) if math.isfinite(low) else (p, math.nan, math.nan)


@lru_cache(maxsize=16)  # of 2 MB
def _divisions(n: int, m: int) -> Any:
    """All divisions of n + m runs into two rows, or half of them, or a sample; the first is the true one.

    Returns a Boolean array of shape (divisions, n + m): whether a run is in the first row.
    """
    total = _number_of_divisions(n, m)
    if total <= MOST_DIVISIONS:
        # In lexicographic order: the first half has the first run in the first row.
        chosen = np.array(list(itertools.islice(itertools.combinations(range(n + m), n), total)))
    else:
        orders = np.random.default_rng(0).permuted(np.tile(np.arange(n + m), (RANDOM_DIVISIONS, 1)), axis=1)
        chosen = np.concatenate([np.arange(n)[None, :], orders[:, :n]])
    is_in_a = np.zeros((len(chosen), n + m), dtype=bool)
    np.put_along_axis(is_in_a, chosen, True, axis=1)
    return is_in_a


@lru_cache(maxsize=8)  # of up to 10 MB
def _signs(n: int) -> Any:
    """The signs of n differences, or a random sample; the first are the true ones. ±1, shape (flips, n).

    The first sign does not change: the other flips are their mirror images.
    """
    if 2 ** (n - 1) <= MOST_DIVISIONS:
        return np.array(list(itertools.product((1.0,), *[(1.0, -1.0)] * (n - 1))))
    drawn = np.random.default_rng(0).choice((1.0, -1.0), (RANDOM_DIVISIONS, n))
    return np.concatenate([np.ones((1, n)), drawn])


def _effect(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Hedges' g, and the smallest detectable difference; NaN if no row varies."""
    n, m = len(a), len(b)
    dof = n + m - 2
    pooled = math.sqrt(((n - 1) * _std(a) ** 2 + (m - 1) * _std(b) ** 2) / dof)
    if pooled == 0:
        return math.nan, math.nan
    g = (statistics.fmean(a) - statistics.fmean(b)) / pooled * scale_of_g(dof)
    variances = [_std(values) ** 2 / len(values) for values in (a, b)]  # of the means
    variance = sum(variances)
    if variance < sys.float_info.min:  # rounded: the degrees of freedom are unknown
        return g, math.nan
    shares = [each / variance for each in variances]  # the squares of variances may be no floats
    welch_dof = max(1 / (shares[0] ** 2 / (n - 1) + shares[1] ** 2 / (m - 1)), 1.0)  # scipy's search ends at 1
    return g, detectable_t(welch_dof) * math.sqrt(variance)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p: for the i-th smallest of m, the largest (m − j + 1) · p_j of all j ≤ i, at most 1.

    NaN means not tested: it does not count and stays NaN.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, greatest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        greatest = max(greatest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = greatest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's (1995) q: for the i-th smallest of m, the smallest m · p_j / j of all j ≥ i.

    Of the differences with q ≤ 0.05, 5 % are expected to be false. NaN means not tested: it does not count and stays
    NaN.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, least = [math.nan] * len(p_values), 1.0
    for rank, (p, index) in reversed([*enumerate(order, start=1)]):
        least = min(least, len(order) * p / rank)
        adjusted[index] = least
    return adjusted


@lru_cache(maxsize=1024)
def scale_of_g(dof: float) -> float:
    """Hedges' (1981) factor J = Γ(ν/2) / (√(ν/2) Γ((ν − 1)/2)), which makes an effect size unbiased; NaN for ν < 2.

    For ν = 1, it is 0: no multiple of such an effect is unbiased.
    """
    if dof < 2:
        return math.nan
    return math.exp(math.lgamma(dof / 2) - math.lgamma((dof - 1) / 2)) / math.sqrt(dof / 2)


@lru_cache(maxsize=4096)
def detectable_t(dof: float) -> float:
    """The noncentrality at which a two-sided t test at 5 % has a power of `POWER`: 5.653 for 2 degrees of freedom.

    Multiplied by the standard error of a difference, it is the smallest difference that the test finds this often.
    """
    # The probability of a significant difference in the wrong direction is below 1e-4 at this power.
    return float(_special().nctdtrinc(dof, 1 - POWER, t_quantile((1 + LEVEL) / 2, dof)))


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 if all values are equal, whatever rounding does to their mean."""
    if len(set(values)) == 1:
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_of(values: Collection[float]) -> float:
    """The mean of at least one value; NaN if infinite values of both signs are among them."""
    try:
        return statistics.fmean(values)
    except OverflowError:  # the sum
        return math.fsum(value / len(values) for value in values)
    except ValueError:
        return math.nan


def with_ties(values: Sequence[float], size: float | None = None) -> list[float]:
    """The values, with the smallest of those that are equal up to rounding (`TIE`) in place of each of them.

    `size`: of the numbers from which the values were computed; None: each value's own.
    """
    result, smallest = list(values), math.nan
    for index in sorted(range(len(values)), key=values.__getitem__):
        value = values[index]
        if not value - smallest <= TIE * (abs(smallest) if size is None else size):
            smallest = value
        result[index] = smallest
    return result


def _are_testable(values: Iterable[float]) -> bool:
    return all(abs(value) <= LARGEST for value in values)


def finite(value: float) -> float | None:
    """The value; None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
