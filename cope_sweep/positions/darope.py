"""DaRoPE (2026) and HoPE (Chen et al. 2024): RoPE with other angles in its slow pairs.

Fast pairs, which turn at least once in the trained length L (θ_c ≥ 2π/L), rotate as in RoPE. In the slow ones the
angle of token t is

    θ_c·L·σ(w_h·x_t + α_h·β_t),  β_t = ln(m/(L − m)),  m = t + ½ within [εL, (1 − ε)L],  ε = 10⁻⁶       DaRoPE
    0                                                                                      HoPE (`slow: none`)

so all slow pairs of a head follow one number. w starts from N(0, 0.1²) and α at ½, for each head; there is no bias. w
= 0 and α = 1 give RoPE's angle at t + ½. Whether x is taken before or after the norm is not stated; here it is the
layer's input, after it. With x of unit root mean square, w·x starts with the deviation 0.1·√D: at another width the
same 0.1 is another model. β is computed in float64, from both ends of the clipped interval, as 1 − 10⁻⁶ is coarse in
float32.

`reading: guessed` is what this file computed before the text could be read: a bias, w from the family's start, α from
1, and the bounds 1/(2L) and 1 − 1/(2L) of m/L. Its runs have version 1.

Shapes: C = K/2 pairs of components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, project, projection
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EPS = 1e-6


class DaRoPE(RotaryEncoding):
    """Rotary position embedding whose slow pairs rotate by what a token decides, or not at all."""

    SOURCE: ClassVar[str] = "arXiv 2609.34556"
    VERSION = 2
    # The version tells the readings apart: runs of the guessed one keep the ids that they had before the text's.
    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("reading",)

    kind: Literal["darope"] = "darope"
    length: Positive = Field(default=512, description="L, the length of the training sequences.")
    base: float = Field(default=10_000.0, gt=1, description="As RoPE's.")
    slow: Literal["contextual", "none"] = Field(
        default="contextual", description="Angles of the slow pairs; none: they do not rotate (HoPE)."
    )

    alpha: float = Field(default=0.5, allow_inf_nan=False, description="Initial α of each head.")
    std: float = Field(
        default=0.1, ge=0, allow_inf_nan=False, description="Standard deviation of w's normal initialisation."
    )
    reading: Literal["text", "guessed"] = Field(
        default="text",
        description="The text's equation and start; guessed: what `darope` meant before its text could be read.",
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.slow == "none":
            self.refuse(("alpha", "std", "reading"), "darope.slow is none")
        if self.reading == "guessed":
            self.refuse(("alpha", "std"), "darope.reading is guessed")

    @classmethod
    def default_before(cls, name: str, fields: Mapping[str, Any]) -> Any:
        """Runs that are older than `reading` have the guessed one."""
        if name == "reading" and fields.get("slow") != "none":
            return "guessed"
        return super().default_before(name, fields)

    def version(self, dims: Dims) -> int:
        return 1 if self.slow == "none" or self.reading == "guessed" else self.VERSION

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        if self.slow == "none":
            return {}
        if self.reading == "guessed":
            alpha = Parameter((dims.heads,), per_layer=True, centre=1.0)
            return {**projection("angle", dims.heads, dims), "alpha": alpha}
        return {
            "angle_weight": Parameter((dims.heads, dims.input_dim), std=self.std, per_layer=True),
            "alpha": Parameter((dims.heads,), per_layer=True, centre=self.alpha),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor | None:
        """w·x of each head."""
        if self.slow == "none":
            return None
        if self.reading == "guessed":
            return project(parameters, "angle", h_BTD)
        return h_BTD @ parameters["angle_weight"].T

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
        beta_T1 = self._beta(position_T1, features_BHT1.dtype)
        logit_BHT1 = features_BHT1 + parameters["alpha"][:, None, None] * beta_T1
        slow_BHTC = (rate_C * self.length).to(features_BHT1.dtype) * logit_BHT1.sigmoid()
        cos_BHTC = fast_cos_TC.to(slow_BHTC.dtype).where(is_fast_C, slow_BHTC.cos())
        sin_BHTC = fast_sin_TC.to(slow_BHTC.dtype).where(is_fast_C, slow_BHTC.sin())
        return turned(x_BHTK, cos_BHTC, sin_BHTC)

    def _beta(self, position_T1: Tensor, dtype: torch.dtype) -> Tensor:
        """The logit of each token's share of the length, clipped."""
        if self.reading == "guessed":
            share_T1 = (position_T1.to(dtype) + 0.5) / self.length
            return share_T1.clamp(0.5 / self.length, 1 - 0.5 / self.length).logit()
        middle_T1 = position_T1.double() + 0.5
        nearest = EPS * self.length  # of a token to either end
        before_T1 = middle_T1.clamp(nearest, (1 - EPS) * self.length)
        behind_T1 = (self.length - middle_T1).clamp(nearest, (1 - EPS) * self.length)
        return (before_T1.log() - behind_T1.log()).to(dtype)
