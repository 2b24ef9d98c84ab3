"""Attention computed directly from the equation. Every fused kernel has to give the same result.

Shapes: B batch, H heads, T queries, S all tokens (queries are the last T of them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Inputs, LayerEncoding, LayerEncodings
from cope_sweep.kernels.dropout import draw_seeds, dropout_mask, heads_of_batch

if TYPE_CHECKING:
    from cope_sweep.positions import Attention


def reference(inputs: Inputs, positions: LayerEncodings, dropout: float = 0.0, seeds_B: Tensor | None = None) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight. `seeds_B`, int64, determine the mask of each sequence; None: they
    are drawn from torch's global generator. Half-precision inputs are computed in float32, as the fused kernels do; the
    result has the type of the values.
    """
    with torch.autocast(inputs.q_BHTK.device.type, enabled=False):
        precise, positions = with_float32(inputs, positions)
        weights_BHTS = dropped_weights(precise, positions, dropout, seeds_B)
        out_BHTK = without_padding(weights_BHTS @ precise.v_BHSK, inputs)
    return out_BHTK.to(inputs.v_BHSK.dtype)


def with_float32(inputs: Inputs, positions: LayerEncodings) -> tuple[Inputs, LayerEncodings]:
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
        LayerEncoding(position.encoding, {name: cast(Tensor, convert(x)) for name, x in position.parameters.items()})
        for position in positions
    ]


def dropped_weights(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """The attention weights, (B, H, T, S), after dropout."""
    (B, H, T, _), S, device = inputs.q_BHTK.shape, inputs.k_BHSK.shape[2], inputs.q_BHTK.device
    weights_BHTS = attention_weights(inputs, positions, visible(T, S, device))
    if not dropout:
        return weights_BHTS
    seeds_B = draw_seeds(B, device) if seeds_B is None else seeds_B.to(device)
    tokens_S = torch.arange(S, device=device)
    mask_NTS = dropout_mask(dropout, *heads_of_batch(seeds_B, H), tokens_S[S - T :], tokens_S)
    return weights_BHTS * mask_NTS.view(B, H, T, S) / (1 - dropout)


def without_padding(x_BHTK: Tensor, inputs: Inputs) -> Tensor:
    """The same numbers, and 0 for queries that are padding."""
    if inputs.lengths_B is None:
        return x_BHTK
    T, S = x_BHTK.shape[2], inputs.k_BHSK.shape[2]
    is_token_BT = torch.arange(S - T, S, device=x_BHTK.device) < inputs.lengths_B[:, None]
    return x_BHTK.where(is_token_BT[:, None, :, None], 0)


def visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """The causal mask, bool (T, S): True unless key s is after query t. Queries are the last T of the S tokens."""
    tokens_S = torch.arange(keys, device=device)
    return tokens_S <= tokens_S[keys - queries :, None]


def hide_later_keys(x_BHTS: Tensor, visible_TS: Tensor) -> Tensor:
    """The same numbers, and −∞ for keys after the query. All others are before the first query: they are not masked."""
    T, S = visible_TS.shape
    earlier_BHTX, own_BHTT = torch.split(x_BHTS, [S - T, T], dim=-1)
    own_BHTT = own_BHTT.masked_fill(~visible_TS[:, S - T :], -torch.inf)
    return own_BHTT if S == T else torch.cat((earlier_BHTX, own_BHTT), dim=-1)


def attention_weights(inputs: Inputs, positions: LayerEncodings, visible_TS: Tensor) -> Tensor:
    """The attention weights, (B, H, T, S), before dropout: the softmax, or what an encoding has in its place."""
    scaled_q_BHTK = inputs.rotated_q_BHTK / inputs.q_BHTK.shape[-1] ** 0.5
    logits_BHTS = scaled_q_BHTK @ inputs.rotated_k_BHSK.transpose(-1, -2)
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
        weights_BHTS = hide_later_keys(total_BHTS, visible_TS).softmax(dim=-1)
    if not inputs.hard:
        return weights_BHTS
    largest_BHT1, index_BHT1 = weights_BHTS.max(dim=-1, keepdim=True)
    one_hot_BHTS = torch.zeros_like(weights_BHTS).scatter(-1, index_BHT1, (largest_BHT1 > 0).to(weights_BHTS))
    return one_hot_BHTS + weights_BHTS - weights_BHTS.detach()


def seen(inputs: Inputs, positions: LayerEncodings, logits_BHTS: Tensor, visible_TS: Tensor) -> list[Attention]:
    """The argument of each encoding's `score`. `logits_BHTS` are q·k/√K, before any score is added."""
    from cope_sweep.positions import Attention  # on use: machines that only check and measure kernels lack pydantic

    plain = Attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, logits_BHTS, visible_TS, rotated=inputs.rotated)
    rotated = replace(plain, q_BHQK=inputs.rotated_q_BHTK, k_BHSK=inputs.rotated_k_BHSK, rotated=False)
    return [
        replace(rotated if position.encoding.uses_rotated_query else plain, features_BHSF=features_BHSF)
        for position, features_BHSF in zip(positions, inputs.features_BHSF or [None] * len(positions), strict=True)
    ]
