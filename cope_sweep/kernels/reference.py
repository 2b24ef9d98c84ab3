"""Attention computed directly from the equation. Every fused kernel has to give the same result.

Shapes: B batch, H heads, T queries, S all tokens (queries are the last T of them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.kernels.arguments import Inputs, Position, Positions
from cope_sweep.kernels.dropout import draw_seeds, dropout_mask, heads_of_batch

if TYPE_CHECKING:
    from cope_sweep.positions import Attention


def reference(inputs: Inputs, positions: Positions, dropout: float = 0.0, seeds_B: Tensor | None = None) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight. `seeds_B`, int64, determine the mask of each sequence; None: they
    are drawn from torch's global generator. Half-precision inputs are computed in float32, as the fused kernels do; the
    result has the type of the values.
    """
    with torch.autocast(inputs.q_BHTK.device.type, enabled=False):
        out_BHTK = _reference(*at_least_float32(inputs, positions), dropout, seeds_B)
    return out_BHTK.to(inputs.v_BHSK.dtype)


def at_least_float32(inputs: Inputs, positions: Positions) -> tuple[Inputs, Positions]:
    """The same tensors, with half-precision ones in float32. Tensors that were one object remain one."""
    converted: dict[int, Tensor] = {}

    def convert(x: Tensor | None) -> Tensor | None:
        if x is None or x.dtype not in (torch.bfloat16, torch.float16):
            return x
        if id(x) not in converted:
            converted[id(x)] = x.float()
        return converted[id(x)]

    names = ("q_BHTK", "k_BHSK", "v_BHSK", "rotated_q_BHTK", "rotated_k_BHSK")
    tensors: dict[str, Any] = {name: convert(getattr(inputs, name)) for name in names}
    tensors["features_BHSF"] = [convert(features) for features in inputs.features_BHSF]
    return replace(inputs, **tensors), [
        Position(position.encoding, {name: cast(Tensor, convert(x)) for name, x in position.parameters.items()})
        for position in positions
    ]


def _reference(inputs: Inputs, positions: Positions, dropout: float, seeds_B: Tensor | None) -> Tensor:
    (B, H, T, _), S, device = inputs.q_BHTK.shape, inputs.k_BHSK.shape[2], inputs.q_BHTK.device
    weights_BHTS = attention_weights(inputs, positions, visible(T, S, device))
    if dropout:
        seeds_B = draw_seeds(B, device) if seeds_B is None else seeds_B.to(device)
        tokens_S = torch.arange(S, device=device)
        mask_NTS = dropout_mask(dropout, *heads_of_batch(seeds_B, H), tokens_S[S - T :], tokens_S)
        weights_BHTS = weights_BHTS * mask_NTS.view(B, H, T, S) / (1 - dropout)
    attended_BHTK = weights_BHTS @ inputs.v_BHSK
    if inputs.lengths_B is None:
        return attended_BHTK
    is_token_BT = torch.arange(S - T, S, device=device) < inputs.lengths_B[:, None]
    return attended_BHTK.where(is_token_BT[:, None, :, None], 0)


def visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """The causal mask, bool (T, S): True unless key s is after query t. Queries are the last T of the S tokens."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attention_weights(inputs: Inputs, positions: Positions, visible_TS: Tensor) -> Tensor:
    """The attention weights, (B, H, T, S), before dropout: the softmax, or what an encoding has in its place."""
    logits_BHTS = inputs.rotated_q_BHTK @ inputs.rotated_k_BHSK.transpose(-1, -2) / inputs.q_BHTK.shape[-1] ** 0.5
    total_BHTS, of_each = logits_BHTS, seen(inputs, positions, logits_BHTS, visible_TS)
    for position, attention in zip(positions, of_each, strict=True):
        score_BHTS = position.encoding.score(position.parameters, attention)
        if score_BHTS is not None:
            total_BHTS = total_BHTS + score_BHTS
    weighing = [(p, a) for p, a in zip(positions, of_each, strict=True) if p.encoding.weighs]
    weights_BHTS: Tensor
    if weighing:
        ((position, attention),) = weighing
        weights_BHTS = position.encoding.weights(position.parameters, attention, total_BHTS)
    else:
        weights_BHTS = total_BHTS.masked_fill(~visible_TS, -torch.inf).softmax(dim=-1)
    if not inputs.hard:
        return weights_BHTS
    one_hot_BHTS = F.one_hot(weights_BHTS.argmax(dim=-1), weights_BHTS.shape[-1]).to(weights_BHTS)
    return one_hot_BHTS + weights_BHTS - weights_BHTS.detach()


def seen(inputs: Inputs, positions: Positions, logits_BHTS: Tensor, visible_TS: Tensor) -> list[Attention]:
    """The argument of each encoding's `score`. `logits_BHTS` are q·k/√K, before any score is added."""
    from cope_sweep.positions import Attention  # on use: machines that only check and measure kernels lack pydantic

    plain = Attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, logits_BHTS, visible_TS, rotated=inputs.rotated)
    rotated = replace(plain, q_BHQK=inputs.rotated_q_BHTK, k_BHSK=inputs.rotated_k_BHSK, rotated=False)
    return [
        replace(rotated if position.encoding.uses_rotated_query else plain, features_BHSF=features_BHSF)
        for position, features_BHSF in zip(positions, inputs.features_BHSF or [None] * len(positions), strict=True)
    ]
