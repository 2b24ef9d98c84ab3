"""Tests of the difference between two rows, by scipy.

`two_rows` pairs the runs by seed where the rows share seeds, because a seed fixes the generated data and its order. It
uses the paired t test for pairs, and Welch's t test otherwise. It also computes an exact p, which assumes no
distribution: by sign flips of paired differences, or by permutations of the runs. With n pairs the exact p is at least
2 / 2ⁿ, which few seeds cannot bring below 5 %, so both are given. If the runs of both rows do not vary, t is undefined,
and the exact p is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cope_sweep.results.stats import t_quantile

LEVEL = 0.95
POWER = 0.8
"""Power of the smallest detectable difference."""
PAIRS_FROM = 3
"""Rows are compared in pairs if they share this many seeds, or all seeds of the smaller row."""
PERMUTATIONS = 9_999
"""Permutations where the exact test has more."""


@dataclass(frozen=True)
class Difference:
    """A row minus the row that it is compared with; NaN where there are too few runs."""

    difference: float
    """Difference of the means, over the pairs if `paired`."""
    ci_low: float = math.nan
    ci_high: float = math.nan
    """95 % interval of the difference."""
    p: float = math.nan
    """Two-sided, not corrected. 1 if nothing differs."""
    p_exact: float = math.nan
    effect: float = math.nan
    """Hedges' g: the difference in standard deviations (of the differences if paired, else pooled), unbiased."""
    effect_low: float = math.nan
    effect_high: float = math.nan
    detectable: float = math.nan
    """The smallest true difference that a test at this n and spread finds with a probability of 80 %."""
    n: tuple[int, int] = (0, 0)
    paired: bool = False
    test: str = ""
    """`paired t`, `Welch t`, or the exact test whose p is used where t is undefined; empty: too few runs."""


def two_rows(row: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Compare two rows; each maps seeds to values. NaN everywhere but in the difference if a row has one run only."""
    shared = sorted(row.keys() & other.keys())
    if len(shared) >= PAIRS_FROM or 2 <= len(shared) == min(len(row), len(other)):
        return _paired([row[seed] for seed in shared], [other[seed] for seed in shared])
    a, b = ([values[seed] for seed in sorted(values)] for values in (row, other))
    return _independent(a, b)


def _paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    n = len(a)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, std = _mean(differences), _std(differences)
    if _std(a) == _std(b) == 0:
        return _independent(a, b)  # without variation, pairs hold no more information than the runs
    exact = _exact(a, b, paired=True)
    if std == 0:
        return Difference(mean, p=exact, p_exact=exact, n=(n, n), paired=True, test="sign flips")
    from scipy import stats

    error, dof = std / math.sqrt(n), n - 1
    found = stats.ttest_rel(a, b)
    half = t_quantile((1 + LEVEL) / 2, dof) * error
    g, low, high = _effect(mean / error, dof, 1 / math.sqrt(n))
    return Difference(
        mean, mean - half, mean + half, float(found.pvalue), exact, g, low, high, detectable_t(dof) * error, (n, n),
        True, "paired t",
    )  # fmt: skip


def _independent(a: Sequence[float], b: Sequence[float]) -> Difference:
    n = (len(a), len(b))
    if not a or not b:
        return Difference(math.nan, n=n)
    difference = _mean(a) - _mean(b)
    if min(n) < 2:
        return Difference(difference, n=n)
    exact = _exact(a, b, paired=False)
    if _std(a) == _std(b) == 0:
        return Difference(difference, p=exact, p_exact=exact, n=n, test="permutations")
    from scipy import stats

    found = stats.ttest_ind(a, b, equal_var=False)
    interval = found.confidence_interval(LEVEL)
    error = math.hypot(*(_std(values) / math.sqrt(len(values)) for values in (a, b)))
    pooled_dof = n[0] + n[1] - 2
    pooled = math.sqrt(((n[0] - 1) * _std(a) ** 2 + (n[1] - 1) * _std(b) ** 2) / pooled_dof)
    unit = math.sqrt(1 / n[0] + 1 / n[1])
    g, low, high = _effect(difference / (pooled * unit), pooled_dof, unit)
    return Difference(
        difference, float(interval.low), float(interval.high), float(found.pvalue), exact, g, low, high,
        detectable_t(float(found.df)) * error, n, False, "Welch t",
    )  # fmt: skip


def _effect(t: float, dof: float, unit: float) -> tuple[float, float, float]:
    """Hedges' g and its interval, from a t statistic whose standard error is `unit` standard deviations."""
    scale = scale_of_g(dof) * unit
    low, high = noncentrality(t, dof)
    return scale * t, scale * low, scale * high


def _exact(a: Sequence[float], b: Sequence[float], *, paired: bool) -> float:
    """The two-sided p of all sign flips or permutations; of `PERMUTATIONS` random ones if there are more."""
    import numpy as np
    from scipy import stats

    def statistic(x: Any, y: Any, axis: int) -> Any:
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    if paired and list(a) == list(b):
        return 1.0
    found = stats.permutation_test(
        (a, b), statistic, permutation_type="samples" if paired else "independent", vectorized=True,
        n_resamples=PERMUTATIONS, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p: for the i-th smallest of m, the greatest (m − j + 1) · p_j of all j ≤ i, at most 1.

    NaN is no test: it is not counted and stays NaN.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, greatest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(order):
        greatest = max(greatest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = greatest
    return adjusted


@lru_cache(maxsize=1024)
def scale_of_g(dof: float) -> float:
    """Hedges' (1981) factor J = Γ(ν/2) / (√(ν/2) Γ((ν − 1)/2)), which makes an effect size unbiased; NaN for ν = 1."""
    if dof <= 1:
        return math.nan
    return math.exp(math.lgamma(dof / 2) - math.lgamma((dof - 1) / 2)) / math.sqrt(dof / 2)


@lru_cache(maxsize=65_536)
def noncentrality(t: float, dof: float) -> tuple[float, float]:
    """The 95 % interval of the noncentrality parameter of a t statistic (Steiger & Fouladi, 1997)."""
    from scipy.special import nctdtrinc

    low, high = (float(nctdtrinc(dof, probability, abs(t))) for probability in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))
    return (low, high) if t >= 0 else (-high, -low)


@lru_cache(maxsize=4096)
def detectable_t(dof: float) -> float:
    """The noncentrality at which a two-sided t test at 5 % has a power of `POWER`: 5.653 for 2 degrees of freedom.

    Times the standard error of a difference, it is the smallest difference that is found this often.
    """
    from scipy.optimize import brentq
    from scipy.special import nctdtr

    critical = t_quantile((1 + LEVEL) / 2, dof)

    def power(nc: float) -> float:
        # The probability of a significant difference in the wrong direction is below 1e-4 at this power.
        return 1 - float(nctdtr(dof, nc, critical))

    return float(brentq(lambda nc: power(nc) - POWER, 0.0, 3 * critical + 10, xtol=1e-9))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 if all values are equal, whatever rounding does to their mean."""
    if len(set(values)) == 1:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
