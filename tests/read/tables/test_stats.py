import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.stats import (
    BOOTSTRAP_FROM,
    NON_NEGATIVE,
    PERCENT,
    UNBOUNDED,
    Share,
    bounds_of,
    stuck,
    t_quantile,
)

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=BOOTSTRAP_FROM - 1)


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


@pytest.mark.parametrize("dof", [1, 2, 5, 29.5, 500])
def test_t_quantiles_are_those_of_scipy_stats(dof):
    assert t_quantile(0.975, dof) == pytest.approx(scipy.stats.t.ppf(0.975, dof), rel=1e-11)


def test_median_and_extremes():
    summary = summarise([5.0, 1.0, 2.0, 100.0])
    assert (summary.median, summary.low, summary.high) == (3.5, 1.0, 100.0)


def test_a_percentage_has_the_t_interval_of_its_logit():
    # x̄ = 12, s / √n = 2; on the logit scale 0.02 / (0.12 · 0.88) = 0.189394, and 12.7062 · 0.189394 = 2.406477.
    summary = summarise([10.0, 14.0], PERCENT)
    logit = math.log(0.12 / 0.88)
    assert summary.method == "logit t"
    assert summary.ci_low == pytest.approx(100 / (1 + math.exp(-(logit - 2.406477))), abs=1e-4)
    assert summary.ci_high == pytest.approx(100 / (1 + math.exp(-(logit + 2.406477))), abs=1e-4)


def test_a_quantity_that_is_never_negative_has_the_t_interval_of_its_logarithm():
    # x̄ = 2, s / √n = 1: log(2) ± 12.7062 · 1 / 2.
    summary = summarise([1.0, 3.0], NON_NEGATIVE)
    assert (summary.ci_low, summary.ci_high) == pytest.approx(
        (2 * math.exp(-6.353102), 2 * math.exp(6.353102)), rel=1e-5
    )
    assert summary.method == "log t"


@pytest.mark.parametrize("end", [0.0, 100.0])
def test_seeds_that_are_all_at_the_end_of_the_range_give_no_interval(end):
    summary = summarise([end] * 3, PERCENT)
    assert (summary.mean, summary.std, summary.method) == (end, 0.0, "")
    assert math.isnan(summary.ci_low)
    assert math.isnan(summary.ci_high)


def test_values_outside_of_the_supposed_range_have_the_plain_interval():
    assert summarise([90.0, 110.0], PERCENT).method == "t"


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30))
def test_intervals_of_percentages_hold_the_mean_and_stay_in_the_range(data):
    summary = summarise(data, PERCENT)
    if summary.method:
        assert 0 <= summary.ci_low <= summary.ci_high <= 100
        if summary.method != "bootstrap":
            assert summary.ci_low - 1e-9 <= summary.mean <= summary.ci_high + 1e-9
    else:
        assert summary.mean in (0, 100)


def test_many_seeds_are_bootstrapped():
    data = np.random.default_rng(3).exponential(2.0, BOOTSTRAP_FROM).tolist()
    summary = summarise(data, NON_NEGATIVE)
    found = scipy.stats.bootstrap((data,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(9))
    assert summary.method == "bootstrap"
    assert summary.ci_low == pytest.approx(found.confidence_interval.low, abs=0.1)
    assert summary.ci_high == pytest.approx(found.confidence_interval.high, abs=0.1)
    assert summarise(data[::-1], NON_NEGATIVE) == summary
    assert summarise(data[1:], NON_NEGATIVE).method == "log t"


@pytest.mark.parametrize(
    ("name", "unit", "bounds"),
    [
        ("in_dist/token_error", "%", PERCENT),
        ("test/perplexity@2048", "", NON_NEGATIVE),
        ("dense/loss", "", NON_NEGATIVE),
        ("facts.train_s", "", NON_NEGATIVE),
        ("my/score", "", UNBOUNDED),
    ],
)
def test_ranges_follow_from_names_and_units(name, unit, bounds):
    assert bounds_of(name, unit) == bounds


@pytest.mark.parametrize(
    ("values", "goal", "bounds", "far"),
    [
        ([0.1, 0.0, 35.0], "min", PERCENT, [False, False, True]),
        ([0.1, 0.0, 9.9], "min", PERCENT, [False, False, False]),  # less than 10 percentage points
        ([10.0, 25.0, 40.0], "min", PERCENT, [False, False, False]),  # 15 < 3 · 1.4826 · 15
        ([0.0, 0.0, 35.0, 40.0, 0.2], "min", PERCENT, [False, False, True, True, False]),
        ([99.0, 98.0, 50.0], "max", PERCENT, [False, False, True]),
        ([0.1, 0.0, 35.0], "max", PERCENT, [False, False, False]),
        ([20.0, 20.1, 30.0], "min", NON_NEGATIVE, [False, False, True]),
        ([20.0, 20.1, 23.0], "min", NON_NEGATIVE, [False, False, False]),  # less than 20 % of the median
        ([0.0, 90.0], "min", PERCENT, [False, False]),
    ],
)
def test_stuck_seeds_by_hand(values, goal, bounds, far):
    assert stuck(values, goal, bounds) == far


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


COVERED = {
    "normal": (lambda rng, n: rng.normal(50.0, 3.0, n), 50.0, 0.93),
    "near 0": (lambda rng, n: 100 * rng.beta(2.0, 30.0, n), 100 * 2 / 32, 0.92),
    "very skewed": (lambda rng, n: 100 * rng.beta(0.5, 10.0, n), 100 * 0.5 / 10.5, 0.88),
}


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("name", COVERED)
def test_intervals_of_percentages_cover_the_true_mean(name, n):
    """At 95 % for a normal distribution; near 0 a little less, and more often than the plain t interval."""
    draw, truth, least = COVERED[name]
    rng = np.random.default_rng(n)
    samples = [draw(rng, n).tolist() for _ in range(1500)]
    share, plain = (np.mean([s.ci_low <= truth <= s.ci_high for s in (summarise(x, bounds) for x in samples)])
                    for bounds in (PERCENT, UNBOUNDED))  # fmt: skip
    assert share >= least
    assert share >= plain - 0.02


def test_plain_intervals_cover_the_true_mean_at_their_level():
    rng = np.random.default_rng(0)
    intervals = [summarise(row) for row in rng.normal(3.0, 2.0, (4000, 4)).tolist()]
    share = np.mean([s.ci_low <= 3.0 <= s.ci_high for s in intervals])
    # Three standard errors of a share of 0.95 over 4000.
    assert share == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4000))


def test_bootstrapped_intervals_cover_the_true_mean():
    rng = np.random.default_rng(0)
    intervals = [summarise(row) for row in rng.normal(3.0, 2.0, (300, BOOTSTRAP_FROM)).tolist()]
    assert np.mean([s.ci_low <= 3.0 <= s.ci_high for s in intervals]) > 0.88


# statsmodels 0.15: proportion_confint(k, n, method="wilson").
@pytest.mark.parametrize(("k", "n", "low", "high"), [(5, 5, 0.5655, 1.0), (0, 5, 0.0, 0.4345), (3, 10, 0.1078, 0.6032)])
def test_the_interval_of_a_share(k, n, low, high):
    assert Share(k, n).interval == pytest.approx((low, high), abs=1e-4)


def test_no_seed_has_no_share():
    assert all(map(math.isnan, Share(0, 0).interval))
