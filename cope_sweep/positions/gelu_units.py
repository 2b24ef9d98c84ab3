"""Σ_n c_n·gelu(w_n·p + b_n) for every position p, without an array for each of the N hidden units.

The derivative of gelu(x) = x·Φ(x) is Φ(x) + x·φ(x), with Φ and φ the normal distribution and its density (Hendrycks and
Gimpel 2016). The backward pass computes the units again.

Shapes: B batch, H heads, Q queries, S keys, N hidden units.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_units(p_BHQS: Tensor, c_BHQN: Tensor, w_N: Tensor, b_N: Tensor) -> Tensor:
    """The weighted sums of the hidden units at each position, (B, H, Q, S), differentiable in all arguments."""
    sums_BHQS: Tensor = _WeightedUnits.apply(p_BHQS, c_BHQN, w_N, b_N)
    return sums_BHQS


class _WeightedUnits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p_BHQS: Tensor, c_BHQN: Tensor, w_N: Tensor, b_N: Tensor) -> Tensor:
        ctx.save_for_backward(p_BHQS, c_BHQN, w_N, b_N)
        sums_BHQS = torch.zeros_like(p_BHQS)
        for n in range(len(w_N)):
            sums_BHQS.addcmul_(c_BHQN[..., n, None], F.gelu(p_BHQS * w_N[n] + b_N[n]))
        return sums_BHQS

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p_BHQS, c_BHQN, w_N, b_N = ctx.saved_tensors
        (dsums_BHQS,) = gradients
        dp_BHQS, dc_BHQN = torch.zeros_like(p_BHQS), torch.empty_like(c_BHQN)
        dw_N, db_N = torch.empty_like(w_N), torch.empty_like(b_N)
        for n in range(len(w_N)):
            x_BHQS = p_BHQS * w_N[n] + b_N[n]
            below_BHQS = torch.special.ndtr(x_BHQS)
            dc_BHQN[..., n] = (dsums_BHQS * x_BHQS * below_BHQS).sum(-1)
            density_BHQS = (x_BHQS.square() / -2).exp_() / math.sqrt(2 * math.pi)
            dx_BHQS = (below_BHQS + x_BHQS * density_BHQS).mul_(dsums_BHQS).mul_(c_BHQN[..., n, None])
            dp_BHQS.add_(dx_BHQS * w_N[n])
            dw_N[n], db_N[n] = (dx_BHQS * p_BHQS).sum(), dx_BHQS.sum()
        return dp_BHQS, dc_BHQN, dw_N, db_N
