"""Sinusoidal position encoding (Vaswani et al. 2017, section 3.5): fixed, added to the input.

P(t)[2i] = sin(t·base^(−2i/D)),  P(t)[2i + 1] = cos(t·base^(−2i/D))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import Dims, Encoding, Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Sinusoidal(Encoding):
    """Sines and cosines of the token's position, added to the input."""

    SOURCE: ClassVar[str] = "arXiv 1706.03762"

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: float = Field(default=10_000.0, gt=1, description="Wavelengths range from 2π to 2π·base tokens.")
    amplitude: float = Field(
        default=1.0,
        gt=0,
        description="Factor of the sinusoids; Vaswani et al. multiply the token embeddings by √D instead.",
    )

    def check(self, dims: Dims) -> None:
        if dims.dim % 2:
            raise InvalidValue(
                f"sinusoidal needs pairs of components, and model.dim = {dims.dim} is odd; choose an even one",
                key="model.dim",
                kind=self.kind,
                dim=dims.dim,
            )

    def embed(self, parameters: Tensors, x_BTD: Tensor, start: int) -> Tensor:
        import torch

        T, D = x_BTD.shape[-2:]
        rate = self.base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x_BTD.device) / D)
        angle = torch.arange(start, start + T, device=x_BTD.device)[:, None] * rate
        p_TD = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
        return x_BTD + self.amplitude * p_TD.to(x_BTD.dtype)
