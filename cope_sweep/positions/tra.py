"""TRA, threshold relative attention (Opper et al. 2025): distances count only the keys that pass a threshold.

    S_ij = ReLU(q̂_i·k̂_j/√K)                       q̂, k̂: divided by their root mean squares
    D_ij = log σ(w_h·x_i + b_h)·#{k: j ≤ k ≤ i, S_ik > 0}
    a_ij = softmax_j(S_ij + D_ij) over the keys with S_ij > 0; a row without any is 0

It replaces q·k/√K and the softmax's mask. With RoPE, q and k are the rotated ones. Whether the key itself is counted
cancels in the softmax. The released code drops out logits, and w and b start as torch's linear layers; ours drops out
weights, and starts as the family's linear layers.
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
    projection,
)

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6


class TRA(AttentionEncoding):
    """Selective sparsity, and a decay with the number of selected keys."""

    SOURCE: ClassVar[str] = "arXiv 2503.23174"
    uses_rotated_query: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    kind: Literal["tra"] = "tra"

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        return projection("decay", dims.heads, dims)

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """The logit of each head's decay."""
        return project(parameters, "decay", h_BTD)

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch.nn.functional as F

        s_BHQS = _similarity(attention)
        passed_BHQS = ((s_BHQS > 0) & attention.visible_QS).to(s_BHQS.dtype)
        count_BHQS = passed_BHQS.flip(-1).cumsum(-1).flip(-1)
        query_logits_BHQF = at_least_float32(computed(attention.features_BHSF)[:, :, -s_BHQS.shape[2] :])
        score_BHQS: Tensor = s_BHQS + F.logsigmoid(query_logits_BHQF) * count_BHQS - attention.logits_BHQS
        return score_BHQS

    def weights(self, parameters: Tensors, attention: Attention, logits_BHQS: Tensor) -> Tensor:
        hidden_BHQS = ~((_similarity(attention) > 0) & attention.visible_QS)
        # A row without a key keeps finite logits, so that its gradient is finite, and its weights become 0.
        # float16 ends at 65,504.
        lowest = -1e30 if logits_BHQS.dtype.itemsize >= 4 else -1e4
        weights_BHQS: Tensor = logits_BHQS.masked_fill(hidden_BHQS, lowest).softmax(dim=-1)
        return weights_BHQS.masked_fill(hidden_BHQS, 0)


def _similarity(attention: Attention) -> Tensor:
    """S, (B, H, Q, S)."""

    def normed(x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()

    q_BHQK, k_BHSK = normed(attention.q_BHQK), normed(attention.k_BHSK)
    similarity_BHQS: Tensor = (q_BHQK @ k_BHSK.transpose(-1, -2) / math.sqrt(q_BHQK.shape[-1])).relu()
    return similarity_BHQS
