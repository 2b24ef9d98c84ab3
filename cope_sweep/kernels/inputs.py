"""The inputs of attention.

Shapes: B batch, T queries, S all tokens (queries are the last T of them), H heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cope_sweep.positions import Encoding


@dataclass(frozen=True)
class Position:
    """An encoding of a layer, with its parameters in that layer."""

    encoding: Encoding
    parameters: Mapping[str, Tensor] = field(default_factory=dict)


Positions = Sequence[Position]


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of one attention layer. Queries are the last T of the S tokens."""

    q_BHTK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor
    rotated_q_BHTK: Tensor
    rotated_k_BHSK: Tensor
    features_BHSF: Sequence[Tensor | None]
    """For each encoding, its features of all tokens, as gate keys; None if it has none."""
    hard: bool = False
    """One-hot attention to the largest logit; the gradient is that of the softmax ("straight through")."""
    lengths_B: Tensor | None = None
    """int64: the number of tokens of each sequence; later ones are padding. None: all S. The output at padding is 0 and
    has no gradient."""

    @staticmethod
    def plain(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Inputs:
        """Inputs without rotation and without features."""
        return Inputs(q_BHTK, k_BHSK, v_BHSK, q_BHTK, k_BHSK, ())

    @property
    def rotated(self) -> bool:
        """Whether an encoding has rotated queries and keys."""
        return self.rotated_q_BHTK is not self.q_BHTK
