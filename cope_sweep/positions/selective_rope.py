"""Selective RoPE (Movahedi et al. 2025): rotations whose angles are running sums of what each token decides.

    angle of pair c at token t: τ_c·Σ_{l ≤ t} φ_lc        τ_c = 500000^(−2c/K)
    φ = conv₄(W₂·W₁·x/|x|), K/2 numbers for each head

The convolution is causal, of 4 taps for each number; W₂·W₁ has a low rank. The released code takes the unit vector of
each head's slice of x (`unit: head`), the paper's text normalises x. Its taps start from N(0, 0.02²), ours as in
torch's convolution, ±1/2: initial angles are small in both, and in its model smaller.

Three options of both change φ before the sum, in this order. The first and the last gave the text's largest gains, and
are off in every released configuration; the bias was on in its runs of parity.

    SiLU(φ)                    `activation: silu`
    φ + exp(β_hc)              `phase_bias`, β = 0 at the start
    φ·σ(w_h·u + b_h)           `phase_gate`, of the unit vector u = x/|x|, one number for each head

Shapes: C = K/2 pairs of components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import (
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    causal_convolution,
    computed,
    project,
    projection,
)
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor

TAPS = 4
EPS = 1e-6
"""Inside the root of the unit vector, as released."""
BASE = 500_000.0


class SelectiveRoPE(RotaryEncoding):
    """Rotations that depend on the input."""

    SOURCE: ClassVar[str] = "arXiv 2511.17388"

    kind: Literal["selective_rope"] = "selective_rope"
    rank: int = Field(default=16, ge=1, le=10**6, description="Rank of the projection to φ.")
    unit: Literal["input", "head"] = Field(
        default="input", description="What is divided by its length: the layer's input, or each head's slice of it."
    )
    activation: Literal["none", "silu"] = Field(default="none", description="Applied to φ after the convolution.")
    phase_gate: bool = Field(
        default=False, description="Whether φ is multiplied by a gate between 0 and 1, one for each token and head."
    )
    phase_bias: bool = Field(
        default=False, description="Whether each pair turns by a learned amount at every token, before the gate."
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.unit == "head" and dims.input_dim % dims.heads:
            raise InvalidValue(
                f"selective_rope.unit: head divides the layer's input into slices, and its {dims.input_dim} components "
                f"are no multiple of {dims.heads} heads; choose unit: input",
                key="selective_rope.unit",
                input_dim=dims.input_dim,
                heads=dims.heads,
            )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        pairs, bound = dims.head_dim // 2, dims.linear_bound
        declared = {
            "down": Parameter((self.rank, dims.input_dim), std=0.02, per_layer=True, bound=bound),
            "up": Parameter((dims.heads, pairs, self.rank), std=0.02, per_layer=True, bound=bound),
            "taps": Parameter((dims.heads * pairs, TAPS), per_layer=True, bound=TAPS**-0.5),
        }
        if self.phase_bias:
            declared["log_bias"] = Parameter((dims.heads, pairs), per_layer=True)
        return declared | (projection("gate", dims.heads, dims) if self.phase_gate else {})

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """W₂·W₁·x/|x|, before the convolution, and then the logit of the phase gate."""
        import torch

        up_HCR = parameters["up"]
        units = len(up_HCR) if self.unit == "head" else 1
        parts = at_least_float32(h_BTD).reshape(*h_BTD.shape[:2], units, h_BTD.shape[-1] // units)
        unit = parts * (parts.square().sum(-1, keepdim=True) + EPS).rsqrt()
        u_BTD = unit.flatten(2).to(h_BTD.dtype)
        phi_BTX = u_BTD @ parameters["down"].T @ up_HCR.flatten(0, 1).T
        if not self.phase_gate:
            return phi_BTX
        gate_BTH1 = project(parameters, "gate", u_BTD)[..., None]
        phi_BTHC = phi_BTX.view(*gate_BTH1.shape[:3], up_HCR.shape[1])
        return torch.cat((phi_BTHC, gate_BTH1.to(phi_BTHC.dtype)), dim=-1).flatten(2)

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

        phi_BHSC = self._phi(parameters, at_least_float32(computed(features_BHSF)))
        C, T = phi_BHSC.shape[-1], x_BHTK.shape[2]
        tau_C = BASE ** (-torch.arange(C, dtype=torch.float64, device=x_BHTK.device) / C)
        angle_BHTC = (phi_BHSC.cumsum(2) * tau_C.to(phi_BHSC.dtype))[:, :, start : start + T]
        return turned(x_BHTK, angle_BHTC.cos(), angle_BHTC.sin())

    def _phi(self, parameters: Tensors, features_BHSF: Tensor) -> Tensor:
        """φ of each token, (B, H, S, C)."""
        import torch.nn.functional as F

        before_BHSC = features_BHSF[..., :-1] if self.phase_gate else features_BHSF
        phi_BHSC = causal_convolution(before_BHSC, parameters["taps"])
        if self.activation == "silu":
            phi_BHSC = F.silu(phi_BHSC)
        if self.phase_bias:
            phi_BHSC = phi_BHSC + at_least_float32(parameters["log_bias"]).exp()[:, None]
        return phi_BHSC * features_BHSF[..., -1:].sigmoid() if self.phase_gate else phi_BHSC
