"""Contextual positions, and look-ups at them, with backward passes that cost less than autograd's.

Shapes: B batch, H heads, Q queries, S keys, M pieces of a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sum_gates(logits_BHQS: Tensor, visible_QS: Tensor) -> Tensor:
    """p_ij, the sum of the gates σ(logit) of the keys from key j to query i, (B, H, Q, S)."""
    p_BHQS: Tensor = _SumGates.apply(logits_BHQS, visible_QS)
    return p_BHQS


def linear_pieces(base_BHQM: Tensor, slope_BHQM: Tensor, index_BHQS: Tensor, x_BHQS: Tensor) -> Tensor:
    """base[index] + slope[index]·x, (B, H, Q, S): a function of x that has M linear pieces for each query."""
    y_BHQS: Tensor = _LinearPieces.apply(base_BHQM, slope_BHQM, index_BHQS, x_BHQS)
    return y_BHQS


def count_knots(knots_N: Tensor, p_BHQS: Tensor) -> Tensor:
    """The number of knots ≤ p, (B, H, Q, S), of positions that fall along the keys: a search for each knot, not key."""
    shape = p_BHQS.shape[:-1]
    # The positions of the first keys are ≥ a knot.
    ends_BHQN = torch.searchsorted(-p_BHQS, (-knots_N.to(p_BHQS.dtype)).expand(*shape, -1).contiguous(), right=True)
    ending_BHQS = ends_BHQN.new_zeros(*shape, p_BHQS.shape[-1] + 1).scatter_add_(
        -1, ends_BHQN, torch.ones_like(ends_BHQN)
    )
    return len(knots_N) - ending_BHQS.cumsum(-1)[..., :-1]


class _SumGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BHQS: Tensor, visible_QS: Tensor) -> Tensor:
        gates_BHQS = logits_BHQS.sigmoid()
        queries = len(visible_QS)  # their keys are the last ones; all others are visible
        gates_BHQS[..., -queries:].masked_fill_(~visible_QS[:, -queries:], 0)
        ctx.save_for_backward(gates_BHQS)
        return gates_BHQS.flip(-1).cumsum(-1).flip(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gates_BHQS,), (dp_BHQS,) = ctx.saved_tensors, gradients
        # A gate adds to the positions of its key and of all earlier keys.
        dgates_BHQS = dp_BHQS.cumsum(-1)
        dgates_BHQS *= gates_BHQS
        # σ' = σ·(1 − σ), in place.
        return dgates_BHQS.addcmul_(dgates_BHQS, gates_BHQS, value=-1), None


class _LinearPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base_BHQM: Tensor, slope_BHQM: Tensor, index_BHQS: Tensor, x_BHQS: Tensor) -> Tensor:
        slope_BHQS = slope_BHQM.gather(-1, index_BHQS)
        ctx.save_for_backward(slope_BHQS, index_BHQS, x_BHQS)
        ctx.pieces = base_BHQM.shape[-1]
        return torch.addcmul(base_BHQM.gather(-1, index_BHQS), slope_BHQS, x_BHQS)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        (slope_BHQS, index_BHQS, x_BHQS), (dy_BHQS,) = ctx.saved_tensors, gradients
        zeros_BHQM = dy_BHQS.new_zeros(*dy_BHQS.shape[:-1], ctx.pieces)
        dbase_BHQM = zeros_BHQM.scatter_add(-1, index_BHQS, dy_BHQS)
        # In place: the zeros are not needed any more.
        dslope_BHQM = zeros_BHQM.scatter_add_(-1, index_BHQS, dy_BHQS * x_BHQS)
        return dbase_BHQM, dslope_BHQM, None, dy_BHQS * slope_BHQS
