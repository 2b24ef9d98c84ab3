import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.results import summarise
from cope_sweep.results.stats import student_t

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


def test_three_values_computed_by_hand():
    # x̄ = 4; s² = ((−2)² + 0² + 2²) / 2 = 4; t(0.95, 2) = 4.302653; 4.302653 · 2 / √3 = 4.968275.
    summary = summarise([2.0, 4.0, 6.0])
    assert (summary.n, summary.mean, summary.std) == (3, 4.0, 2.0)
    assert summary.ci_low == pytest.approx(4 - 4.968275, abs=1e-5)
    assert summary.ci_high == pytest.approx(4 + 4.968275, abs=1e-5)


def test_two_values_computed_by_hand():
    # s = |a − b| / √2, and t(0.95, 1) = tan(0.95 · π / 2) = 12.7062, so the half width is 12.7062 · |a − b| / 2.
    summary = summarise([1.0, 2.0])
    assert summary.std == pytest.approx(1 / math.sqrt(2))
    assert summary.ci_high - summary.mean == pytest.approx(12.7062047 / 2)


def test_statistics_of_too_few_values_are_nan():
    none, one = summarise([]), summarise([3.5])
    assert none.n == 0
    assert all(map(math.isnan, (none.mean, none.std, none.ci_low, none.ci_high)))
    assert (one.n, one.mean) == (1, 3.5)
    assert all(map(math.isnan, (one.std, one.ci_low, one.ci_high)))


def test_missing_values_are_left_out():
    assert summarise([1.0, math.nan, 2.0]) == summarise([1.0, 2.0])


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 9, 10, 29, 30, 99, 500])
def test_student_t_equals_the_quantile_of_scipy_stats(level, dof):
    assert student_t(level, dof) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, dof), rel=1e-11)


@pytest.mark.parametrize(("level", "dof"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_student_t_refuses_impossible_arguments(level, dof):
    with pytest.raises(ValueError, match="level"):
        student_t(level, dof)


@given(values)
def test_numpy_and_scipy_agree(data):
    summary = summarise(data)
    scale = max(map(abs, data)) + 1
    assert summary.mean == pytest.approx(np.mean(data), abs=1e-12 * scale)
    assert summary.std == pytest.approx(np.std(data, ddof=1), rel=1e-9, abs=1e-9 * scale)
    half = scipy.stats.t.ppf(0.975, len(data) - 1) * scipy.stats.sem(data)
    assert summary.ci_low == pytest.approx(np.mean(data) - half, rel=1e-9, abs=1e-8 * scale)
    assert summary.ci_high == pytest.approx(np.mean(data) + half, rel=1e-9, abs=1e-8 * scale)


@given(values)
def test_the_mean_is_in_the_range_of_the_values_and_in_its_interval(data):
    summary = summarise(data)
    assert min(data) <= summary.mean <= max(data)
    assert summary.ci_low <= summary.mean <= summary.ci_high
    assert summary.std >= 0


@given(values, st.randoms())
def test_order_does_not_matter(data, random):
    shuffled = random.sample(data, len(data))
    assert summarise(shuffled) == summarise(data)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=12), st.integers(-1000, 1000), st.integers(1, 9))
def test_statistics_follow_shifts_and_scalings(data, shift, factor):
    before, after = summarise(data), summarise([factor * x + shift for x in data])
    assert after.mean == pytest.approx(factor * before.mean + shift, abs=1e-9)
    assert after.std == pytest.approx(factor * before.std, rel=1e-9, abs=1e-9)
    assert after.ci_high == pytest.approx(factor * before.ci_high + shift, rel=1e-9, abs=1e-7)


def test_intervals_cover_the_true_mean_at_their_level():
    rng = np.random.default_rng(0)
    intervals = [summarise(row) for row in rng.normal(3.0, 2.0, (4000, 4)).tolist()]
    share = np.mean([s.ci_low <= 3.0 <= s.ci_high for s in intervals])
    # Three standard errors of a share of 0.95 over 4000.
    assert share == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4000))
