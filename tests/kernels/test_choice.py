"""The implementation that is chosen, and observers, in code that torch.compile has traced."""

import pytest
import torch

from cope_sweep.kernels import Inputs, attend, observing, using
from cope_sweep.kernels.choice import chosen_implementation, constant_when_compiled


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_code_notices_that_another_implementation_is_chosen():
    def named(x):
        return x + 1 if chosen_implementation() == "auto" else x * 10

    call, x = torch.compile(named, backend="eager", fullgraph=True), torch.ones(1)
    assert call(x) == 2
    with using("blocked"):
        assert call(x) == named(x) == 10
        with using("auto"):
            assert call(x) == named(x) == 2
        assert call(x) == named(x) == 10
    assert call(x) == named(x) == 2


def test_compiled_attention_is_observed():
    q, k, v = torch.randn(3, 1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    calls = []

    def attention(q):
        return attend(Inputs.plain(q, k, v), [], implementation="reference")

    call = torch.compile(attention, backend="eager")
    expected = call(q)
    with observing(lambda inputs, positions: calls.append(positions)):
        assert torch.equal(call(q), expected)
    assert torch.equal(call(q), expected)
    assert calls == [[]]


def test_the_mark_of_constants_is_that_of_torch():
    def ours():
        return 1

    def theirs():
        return 1

    assert constant_when_compiled(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}
