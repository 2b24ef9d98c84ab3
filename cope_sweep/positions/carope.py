"""CARoPE (Veisi et al. 2025): RoPE whose frequency each token and head decides, by one number.

    angle of pair c at token t: Σ_{l ≤ t} f_lhᶜ        f_th = 1/(sp(w_h·x_t + b_h) + 1),  sp(z) = ln(1 + eᶻ)

f is between 0 and 1, so a token can slow the slower pairs down, but not stop them or turn them back. f = base^(−2/K)
for all tokens is RoPE, if c counts from 0, which the text does not say; then the fastest pair turns by 1 at every
token, whatever its content. The text has no bias, and says that training starts as RoPE: from w = 0 that needs a bias
with sp(b) = base^(2/K) − 1, which is our reading. With `bias: false`, w starts as the family's linear layers, and f
near 0.59. No code was found.

Shapes: C = K/2 pairs of components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, computed
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor


class CARoPE(RotaryEncoding):
    """Context-aware RoPE: each token decides how fast the pairs of a head turn."""

    SOURCE: ClassVar[str] = "arXiv 2507.23083"

    kind: Literal["carope"] = "carope"
    base: float = Field(default=10_000.0, gt=1, description="With `bias`: training starts as RoPE with this base.")
    bias: bool = Field(default=True, description="Whether training starts as RoPE, with w = 0 and a learned bias.")

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if not self.bias:
            self.refuse(("base",), "carope.bias is false")

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        shape = (dims.heads, dims.input_dim)
        if not self.bias:
            return {"frequency_weight": Parameter(shape, std=0.02, per_layer=True, bound=dims.linear_bound)}
        sp = math.expm1(2 / dims.head_dim * math.log(self.base))
        start = sp + math.log(-math.expm1(-sp))  # log(exp(sp) − 1), without the overflow of exp
        return {
            "frequency_weight": Parameter(shape, per_layer=True),
            "frequency_bias": Parameter((dims.heads,), per_layer=True, centre=start),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """w·x + b of each head."""
        logit_BTH = h_BTD @ parameters["frequency_weight"].T
        return logit_BTH + parameters["frequency_bias"] if self.bias else logit_BTH

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
        import torch.nn.functional as F

        T, C = x_BHTK.shape[2], x_BHTK.shape[-1] // 2
        log_f_BHS1 = -F.softplus(at_least_float32(computed(features_BHSF))).log1p()
        power_C = torch.arange(C, device=x_BHTK.device)
        angle_BHSC = (log_f_BHS1 * power_C).exp().cumsum(2)
        # Token 0 has the angle f of one token: differences are those of RoPE, whose angle there is 0.
        angle_BHTC = angle_BHSC[:, :, start : start + T]
        return turned(x_BHTK, angle_BHTC.cos(), angle_BHTC.sin())
