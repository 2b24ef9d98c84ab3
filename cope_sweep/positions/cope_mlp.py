"""CoPE-MLP: the embedding of a contextual position by a small MLP (Golovneva et al. 2024, appendix C).

    e(p) = W₂·φ(w₁·p + b₁) + b₂,    a_ij = softmax_j(q_i·k_j/√K + q_i·e(p_ij))

with N hidden units, instead of an interpolated table; p_ij as in CoPE, not clamped unless `p_max` is set. The paper
says "an N-dimensional MLP layer" and no more; one hidden layer with φ = ReLU is our interpretation, φ = GELU (the exact
one, x·Φ(x)) another.

With ReLU the bias is a piecewise linear function of p: a score is one look-up in a table of N + 1 segments, in fused
kernels too. At a knot, and at p_max − 1, its derivative is the one to the right. With GELU it is not piecewise linear:
such attention is computed in blocks of queries, with N multiply-adds for each score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import Attention, Dims, Parameter, Tensors, at_least_float32
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.terms import PiecewiseLinear

if TYPE_CHECKING:
    from torch import Tensor


class CoPEMLP(ContextualEncoding):
    """Contextual positions, embedded by an MLP with one hidden layer."""

    SOURCE: ClassVar[str] = "arXiv 2405.18719"

    kind: Literal["cope_mlp"] = "cope_mlp"
    hidden: Positive = Field(default=64, description="Hidden units: the paper's N.")
    p_max: Positive | None = Field(default=None, description="Positions are clamped to p_max − 1; null: not clamped.")
    activation: Literal["relu", "gelu"] = Field(
        default="relu", description="Of the hidden units. gelu: without fused kernels, so slower."
    )
    share_layers: bool = Field(default=False, description="One MLP for all layers, or one for each layer.")
    scale_positions: bool = Field(default=False, description="Also divide q·e(p) by √K.")

    def has_term(self, head_dim: int) -> bool:
        return self.activation == "relu"

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        per_layer = not self.share_layers
        return {
            # With these, the knots −b₁/w₁ spread over positions of about ±16, and e is small at the start.
            "w1": Parameter((self.hidden,), std=1 / 16, per_layer=per_layer),
            "b1": Parameter((self.hidden,), std=1.0, per_layer=per_layer),
            "w2": Parameter((dims.head_dim, self.hidden), std=0.02, per_layer=per_layer),
            "b2": Parameter((dims.head_dim,), per_layer=per_layer),
            **self.gate_parameters(dims),
        }

    def limit(self, parameters: Tensors) -> int | None:
        return None if self.p_max is None else self.p_max - 1

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        from cope_sweep.positions.contextual import count_knots, linear_pieces

        p_BHQS, q_BHQK = self.positions(parameters, attention), attention.q_BHQK
        if (limit := self.limit(parameters)) is not None:
            # Not clamp, which passes the gradient at the limit itself: the derivative to the right is 0.
            p_BHQS = p_BHQS.masked_fill(p_BHQS >= limit, limit)
        if self.activation == "gelu":
            from cope_sweep.positions.gelu_units import weighted_units

            # q·(W₂h + b₂) = (q·W₂)·h + q·b₂, so the vectors e(p) are never computed.
            units_BHQS = weighted_units(p_BHQS, q_BHQK @ parameters["w2"], parameters["w1"], parameters["b1"])
            return (units_BHQS + q_BHQK @ parameters["b2"][:, None]) * self._scale(q_BHQK)
        knots_N, slope_BHQM, intercept_BHQM = self._segments(parameters, q_BHQK)
        return linear_pieces(intercept_BHQM, slope_BHQM, count_knots(knots_N, p_BHQS.detach()), p_BHQS)

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> PiecewiseLinear:
        """The table of `score` with ReLU; with GELU there is none."""
        limit = self.limit(parameters)
        return PiecewiseLinear(
            *self._segments(parameters, q_BHQK),
            None if limit is None else float(limit),
            self.gate_source,
            self.gate_shift(parameters),
        )

    def _segments(self, parameters: Tensors, q_BHQK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The bias as a piecewise linear function of p: q·e(p) = slope[n]·p + intercept[n] between knots n − 1 and n.

        The knots −b₁/w₁ are the same for all queries, so a query needs only two tables of N + 1 entries. They move with
        w₁ and b₁, but the function is continuous there, so slopes and intercepts carry all of its gradient.
        """
        w1_N, b1_N, w2_KN, b2_K = (at_least_float32(parameters[name]) for name in ("w1", "b1", "w2", "b2"))
        precise_q_BHQK = at_least_float32(q_BHQK)
        knots_N, on_NM = relu_segments(w1_N, b1_N)
        c_BHQN = precise_q_BHQK @ w2_KN
        slope_BHQM = c_BHQN @ (w1_N[:, None] * on_NM)
        intercept_BHQM = c_BHQN @ (b1_N[:, None] * on_NM) + (precise_q_BHQK @ b2_K)[..., None]
        if self.scale_positions:
            slope_BHQM, intercept_BHQM = (x * self._scale(q_BHQK) for x in (slope_BHQM, intercept_BHQM))
        return knots_N, slope_BHQM, intercept_BHQM

    def _scale(self, q_BHQK: Tensor) -> float:
        return q_BHQK.shape[-1] ** -0.5 if self.scale_positions else 1.0


def relu_segments(w1_N: Tensor, b1_N: Tensor) -> tuple[Tensor, Tensor]:
    """The knots −b₁/w₁ of units relu(w₁p + b₁), p ≥ 0, ascending, and which units are active in each segment, (N, M).

    M = N + 1. Knots that no p reaches are infinite; a segment beyond them has no active unit.
    """
    import torch

    knots_N = (-b1_N / w1_N).detach()
    # Knots ≤ 0 have no effect. A unit with w₁ = 0 has no knot.
    knots_N = torch.where(knots_N > 0, knots_N, torch.inf).sort().values
    # A unit is either active or inactive throughout a segment, so one inner point of each segment decides.
    edges = torch.cat((knots_N.new_zeros(1), knots_N, knots_N.new_full((1,), torch.inf)))
    left, right = edges[:-1], edges[1:]
    inside_M = torch.where(right.isinf(), 2 * left + 1, (left + right) / 2)
    return knots_N, (w1_N[:, None] * inside_M + b1_N[:, None] > 0) & inside_M.isfinite()
