"""DaRoPE (2026) and HoPE (Chen et al. 2024): RoPE with other angles in its slow pairs.

Fast pairs, which turn at least once in the trained length L (θ_c ≥ 2π/L), rotate as in RoPE. In the slow ones the angle
of token t is

    θ_c·L·σ(w_h·x_t + b_h + α_h·logit(u_t)),  u_t = (t + ½)/L within [1/(2L), 1 − 1/(2L)]       DaRoPE
    0                                                                                          HoPE (`slow: none`)

α starts at 1, where w = 0 gives RoPE's angle at t + ½. The bounds of u are ours: the paper was not at hand.

Shapes: C = K/2 pairs of components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, project, projection
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor


class DaRoPE(RotaryEncoding):
    """Rotary position embedding whose slow pairs rotate by what a token decides, or not at all."""

    kind: Literal["darope"] = "darope"
    length: int = Field(default=512, ge=1, le=10**9, description="L, the length of the training sequences.")
    base: float = Field(default=10_000.0, gt=1, description="As RoPE's.")
    slow: Literal["contextual", "none"] = Field(
        default="contextual", description="Angles of the slow pairs; none: they do not rotate (HoPE)."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        if self.slow == "none":
            return {}
        return {**projection("angle", dims.heads, dims), "alpha": Parameter((dims.heads,), per_layer=True, centre=1.0)}

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor | None:
        """w·x + b of each head."""
        return None if self.slow == "none" else project(parameters, "angle", h_BTD)

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

        T, K = x_BHTK.shape[-2:]
        rate_C = self.base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x_BHTK.device) / K)
        is_fast_C = rate_C >= 2 * math.pi / self.length
        position_T1 = torch.arange(start, start + T, device=x_BHTK.device)[:, None]
        angle_TC = position_T1 * rate_C
        fast_cos_TC, fast_sin_TC = angle_TC.cos(), angle_TC.sin()
        if features_BHSF is None:
            return turned(x_BHTK, fast_cos_TC.where(is_fast_C, 1), fast_sin_TC.where(is_fast_C, 0))
        features_BHT1 = at_least_float32(features_BHSF[:, :, start : start + T])
        middle_T1 = position_T1.to(features_BHT1.dtype) + 0.5
        share_T1 = (middle_T1 / self.length).clamp(0.5 / self.length, 1 - 0.5 / self.length)
        logit_BHT1 = features_BHT1 + parameters["alpha"][:, None, None] * share_T1.logit()
        slow_BHTC = (rate_C * self.length).to(features_BHT1.dtype) * logit_BHT1.sigmoid()
        cos_BHTC = fast_cos_TC.to(slow_BHTC.dtype).where(is_fast_C, slow_BHTC.cos())
        sin_BHTC = fast_sin_TC.to(slow_BHTC.dtype).where(is_fast_C, slow_BHTC.sin())
        return turned(x_BHTK, cos_BHTC, sin_BHTC)
