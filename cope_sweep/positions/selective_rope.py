"""Selective RoPE (Movahedi et al. 2025): rotations whose angles are running sums of what each token decides.

    angle of pair c at token t: τ_c·Σ_{l ≤ t} φ_lc        τ_c = 500000^(−2c/K)
    φ = conv₄(W₂·W₁·x/|x|), K/2 numbers for each head

The convolution is causal, of 4 taps for each number; W₂·W₁ has a low rank. The released code takes the unit vector of
each head's slice of x (`unit: head`), the paper's text normalises x. Its taps start from N(0, 0.02²), ours as in
torch's convolution, ±1/2: initial angles are small in both, and in its model smaller.

Shapes: C = K/2 pairs of components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, causal_convolution
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor

TAPS = 4
EPS = 1e-6
"""Inside the root of the unit vector, as released."""
BASE = 500_000.0


class SelectiveRoPE(RotaryEncoding):
    """Rotations that depend on the input."""

    kind: Literal["selective_rope"] = "selective_rope"
    rank: int = Field(default=16, ge=1, le=10**6, description="Rank of the projection to φ.")
    unit: Literal["input", "head"] = Field(
        default="input", description="What is divided by its length: the layer's input, or each head's slice of it."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        pairs, bound = dims.head_dim // 2, dims.linear_bound
        return {
            "down": Parameter((self.rank, dims.input_dim), std=0.02, per_layer=True, bound=bound),
            "up": Parameter((dims.heads, pairs, self.rank), std=0.02, per_layer=True, bound=bound),
            "taps": Parameter((dims.heads * pairs, TAPS), per_layer=True, bound=TAPS**-0.5),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """W₂·W₁·x/|x|, before the convolution."""
        up_HCR = parameters["up"]
        units = len(up_HCR) if self.unit == "head" else 1
        parts = at_least_float32(h_BTD).reshape(*h_BTD.shape[:2], units, h_BTD.shape[-1] // units)
        unit = parts * (parts.square().sum(-1, keepdim=True) + EPS).rsqrt()
        return unit.flatten(2).to(h_BTD.dtype) @ parameters["down"].T @ up_HCR.flatten(0, 1).T

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        import torch

        assert features_BHSF is not None  # noqa: S101 - the model calls features first
        phi_BHSC = causal_convolution(at_least_float32(features_BHSF), parameters["taps"])
        C, T = phi_BHSC.shape[-1], x_BHTK.shape[2]
        tau_C = BASE ** (-torch.arange(C, dtype=torch.float64, device=x_BHTK.device) / C)
        angle_BHTC = (phi_BHSC.cumsum(2) * tau_C.to(phi_BHSC.dtype))[:, :, start : start + T]
        return turned(x_BHTK, angle_BHTC.cos(), angle_BHTC.sin())
