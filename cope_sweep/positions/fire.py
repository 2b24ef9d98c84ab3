"""FIRE (Li et al. 2024): a learned function of the distance, relative to the query's position.

    a_ij = softmax_j(q_i·k_j/√K + MLP_h(ψ(i − j)/ψ(max(i, L))))        ψ(z) = log(|c·z| + 1)

The MLP has one input, N hidden units with ReLU and H outputs; it, c (which starts at 0.1) and the threshold L (512
times a learned factor that starts at 1) are those of a layer. DAPE's training code starts FIRE from half that L.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Attention, AttentionEncoding, Cut, Dims, Parameter, Tensors, at_least_float32
from cope_sweep.positions.cope_mlp import relu_segments
from cope_sweep.positions.relative import distances
from cope_sweep.terms import ShareBias

if TYPE_CHECKING:
    from torch import Tensor

SLOPE = 0.01
"""Slope of LeakyReLU below 0."""


class FIRE(AttentionEncoding):
    """Functional interpolation of relative positions."""

    SOURCE: ClassVar[str] = "arXiv 2310.04418"

    kind: Literal["fire"] = "fire"
    hidden: int = Field(default=32, ge=1, le=10**6, description="Hidden units of the MLP.")
    threshold: float = Field(
        default=512.0, gt=0, description="Initial L: earlier queries divide distances by ψ(L), later ones by ψ(i)."
    )
    activation: Literal["relu", "leaky_relu"] = Field(default="relu", description="leaky_relu: as DAPE uses FIRE.")
    cut: Cut = Field(
        default=None,
        description="This and larger distances have the bias of the distance before; null: none. For "
        "`evaluate.variants`.",
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        inner = self.hidden**-0.5
        return {
            "w1": Parameter((self.hidden,), per_layer=True, bound=1.0),
            "b1": Parameter((self.hidden,), per_layer=True, bound=1.0),
            "w2": Parameter((dims.heads, self.hidden), per_layer=True, bound=inner),
            "b2": Parameter((dims.heads,), per_layer=True, bound=inner),
            "c": Parameter((1,), per_layer=True, centre=0.1),
            "factor": Parameter((1,), per_layer=True, centre=1.0),
        }

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch.nn.functional as F

        Q, S = attention.visible_QS.shape
        u_S, r_Q = self._factors(parameters, Q, S)
        # Keys after the query have negative distances. They are masked, and only need an index.
        share_QS1 = (u_S[distances(attention).clamp(min=0)] * r_Q[:, None])[..., None]
        units_QSN = share_QS1 * parameters["w1"] + parameters["b1"]
        units_QSN = units_QSN.relu() if self.activation == "relu" else F.leaky_relu(units_QSN, SLOPE)
        return (units_QSN @ parameters["w2"].T + parameters["b2"]).permute(2, 0, 1)[None]

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> ShareBias:
        """The MLP is a piecewise linear function of its input, with the same knots for all heads."""
        u_S, r_Q = self._factors(parameters, q_BHQK.shape[2], keys)
        w1_N, b1_N, w2_HN, b2_H = (at_least_float32(parameters[name]) for name in ("w1", "b1", "w2", "b2"))
        knots_N, on_NM = relu_segments(w1_N, b1_N)
        slope_of_unit_NM = on_NM.to(w1_N.dtype)
        if self.activation == "leaky_relu":
            slope_of_unit_NM = slope_of_unit_NM + SLOPE * (1 - slope_of_unit_NM)
        # Not as matrix products: they add in another order, and runs would no longer give the same numbers to the bit.
        of_units_HNM = w2_HN[:, :, None] * slope_of_unit_NM
        slope_HM = (of_units_HNM * w1_N[:, None]).sum(1)
        intercept_HM = (of_units_HNM * b1_N[:, None]).sum(1) + b2_H[:, None]
        return ShareBias(u_S, r_Q, knots_N, slope_HM, intercept_HM)

    def _factors(self, parameters: Tensors, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """ψ of all distances, and 1/ψ(max(i, L)) of the last queries: their products are the input of the MLP."""
        import torch

        c, threshold = (
            at_least_float32(parameters["c"]),
            (self.threshold * at_least_float32(parameters["factor"])).abs(),
        )
        i_S = torch.arange(keys, device=c.device, dtype=c.dtype)
        distance_S = i_S if self.cut is None else i_S.clamp(max=self.cut - 1)
        u_S = ((c * distance_S).abs() + 1).log()
        normaliser_Q = ((c * i_S[keys - queries :].maximum(threshold)).abs() + 1).log()
        # A threshold that was learned down to 0 leaves ψ(0) = 0 to the first query.
        return u_S, 1 / (normaliser_Q + 1e-6)
