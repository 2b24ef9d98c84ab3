"""The alternative that fused CoPE is compared with, written from its source, without code of this project.

Shapes: B batch, H heads, T tokens, K head dim, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def listing(x: Mapping[str, Tensor]) -> Tensor:
    """The paper's code (Golovneva et al. 2024, appendix B), operation by operation, on batch × heads at once.

    `x`: q, k, v (B, H, T, K) and e (P, K).
    """
    query, key, val = (x[name].flatten(0, 1) for name in ("q", "k", "v"))
    T, K = query.shape[-2:]
    npos_max = len(x["e"])
    mask = torch.ones(T, T, device=query.device, dtype=query.dtype).tril()
    attn_logits = torch.bmm(query, key.transpose(-1, -2))
    attn_logits = attn_logits / math.sqrt(K)
    attn_logits = attn_logits + mask.log()
    gates = torch.sigmoid(attn_logits)
    pos = gates.flip(-1).cumsum(dim=-1).flip(-1)
    pos = pos.clamp(max=npos_max - 1)
    pos_ceil = pos.ceil().long()
    pos_floor = pos.floor().long()
    logits_int = torch.matmul(query, x["e"].T[None])
    logits_ceil = logits_int.gather(-1, pos_ceil)
    logits_floor = logits_int.gather(-1, pos_floor)
    w = pos - pos_floor
    attn_logits = attn_logits + logits_ceil * w + logits_floor * (1 - w)
    attn = torch.softmax(attn_logits, dim=-1)
    return torch.bmm(attn, val).view_as(x["v"])
