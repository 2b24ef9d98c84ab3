"""Positions that are not the tokens' numbers, as shares of the range that an encoding has them in (`sampled.py`).

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cope_sweep.kernels.dropout import at_place, uniforms


def sampled_shares(seeds_B: Tensor, tokens: int) -> Tensor:
    """Positions in training, (B, T) float64: sorted, uniform on [0, 1), a function of the sequences' seeds."""
    # Each place in the model draws from its own stream. 0 to 15 belong to the embedding, whose dropout uses only 0.
    return uniforms(at_place(seeds_B, 1), tokens).sort(dim=1).values


def even_shares(lengths_B: Tensor, tokens: int) -> Tensor:
    """Positions in an evaluation, (B, T) float64: evenly spaced on (0, 1) within each sequence's length."""
    place_T = torch.arange(1, tokens + 1, dtype=torch.float64, device=lengths_B.device)
    return place_T / (lengths_B[:, None] + 1)
