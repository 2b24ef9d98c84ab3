"""Attention computed directly from the equation. Every fused kernel has to give the same result.

Shapes: B batch, H heads, T queries, S all tokens (queries are the last T of them).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.kernels.dropout import draw_seed, dropout_mask
from cope_sweep.kernels.inputs import Inputs, Positions
from cope_sweep.positions import Attention


def reference(inputs: Inputs, positions: Positions, dropout: float = 0.0, seed: Tensor | None = None) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight. `seed`, an int64 scalar, determines the mask; None: it is drawn
    from torch's global generator.
    """
    (B, H, T, _), S, device = inputs.q_BHTK.shape, inputs.k_BHSK.shape[2], inputs.q_BHTK.device
    weights_BHTS = attention_weights(inputs, positions, visible(T, S, device))
    if dropout:
        heads_N, tokens_S = torch.arange(B * H, device=device), torch.arange(S, device=device)
        mask_NTS = dropout_mask(draw_seed() if seed is None else seed, dropout, heads_N, tokens_S[S - T :], tokens_S)
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
    """The attention weights, (B, H, T, S), before dropout; each row sums to 1."""
    logits_BHTS = inputs.rotated_q_BHTK @ inputs.rotated_k_BHSK.transpose(-1, -2) / inputs.q_BHTK.shape[-1] ** 0.5
    total_BHTS = logits_BHTS
    for position, attention in zip(positions, seen(inputs, positions, logits_BHTS, visible_TS), strict=True):
        score_BHTS = position.encoding.score(position.parameters, attention)
        if score_BHTS is not None:
            total_BHTS = total_BHTS + score_BHTS
    weights_BHTS: Tensor = total_BHTS.masked_fill(~visible_TS, -torch.inf).softmax(dim=-1)
    if not inputs.hard:
        return weights_BHTS
    one_hot_BHTS = F.one_hot(weights_BHTS.argmax(dim=-1), weights_BHTS.shape[-1]).to(weights_BHTS)
    return one_hot_BHTS + weights_BHTS - weights_BHTS.detach()


def seen(inputs: Inputs, positions: Positions, logits_BHTS: Tensor, visible_TS: Tensor) -> list[Attention]:
    """The argument of each encoding's `score`. `logits_BHTS` are q·k/√K, before any score is added."""
    return [
        Attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, logits_BHTS, visible_TS, gate_k_BHSK, inputs.rotated)
        for gate_k_BHSK in inputs.gate_k_BHSK or [None] * len(positions)
    ]
