"""χ² tests of what generators draw. Everything is seeded: a test that passes once passes always."""

import numpy as np
from scipy import stats

RARE = 1e-4
"""p-values below this say that a generator is not what it says it is: of some hundred tests, none should be."""


def follows(counts, shares) -> float:
    """The p-value that `counts` come from these shares (which need not sum to 1); few-counted cells are pooled."""
    expected = np.asarray(shares, float) / np.sum(shares) * np.sum(counts)
    observed, expected = _pooled(np.asarray(counts, float), expected)
    return float(stats.chisquare(observed, expected).pvalue)


def even(counts) -> float:
    return follows(counts, np.ones(len(counts)))


def independent(table) -> float:
    """The p-value that rows and columns of a contingency table have nothing to do with each other."""
    table = np.asarray(table)
    return float(stats.chi2_contingency(table[table.any(1)][:, table.any(0)]).pvalue)


def alike(a, b) -> float:
    """The p-value that two samples of small whole numbers come from one distribution."""
    size = int(max(np.max(a), np.max(b))) + 1
    table = np.stack([np.bincount(a, minlength=size), np.bincount(b, minlength=size)])
    few = table.sum(0) < 20
    return independent(np.concatenate((table[:, ~few], table[:, few].sum(1, keepdims=True)), axis=1))


def _pooled(observed, expected):
    few = expected < 5
    if few.sum() < 1 or few.all():
        return observed, expected
    return np.append(observed[~few], observed[few].sum()), np.append(expected[~few], expected[few].sum())


def crossed(a, b):
    """The contingency table of two arrays of small whole numbers."""
    table = np.zeros((np.max(a) + 1, np.max(b) + 1), dtype=int)
    np.add.at(table, (np.ravel(a), np.ravel(b)), 1)
    return table
