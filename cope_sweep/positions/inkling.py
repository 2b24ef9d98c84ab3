"""Inkling's bias (model code in transformers, 2026): each query chooses a curve over the distance from a bank of them.

    s_ij = q_i·k_j/√K + Σ_m r_im·B[m, i − j]            r_i = W_r·x_i, d numbers for each head; 0 where i − j ≥ E

The d curves B are shared by the heads of a layer; layers share nothing. W_r has no bias, and both start as N(0, 0.02²).
The model has d = 16, E = 1,024, and E = 512 in layers with a window of 512 keys. There is no paper.

What else the model has is not part of it: RMS-normed queries and keys, `model.qk_norm`, there with q·k/K in place of
q·k/√K; a convolution of keys and values; in layers without a window a temperature that multiplies the bias, too
(`temperature` with `steps: false` multiplies q·k alone). A library's version has a bias beside W_r.

It is a table of distances for each query, so that the fused kernels for `relative` compute it, with r as the queries.

Shapes: M curves (d), E distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import Attention, AttentionEncoding, Dims, Parameter, Tensors, at_least_float32, computed
from cope_sweep.positions.relative import distances
from cope_sweep.terms import RelativeLookUp

if TYPE_CHECKING:
    from torch import Tensor


class Inkling(AttentionEncoding):
    """Curves over the distance, mixed by numbers that each query chooses."""

    SOURCE: ClassVar[str] = "2026 huggingface/transformers"

    kind: Literal["inkling"] = "inkling"
    curves: Annotated[int, Field(ge=1, le=10**6)] = Field(default=16, description="Number of curves.")
    distances: Positive | Literal["full"] = Field(
        default=1024, description="Distances of a curve, 0 … distances − 1; larger ones add nothing. full: the context."
    )

    def has_term(self, head_dim: int) -> bool:
        return self.curves <= head_dim

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        reach = dims.context if self.distances == "full" else self.distances
        return {
            "read_weight": Parameter((dims.heads * self.curves, dims.input_dim), std=0.02, per_layer=True),
            "curves": Parameter((self.curves, reach), std=0.02, per_layer=True),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """r, a number for each curve and head."""
        return h_BTD @ parameters["read_weight"].T

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        distance_QS = distances(attention)
        Q, S = distance_QS.shape
        r_BHQM = at_least_float32(computed(attention.features_BHSF)[:, :, S - Q :])
        curve_BHQE = r_BHQM @ parameters["curves"][:, :S].to(r_BHQM.dtype)
        reach = curve_BHQE.shape[-1]
        index_QS = distance_QS.clamp(0, reach - 1)
        return curve_BHQE.gather(-1, index_QS.expand(*curve_BHQE.shape[:2], Q, S)) * (distance_QS < reach)

    def term(
        self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None
    ) -> RelativeLookUp | None:
        """The table of `score`, in which r has as many components as the queries."""
        import torch.nn.functional as F

        if features_BHSF is None:
            return None
        missing = q_BHQK.shape[-1] - self.curves
        r_BHQK = F.pad(features_BHSF[:, :, keys - q_BHQK.shape[2] :], (0, missing))
        return RelativeLookUp(r_BHQK, F.pad(parameters["curves"][:, :keys].T, (0, missing)), 1.0, "none")
