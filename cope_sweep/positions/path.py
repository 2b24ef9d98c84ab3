"""PaTH (Yang et al. 2025): a product of Householder-like matrices, which depend on the tokens, between key and query.

    s_ij = k_jᵀ·H_{j+1}·H_{j+2} ⋯ H_i·q_i/√K            H_t = I − β_t·w_t·w_tᵀ
    β_t = 2·σ(u_h·x_t + b_h)                            w_t = unit vector of SiLU(conv₃(W₂·W₁·x)_t), per head

The convolution is causal, of 3 taps for each channel; W₂·W₁ has rank 32. SiLU is in the released code only. Its
taps start from N(0, 0.02²), where w is so short that ε counts (|w| ≈ 0.85 after division, at dim 64); ours start as
as for torch's convolution, ±1/√3.

Keys are visited in chunks from the last to the first, q̃ being the query after the steps of those behind it. Inside
a chunk, with c_it = w_t·(H_{t+1} ⋯ q̃_i), the score is q̃_i·k_j − Σ_{t > j} β_t·c_it·(w_t·k_j). All c of a chunk solve
one triangular system, C·(I + strict lower triangle of β_u·w_u·w_t) = lower triangle of Q̃·Wᵀ: the compact WY form. Then
q̃_i becomes q̃_i − Σ_t β_t·c_it·w_t. The score replaces q·k/√K. With RoPE, q and k are the rotated ones.

Shapes: t, u tokens; C tokens of a chunk (W is (C, K)); R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import (
    Attention,
    AttentionEncoding,
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    causal_convolution,
    computed,
    project,
    projection,
)

if TYPE_CHECKING:
    from torch import Tensor

TAPS = 3
CHUNK = 64
"""Tokens whose steps are one product: for a block of queries the work besides theirs is O(S·CHUNK·K)."""
EPS = 1e-6
"""Inside the root of the unit vector, as released."""


class PaTH(AttentionEncoding):
    """Accumulated Householder transformations between a key and a query."""

    SOURCE: ClassVar[str] = "arXiv 2505.16381"
    uses_rotated_query: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    kind: Literal["path"] = "path"
    rank: int = Field(default=32, ge=1, le=10**6, description="Rank of the projection to w.")
    convolution: bool = Field(
        default=True, description="Whether w is convolved over 3 tokens. false: what of PaTH is not its convolution."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        bound = dims.linear_bound
        taps = {"taps": Parameter((dims.dim, TAPS), per_layer=True, bound=TAPS**-0.5)} if self.convolution else {}
        return {
            "down": Parameter((self.rank, dims.input_dim), std=0.02, per_layer=True, bound=bound),
            "up": Parameter((dims.dim, self.rank), std=0.02, per_layer=True, bound=bound),
            **taps,
            **projection("beta", dims.heads, dims),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """W₂·W₁·x and the logit of β, K + 1 numbers for each head."""
        import torch

        beta_BTH1 = project(parameters, "beta", h_BTD)[..., None]
        w_BTD = h_BTD @ parameters["down"].T @ parameters["up"].T
        w_BTHK = w_BTD.view(*beta_BTH1.shape[:3], w_BTD.shape[-1] // beta_BTH1.shape[2])
        return torch.cat((w_BTHK, beta_BTH1.to(w_BTHK.dtype)), dim=-1).flatten(2)

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch
        import torch.nn.functional as F

        features_BHSF = at_least_float32(computed(attention.features_BHSF))
        q_BHQK, k_BHSK = at_least_float32(attention.q_BHQK), at_least_float32(attention.k_BHSK)
        w_BHSK = features_BHSF[..., :-1]
        if self.convolution:
            w_BHSK = causal_convolution(w_BHSK, parameters["taps"])
        w_BHSK = F.silu(w_BHSK)
        w_BHSK = w_BHSK * (w_BHSK.square().sum(-1, keepdim=True) + EPS).rsqrt()
        step_BHSK = 2 * features_BHSF[..., -1:].sigmoid() * w_BHSK  # β·w
        scores: list[Tensor] = []
        for end in range(k_BHSK.shape[2], 0, -CHUNK):
            chunk = slice(max(0, end - CHUNK), end)
            w_BHKC, k_BHKC = (x[:, :, chunk].transpose(-1, -2) for x in (w_BHSK, k_BHSK))
            step_BHCK = step_BHSK[:, :, chunk]
            between_BHCC = (step_BHCK @ w_BHKC).tril(-1)  # row u, column t: β_u·w_u·w_t
            # A token after the query takes no step on it. In its own chunk there are some.
            products_BHQC = (q_BHQK @ w_BHKC).masked_fill(~attention.visible_QS[:, chunk], 0)
            c_BHQC = torch.linalg.solve_triangular(
                between_BHCC, products_BHQC, upper=False, left=False, unitriangular=True
            )
            taken_BHCC = (step_BHCK @ k_BHKC).tril(-1)  # row t, column j: β_t·w_t·k_j
            scores.append(q_BHQK @ k_BHKC - c_BHQC @ taken_BHCC)
            q_BHQK = q_BHQK - c_BHQC @ step_BHCK
        changed_BHQS = torch.cat(scores[::-1], dim=-1)
        # Attention adds this to its logits, which it replaces.
        return changed_BHQS / math.sqrt(q_BHQK.shape[-1]) - attention.logits_BHQS
