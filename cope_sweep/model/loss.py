"""The loss of the next token, and predictions, from the input of the output layer.

With a large vocabulary the logits are the largest tensor of a training step: 4 × 1024 tokens over 50,257 ids take
0.8 GB in float32, and the plain loss holds four tensors of that size. Here the tokens pass the output layer in chunks,
and each chunk's gradient is computed together with its loss, so that only one chunk's logits exist at a time. The
values equal the plain loss, to rounding. Small logits take the plain loss, which is then faster.

Shapes: N tokens, D dim, V vocabulary, B batch, T tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.positions.base import at_least_float32
from cope_sweep.sizes import CHUNK_LOGITS

IGNORED = -100
"""The target of a token without a target: torch's default, which tasks use."""


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The cross-entropy in nats, summed over the tokens that have a target, in float32 or in float64."""
    logits_NV = at_least_float32(logits_BTV.flatten(0, -2))
    return F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum", ignore_index=IGNORED)


def perplexity(nats: float) -> float:
    """The exponential of a mean cross-entropy in nats; infinite where a float overflows."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def output_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """`next_token_loss` of the logits `hidden_BTD @ weight_VD.T`, which never exist as a whole if they are large.

    Differentiable once in `hidden_BTD` and `weight_VD`.
    """
    rows = _chunk_rows(weight_VD)
    if targets_BT.numel() <= rows:
        return next_token_loss(F.linear(hidden_BTD, weight_VD), targets_BT)
    loss: Tensor = _ChunkedLoss.apply(hidden_BTD.flatten(0, -2), weight_VD, targets_BT.flatten(), rows)
    return loss


@torch.no_grad()
def predict(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The summed `next_token_loss`, and the most probable token after each token, (B, T), without a gradient."""
    nats: list[Tensor] = []
    most_probable: list[Tensor] = []
    for hidden_ND, targets_N in _chunks(hidden_BTD.flatten(0, -2), targets_BT.flatten(), _chunk_rows(weight_VD)):
        logits_NV = F.linear(hidden_ND, weight_VD)
        nats.append(next_token_loss(logits_NV, targets_N))
        most_probable.append(logits_NV.argmax(-1))
    return torch.stack(nats).sum(), torch.cat(most_probable).view_as(targets_BT)


class _ChunkedLoss(torch.autograd.Function):
    """The summed cross-entropy of `hidden_ND @ weight_VD.T`; its gradient is computed in the forward pass.

    Under autocast the products are computed in its data type, and the weight's gradient is summed in the weight's.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        device = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        # The types are chosen by hand below: products in `dtype`, the loss in float32 at least.
        with torch.autocast(device, enabled=False):
            weight = weight_VD.to(dtype)
            grad_hidden_ND, grad_weight_VD = _gradient_buffers(ctx, hidden_ND, weight_VD)
            losses: list[Tensor] = []
            start = 0
            for part_ND, targets in _chunks(hidden_ND, targets_N, rows):
                hidden = part_ND.to(dtype)
                log_p_NV = torch.log_softmax(at_least_float32(hidden @ weight.T), dim=-1)
                losses.append(F.nll_loss(log_p_NV, targets, reduction="sum", ignore_index=IGNORED))
                if any(ctx.needs_input_grad):
                    grad_logits_NV = _gradient_of_logits(log_p_NV, targets).to(dtype)
                    if grad_hidden_ND is not None:
                        grad_hidden_ND[start : start + rows] = grad_logits_NV @ weight
                    if grad_weight_VD is not None:
                        _add_product(grad_weight_VD, grad_logits_NV, hidden)
                start += rows
        ctx.gradients = grad_hidden_ND, grad_weight_VD
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a loss in chunks can be computed once only; call the loss again")
        # Multiplied in place, so they serve one backward pass.
        gradients, ctx.gradients = ctx.gradients, None
        grad_hidden_ND, grad_weight_VD = (None if gradient is None else gradient.mul_(grad) for gradient in gradients)
        return grad_hidden_ND, grad_weight_VD, None, None


def _gradient_buffers(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor | None, Tensor | None]:
    hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
    return hidden, torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None


def _gradient_of_logits(log_p_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The difference softmax − one-hot(target), and 0 for tokens without a target. Overwrites `log_p_NV`."""
    p_NV = log_p_NV.exp_()
    has_target_N1 = (targets_N != IGNORED).to(p_NV.dtype)[:, None]
    p_NV.mul_(has_target_N1)
    # IGNORED is no index. Such a token adds 0 to the first id.
    return p_NV.scatter_add_(1, targets_N.clamp(min=0)[:, None], -has_target_N1)


def _add_product(sum_VD: Tensor, left_NV: Tensor, right_ND: Tensor) -> None:
    """Add leftᵀ·right to `sum_VD`, in the data type of `sum_VD`."""
    if sum_VD.dtype == left_NV.dtype:
        # Without an array for the product, which is as large as the weight. It takes one data type only.
        sum_VD.addmm_(left_NV.T, right_ND)
    else:
        sum_VD += left_NV.T @ right_ND


def _chunk_rows(weight_VD: Tensor) -> int:
    return max(1, CHUNK_LOGITS.get(weight_VD.device.type, CHUNK_LOGITS["cpu"]) // len(weight_VD))


def _chunks(hidden_ND: Tensor, targets_N: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(targets_N), rows):
        yield hidden_ND[start : start + rows], targets_N[start : start + rows]
