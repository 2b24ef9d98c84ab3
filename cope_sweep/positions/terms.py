"""What a scoring encoding adds to the attention logits, said in a form that fused kernels understand.

An encoding's `score` makes its whole (B, H, Q, S) bias; its `term` says the same by tables of at most (B, H, Q, ·),
or by what makes them, from which a kernel makes the bias of one tile at a time. The kinds of terms:

    contextual, at the position p_ij that gates add up to (see cope.py):
        LookUp            z_i[p_ij], interpolated between integers, positions stopping at the table's last
        PiecewiseLinear   slope_i[n]·p_ij + intercept_i[n], p_ij being in segment n
        Slope             m_h·p_ij
    of the distance i − j:
        RelativeLookUp    z_i[i − j]
        DistanceBias      b_h[i − j]
        DistanceSlope     m_h·(i − j)

Shapes: B batch, H heads, Q queries, P positions, N knots, R distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

GateSource = Literal["logits", "keys", "values", "separate"]
"""What a gate is the sigmoid of: the attention logits themselves (after any rotation), or q·x/√K with q before any
rotation and x the keys before any rotation, the values, or the encoding's own keys."""


@dataclass(frozen=True)
class LookUp:
    """z_i[p_ij] with z = scale·q·e, interpolated; p_ij stops at P − 1."""

    q_BHQK: Tensor
    e_PK: Tensor
    """Or (H, P, K): a table for each head."""
    scale: float
    gate: GateSource

    @cached_property
    def z_BHQP(self) -> Tensor:  # noqa: N802
        """For kernels that want it made; those that make it tile by tile never hold it."""
        return _products(self.q_BHQK, self.e_PK, self.scale)


@dataclass(frozen=True)
class PiecewiseLinear:
    """slope_i[n]·p_ij + intercept_i[n], where n knots are ≤ p_ij. Continuous: the knots themselves get no gradient."""

    knots_N: Tensor
    """Ascending."""
    slope_BHQM: Tensor
    """M = N + 1 segments."""
    intercept_BHQM: Tensor
    limit: float | None
    """Where positions stop, if they do."""
    gate: GateSource


@dataclass(frozen=True)
class Slope:
    """m_h·p_ij, without a limit."""

    m_H: Tensor
    gate: GateSource


@dataclass(frozen=True)
class RelativeLookUp:
    """z_i[i − j] with z = scale·q·e; a distance ≥ R adds nothing, or what R − 1 adds."""

    q_BHQK: Tensor
    e_RK: Tensor
    scale: float
    far: Literal["none", "last"]

    @cached_property
    def z_BHQR(self) -> Tensor:  # noqa: N802
        return _products(self.q_BHQK, self.e_RK, self.scale)


@dataclass(frozen=True)
class DistanceBias:
    """b_h[i − j]; the last entry serves all that is farther."""

    b_HR: Tensor


@dataclass(frozen=True)
class DistanceSlope:
    """m_h·(i − j), the slopes being constants."""

    m_H: Tensor


ContextualTerm = LookUp | PiecewiseLinear | Slope
Term = ContextualTerm | RelativeLookUp | DistanceBias | DistanceSlope


def _products(q_BHQK: Tensor, e_PK: Tensor, scale: float) -> Tensor:
    z_BHQP = q_BHQK @ e_PK.transpose(-1, -2)
    return z_BHQP if scale == 1 else z_BHQP * scale
