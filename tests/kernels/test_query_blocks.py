"""PyTorch in blocks of queries against the reference, in float64 and half precision.

`test_features.py` has encodings with features or weights of their own.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings

from cope_sweep.kernels import attend, query_blocks, reference
from cope_sweep.positions import CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, cases, long_cases
from tests.kernels.not_finite import INPUTS, assert_not_finite_is_seen

attend_in_blocks = partial(attend, implementation="blocked")


@given(cases())
@settings(max_examples=40)
def test_output_and_gradients_equal_the_reference(case):
    assert_equals_reference(case, attend_in_blocks, torch.float64)


@pytest.mark.parametrize(("case", "place", "value"), INPUTS)
def test_numbers_that_are_not_finite(case, place, value):
    assert_not_finite_is_seen(case, place, value, attend_in_blocks)
    assert_not_finite_is_seen(case, place, value, reference)


@given(long_cases())
@settings(max_examples=6)
def test_long_sequences(case):
    assert_equals_reference(case, attend_in_blocks, torch.float64)


@pytest.mark.parametrize("elements", [1, 1 << 10, 1 << 12])
@pytest.mark.parametrize("cached", [0, 11])
def test_the_block_size_does_not_matter(monkeypatch, elements, cached):
    monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", elements)
    encodings = (CoPE(p_max=9), CoPEALiBi(slopes="learned"), CoPEMLP(hidden=7), Relative(positions=5))
    case = Case(encodings, queries=70, cached=cached, lengths=(70, 33), dropout=0.2)
    assert_equals_reference(case, attend_in_blocks, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    assert_equals_reference(Case((CoPE(p_max=20),), queries=200, head_dim=32), attend_in_blocks, dtype)
    case = Case((CoPEMLP(hidden=7, gate="separate"), Relative(positions=5)), queries=70, rotated=True)
    assert_equals_reference(case, attend_in_blocks, dtype)
