"""Sequences of different lengths without their padding.

Every layer but attention computes each token by itself, so it can compute the tokens of all sequences in one row,
(1, N, D). Attention needs them as (B, T, …) again, where what follows a sequence is padding.

Shapes: B sequences, T tokens of the longest, N tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Packing:
    """The places of the N tokens of B sequences in a padded batch of (B, T)."""

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None) -> None:
        """`lengths`: the number of tokens of each sequence."""
        self.batch, self.longest = len(lengths), max(lengths)
        self.lengths_B = lengths_B = torch.tensor(lengths, device=device)
        # Row-major: the tokens of the first sequence, then of the second.
        is_token_BT = torch.arange(self.longest, device=device) < lengths_B[:, None]
        # Without padding there is nothing to move.
        self._places_N = None if bool(is_token_BT.all()) else is_token_BT.flatten().nonzero().squeeze(1)

    def pack(self, padded_BTX: Tensor) -> Tensor:
        """(B, T, …) without padding, (1, N, …)."""
        rows = padded_BTX.flatten(0, 1)
        return (rows if self._places_N is None else rows.index_select(0, self._places_N))[None]

    def unpack(self, packed_1NX: Tensor) -> Tensor:
        """(1, N, …) as (B, T, …), with zeros as padding."""
        rows, inner = packed_1NX[0], packed_1NX.shape[2:]
        if self._places_N is not None:
            rows = rows.new_zeros(self.batch * self.longest, *inner).index_copy_(0, self._places_N, rows)
        return rows.view(self.batch, self.longest, *inner)
