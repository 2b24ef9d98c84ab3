"""χ² tests of random generators. Everything is seeded, so a test that passes once always passes."""

import numpy as np
from scipy import stats

ALPHA = 1e-4
"""Significance level: about a hundred tests have a 1 % probability of any p-value below this by chance."""


def shares_p(counts, shares) -> float:
    """p-value of the hypothesis that `counts` have these shares, which need not sum to 1; rare cells are pooled."""
    expected = np.asarray(shares, float) / np.sum(shares) * np.sum(counts)
    observed, expected = _pooled(np.asarray(counts, float), expected)
    return float(stats.chisquare(observed, expected).pvalue)


def uniform_p(counts) -> float:
    """p-value of the hypothesis that all cells are equally likely."""
    return shares_p(counts, np.ones(len(counts)))


def independent_p(table) -> float:
    """p-value of the hypothesis that the rows and columns of a contingency table are independent."""
    table = np.asarray(table)
    return float(stats.chi2_contingency(table[table.any(1)][:, table.any(0)]).pvalue)


def same_distribution_p(a, b) -> float:
    """p-value of the hypothesis that two samples of small whole numbers have the same distribution."""
    size = int(max(np.max(a), np.max(b))) + 1
    table = np.stack([np.bincount(a, minlength=size), np.bincount(b, minlength=size)])
    few = table.sum(0) < 20
    return independent_p(np.concatenate((table[:, ~few], table[:, few].sum(1, keepdims=True)), axis=1))


def _pooled(observed, expected):
    few = expected < 5
    if few.sum() < 1 or few.all():
        return observed, expected
    return np.append(observed[~few], observed[few].sum()), np.append(expected[~few], expected[few].sum())


def contingency(a, b):
    """The contingency table of two arrays of small whole numbers."""
    table = np.zeros((np.max(a) + 1, np.max(b) + 1), dtype=int)
    np.add.at(table, (np.ravel(a), np.ravel(b)), 1)
    return table
