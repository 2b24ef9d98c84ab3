"""The blocked path against the reference, in float64 and float32."""

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from cope_sweep.kernels import blocked, operator, reference
from cope_sweep.positions import CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, attention_by, cases, long_cases, problem_of
from tests.kernels.not_finite import INPUTS, assert_not_finite_is_seen

attend_blocked = attention_by("blocked")


@given(cases())
@settings(max_examples=40)
def test_output_and_gradients_equal_the_reference(case):
    assert_equals_reference(case, attend_blocked, torch.float64)


@pytest.mark.parametrize(("case", "place", "value"), INPUTS)
def test_numbers_that_are_not_finite(case, place, value):
    assert_not_finite_is_seen(case, place, value, attend_blocked)
    assert_not_finite_is_seen(case, place, value, reference)


@given(long_cases())
@settings(max_examples=6)
def test_long_sequences(case):
    assert_equals_reference(case, attend_blocked, torch.float64)


@pytest.mark.parametrize("elements", [1, 1 << 10, 1 << 12])
@pytest.mark.parametrize("cached", [0, 11])
def test_the_block_size_does_not_matter(monkeypatch, elements, cached):
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", elements)
    encodings = (CoPE(p_max=9), CoPEALiBi(slopes="learned"), CoPEMLP(hidden=7), Relative(positions=5))
    case = Case(encodings, queries=70, cached=cached, lengths=(70, 33), dropout=0.2)
    assert_equals_reference(case, attend_blocked, torch.float64)
    assert_equals_reference(Case((CoPE(p_max=9),), queries=70, cached=cached), attend_blocked, torch.float64)


@pytest.mark.parametrize("p_max", [1, 2, 3, 8])
def test_gates_count_until_the_last_position(monkeypatch, p_max):
    """Saturation begins at p_max − 1: between p_max − 2 and there, biases still change and gates have gradients."""
    monkeypatch.setattr(blocked, "MAX_ROWS", 16)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 16 * 60)
    # With few rows in a block, the columns that are computed end soon after the last position is reached.
    for cached in (0, 40, 59):
        case = Case((CoPE(p_max=p_max),), batch=1, heads=1, queries=60 - cached, cached=cached)
        assert_equals_reference(case, attend_blocked, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    assert_equals_reference(Case((CoPE(p_max=20),), queries=200, head_dim=32), attend_blocked, dtype)
    case = Case((CoPEMLP(hidden=7, gate="separate"), Relative(positions=5)), queries=70, rotated=True)
    assert_equals_reference(case, attend_blocked, dtype)


class Reads(TorchDispatchMode):
    """The memory of the tensors whose values Python reads: it waits for a GPU if they are there."""

    def __init__(self):
        super().__init__()
        self.storages = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.storages.add(arguments[0].untyped_storage().data_ptr())
        return function(*arguments, **(keywords or {}))


def test_the_backward_pass_reads_the_carried_integers_only():
    encodings = (CoPE(p_max=4), CoPEALiBi(slopes="learned"), CoPEMLP(hidden=7, p_max=5), Relative(positions=5))
    for case in (Case(encodings, queries=70, dropout=0.2, lengths=(70, 33)), Case(encodings[:1], queries=300, batch=1)):
        given = problem_of(case, torch.float64)
        outputs, gradients = operator.empty_outputs(given, "blocked"), operator.empty_gradients(given, "blocked")
        carried = outputs[2].untyped_storage().data_ptr()
        with torch.no_grad(), Reads() as forward:
            blocked.forward(given, *outputs)
        with torch.no_grad(), Reads() as backward:
            blocked.backward(given, torch.ones_like(outputs[0]), *outputs, gradients)
        assert forward.storages - {carried}  # it has to know when positions are saturated
        assert backward.storages == {carried}
