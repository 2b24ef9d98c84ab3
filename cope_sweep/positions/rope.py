"""RoPE: queries and keys rotated by angles proportional to their positions (Su et al. 2021, RoFormer).

At position t the pair of components (k, k + K/2) is rotated by t·base^(−2k/K), the layout of Llama. A score then
depends on positions only through their difference.

Shapes: B batch, H heads, T tokens, K head dim, C = K/2 pairs of components.
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

        cos_TC, sin_TC = _rotation(self.base, start, x_BHTK)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos_TC - b * sin_TC, b * cos_TC + a * sin_TC), dim=-1)


def _rotation(base: float, start: int, x_BHTK: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each pair of components of `x_BHTK`, (T, C), in its type and on its device.

    They are kept: layers, queries and keys share them. While torch.compile traces, they are part of the graph, which
    computes them once for all layers.
    """
    import torch

    T, K = x_BHTK.shape[-2:]
    wanted = (base, K, start, T, x_BHTK.dtype, x_BHTK.device)
    # What is computed with fake tensors, or while a CUDA graph is captured, has no values to keep.
    if torch.compiler.is_compiling() or type(x_BHTK) is not torch.Tensor:
        return _cos_and_sin(*wanted)
    if x_BHTK.is_cuda and torch.cuda.is_current_stream_capturing():
        return _cos_and_sin(*wanted)
    return _kept_cos_and_sin(*wanted)


def _cos_and_sin(
    base: float, head_dim: int, start: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    import torch

    # In float64: at position 10⁵ a float32 angle has an error of up to 4·10⁻³.
    rate_C = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle_TC = torch.arange(start, start + tokens, device=device)[:, None] * rate_C
    return angle_TC.cos().to(dtype), angle_TC.sin().to(dtype)


@functools.lru_cache(maxsize=8)
def _kept_cos_and_sin(
    base: float, head_dim: int, start: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    import torch

    # Tensors made in inference mode could not be used in a training step later.
    with torch.inference_mode(False), torch.no_grad():
        return _cos_and_sin(base, head_dim, start, tokens, dtype, device)
