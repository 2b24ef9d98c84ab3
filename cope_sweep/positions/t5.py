"""T5's relative position bias (Raffel et al. 2020): a learned scalar for each head and bucket of distances.

    a_ij = softmax_j(q_i·k_j/√K + b_h[bucket(i − j)])

Each of the first half of the buckets holds one distance. The widths of the others grow logarithmically up to
`max_distance`; larger distances share the last bucket. (T5 itself does not divide q·k by √K.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import Attention, AttentionEncoding, Cut, Dims, Parameter, Tensors
from cope_sweep.positions.relative import distances
from cope_sweep.terms import DistanceBias

if TYPE_CHECKING:
    from torch import Tensor


class T5(AttentionEncoding):
    """A learned bias for each head and bucket of distances."""

    SOURCE: ClassVar[str] = "arXiv 1910.10683"

    kind: Literal["t5"] = "t5"
    buckets: Annotated[int, Field(ge=2, le=10**9)] = Field(default=32, description="Number of buckets.")
    max_distance: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=128, description="This and larger distances use the last bucket."
    )
    share_layers: bool = Field(default=True, description="One table for all layers, as in T5, or one for each layer.")
    cut: Cut = Field(
        default=None,
        description="This and larger distances have the bucket of the distance before; null: none. In "
        "`evaluate.variants`, this measures buckets that are cut after training.",
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.max_distance <= self.buckets // 2:
            raise InvalidValue(
                f"t5.max_distance = {self.max_distance} must be more than half of t5.buckets = {self.buckets}: "
                "each of the smaller distances has its own bucket",
                key="t5.max_distance",
                value=self.max_distance,
                buckets=self.buckets,
            )
        if self.cut is not None and self.cut > self.max_distance:
            self.refuse(("cut",), f"t5.max_distance is {self.max_distance}")

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        return {"b": Parameter((self.buckets, dims.heads), per_layer=not self.share_layers)}

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        bucket_QS = self.bucket(distances(attention).clamp(min=0))
        return parameters["b"][bucket_QS].permute(2, 0, 1)[None]

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> DistanceBias:
        import torch

        distance_R = torch.arange(min(self.max_distance + 1, keys), device=q_BHQK.device)
        return DistanceBias(parameters["b"][self.bucket(distance_R)].T)

    def bucket(self, distance: Tensor) -> Tensor:
        """The buckets of distances ≥ 0, int64 in 0 … buckets − 1; the same shape as `distance`."""
        distance = distance if self.cut is None else distance.clamp(max=self.cut - 1)
        exact = self.buckets // 2
        # The logarithm of 0 would be −∞. Small distances have buckets of their own anyway.
        ratio = (distance.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        far = (exact + ratio * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        return distance.where(distance < exact, far)
