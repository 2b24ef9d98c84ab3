"""RoPE: queries and keys rotated by angles proportional to their positions (Su et al. 2021, RoFormer).

At position t the pair of components (k, k + K/2) is rotated by t·base^(−2k/K), the layout of Llama. A score then
depends on positions only through their difference.
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
    base: float = Field(
        default=10_000.0, gt=1, description="The slowest pair completes a turn in about 2π·base tokens."
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if dims.head_dim % 2:
            raise ValueError(
                f"rope rotates pairs of components, and the head dimension {dims.dim}/{dims.heads} = {dims.head_dim} "
                "is odd; choose model.dim and model.heads with an even quotient"
            )

    def rotate(self, parameters: Mapping[str, Tensor], x_BHTK: Tensor, start: int) -> Tensor:
        import torch

        T, K = x_BHTK.shape[-2:]
        # In float64: at position 10⁵ a float32 angle has an error of up to 4·10⁻³.
        rate = self.base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x_BHTK.device) / K)
        angle = torch.arange(start, start + T, device=x_BHTK.device)[:, None] * rate
        cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
