"""How exact a kernel has to be. Every numerical test of the kernels compares with the reference through this file.

The exact result is the reference in float64. A kernel that computes in a type of machine epsilon ε rounds inputs, products
and sums, so its result is that of a slightly different computation. These errors are allowed, n being the number of keys
or the head dim, whichever is larger, and ε₃₂ the epsilon of the sums (float32; float64 for float64):

    a value                                 relative error η = ε + ε₃₂·√n: one rounding, and those of a sum of n terms
    a position p, a sum of n gates          absolute error 2·ε₃₂·(p + √n): of its own size and of the gates in the sum
    a weight exp(s − log-sum-exp)           relative error η + ε₃₂·|s|
    the gradient of a score, a·(da − Σ a·da)   relative error η, and η times a·√K, the size of the two terms of the difference

Their effect depends on the problem: large logits amplify them, and a position beside an integer or a knot of CoPE-MLP may
fall on its other side, where the slope is different. So the effect is measured: the attention is computed again in float64
with random errors of this size, once with all positions moved up and once with all moved down. The tolerance is `SAFETY`
times the distance of these two results from the exact one, plus η times the size of the result and of numbers of order 1.

The tolerance is computed in float64 from seeded errors, so it is the same on every machine and for every kernel.
`test_accuracy.py` checks that it rejects a fault of relative size 1e-3.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from cope_sweep.kernels import Inputs, Position, reference, seen, visible
from cope_sweep.kernels.dropout import dropout_mask, heads_of_batch
from cope_sweep.positions.cope import ContextualEncoding
from tests.kernels.cases import Case, dropout_seeds, make_inputs, random_tensors

SAFETY = 4.0
"""Correct kernels stayed below 1.1 in 225 random cases (native on AVX-512 and portable, blocked in both types)."""

Attend = Callable[[Inputs, list[Position], float, Tensor], Tensor]
"""attention(inputs, positions, dropout, seeds of the dropout) → (B, H, T, K)."""


def assert_equals_reference(case: Case, attend: Attend, dtype: torch.dtype) -> None:
    """The output of `attend` in `dtype`, and the gradient of every input and parameter, are within the tolerance."""
    errors = errors_over_rounding(case, attend, dtype)
    wrong = {name: f"{error:.2g}" for name, error in errors.items() if not error <= SAFETY}
    assert not wrong, f"errors in units of what rounding explains, above {SAFETY}: {wrong}"


def errors_over_rounding(case: Case, attend: Attend, dtype: torch.dtype) -> dict[str, float]:
    """By name of output or input: the error of `attend`, divided by the error that rounding explains.

    The larger quotient of two norms: the Euclidean norm of the whole tensor, and its largest entry.
    """
    exact = output_and_gradients(case, reference, dtype, torch.float64)
    rounded = [RoundedAttention(case, dtype, draw).output_and_gradients() for draw in (0, 1)]
    computed = output_and_gradients(case, attend, dtype, dtype)
    eta = relative_error(case, dtype)
    errors = {}
    for name, expected in exact.items():
        assert computed[name].dtype == dtype, name
        assert computed[name].isfinite().all(), f"{name} is not finite"
        errors[name] = 0.0
        for norm in (torch.linalg.vector_norm, lambda x: x.abs().max()):
            explained = eta * (norm(expected) + norm(torch.ones_like(expected)))
            explained += sum(norm(other[name] - expected) for other in rounded)
            errors[name] = max(errors[name], (norm(computed[name].double() - expected) / explained).item())
    return errors


def output_and_gradients(
    case: Case, attend: Attend, dtype: torch.dtype, compute_dtype: torch.dtype, rounded: Callable | None = None
) -> dict[str, Tensor]:
    """By name: the output of `attend`, and the gradient of every input and parameter.

    Inputs are exact in `dtype` and given as `compute_dtype`, after `rounded` has changed them.
    """
    tensors = random_tensors(case, dtype)
    weight = tensors.pop("weight").to(compute_dtype)
    if rounded is not None:
        tensors = {name: rounded(x) for name, x in tensors.items()}
    tensors = {name: x.to(compute_dtype).requires_grad_() for name, x in tensors.items()}
    out = attend(*make_inputs(case, tensors), case.dropout, dropout_seeds(case.batch))
    # An input may be unused: the unrotated queries, where a rotation is given and no gate or table reads them.
    gradients = torch.autograd.grad((out * weight).sum(), list(tensors.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, tensors.values(), strict=True)]
    return {"output": out.detach(), **dict(zip(tensors, zeros, strict=True))}


def sum_epsilon(dtype: torch.dtype) -> float:
    """ε₃₂ of the module's docstring."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def relative_error(case: Case, dtype: torch.dtype) -> float:
    """η of the module's docstring."""
    return torch.finfo(dtype).eps + sum_epsilon(dtype) * max(case.tokens, case.head_dim) ** 0.5


class RoundedAttention:
    """Attention in float64 with random errors of the size that `dtype` makes; even draws move positions up, odd ones down."""

    def __init__(self, case: Case, dtype: torch.dtype, draw: int, size: float = 1.0) -> None:
        self.case, self.dtype = case, dtype
        self.eta = size * relative_error(case, dtype)
        self.epsilon = size * sum_epsilon(dtype)
        self.position_epsilon = 0 if case.exact_positions else self.epsilon * (-2 if draw % 2 else 2)
        self.rng = torch.Generator().manual_seed(draw)

    def output_and_gradients(self) -> dict[str, Tensor]:
        return output_and_gradients(
            self.case, self.attend, self.dtype, torch.float64, lambda x: x * (1 + self.eta * self.normal(x))
        )

    def attend(self, inputs: Inputs, positions: list[Position], dropout: float, seeds_B: Tensor) -> Tensor:
        (B, H, T, K), S = inputs.q_BHTK.shape, inputs.k_BHSK.shape[2]
        visible_TS = visible(T, S, torch.device("cpu"))
        is_token_BHTK = torch.ones(B, 1, T, 1, dtype=torch.bool)
        if inputs.lengths_B is not None:
            is_token_BHTK = (torch.arange(S - T, S) < inputs.lengths_B[:, None])[:, None, :, None]
        logits_BHTS = inputs.rotated_q_BHTK @ inputs.rotated_k_BHSK.mT / K**0.5
        s_BHTS = logits_BHTS + 0
        for position, attention in zip(positions, seen(inputs, positions, logits_BHTS, visible_TS), strict=True):
            with mock.patch.object(ContextualEncoding, "positions", self.moved(ContextualEncoding.positions)):
                score_BHTS = position.encoding.score(position.parameters, attention)
            s_BHTS = s_BHTS if score_BHTS is None else s_BHTS + score_BHTS
        a_BHTS = s_BHTS.masked_fill(~visible_TS, -torch.inf).softmax(-1)
        size_BHTS = a_BHTS.detach() * is_token_BHTK * K**0.5
        s_BHTS.register_hook(lambda ds: ds + self.eta * (ds.abs() + size_BHTS) * self.normal(ds))
        a_BHTS = a_BHTS * (1 + (self.eta + self.epsilon * s_BHTS.detach().abs()) * self.normal(a_BHTS))
        if dropout:
            tokens_S = torch.arange(S)
            kept_NTS = dropout_mask(dropout, *heads_of_batch(seeds_B, H), tokens_S[S - T :], tokens_S)
            a_BHTS = a_BHTS * kept_NTS.view(B, H, T, S) / (1 - dropout)
        return (a_BHTS @ inputs.v_BHSK).where(is_token_BHTK, 0)

    def moved(self, positions: Callable) -> Callable:
        def moved_positions(encoding, attention) -> Tensor:
            p_BHTS = positions(encoding, attention)
            error_BHTS = self.position_epsilon * (p_BHTS + self.case.tokens**0.5)
            # Positions stay ≥ 0, and their gradients as they are.
            return (p_BHTS + ((p_BHTS + error_BHTS).clamp(min=0) - p_BHTS).detach()) * attention.visible_QS

        return moved_positions

    def normal(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.rng, dtype=torch.float64)
