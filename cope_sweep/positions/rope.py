"""RoPE: queries and keys turned by angles proportional to their positions (Su et al. 2021, RoFormer).

Component pairs (k, k + K/2) of position t turn by t·base^(−2k/K), the layout of Llama; a score then depends on
positions only through their difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.base import AttentionEncoding, Dims

if TYPE_CHECKING:
    from torch import Tensor


class RoPE(AttentionEncoding):
    """Rotary position embedding."""

    kind: Literal["rope"] = "rope"
    base: float = Field(default=10_000.0, gt=1, description="The slowest pair turns once in about 2π·base tokens.")

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if dims.head_dim % 2:
            raise ValueError(
                f"rope turns pairs of components, and the head dimension {dims.dim}/{dims.heads} = {dims.head_dim} "
                "is odd; choose model.dim and model.heads with an even quotient"
            )

    def rotate(self, parameters: Mapping[str, Tensor], x_BHTK: Tensor, start: int) -> Tensor:
        import torch

        T, K = x_BHTK.shape[-2:]
        # Angles in float64: at float32 a position of 10⁵ already errs in the fourth digit.
        rate = self.base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x_BHTK.device) / K)
        angle = torch.arange(start, start + T, device=x_BHTK.device)[:, None] * rate
        cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
