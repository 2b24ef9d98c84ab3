import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.text import permuted


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_index_once(size, seed, epoch):
    order = permuted(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 10**12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_is_a_part_of_the_whole(size, data):
    """…at any size: nothing is stored. What two parts share lands at the same place."""
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permuted(index, size, 1, 2)
    assert ((together >= 0) & (together < size)).all()
    assert [permuted(index[i : i + 1], size, 1, 2)[0] for i in range(len(index))] == together.tolist()


def test_orders_of_other_keys_are_unrelated():
    size = 1000
    orders = [permuted(np.arange(size), size, *key) for key in ((0, 0), (0, 1), (1, 0), (7, 0))]
    for i, a in enumerate(orders):
        for b in [np.arange(size), *orders[:i]]:
            # Of two random orders, 1 place in 1000 is the same on average, and the correlation is 0 ± 0.03.
            assert (a == b).sum() < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.13


def test_places_are_even():
    """χ² of where index 0 lands, in 10 tenths over 5000 keys (p = 0.001 at 27.9 for 9 degrees of freedom)."""
    landed = np.array([permuted(np.zeros(1, dtype=np.int64), 1000, key)[0] for key in range(5000)])
    counts = np.bincount(landed // 100, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 27.9


def test_the_same_order_on_every_machine():
    """A change here changes every run that reads a text: bump their tasks' VERSION."""
    assert permuted(np.arange(8), 1000, 0, 0).tolist() == [901, 724, 507, 66, 351, 6, 655, 457]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_smallest(size):
    assert sorted(permuted(np.arange(size), size, 3).tolist()) == list(range(size))
