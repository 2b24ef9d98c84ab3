"""What CoPE's kernels are compared with on a GPU: torch's SDPA by backend, flex_attention, and the paper's listing.

Shapes: B batch, H heads, T tokens, K head dim, R distances.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cope_benchmarks import peers
from cope_benchmarks.gpu_problems import Problem

Leaves = dict[str, Tensor]
Attend = Callable[[Leaves], Tensor]

BACKENDS = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA, math": SDPBackend.MATH,
}


def sdpa(problem: Problem, backend: str) -> Attend:
    """Attention without positions by one backend, on the same queries, keys and values."""

    def attend(x: Leaves) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(*_qkv(problem, x), dropout_p=problem.dropout, is_causal=True)

    return attend


def listing(problem: Problem, device: str) -> Attend:
    """The paper's listing, under autocast if the type is not float32: then sums of gates are float32, as in its users' code."""

    def attend(x: Leaves) -> Tensor:
        dtype = x["q"].dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            return peers.listing(x).to(dtype)

    return attend


def listing_compiled(problem: Problem, device: str) -> Attend:
    compiled: Attend = torch.compile(listing(problem, device), dynamic=False)
    return compiled


def flex(problem: Problem, device: str) -> Attend:
    """flex_attention with the problem's bias by distance: ALiBi or a table. It cannot express sums of gates."""
    from torch.nn.attention.flex_attention import flex_attention

    attention: Any = _compiled_flex() if device == "cuda" else flex_attention
    mask = _causal(problem.tokens, device)
    table = problem.build  # the slopes of ALiBi are those of the problem

    def attend(x: Leaves) -> Tensor:
        q, k, v = _qkv(problem, x)
        if problem.alibi:
            m_H = table(x).distance_slope
            assert m_H is not None

            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s + m_H[h] * (i - j)

        else:
            z_BHTR = q @ x["e_relative"].mT

            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s + z_BHTR[b, h, i, (i - j).clamp(min=0)]

        out: Tensor = attention(q, k, v, score_mod=score, block_mask=mask, scale=problem.head_dim**-0.5)
        return out

    return attend


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal(tokens: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    return create_block_mask(causal, None, None, tokens, tokens, device=device)


def _qkv(problem: Problem, x: Leaves) -> tuple[Tensor, Tensor, Tensor]:
    if not problem.projection:
        return x["q"], x["k"], x["v"]
    q, k, v = x["qkv"].permute(2, 0, 3, 1, 4)
    return q, k, v
