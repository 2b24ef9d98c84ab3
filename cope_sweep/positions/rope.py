"""RoPE: queries and keys rotated by angles proportional to their positions (Su et al. 2021, RoFormer).

At position t the pair of components (k, k + K/2) is rotated by t·base^(−2k/K), the layout of Llama. A score then
depends on positions only through their difference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.base import AttentionEncoding, Dims

if TYPE_CHECKING:
    import torch
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
        # A tensor that only stands for one, as in compilation, must not enter the cache.
        plain = type(x_BHTK) is torch.Tensor and not torch.compiler.is_compiling()
        angles = _cached_cos_sin if plain else _cos_sin
        cos, sin = angles(self.base, start, T, K, x_BHTK.dtype, x_BHTK.device)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _cos_sin(
    base: float, start: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of `tokens` positions from `start`, each (T, K/2)."""
    import torch

    with torch.inference_mode(mode=False):  # a tensor of inference mode could not be used in training later
        # In float64: at position 10⁵ a float32 angle has an error of up to 4·10⁻³.
        rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.arange(start, start + tokens, device=device)[:, None] * rate
        return angle.cos().to(dtype), angle.sin().to(dtype)


_cached_cos_sin = functools.lru_cache(maxsize=16)(_cos_sin)
"""The layers of a model, its queries and keys, and the steps of a training have the same angles."""
