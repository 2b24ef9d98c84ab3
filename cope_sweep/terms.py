"""Terms: the biases of scoring encodings in the form that fused kernels take.

An encoding's `score` computes its whole (B, H, Q, S) bias. Its `term` describes the same bias by tables of at most
(B, H, Q, ·) entries, or by their factors, from which a kernel computes the bias of one tile at a time. The terms:

    contextual, functions of the position p_ij, which is a sum of gates (see cope.py):
        LookUp            z_i[p_ij], interpolated between integers, positions clamped to the last entry
        PiecewiseLinear   slope_i[n]·p_ij + intercept_i[n] in segment n
        Slope             m_h·p_ij
        LogSlope          m_h·(a sum of logarithms of gates)
    functions of the distance i − j:
        RelativeLookUp    z_i[i − j]
        DistanceBias      b_h[i − j]
        DistanceSlope     m_h·(i − j)
    a function of the distance and the query's position:
        ShareBias         f_h(u[i − j]·r[i]), f_h piecewise linear
    a function of the key:
        KeyBias           b_hj
    a mask:
        Window            −∞ for i − j ≥ w

One term describes weights that replace the softmax: StickBreak.

Shapes: B batch, H heads, Q queries, K head dim, P positions, N knots, M = N + 1 segments,
R distances, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

GateSource = Literal["logits", "keys", "values", "separate"]
"""The argument of a gate's sigmoid. `logits`: the attention logits, after any rotation. Otherwise q·x/√K with the query
q before any rotation, where x are the keys before any rotation, the values, or the encoding's separate keys. A term's
`gate_bias_H` is added to that argument; None: nothing is."""


@dataclass(frozen=True)
class LookUp:
    """z_i[p_ij] with z = scale·q·e, interpolated linearly; p_ij is clamped to P − 1."""

    q_BHQK: Tensor
    """Before any rotation, or after it (`Encoding.uses_rotated_query`)."""
    e_PK: Tensor
    """Or (H, P, K), with a table for each head."""
    scale: float
    gate: GateSource
    gate_bias_H: Tensor | None = None


@dataclass(frozen=True)
class PiecewiseLinear:
    """slope_i[n]·p_ij + intercept_i[n], where n is the number of knots ≤ p_ij.

    The function is continuous, so the knots get no gradient.
    """

    knots_N: Tensor
    """Ascending."""
    slope_BHQM: Tensor
    """M = N + 1 segments."""
    intercept_BHQM: Tensor
    limit: float | None
    """The largest position; None if positions are not clamped."""
    gate: GateSource
    gate_bias_H: Tensor | None = None


@dataclass(frozen=True)
class Slope:
    """m_h·p_ij; p_ij is not clamped."""

    m_H: Tensor
    gate: GateSource
    gate_bias_H: Tensor | None = None


@dataclass(frozen=True)
class LogSlope:
    """m_h·Σ_{j < l ≤ i} log σ(q_i·k_l), with queries and keys for these gates alone."""

    m_H: Tensor
    q_BHQF: Tensor
    k_BHSF: Tensor


@dataclass(frozen=True)
class RelativeLookUp:
    """z_i[i − j] with z = scale·q·e; a distance ≥ R adds 0 (`none`), or the same as R − 1 (`last`)."""

    q_BHQK: Tensor
    e_RK: Tensor
    """Or (H, R, K), with a table for each head."""
    scale: float
    far: Literal["none", "last"]


@dataclass(frozen=True)
class DistanceBias:
    """b_h[i − j]; larger distances use the last entry."""

    b_HR: Tensor


@dataclass(frozen=True)
class DistanceSlope:
    """m_h·(i − j); the slopes are constants without a gradient."""

    m_H: Tensor


@dataclass(frozen=True)
class ShareBias:
    """f_h(u[i − j]·r[i]), f_h(x) = slope_h[n]·x + intercept_h[n], where n is the number of knots ≤ x.

    f_h is continuous, so the knots get no gradient. u is ≥ 0 and does not decrease, and r is ≥ 0.
    """

    u_S: Tensor
    r_Q: Tensor
    knots_N: Tensor
    """Ascending."""
    slope_HM: Tensor
    """M = N + 1 segments."""
    intercept_HM: Tensor


@dataclass(frozen=True)
class KeyBias:
    """b_hj, one number for each key and head."""

    b_BHS: Tensor


@dataclass(frozen=True)
class Window:
    """0 for the last `size` keys, the query's own included, and −∞ for keys before them."""

    size: int


@dataclass(frozen=True)
class StickBreak:
    """Weights σ(s_ij)·Π_{j < k < i} (1 − σ(s_ik)) of the earlier keys, where s are the logits with all scores added."""

    keep_remainder: bool
    """The query's own value gets the weight that no key has taken."""


ContextualTerm = LookUp | PiecewiseLinear | Slope | LogSlope
Term = ContextualTerm | RelativeLookUp | DistanceBias | DistanceSlope | ShareBias | KeyBias | Window | StickBreak
