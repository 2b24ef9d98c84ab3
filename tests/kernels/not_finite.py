"""What every implementation has to do with numbers that are not finite, as in a training that diverges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cope_sweep.kernels import Inputs
from cope_sweep.positions import CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.cases import Case, dropout_seeds, make_inputs, random_tensors

Attend = Callable[..., Tensor]

QUERIES = 40
# More positions than tokens: an index that is taken from a NaN would be outside of what a query can reach.
CASES = {
    "cope": Case((CoPE(p_max=8),), queries=QUERIES),
    "cope, full": Case((CoPE(p_max=3000),), queries=QUERIES),
    "cope, separate keys": Case((CoPE(p_max=3000, gate="separate"),), queries=QUERIES),
    "cope_mlp": Case((CoPEMLP(hidden=6),), queries=QUERIES),
    "cope_mlp, a limit": Case((CoPEMLP(hidden=6, p_max=9),), queries=QUERIES),
    "cope_alibi": Case((CoPEALiBi(slopes="learned"),), queries=QUERIES),
    "cope and relative": Case((CoPE(p_max=8), Relative(positions=70)), queries=QUERIES),
}
PLACES = {"cope, separate keys": ("q", "k", "features0")}
INPUTS = [
    pytest.param(case, place, value, id=f"{name}, {value} in {place}")
    for name, case in CASES.items()
    for place in PLACES.get(name, ("q", "k"))
    for value in ("nan", "inf")
]


def assert_not_finite_is_seen(case: Case, place: str, value: str, attend: Attend) -> None:
    """Check that one number that is not finite makes the query's output NaN, and changes no output that it cannot reach.

    In `q` and `k` and separate keys of gates, token 5 of the first sequence and head has it. Also that the backward
    pass ends, with a gradient that is not finite.
    """
    tensors = {name: x.float() for name, x in random_tensors(case, torch.float32).items()}
    seeds = dropout_seeds(len(tensors["q"]))
    expected = attend(*make_inputs(case, tensors), 0.0, seeds)
    tensors[place] = tensors[place].clone()
    tensors[place][0, 0, 5, :] = float(value)
    if value == "inf":
        tensors[place][0, 0, 5, 1] = -torch.inf  # a product of it is NaN
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    inputs: Inputs
    inputs, positions = make_inputs(case, tensors)
    out_BHTK = attend(inputs, positions, 0.0, seeds)
    assert out_BHTK[0, 0, 5].isnan().any(), f"NaN in {place} is not seen"
    torch.testing.assert_close(out_BHTK[1], expected[1])
    torch.testing.assert_close(out_BHTK[0, 1], expected[0, 1])
    torch.testing.assert_close(out_BHTK[0, 0, :5], expected[0, 0, :5])
    (out_BHTK * tensors["weight"]).sum().backward()
    gradient = tensors[place].grad
    assert gradient is not None
    assert not gradient[0, 0, 5].isfinite().all()
