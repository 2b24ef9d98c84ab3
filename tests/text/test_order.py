"""Permutations as functions: bijective, evaluated at any indices, random, and the same everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cope_sweep.text import permuted


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_index_occurs_once(size, seed, epoch):
    order = permuted(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 10**12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_index_has_the_same_image_in_any_array(size, data):
    """At any size, because nothing is stored."""
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permuted(index, size, 1, 2)
    assert ((together >= 0) & (together < size)).all()
    assert [permuted(index[i : i + 1], size, 1, 2)[0] for i in range(len(index))] == together.tolist()


def test_permutations_of_different_keys_are_unrelated():
    size = 1000
    orders = [permuted(np.arange(size), size, *key) for key in ((0, 0), (0, 1), (1, 0), (7, 0))]
    for i, a in enumerate(orders):
        for b in [np.arange(size), *orders[:i]]:
            # Two random permutations agree at 1 of 1000 indices on average, and their correlation is 0 ± 0.03.
            assert (a == b).sum() < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.13


def test_images_are_uniform():
    """χ² of the image of index 0 over 5000 keys, in ten bins."""
    landed = np.array([permuted(np.zeros(1, dtype=np.int64), 1000, key)[0] for key in range(5000)])
    counts = np.bincount(landed // 100, minlength=10)
    assert stats.chisquare(counts).pvalue > 0.001


def test_the_same_permutation_on_every_machine():
    """If this changes, so does every run that reads a text: then increase the VERSION of the tasks."""
    assert permuted(np.arange(8), 1000, 0, 0).tolist() == [901, 724, 507, 66, 351, 6, 655, 457]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_smallest_sizes(size):
    assert sorted(permuted(np.arange(size), size, 3).tolist()) == list(range(size))
