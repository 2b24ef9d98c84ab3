"""What CoPE and our training step are compared with, written from its source or by others, without code of this project.

Shapes: B batch, H heads, T tokens, D model dim, K head dim, P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    vocabulary: int
    tokens: int
    layers: int
    dim: int
    heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class PlainAttention(nn.Module):
    """Causal attention by `scaled_dot_product_attention`, with or without RoPE on pairs (k, k + K/2)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes, rotate: bool) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv, self.out = nn.Linear(sizes.dim, 3 * sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        rates = 10000.0 ** (-torch.arange(0, sizes.head_dim, 2).double() / sizes.head_dim)
        angles = torch.arange(sizes.tokens)[:, None] * rates if rotate else torch.empty(0)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if len(self.cos):
            q, k = self.rotate(q), self.rotate(k)
        attended_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out_BTD: Tensor = self.out(attended_BHTK.transpose(1, 2).reshape(B, T, D))
        return out_BTD

    def rotate(self, x_BHTK: Tensor) -> Tensor:
        T = x_BHTK.shape[2]
        cos, sin = self.cos[:T], self.sin[:T]
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainBlock(nn.Module):
    def __init__(self, sizes: Sizes, rotate: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.attention = PlainAttention(sizes, rotate)
        self.feed_forward = nn.ModuleDict(
            {"up": nn.Linear(sizes.dim, 4 * sizes.dim), "down": nn.Linear(4 * sizes.dim, sizes.dim)}
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        hidden_BTF = F.gelu(self.feed_forward["up"](self.ffn_norm(x_BTD)), approximate="tanh")
        out_BTD: Tensor = x_BTD + self.feed_forward["down"](hidden_BTF)
        return out_BTD


class Plain(nn.Module):
    """GPT-2 in plain PyTorch, with or without RoPE; the names of its parameters are those of our model."""

    def __init__(self, sizes: Sizes, rotate: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.ModuleList(PlainBlock(sizes, rotate) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.embedding.weight)


def x_transformers_model(sizes: Sizes, cope: bool) -> nn.Module:
    """The decoder of the package x-transformers with its CoPE (64 positions), or with its RoPE and SDPA."""
    from x_transformers import Decoder, TransformerWrapper  # type: ignore[import-untyped]

    if cope:
        options = {"attn_use_cope": True, "attn_cope_max_pos": 64}
    else:
        options = {"rotary_pos_emb": True, "rotary_emb_dim": sizes.head_dim, "attn_flash": True}
    decoder = Decoder(dim=sizes.dim, depth=sizes.layers, heads=sizes.heads, attn_dim_head=sizes.head_dim, **options)
    model: nn.Module = TransformerWrapper(
        num_tokens=sizes.vocabulary,
        max_seq_len=sizes.tokens,
        attn_layers=decoder,
        tie_embedding=True,
        use_abs_pos_emb=False,
    )
    return model
