"""Wall attention (Tilde Research 2026): forget gates for each channel, which scale the products of a score.

    s_ij = Σ_n q_in·k_jn·exp(P_in − P_jn)/√K            P_t = Σ_{l ≤ t} log σ(W·x_l + b), for each head and channel

The key's own gate is not in the product, the query's is. There is no paper; this is the authors' code in
fla-org/flash-linear-attention. W starts as N(0, 0.02²) and b = 8, where all gates are open: plain attention, but for
0.03 % a token. A closed gate takes a far score to 0, and not to −∞ as FoX's. The code's option of FoX's gate beside it,
not divided by √K, is `[wall, {kind: fox, start: 8}]`. Its output gate is `model.output_gate`, its window is
`window`, its QK norm is `model.qk_norm`, with gains for each head there; a sink logit for each head is left out.

exp(−P_j) alone would overflow. So only differences of running sums are taken, all ≤ 0: between tokens inside a chunk of
keys, and from each key to its chunk's last token and from there to each later query, which is a product of matrices.
The score replaces q·k/√K. The code has no RoPE beside it; with one, q and k are the rotated ones.

Shapes: C keys of a chunk, R queries of the chunk's tokens, L later queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from cope_sweep.positions.base import (
    Attention,
    AttentionEncoding,
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    computed,
    project,
)

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16
"""Keys whose products with later queries are one product of matrices; with queries between them, C·R·K exponentials."""


class Wall(AttentionEncoding):
    """Forget gates for each channel of queries and keys."""

    SOURCE: ClassVar[str] = "2026 fla-org/flash-linear-attention"
    uses_rotated_query: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    kind: Literal["wall"] = "wall"

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        return {
            "gate_weight": Parameter((dims.dim, dims.input_dim), std=0.02, per_layer=True),
            "gate_bias": Parameter((dims.dim,), per_layer=True, centre=8.0),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """The logits of the gates, K for each head."""
        return project(parameters, "gate", h_BTD)

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch
        import torch.nn.functional as F

        p_BHSK: Tensor = F.logsigmoid(at_least_float32(computed(attention.features_BHSF))).cumsum(2)
        q_BHQK, k_BHSK = at_least_float32(attention.q_BHQK), at_least_float32(attention.k_BHSK)
        Q, S = attention.visible_QS.shape
        scores: list[Tensor] = []
        for start in range(0, S, CHUNK):
            end = min(S, start + CHUNK)
            # The first query of the chunk's tokens, and the first of a later token.
            inside, later = (min(Q, max(0, token - (S - Q))) for token in (start, end))
            k_BHCK, p_BHCK = k_BHSK[:, :, start:end], p_BHSK[:, :, start:end]
            last_BH1K = p_BHCK[:, :, -1:]
            p_BHRK = p_BHSK[:, :, S - Q + inside : S - Q + later]
            difference_BHRCK = p_BHRK[:, :, :, None] - p_BHCK[:, :, None]
            is_after_RC1 = ~attention.visible_QS[inside:later, start:end, None]
            decay_BHRCK = difference_BHRCK.masked_fill(is_after_RC1, 0).exp()
            near_BHRC = (decay_BHRCK * k_BHCK[:, :, None] @ q_BHQK[:, :, inside:later, :, None]).squeeze(-1)
            q_BHLK = q_BHQK[:, :, later:] * (p_BHSK[:, :, S - Q + later :] - last_BH1K).exp()
            far_BHLC = q_BHLK @ (k_BHCK * (last_BH1K - p_BHCK).exp()).transpose(-1, -2)
            before_BHXC = near_BHRC.new_zeros(*near_BHRC.shape[:2], inside, end - start)
            scores.append(torch.cat((before_BHXC, near_BHRC, far_BHLC), dim=2))
        decayed_BHQS = torch.cat(scores, dim=-1)
        # Attention adds this to its logits, which it replaces.
        return decayed_BHQS / math.sqrt(q_BHQK.shape[-1]) - attention.logits_BHQS
