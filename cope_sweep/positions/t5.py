"""T5's relative position bias (Raffel et al. 2020): a learned scalar for each head and bucket of distances.

    a_ij = softmax_j(q_i·k_j/√K + b_h[bucket(i − j)])

The first half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`, and all that
is farther shares the last. (T5 itself does not divide q·k by √K.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from cope_sweep.positions.base import Attention, AttentionEncoding, Dims, Parameter
from cope_sweep.positions.relative import distances
from cope_sweep.positions.terms import DistanceBias

if TYPE_CHECKING:
    from torch import Tensor


class T5(AttentionEncoding):
    """A bias looked up by the bucket of the distance."""

    kind: Literal["t5"] = "t5"
    buckets: Annotated[int, Field(ge=2)] = 32
    max_distance: Annotated[int, Field(ge=2)] = Field(default=128, description="From here on, the last bucket.")
    share_layers: bool = Field(default=True, description="One table for all layers (T5's way), or one for each.")

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"t5.max_distance = {self.max_distance} must be more than half of t5.buckets = {self.buckets}: "
                "so many distances have a bucket of their own"
            )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        return {"b": Parameter((self.buckets, dims.heads), per_layer=not self.share_layers)}

    def score(self, parameters: Mapping[str, Tensor], attention: Attention) -> Tensor:
        bucket_QS = self.bucket(distances(attention).clamp(min=0))
        return parameters["b"][bucket_QS].permute(2, 0, 1)[None]

    def term(self, parameters: Mapping[str, Tensor], q_BHQK: Tensor) -> DistanceBias:
        import torch

        distance_R = torch.arange(self.max_distance + 1, device=q_BHQK.device)
        return DistanceBias(parameters["b"][self.bucket(distance_R)].T)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket, 0 … buckets − 1, of distances ≥ 0."""
        exact = self.buckets // 2
        ratio = (distance.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        far = (exact + ratio * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        return distance.where(distance < exact, far)
