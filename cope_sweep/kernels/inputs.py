"""What attention is asked to compute.

Shapes: B batch, T queries, S all tokens (queries are the last T of them), H heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cope_sweep.positions import Encoding


@dataclass(frozen=True)
class Position:
    """An encoding that serves a layer, with its parameters there."""

    encoding: Encoding
    parameters: Mapping[str, Tensor] = field(default_factory=dict)


Positions = Sequence[Position]


@dataclass(frozen=True)
class Inputs:
    """What attention is computed from. Queries are the last T of the S tokens."""

    q_BHTK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor
    rotated_q_BHTK: Tensor
    rotated_k_BHSK: Tensor
    gate_k_BHSK: Sequence[Tensor | None]
    """Each encoding's own keys, where it has them."""
    hard: bool = False
    """One-hot attention to the largest logit; the gradient is that of the softmax ("straight through")."""
    lengths_B: Tensor | None = None
    """int64, the tokens of each sequence, where they differ: what is after them is padding. A query there attends to
    nothing: its output is 0, and no gradient comes of it."""

    @staticmethod
    def plain(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Inputs:
        """Without rotation, and with no keys but these."""
        return Inputs(q_BHTK, k_BHSK, v_BHSK, q_BHTK, k_BHSK, ())

    @property
    def rotated(self) -> bool:
        return self.rotated_q_BHTK is not self.q_BHTK
