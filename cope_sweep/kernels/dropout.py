"""Attention dropout whose mask is a function of (seed, head, query, key): a backward pass computes it again.

All implementations of attention compute this function, so they have the same mask for the same seed. A 64-bit mixer
(Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") makes a key for each query; a 32-bit one
(lowbias32, Wellons 2018) makes 32 bits for each query and key. A weight is kept if these are ≥ p·2³². Integers wrap
around, as in C.

Shapes: N heads of the batch (B·H), T queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seed(device: torch.device | None = None) -> Tensor:
    """A seed, an int64 scalar on the device (None: the CPU), drawn from torch's global generator of that device.

    On a GPU it is drawn there, so that nothing waits for the GPU, and each replay of a CUDA graph draws another one.
    """
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """Weights whose 32 bits are below this number are dropped, for a dropout probability p."""
    return min(round(p * 2**32), 2**32 - 1)


def dropout_mask(seed: Tensor, p: float, heads_N: Tensor, queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """Which weights are kept, bool (N, T, S).

    `heads_N` are indices among the B·H heads of the batch; `queries_T` and `keys_S` count tokens from the start of the
    sequence.
    """
    row_NT = seed.to(heads_N.device) + ((heads_N.long()[:, None] << 32) | queries_T.long()) * _signed64(
        0x9E3779B97F4A7C15
    )
    row_NT = (row_NT ^ _shift(row_NT, 30, 64)) * _signed64(0xBF58476D1CE4E5B9)
    row_NT = (row_NT ^ _shift(row_NT, 27, 64)) * _signed64(0x94D049BB133111EB)
    row_NT = (row_NT ^ _shift(row_NT, 31, 64)).to(torch.int32)
    x_NTS = row_NT[..., None] + keys_S.to(torch.int32) * _signed32(0x9E3779B9)
    x_NTS ^= _shift(x_NTS, 16, 32)
    x_NTS *= _signed32(0x7FEB352D)
    x_NTS ^= _shift(x_NTS, 15, 32)
    x_NTS *= _signed32(0x846CA68B)
    x_NTS ^= _shift(x_NTS, 16, 32)
    # With the highest bit flipped, signed integers compare as unsigned ones.
    return (x_NTS ^ _signed32(0x80000000)) >= threshold(p) - 2**31


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Shift right, filled with zeros."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
