"""Tile sizes, numbers of warps and of pipeline stages of the Triton kernels: one choice for each type and head dim.

They are constants, because the kernels share the boundaries of tiles, and because a choice by measurement could differ
between two processes, and with it the bits of their results. They are what fits the registers and the shared memory of
compute capabilities 8.0 and 9.0, as compiled. For 16-bit numbers and head dims up to 64, twelve choices per kernel were
timed on an H100: these are within 8 % of the fastest, with 64 positions and with one position per key; others take up
to 2.4 times as long. For other types and head dims, no others were tried.

The forward kernel determines where plain tiles end, and `backward_rows` stores positions at the edges of the tiles of
`backward_keys`, so the tiles of one kernel have to be multiples of another's: `tests/kernels/test_triton.py` lists
which. A BLOCK_S is at most 64: sums of so many gates are exact (see `tiles.py`).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

KERNELS = ("forward", "backward_rows", "backward_keys")
NEAR = tuple(f"{kernel}_near" for kernel in KERNELS)
FAR = tuple(f"{kernel}_far" for kernel in KERNELS)
TileSizes = dict[str, int]
"""By parameter of a kernel: its tile sizes, `num_warps` and `num_stages`."""

INTERPRETED = (16, 16, 16, 4, 1)
"""For Triton's interpreter, whose time grows with operations, not tiles: small tiles test more borders."""

CHOICES = {
    (16, 64): ((64, 64, 128, 4, 3), (64, 32, 32, 4, 3), (32, 64, 64, 4, 3)),
    (16, 128): ((64, 32, 64, 4, 2), (64, 32, 64, 4, 2), (16, 64, 64, 4, 2)),
    (16, 256): ((64, 32, 32, 8, 2), (32, 32, 32, 8, 1), (32, 32, 32, 8, 1)),
    (32, 64): ((32, 32, 32, 4, 1), (32, 32, 32, 4, 1), (32, 32, 32, 4, 1)),
    (32, 128): ((32, 32, 32, 4, 1), (16, 32, 32, 4, 1), (16, 32, 16, 4, 1)),
    (32, 256): ((16, 32, 32, 8, 1), (16, 32, 32, 8, 1), (16, 32, 16, 8, 1)),
}
"""By the bits of an input's number and the largest head dim, for each of `KERNELS`: BLOCK_T queries and BLOCK_S keys of
a general tile, PLAIN_S keys (of `backward_keys`: PLAIN_T queries) of a plain one, warps, and stages."""

NEAR_CHOICES = {
    (16, 64): ((64, 64, 64, 4, 3), (64, 32, 64, 4, 3), (32, 64, 64, 4, 1)),
    (16, 128): ((64, 32, 64, 4, 2), (64, 32, 64, 4, 2), (16, 64, 64, 4, 1)),
}
FAR_CHOICES = {
    (16, 64): ((64, 64, 64, 4, 3), (64, 32, 32, 4, 3), (32, 64, 64, 4, 3)),
    (16, 128): ((64, 64, 64, 4, 2), (64, 64, 64, 4, 2), (16, 64, 64, 8, 2)),
}
"""For `NEAR` and `FAR`, where they are not `CHOICES`: as compiled (`cope-sweep bench sizes`), not timed. In FAR, only
`backward_keys` uses BLOCK_S; its tiles have to be those of NEAR."""


def tile_sizes(kernel: str, dtype: torch.dtype, head_dim: int) -> TileSizes:
    """The choice for a kernel."""
    of = kernel.removesuffix("_near").removesuffix("_far")
    sizes = INTERPRETED
    if not triton.knobs.runtime.interpret:
        largest = next(size for size in (64, 128, 256) if head_dim <= size)
        choices = {"near": NEAR_CHOICES, "far": FAR_CHOICES}.get(kernel.rpartition("_")[2], {})
        key = dtype.itemsize * 8, largest
        sizes = choices.get(key, CHOICES[key])[KERNELS.index(of)]
    plain = "PLAIN_T" if of == "backward_keys" else "PLAIN_S"
    found = dict(zip(("BLOCK_T", "BLOCK_S", plain, "num_warps", "num_stages"), sizes, strict=True))
    if kernel in FAR and of != "backward_keys":  # has no general tiles
        found.pop("BLOCK_S")
    return found
