import itertools
import math
from random import Random

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.read.tables import summarise
from cope_sweep.read.tables.stats import (
    NON_NEGATIVE,
    PERCENT,
    UNBOUNDED,
    Proportion,
    bounds_of,
    detectable_t,
    holm,
    paired_rows,
    smallest_p,
    two_rows,
    with_ties,
)

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=19)


def test_statistics_of_too_few_values_are_nan():
    none, one = summarise([]), summarise([3.5])
    assert none.n == 0
    assert all(map(math.isnan, (none.mean, none.std, none.ci_low, none.ci_high)))
    assert (one.n, one.mean) == (1, 3.5)
    assert all(map(math.isnan, (one.std, one.ci_low, one.ci_high)))


def test_missing_values_are_left_out():
    assert summarise([1.0, math.nan, 2.0]) == summarise([1.0, 2.0])


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


@pytest.mark.parametrize(
    ("name", "unit", "bounds"),
    [
        ("in_dist/token_error", "%", PERCENT),
        ("test/perplexity@2048", "", NON_NEGATIVE),
        ("dense/loss", "", NON_NEGATIVE),
        ("facts.train_s", "", NON_NEGATIVE),
        ("test/word_perplexity", "", NON_NEGATIVE),
        ("test/position_perplexity@64", "", NON_NEGATIVE),
        ("steps_until/in_dist/token_error", "", NON_NEGATIVE),
        ("test/perplexity@128..512", "", NON_NEGATIVE),
        ("in_dist/token_error@1x..4x", "%", UNBOUNDED),
        ("test/loss@128..512", "", UNBOUNDED),
        ("my/score", "", UNBOUNDED),
    ],
)
def test_ranges_follow_from_names_and_units(name, unit, bounds):
    assert bounds_of(name, unit) == bounds


@given(values)
def test_numpy_and_scipy_agree(data):
    summary = summarise(data)
    scale = max(map(abs, data)) + 1
    assert summary.mean == pytest.approx(np.mean(data), abs=1e-12 * scale)
    assert summary.std == pytest.approx(np.std(data, ddof=1), rel=1e-9, abs=1e-9 * scale)
    half = scipy.stats.t.ppf(0.975, len(data) - 1) * scipy.stats.sem(data)
    assert summary.ci_low == pytest.approx(np.mean(data) - half, rel=1e-9, abs=1e-8 * scale)
    assert summary.ci_high == pytest.approx(np.mean(data) + half, rel=1e-9, abs=1e-8 * scale)


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


# statsmodels 0.15: proportion_confint(k, n, method="wilson").
@pytest.mark.parametrize(("k", "n", "low", "high"), [(5, 5, 0.5655, 1.0), (0, 5, 0.0, 0.4345), (3, 10, 0.1078, 0.6032)])
def test_the_interval_of_a_share(k, n, low, high):
    assert Proportion(k, n).interval == pytest.approx((low, high), abs=1e-4)


A, B = [1.0, 2.0, 4.0, 3.5], [2.0, 5.0, 5.5, 3.0]


def row(values, first=0):
    return dict(enumerate(values, first))


def share_of_divisions(a, b):
    """p by the definition: every way to divide the runs, one after another."""
    runs = [*a, *b]
    means = [
        sum(runs[i] for i in chosen) / len(a) - sum(runs[i] for i in range(len(runs)) if i not in chosen) / len(b)
        for chosen in itertools.combinations(range(len(runs)), len(a))
    ]
    limit = abs(sum(a) / len(a) - sum(b) / len(b))
    return sum(abs(mean) >= limit - 1e-9 for mean in means) / len(means)


def test_all_divisions_are_counted_by_hand():
    # {1, 2, 3} and {4, 5, 6}: of the 20 ways to divide them, two are as far apart.
    got = two_rows(row([1.0, 2.0, 3.0]), row([4.0, 5.0, 6.0]))
    assert (got.difference, got.p, got.smallest_p, got.n) == (-3.0, 2 / 20, 2 / 20, (3, 3))
    assert math.isnan(got.ci_low), "no shift is rejected at 5 % where p cannot be below 10 %"
    # {0, 9} and {1, 2, 3} differ by 2.5. Of the 10 pairs of these numbers only {1, 3} and {2, 3} differ by less.
    assert two_rows(row([0.0, 9.0]), row([1.0, 2.0, 3.0])).p == pytest.approx(8 / 10)


def test_bimodal_errors_that_do_not_overlap_differ():
    """The worst of one row is better than the best of the other, and one seed is stuck: Welch's p is 0.096."""
    stuck, learned = [10.35, 12.1, 13.0, 14.2, 62.0], [1.9, 2.3, 2.8, 3.7, 4.3]
    got = two_rows(row(stuck), row(learned))
    assert scipy.stats.ttest_ind(stuck, learned, equal_var=False).pvalue > 0.05
    assert got.p == pytest.approx(2 / 252)
    assert got.ci_low > 0


def test_rows_that_do_not_vary_can_differ():
    got = two_rows(row([0.0] * 5), row([100.0] * 5))
    assert (got.difference, got.p) == (-100.0, pytest.approx(2 / 252))
    assert (got.ci_low, got.ci_high) == pytest.approx((-100.0, -100.0))
    assert math.isnan(got.effect)
    assert two_rows(row([0.0] * 5), row([0.0] * 5)).p == 1.0


@pytest.mark.parametrize("size", [0.0, 1e3, 1e6, 1e9])
def test_ties_of_large_values_are_ties(size):
    """0.1 + 0.4 and 0.2 + 0.3 are the same above 1e6, too, where the sums of the rounded values are not.

    Of the 70 divisions of 0.1 … 0.8, 24 have sums at least as far apart as 1.4 and 2.2.
    """
    a, b = ([size + tenths / 10 for tenths in row_tenths] for row_tenths in ((1, 2, 4, 7), (3, 5, 6, 8)))
    got = two_rows(row(a), row(b))
    assert got.p == pytest.approx(24 / 70)
    assert got.ci_low <= 0 <= got.ci_high
    assert two_rows(row(b), row(a)).p == got.p
    # Differences 0.2, 0.3, 0.2 and 0.1: only all of one sign are as far from 0. They vary, those of the next line don't.
    assert paired_rows(row(b), row(a)).p == 2 / 16
    assert math.isnan(paired_rows(row(a), row([value + 0.3 for value in a])).effect)
    # ±0.1 ±0.2 ±0.3, whose sum is 0: every choice of signs is as far from 0.
    assert paired_rows(row([size + 0.1, size + 0.2, size]), row([size, size, size + 0.3])).p == 1.0


def test_ties_have_one_value():
    assert with_ties([0.3, 0.1 + 0.2, 0.0, -0.0, 2.0]) == [0.3, 0.3, 0.0, 0.0, 2.0]
    assert with_ties([1e6 + 1e-9, 1e6, 1e6 + 1e-6]) == [1e6, 1e6, 1e6 + 1e-6]
    assert with_ties([math.inf, 1.0, math.inf]) == [math.inf, 1.0, math.inf]
    one_is_infinite = paired_rows({0: math.inf} | dict.fromkeys(range(1, 6), 2.0), dict.fromkeys(range(6), 1.0))
    assert one_is_infinite.difference == math.inf
    assert math.isnan(one_is_infinite.p)
    assert with_ties([]) == []


def test_seeds_are_not_paired():
    assert two_rows(row(A), row(B)) == two_rows(row(A), row(B, first=10))


@pytest.mark.parametrize(
    ("n", "m", "p"), [(2, 2, 1 / 3), (3, 3, 0.1), (5, 5, 2 / 252), (3, 5, 1 / 56), (10, 10, 2 / 184756), (20, 20, 5e-5)]
)
def test_the_least_p_of_so_many_runs(n, m, p):
    assert smallest_p(n, m) == pytest.approx(p)
    far = two_rows(row(range(n)), row(range(1000, 1000 + m)))
    assert far.p == pytest.approx(p)


def test_of_many_runs_random_divisions_are_counted():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.0, 1.0, 30), rng.normal(0.6, 1.0, 30)
    got = two_rows(row(a.tolist()), row(b.tolist()))
    assert got.p == pytest.approx(scipy.stats.ttest_ind(a, b).pvalue, abs=0.01)
    assert got == two_rows(row(a.tolist()), row(b.tolist())), "the same divisions each time"
    interval = scipy.stats.ttest_ind(a, b).confidence_interval()
    assert (got.ci_low, got.ci_high) == pytest.approx((interval.low, interval.high), abs=0.05)


@pytest.mark.parametrize("n", [7, 12])
@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_which_run_or_row_comes_first(n, seed):
    """Of 12 and 12 runs a sample of the divisions is drawn."""
    random = Random(seed)
    a, b = ({seed: random.gauss(centre, 1) for seed in range(n)} for centre in (0, 0.9))
    shuffled = dict(random.sample(list(a.items()), n))
    assert two_rows(shuffled, b) == two_rows(a, b)
    forward, back = two_rows(a, b), two_rows(b, a).reversed()
    assert (forward.p, forward.ci_low, forward.ci_high) == (back.p, back.ci_low, back.ci_high)


@pytest.mark.parametrize("size", [1e-150, 1e-80, 1.0, 1e80, 1e149])
def test_values_of_any_size_can_be_tested(size):
    a, b = ({seed: size * value for seed, value in enumerate(values)} for values in ([1, 2, 3, 4], [5, 6, 8, 9]))
    found = two_rows(a, b)
    assert found.p == pytest.approx(2 / 70)
    assert found.effect == pytest.approx(two_rows({0: 1, 1: 2, 2: 3, 3: 4}, {0: 5, 1: 6, 2: 8, 3: 9}).effect)


def test_an_end_of_an_interval_that_is_0_up_to_rounding_is_0():
    a, b = ([0, 0, 0, 2 / 3, 1 / 3], [4 / 3, 1, 4 / 3, 0, 2])
    found = two_rows(dict(enumerate(a)), dict(enumerate(b)))
    assert found.p > 0.05
    assert found.ci_high == 0


def test_a_true_null_hypothesis_is_rejected_at_most_as_often_as_said():
    rng = np.random.default_rng(0)
    bimodal = np.where(rng.uniform(size=(2000, 10)) < 0.3, 60.0, rng.exponential(2.0, size=(2000, 10)))
    p = [two_rows(row(each[:5]), row(each[5:])).p for each in bimodal.tolist()]
    assert np.mean(np.array(p) <= 0.05) <= 0.055


def test_hedges_g_by_hand():
    # s² = ((4 − 1) · 1.895833 + (4 − 1) · 2.729167) / 6 = 2.3125; d = −1.25 / 1.520691; J(6) = 0.868628.
    got = two_rows(row(A), row(B))
    assert got.effect == pytest.approx(-1.25 / math.sqrt(2.3125) * 0.868628, rel=1e-5)


@pytest.mark.parametrize(("dof", "effect"), [(2, 3.2643), (4, 1.6820), (9, 0.9963)])
def test_the_smallest_detectable_effect_of_pairs(dof, effect):
    assert detectable_t(dof) / math.sqrt(dof + 1) == pytest.approx(effect, abs=2e-3)


def test_a_row_of_one_run_has_a_difference_only():
    got = two_rows({0: 3.0}, row([1.0, 2.0]))
    assert (got.difference, got.n) == (1.5, (1, 2))
    assert math.isnan(got.p)
    assert math.isnan(two_rows({}, {0: 1.0}).difference)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, math.nan]) == [
        pytest.approx(0.03),
        pytest.approx(0.06),
        pytest.approx(0.06),
        pytest.approx(math.nan, nan_ok=True),
    ]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


rows = st.lists(st.floats(0, 100, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows, rows)
def test_p_is_the_share_of_the_divisions(a, b):
    assert two_rows(row(a), row(b)).p == pytest.approx(share_of_divisions(a, b))


@settings(max_examples=60, deadline=None)
@given(rows, rows)
def test_a_number_that_is_added_to_all_values_does_not_change_p_nor_whether_the_interval_excludes_0(a, b):
    got, far = two_rows(row(a), row(b)), two_rows(row(value + 1e6 for value in a), row(value + 1e6 for value in b))
    assert far.p == pytest.approx(got.p)
    for each in (got, far):
        if not math.isnan(each.ci_low):
            assert (each.p <= 0.05) == (not each.ci_low <= 1e-9 or not each.ci_high >= -1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100).map(lambda x: round(x, 2)), min_size=8, max_size=10), st.integers(3, 5))
def test_the_interval_is_of_the_shifts_that_are_not_rejected(values, n):
    a, b = values[:n], values[n:]
    got = two_rows(row(a), row(b))
    assert got.ci_low <= got.difference <= got.ci_high
    for end, inside in ((got.ci_low, 1), (got.ci_high, -1)):
        for shift, kept in ((end + inside * 1e-5, True), (end - inside * 1e-5, False)):
            p = share_of_divisions([value - shift for value in a], b)
            assert (p > 0.05) == kept or got.ci_low == got.ci_high
    assert (got.p <= 0.05) == (not got.ci_low <= 1e-9 or not got.ci_high >= -1e-9)


def share_of_flips(differences):
    """p by the definition: every choice of signs, one after another."""
    n, limit = len(differences), abs(sum(differences))
    flips = itertools.product((1, -1), repeat=n)
    sums = [sum(sign * each for sign, each in zip(signs, differences, strict=True)) for signs in flips]
    return sum(abs(each) >= limit - 1e-9 for each in sums) / 2**n


def test_all_flips_of_signs_are_counted_by_hand():
    # 1, 2 and 4: of the 8 sums ±1 ±2 ±4, only 7 and −7 are as far from 0.
    got = paired_rows({5: 3.0, 6: 4.0, 7: 6.0, 8: 9.0}, {7: 2.0, 6: 2.0, 5: 2.0})
    assert (got.difference, got.p, got.smallest_p, got.n) == (pytest.approx(7 / 3), 2 / 8, 2 / 8, (3, 3))
    assert math.isnan(got.ci_low)
    assert math.isnan((none := paired_rows({0: 1.0}, {1: 2.0})).difference), "no seed in common"
    assert none.n == (0, 0)
    assert paired_rows({0: 1.0}, {0: 3.0}).difference == -2.0
    assert math.isnan(paired_rows({0: 1.0}, {0: 3.0}).p)


# scipy.stats.permutation_test(permutation_type="samples") of the same differences, as a check of another hand.
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-50, 50).map(lambda x: round(x, 2)), min_size=6, max_size=9))
def test_p_of_pairs_is_that_of_scipy_and_its_interval_is_of_the_shifts_that_are_not_rejected(differences):
    zeros = dict.fromkeys(range(len(differences)), 0.0)
    got = paired_rows(row(differences), zeros)
    assert got.p == pytest.approx(share_of_flips(differences))
    other = scipy.stats.permutation_test(
        (differences, [0.0] * len(differences)), lambda a, b, axis: (a - b).mean(axis=axis),
        permutation_type="samples", vectorized=True, n_resamples=10**4,
    )  # fmt: skip
    assert got.p == pytest.approx(other.pvalue, abs=1e-9)
    assert got.ci_low <= got.difference <= got.ci_high
    for end, inside in ((got.ci_low, 1), (got.ci_high, -1)):
        for shift, kept in ((end + inside * 1e-5, True), (end - inside * 1e-5, False)):
            p = share_of_flips([each - shift for each in differences])
            assert (p > 0.05) == kept or got.ci_low == got.ci_high


def test_of_many_pairs_some_flips_are_drawn():
    rng = np.random.default_rng(0)
    differences = rng.normal(0.5, 1.0, 20)
    got = paired_rows(row(differences), dict.fromkeys(range(20), 0.0))
    assert got.smallest_p == 1 / 20_000
    assert got.p == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02)
    # The effect is that of the mean in standard deviations of the differences, corrected as Hedges' g.
    assert got.effect == pytest.approx(differences.mean() / differences.std(ddof=1) * 0.96, rel=0.01)
