import pytest
import torch
from hypothesis import given, settings

from cope_sweep.kernels import blocked as module
from cope_sweep.positions import CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.cases import Case, assert_equals_reference, by_blocked, cases, long_cases


@given(cases())
@settings(max_examples=40, deadline=None)
def test_equals_the_reference_in_output_and_every_gradient(case):
    assert_equals_reference(case, by_blocked, torch.float64, 1e-9)


@given(long_cases())
@settings(max_examples=8, deadline=None)
def test_long_sequences(case):
    assert_equals_reference(case, by_blocked, torch.float64, 1e-9)


@pytest.mark.parametrize("elements", [1, 1 << 10, 1 << 12])
def test_whatever_the_blocks(monkeypatch, elements):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    encodings = (CoPE(p_max=9), CoPEALiBi(slopes="learned"), CoPEMLP(hidden=7), Relative(positions=5))
    for before in (0, 11):
        case = Case(encodings, queries=70, before=before, lengths=(70, 33), dropout=0.2)
        assert_equals_reference(case, by_blocked, torch.float64, 1e-9)
        assert_equals_reference(Case((CoPE(p_max=9),), queries=70, before=before), by_blocked, torch.float64, 1e-9)


def test_float32_is_near_float64():
    assert_equals_reference(Case((CoPE(p_max=20),), queries=200, head_dim=32), by_blocked, torch.float32, 1e-4)
