"""Dropout whose masks are a function of (seed of the sequence, place in the model, head, token, column).

Each sequence has its own seed, so its masks do not depend on the other sequences of a forward pass: they are the
same however a batch is divided over workers and micro-batches. A backward pass, or a recomputation, makes the same mask
again. All implementations of attention compute this function, so they have the same mask for the same seeds.

A 64-bit mixer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") makes a key for each row,
from a counter that holds place (16 bits), head (16 bits) and token (32 bits); a 32-bit one (lowbias32, Wellons 2018)
makes 32 bits for each column of the row. An element is kept if these are ≥ p·2³². Integers wrap around, as in C.

Shapes: B sequences, H heads, N heads of the batch (B·H), T tokens (queries), D features, S columns: keys of attention,
or features; R rows of some sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK_AT_ONCE = 2**15
"""Elements of a mask that are computed at once on a CPU: their 32 bits stay in its cache."""


def draw_seeds(count: int, device: torch.device | None = None) -> Tensor:
    """Seeds, int64 (count,) on the device (None: the CPU), drawn from torch's global generator of that device.

    On a GPU they are drawn there, so that nothing waits for the GPU, and each replay of a CUDA graph draws others.
    """
    return torch.randint(0, 2**62, (count,), dtype=torch.int64, device=device)


def sequence_seeds(run_seed: int, sequences: range) -> Tensor:
    """The seeds of training sequences, int64 (B,), by their numbers, which count all sequences of a training."""
    numbers_B = torch.arange(sequences.start, sequences.stop)
    return _mixed(_mixed(torch.tensor(run_seed)) + numbers_B * _signed64(_GOLDEN))


def at_place(seeds_B: Tensor, place: int) -> Tensor:
    """The seeds for the masks of one place in the model, 0 … 2¹⁶ − 1."""
    if not 0 <= place < 2**16:
        raise ValueError(f"dropout has 65,536 places in a model, and this is place {place}; use fewer layers")
    return seeds_B + _signed64((place << 48) * _GOLDEN % 2**64)


def apply_dropout(x_BTD: Tensor, p: float, seeds_B: Tensor) -> Tensor:
    """Set each element to 0 with probability p, and divide the others by 1 − p."""
    B, T, D = x_BTD.shape
    device, scale = x_BTD.device, 1 / (1 - p)
    heads_B = torch.zeros(B, dtype=torch.int64, device=device)
    features_D = torch.arange(D, device=device)
    keys_BT = _row_keys(seeds_B, heads_B, torch.arange(T, device=device))
    # A compiler computes the mask without temporary tensors. Half-precision factors would be rounded.
    at_once = device.type != "cpu" or torch.compiler.is_compiling() or x_BTD.dtype in (torch.bfloat16, torch.float16)
    if at_once:
        return x_BTD.masked_fill(~_kept(p, keys_BT, features_D), 0) * scale
    factor_BTD = torch.empty(B, T, D, dtype=x_BTD.dtype)
    rows = max(1, MASK_AT_ONCE // max(1, D))
    parts = zip(torch.split(factor_BTD.view(-1, D), rows), torch.split(keys_BT.flatten(), rows), strict=True)
    for factor_RD, keys_R in parts:
        factor_RD.copy_(_kept(p, keys_R, features_D)).mul_(scale)
    return x_BTD * factor_BTD


def threshold(p: float) -> int:
    """Elements whose 32 bits are below this number are dropped, for a dropout probability p."""
    # A p that rounds to 1 must fit 32 bits, too.
    return min(round(p * 2**32), 2**32 - 1)


def heads_of_batch(seeds_B: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """For each of the B·H heads of a batch: its sequence's seed, and its index 0 … H − 1."""
    indices_H = torch.arange(heads, device=seeds_B.device)
    return seeds_B.repeat_interleave(heads), indices_H.repeat(len(seeds_B))


def dropout_mask(p: float, seeds_N: Tensor, heads_N: Tensor, tokens_T: Tensor, columns_S: Tensor) -> Tensor:
    """True where an element is kept, bool (N, T, S).

    `seeds_N` are the seeds of the sequences, and `heads_N` indices among a sequence's heads; `tokens_T`, and
    `columns_S` where they are keys, count tokens from the start of the sequence.
    """
    return _kept(p, _row_keys(seeds_N, heads_N, tokens_T), columns_S)


def uniforms(seeds_B: Tensor, tokens: int) -> Tensor:
    """Numbers for the tokens of each sequence, uniform on [0, 1), float64 (B, tokens): functions of seed and token."""
    tokens_T = torch.arange(tokens, device=seeds_B.device)
    # 53 bits, as many as a float64 holds.
    return _shift(_mixed(seeds_B[:, None] + tokens_T * _signed64(_GOLDEN)), 11, 64).double() * 2.0**-53


_GOLDEN = 0x9E3779B97F4A7C15


def _row_keys(seeds_N: Tensor, heads_N: Tensor, tokens_T: Tensor) -> Tensor:
    """The key of each row, int32 (N, T)."""
    counter_NT = (heads_N.long()[:, None] << 32) | tokens_T.long()
    return _mixed(seeds_N.to(counter_NT.device)[:, None] + counter_NT * _signed64(_GOLDEN)).to(torch.int32)


def _kept(p: float, row_keys: Tensor, columns_S: Tensor) -> Tensor:
    """True where an element of the rows is kept, bool, with the columns as a further dimension."""
    x = row_keys[..., None] + columns_S.to(torch.int32) * _signed32(0x9E3779B9)
    x ^= _shift(x, 16, 32)
    x *= _signed32(0x7FEB352D)
    x ^= _shift(x, 15, 32)
    x *= _signed32(0x846CA68B)
    x ^= _shift(x, 16, 32)
    # With the highest bit flipped, signed integers compare as unsigned ones.
    x ^= _signed32(0x80000000)
    return x >= threshold(p) - 2**31


def _mixed(x: Tensor) -> Tensor:
    """The 64-bit mixer."""
    x = (x ^ _shift(x, 30, 64)) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27, 64)) * _signed64(0x94D049BB133111EB)
    return x ^ _shift(x, 31, 64)


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Shift right, filled with zeros."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


# torch has few operations of unsigned integers. Signed ones wrap around to the same bits.
def _signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
