"""An observer is told of every attention, by whichever implementation, within its block and its context alone."""

import threading

import pytest
import torch

from cope_sweep.kernels import Inputs, Position, attend, observing
from cope_sweep.positions import CoPE


def attention():
    q, k, v = torch.randn(3, 1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    return Inputs.plain(q, k, v), [Position(CoPE(p_max=3), {"e": torch.ones(3, 4)})]


@pytest.mark.parametrize("implementation", ["auto", "reference", "blocked", "native"])
def test_it_sees_what_is_computed_and_changes_nothing(implementation):
    given, told = attention(), []
    with observing(lambda inputs, positions: told.append((inputs, positions))):
        observed = attend(*given, implementation=implementation)
    assert [(inputs is given[0], positions is given[1]) for inputs, positions in told] == [(True, True)]
    torch.testing.assert_close(attend(*given, implementation=implementation), observed, rtol=0, atol=0)
    assert len(told) == 1


def test_the_innermost_is_told_and_an_error_ends_the_block():
    outer, inner = [], []
    with observing(lambda *told: outer.append(told)):
        with observing(lambda *told: inner.append(told)):
            attend(*attention())
        with pytest.raises(ZeroDivisionError), observing(lambda *told: 1 / 0):
            attend(*attention())
        attend(*attention())
    assert (len(outer), len(inner)) == (1, 1)


def test_other_threads_are_not_observed():
    told = []
    with observing(lambda *each: told.append(each)):
        thread = threading.Thread(target=lambda: attend(*attention()))
        thread.start()
        thread.join()
    assert told == []
