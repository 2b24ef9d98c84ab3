"""Tensors for hand-worked cases, and sums written as loops over tokens."""

import math

import torch

from cope_sweep.positions import Attention


def attention(heads=2, tokens=6, head_dim=4, queries=None, features=None, seed=0):
    """Random tensors in float64 for the last `queries` of the tokens; `features` numbers for each head and token."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=rng, dtype=torch.float64)
    q = q[:, :, tokens - (queries or tokens) :]
    visible = torch.ones(q.shape[2], tokens, dtype=torch.bool).tril(tokens - q.shape[2])
    logits = q @ k.mT / math.sqrt(head_dim)
    drawn = None
    if features is not None:
        drawn = torch.randn(1, heads, tokens, features, generator=rng, dtype=torch.float64)
    return Attention(q, k, v, logits, visible, drawn)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_sigmoid(x):
    return -math.log1p(math.exp(-float(x)))


def pairs(attention):
    """Head, row of the query, and the tokens i and j of each query and of each key that it sees."""
    _, H, Q, _ = attention.q_BHQK.shape
    S = attention.k_BHSK.shape[2]
    return [(h, row, row + S - Q, j) for h in range(H) for row in range(Q) for j in range(row + S - Q + 1)]
