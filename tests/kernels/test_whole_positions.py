"""Keys of zeros: all gates are ½, and every second position is a whole number, where the score has a kink.

All paths have the derivative to the right there. The interpreter of Triton does the same cases in `test_triton_interpreted.py`.
"""

from functools import partial

import pytest
import torch

from cope_sweep.kernels import attend, reference
from cope_sweep.positions import CoPE, CoPEMLP
from tests.kernels.accuracy import output_and_gradients
from tests.kernels.cases import Case, make_inputs, random_tensors

CASES = {
    "cope": Case((CoPE(p_max=64),), queries=90, key_std=0),
    "cope, saturated": Case((CoPE(p_max=9),), queries=90, key_std=0),
    "cope_mlp": Case((CoPEMLP(hidden=7),), queries=90, key_std=0),
    "cope_mlp, saturated": Case((CoPEMLP(hidden=7, p_max=9),), queries=90, key_std=0),
}
PATHS = ["blocked", "native", "auto"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_all_paths_have_the_gradients_of_the_reference(case, path):
    expected = output_and_gradients(case, reference, torch.float32, torch.float64)
    actual = output_and_gradients(case, partial(attend, implementation=path), torch.float32, torch.float32)
    for name, exact in expected.items():
        assert (actual[name] - exact).norm() <= 1e-4 * exact.norm().clamp(min=1), name


def gradient_of_keys(case, shift):
    """The gradient of the keys, with all gates moved by a small amount: no position is then a whole number."""
    tensors = {name: x.clone() for name, x in random_tensors(case, torch.float64).items()}
    if shift:
        tensors["k"] = tensors["k"] + shift * tensors["q"].mean(2, keepdim=True)
    k = tensors["k"].requires_grad_()
    weight = tensors.pop("weight")
    return torch.autograd.grad((reference(*make_inputs(case, tensors)) * weight).sum(), k)[0]


def test_the_derivative_is_the_one_to_the_right():
    """One query sees all gates grow by a little: its gradient hardly changes. They shrink: it changes by its own size."""
    for encoding in CoPE(p_max=64), CoPE(p_max=9), CoPEMLP(hidden=7, p_max=9):
        # Of one query, the mean above is the query itself, so its products with all keys have the sign of the shift.
        case = Case((encoding,), queries=1, cached=89, key_std=0)
        at, right, left = (gradient_of_keys(case, shift) for shift in (0.0, 1e-7, -1e-7))
        assert (at - right).norm() < 1e-4 * right.norm()
        assert encoding.kind == "cope_mlp" or (at - left).norm() > 1e-2 * left.norm()
