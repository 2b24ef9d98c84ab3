"""Causal self-attention with a list of position encodings.

Shapes: B batch, T new tokens, S all tokens (cached ones first), D dim, H heads, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cope_sweep.kernels import Inputs, Position, Positions, attend, reference

LayerCache = dict[str, Tensor]
"""What a layer keeps of the tokens before, by name, (B, H, S, K) each; empty at the start."""

__all__ = ["Inputs", "LayerCache", "Position", "Positions", "SelfAttention", "attend", "reference"]


class SelfAttention(nn.Module):
    """Multi-head attention: softmax(q·k/√K + Σ scores)·v over the tokens up to each query."""

    def __init__(self, dim: int, heads: int, dropout: float, *, bias: bool = True, hard: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.hard = hard
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(
        self, x_BTD: Tensor, positions: Positions, cache: LayerCache | None = None, lengths_B: Tensor | None = None
    ) -> Tensor:
        """Attend; `cache`, where given, holds the tokens before, and takes in the new ones.

        `lengths_B`, where given: how many tokens each sequence has, those in the cache included.
        """
        q_BHTK, k_BHTK, v_BHTK = self._heads(self.qkv(x_BTD), 3).permute(2, 0, 3, 1, 4)
        start = cache["v"].shape[2] if cache else 0
        rotated_q, rotated_k = q_BHTK, k_BHTK
        for position in positions:
            rotated_q = position.encoding.rotate(position.parameters, rotated_q, start)
            rotated_k = position.encoding.rotate(position.parameters, rotated_k, start)
        sources: dict[str, Tensor] = {"v": v_BHTK, "k": k_BHTK}
        if rotated_k is not k_BHTK:
            sources["rotated_k"] = rotated_k
        for index, position in enumerate(positions):
            own_BTD = position.encoding.gate_keys(position.parameters, x_BTD)
            if own_BTD is not None:
                sources[f"gate_k{index}"] = self._heads(own_BTD, 1)[:, :, 0].transpose(1, 2)
        if cache is not None:
            for name, new in sources.items():
                sources[name] = torch.cat((cache[name], new), dim=2) if name in cache else new
            cache.update(sources)
        inputs = Inputs(
            q_BHTK,
            sources["k"],
            sources["v"],
            rotated_q,
            sources.get("rotated_k", sources["k"]),
            [sources.get(f"gate_k{index}") for index in range(len(positions))],
            self.hard,
            lengths_B,
        )
        attended_BHTK = attend(inputs, positions, self.dropout if self.training else 0.0)
        return self.out(attended_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTM: Tensor, parts: int) -> Tensor:
        """(B, T, parts·D) → (B, T, parts, H, K)."""
        return x_BTM.view(*x_BTM.shape[:2], parts, self.heads, -1)
