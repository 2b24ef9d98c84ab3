"""Compares a kernel with the reference in float64. Every numerical test of the kernels does so through this file.

`cope_benchmarks.exact` says how large an error may be: it follows from the type and the problem, and is computed in float64
from seeded errors, so it is the same on every machine and for every kernel. `test_accuracy.py` checks that a fault of relative
size 1e-3 is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from cope_benchmarks.exact import Expected, Leaves, computed_by
from torch import Tensor

from cope_sweep.kernels import Inputs, LayerEncoding, reference
from tests.kernels.cases import Case, dropout_seeds, fused, make_inputs, random_tensors

Attend = Callable[[Inputs, list[LayerEncoding], float, Tensor], Tensor]
"""attention(inputs, positions, dropout, seeds of the dropout) → (B, H, T, K)."""


AT_MOST = 4.0
"""How many times as large as `Expected` explains errors may be. Random problems have sums of a few numbers in which nearly all
cancels, for which float32 sums over hundreds of keys count: the native kernels came to 2.5. Triton's interpreter cuts float32
off to bfloat16, where a GPU rounds, which doubles errors."""

MANY_DRAWS = 24


def assert_equals_reference(case: Case, attend: Attend, dtype: torch.dtype) -> None:
    """The output of `attend` in `dtype`, and the gradients of all inputs and parameters, are as exact as rounding lets them."""
    computed = output_and_gradients(case, attend, dtype, dtype)
    wrong = expected(case, dtype).wrong(computed, AT_MOST)
    if wrong is not None:
        # In the few draws of errors, perhaps no position has crossed a knot or an integer, as one of the kernel's has.
        wrong = expected(case, dtype, draws=MANY_DRAWS).wrong(computed, AT_MOST)
    assert wrong is None, wrong


# It takes most of a test's time, and a case is computed on several instruction sets, and with several faults.
@lru_cache(maxsize=32)
def expected(case: Case, dtype: torch.dtype, draws: int | None = None) -> Expected:
    """The results of the reference in float64, and how far those in `dtype` may be from them."""
    leaves, weight = leaves_of(case, dtype)
    of = {name: with_leaves(case, attend) for name, attend in (("build", fused), ("attend", reference))}
    return Expected(
        leaves=leaves,
        weight=weight,
        dtype=dtype,
        exact_positions=case.exact_positions,
        each_entry=True,
        draws=draws,
        **of,
    )


def output_and_gradients(case: Case, attend: Attend, dtype: torch.dtype, compute_dtype: torch.dtype) -> Leaves:
    """By name: the output of `attend`, and the gradient of every input and parameter.

    Inputs are exact in `dtype` and given as `compute_dtype`.
    """
    leaves, weight = leaves_of(case, dtype)
    computed = computed_by(with_leaves(case, attend), {n: x.to(compute_dtype) for n, x in leaves.items()}, weight)
    assert all(x.dtype == compute_dtype for x in computed.values())
    return computed


def leaves_of(case: Case, dtype: torch.dtype) -> tuple[Leaves, Tensor]:
    """The tensors with gradients, by name, and the gradient of the output."""
    tensors = {name: x.to(dtype) for name, x in random_tensors(case, dtype).items()}
    weight = tensors.pop("weight")
    return tensors, weight


def with_leaves(case: Case, attend: Callable) -> Callable:
    """`attend`, or another function with its arguments, of the case's leaves."""
    return lambda leaves: attend(*make_inputs(case, leaves), case.dropout, dropout_seeds(case.batch))
