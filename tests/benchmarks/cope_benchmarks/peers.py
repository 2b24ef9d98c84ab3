"""Alternatives that fused CoPE is compared with, written from their sources, without code of this project.

Shapes: B batch, H heads, T tokens, K head dim, P positions.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Leaves = dict[str, Tensor]
"""q, k, v (B, H, T, K), e (P, K), and e_relative (T, K)."""
Attend = Callable[[Leaves], Tensor]


def listing(x: Leaves) -> Tensor:
    """The paper's code (Golovneva et al. 2024, appendix B), operation by operation, on batch × heads at once."""
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


def sdpa(x: Leaves) -> Tensor:
    """torch's scaled_dot_product_attention, causal, without positions."""
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)


def shaw(x: Leaves) -> Tensor:
    """Relative positions by the skew trick (Huang et al. 2018, "Music Transformer"), without a (T, T, K) array."""
    q, k, v = x["q"], x["k"], x["v"]
    T, K = q.shape[-2:]
    by_distance = q @ x["e_relative"].flip(0).T  # column c: distance T − 1 − c
    skewed = F.pad(by_distance, (1, 0)).view(*q.shape[:2], T + 1, T)[:, :, 1:]
    masked = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) / math.sqrt(K) + skewed).masked_fill(masked, -torch.inf).softmax(-1) @ v


def x_transformers(x: Leaves) -> Tensor:
    """Attention with the CoPE module of x-transformers, called as its attention calls it."""
    from x_transformers.x_transformers import CoPE  # type: ignore[import-not-found,import-untyped,unused-ignore]

    q, k, v = x["q"], x["k"], x["v"]
    T, K = q.shape[-2:]
    module = CoPE(dim=K, heads=q.shape[1], max_pos=len(x["e"])).to(q)
    del module.pos_emb  # a parameter, replaced by our tensor to get its gradient
    module.pos_emb = x["e"]
    masked = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    logits = (q @ k.transpose(-1, -2) / math.sqrt(K)).masked_fill(masked, -torch.inf)
    out: Tensor = (logits + module(q, logits)).softmax(-1) @ v
    return out


def has_x_transformers() -> bool:
    return importlib.util.find_spec("x_transformers") is not None
