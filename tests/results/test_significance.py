import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.results.significance import detectable_t, holm, noncentrality, scale_of_g, two_rows

A, B = [1.0, 2.0, 4.0, 3.5], [2.0, 5.0, 5.5, 3.0]


def row(values, first=0):
    return dict(enumerate(values, first))


def test_shared_seeds_are_paired():
    # Differences −1, −3, −1.5, 0.5: mean −1.25, s² = (0.0625 + 3.0625 + 0.0625 + 3.0625) / 3, t = −1.25 / √(s² / 4).
    got = two_rows(row(A), row(B))
    assert (got.paired, got.n, got.test) == (True, (4, 4), "paired t")
    assert got.difference == -1.25
    t = -1.25 / math.sqrt(6.25 / 3 / 4)
    assert got.p == pytest.approx(2 * scipy.stats.t.sf(-t, 3))
    assert (got.ci_low, got.ci_high) == pytest.approx(tuple(scipy.stats.ttest_rel(A, B).confidence_interval()))
    # Of the 16 sums of ±1, ±3, ±1.5, ±0.5, four have at least the size of 5: ±5 and ±6.
    assert got.p_exact == pytest.approx(4 / 16)


def test_other_seeds_are_compared_by_welch():
    got = two_rows(row(A), row(B, first=10))
    expected = scipy.stats.ttest_ind(A, B, equal_var=False)
    assert (got.paired, got.n, got.test) == (False, (4, 4), "Welch t")
    assert (got.p, got.ci_low, got.ci_high) == pytest.approx((expected.pvalue, *expected.confidence_interval()))


def test_all_permutations_are_counted():
    # {1, 2, 3} and {4, 5, 6}: of the 20 ways to divide them, two are as far apart.
    assert two_rows(row([1.0, 2.0, 3.0]), row([4.0, 5.0, 6.0], 9)).p_exact == pytest.approx(2 / 20)


def test_three_shared_seeds_are_enough_for_pairs_and_the_others_are_left_out():
    got = two_rows({0: 1.0, 1: 2.0, 2: 4.0, 9: 50.0}, {0: 2.0, 1: 5.0, 2: 5.5, 8: 70.0})
    assert (got.paired, got.n) == (True, (3, 3))
    assert got.difference == pytest.approx(-5.5 / 3)
    assert not two_rows({0: 1.0, 1: 2.0, 3: 4.0}, {0: 2.0, 1: 5.0, 2: 5.5}).paired
    assert two_rows({0: 1.0, 1: 2.0, 3: 4.0}, {0: 2.0, 1: 5.0}).paired


def test_hedges_g_of_pairs_by_hand():
    # d_z = −1.25 / √(6.25 / 3) = −0.866025; J(3) = Γ(1.5) / (√1.5 Γ(1)) = 0.723601.
    got = two_rows(row(A), row(B))
    assert got.effect == pytest.approx(-0.866025 * 0.723601, rel=1e-5)
    assert got.effect_low < got.effect < got.effect_high


def test_hedges_g_of_independent_rows_by_hand():
    # s² = ((4 − 1) · 1.895833 + (4 − 1) · 2.729167) / 6 = 2.3125; d = −1.25 / 1.520691; J(6) = 0.868628.
    got = two_rows(row(A), row(B, first=10))
    assert got.effect == pytest.approx(-1.25 / math.sqrt(2.3125) * 0.868628, rel=1e-5)


@pytest.mark.parametrize("dof", [2, 3, 8, 40])
def test_the_factor_of_hedges_is_near_its_usual_approximation(dof):
    assert scale_of_g(dof) == pytest.approx(1 - 3 / (4 * dof - 1), abs=0.01)
    assert math.isnan(scale_of_g(1))


@pytest.mark.parametrize(("t", "dof"), [(0.0, 2), (1.8, 2), (-1.8, 2), (7.0, 4), (-20.0, 8)])
def test_the_noncentrality_interval_inverts_the_distribution(t, dof):
    low, high = noncentrality(t, dof)
    rng = np.random.default_rng(0)
    for nc, share in ((low, 0.975), (high, 0.025)):
        draws = (rng.normal(nc, 1, 200_000)) / np.sqrt(rng.chisquare(dof, 200_000) / dof)
        assert np.mean(draws <= t) == pytest.approx(share, abs=0.002)


# statsmodels 0.15: TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8) for n = 3, 5, 10.
@pytest.mark.parametrize(("dof", "effect"), [(2, 3.2643), (4, 1.6820), (9, 0.9963)])
def test_the_smallest_detectable_effect_of_pairs(dof, effect):
    assert detectable_t(dof) / math.sqrt(dof + 1) == pytest.approx(effect, abs=2e-3)


def test_the_smallest_detectable_difference_is_found_four_times_out_of_five():
    rng, n = np.random.default_rng(1), 5
    true = detectable_t(n - 1) * 2.0 / math.sqrt(n)
    p = scipy.stats.ttest_1samp(rng.normal(true, 2.0, (20_000, n)), 0.0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.01)


def test_rows_that_do_not_vary_are_permuted():
    got = two_rows(row([0.0] * 5), row([100.0] * 5))
    assert (got.test, got.difference, got.p) == ("permutations", -100.0, pytest.approx(2 / 252))
    assert math.isnan(got.ci_low)
    assert math.isnan(got.effect)
    assert two_rows(row([0.0] * 3), row([0.0] * 3)).p == 1.0


def test_a_constant_difference_has_the_p_of_its_signs():
    got = two_rows(row([1.0, 2.0, 3.0]), row([2.0, 3.0, 4.0]))
    assert (got.test, got.p) == ("sign flips", 0.25)


def test_a_row_of_one_run_has_a_difference_only():
    got = two_rows({0: 3.0}, row([1.0, 2.0]))
    assert (got.difference, got.test, got.n) == (1.5, "", (1, 2))
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


def test_holm_keeps_the_familywise_error():
    p = np.random.default_rng(0).uniform(size=(4000, 6))
    assert np.mean([min(holm(each)) < 0.05 for each in p.tolist()]) == pytest.approx(0.05, abs=0.012)


rows = st.dictionaries(
    st.integers(0, 9), st.floats(0, 100, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=2, max_size=6
)


@settings(max_examples=40, deadline=None)
@given(rows, rows)
def test_a_comparison_is_antisymmetric(a, b):
    there, back = two_rows(a, b), two_rows(b, a)
    assert there.difference == pytest.approx(-back.difference, abs=1e-9)
    assert there.p == pytest.approx(back.p, rel=1e-6, abs=1e-12, nan_ok=True)
    assert 0 < there.p_exact <= 1
    assert there.effect == pytest.approx(-back.effect, rel=1e-6, abs=1e-9, nan_ok=True)
