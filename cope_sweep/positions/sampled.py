"""Positions as random floats: Random Float Sampling (Shimizu et al. 2026, arXiv 2602.14050), for RoPE and ALiBi.

In training, the T positions of each sequence are independent, uniform on [0, L), and sorted. So a longer sequence has
no positions that were not seen. L is the field `sampled` of an encoding.

This reading follows the abstract, "instead of selecting position indices from a predefined discrete set, RFS uses
randomly sampled continuous values". Taken where that leaves something open: each sequence has its own positions, in
all layers and, up to L, for all encodings the same. In an evaluation they are the means of sorted ones,
L·(t + 1)/(T + 1) for t = 0 … T − 1, evenly spaced over the same range for the sequence's own T. They depend on the
number of tokens that follow, so tokens cannot be computed one after another, with a cache.
"""

from typing import Annotated

from pydantic import Field

Sampled = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
"""L; None: positions are 0, 1, 2, …"""

DESCRIPTION = (
    "L: in training, positions are random floats, uniform on [0, L) and sorted; in evaluations, evenly spaced over it "
    "(Random Float Sampling). null: 0, 1, 2, …"
)
"""Of the field `sampled`."""
