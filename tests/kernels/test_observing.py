"""An observer is called for every attention, by any implementation, within its `with` block and its thread only."""

import threading

import pytest
import torch

from cope_sweep.kernels import Inputs, Position, attend, observing
from cope_sweep.positions import CoPE


def attention():
    q, k, v = torch.randn(3, 1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    return Inputs.plain(q, k, v), [Position(CoPE(p_max=3), {"e": torch.ones(3, 4)})]


@pytest.mark.parametrize("implementation", ["auto", "reference", "blocked", "native"])
def test_the_observer_gets_the_inputs_and_changes_nothing(implementation):
    given, calls = attention(), []
    with observing(lambda inputs, positions: calls.append((inputs, positions))):
        observed = attend(*given, implementation=implementation)
    assert [(inputs is given[0], positions is given[1]) for inputs, positions in calls] == [(True, True)]
    torch.testing.assert_close(attend(*given, implementation=implementation), observed, rtol=0, atol=0)
    assert len(calls) == 1


def test_the_innermost_observer_is_called_and_an_exception_ends_the_block():
    outer, inner = [], []
    with observing(lambda *arguments: outer.append(arguments)):
        with observing(lambda *arguments: inner.append(arguments)):
            attend(*attention())
        with pytest.raises(ZeroDivisionError), observing(lambda *arguments: 1 / 0):
            attend(*attention())
        attend(*attention())
    assert (len(outer), len(inner)) == (1, 1)


def test_other_threads_are_not_observed():
    calls = []
    with observing(lambda *arguments: calls.append(arguments)):
        thread = threading.Thread(target=lambda: attend(*attention()))
        thread.start()
        thread.join()
    assert calls == []
