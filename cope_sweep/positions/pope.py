"""PoPE (Gopalakrishnan et al. 2025): magnitudes by content, phases by position, for each channel.

    s_ij = Σ_c sp(q_ic)·sp(k_jc)·cos((j − i)·θ_c + δ_hc)/√K        θ_c = base^(−c/K),  sp(z) = ln(1 + eᶻ)

Where RoPE turns K/2 pairs, so that content shifts the distance that a pair prefers, here each of the K channels has a
frequency of its own, and content decides only how much it counts. δ (H, K) is learned and clamped to [−2π, 0]. It
starts at 0, for longer sequences than in training, or uniform on (−2π, 0). The gradient of the clamp is 0 outside the
interval and whole at its ends, so that δ can leave its start at 0, and a δ that is pushed above 0 stays where it is.
(torch.clamp of torch 2.15 passes nothing at its ends: with it, a δ of 0 would never learn.)

With u = sp(x)·cos φ, sp(x)·sin φ, the query's phase φ = iθ_c and the key's jθ_c + δ_hc, s is a product of 2K
components: a rotation to twice the width. It is divided by √K, not by √(2K). The text writes no divisor, and two
libraries take √K; equation 4 prints θ_c without the minus sign and counts channels from 1, RoPE's definition above it
has the minus; and δ has no index of a head in the equations.

`channels: n` is a library's option: the first n channels as above with θ_c = base^(−c/n), the others as they are,
without the softplus.

Shapes: N channels with phases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import AttentionEncoding, Dims, Parameter, Tensors, at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


class PoPE(AttentionEncoding):
    """Polar coordinates: the content of a channel decides its magnitude, the position its phase."""

    SOURCE: ClassVar[str] = "arXiv 2509.10534"
    widens: ClassVar[bool] = True

    kind: Literal["pope"] = "pope"
    base: float = Field(default=10_000.0, gt=1, description="The slowest channel completes a turn in 2π·base tokens.")
    start: Literal["zero", "uniform"] = Field(
        default="zero", description="Initial phases of the keys: all 0, or uniform between −2π and 0."
    )
    channels: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None, description="Channels with magnitudes and phases, the first ones; null: all."
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.channels is not None and self.channels > dims.head_dim:
            raise InvalidValue(
                f"pope.channels = {self.channels} is more than the head dimension {dims.head_dim}; lower it, or "
                "leave it out for all",
                key="pope.channels",
                value=self.channels,
                head_dim=dims.head_dim,
            )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        shape = (dims.heads, dims.head_dim if self.channels is None else self.channels)
        if self.start == "zero":
            return {"delta": Parameter(shape, per_layer=True)}
        return {"delta": Parameter(shape, per_layer=True, bound=math.pi, centre=-math.pi)}

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

        T, device, delta_HN = x_BHTK.shape[2], x_BHTK.device, at_least_float32(parameters["delta"])
        N = delta_HN.shape[-1]
        # In float64, as RoPE's angles.
        rate_N = self.base ** (-torch.arange(N, dtype=torch.float64, device=device) / N)
        angle_TN = torch.arange(start, start + T, device=device)[:, None] * rate_N
        cos, sin = angle_TN.cos().to(delta_HN.dtype), angle_TN.sin().to(delta_HN.dtype)
        if keys:
            is_inside_HN = (delta_HN >= -2 * math.pi) & (delta_HN <= 0)
            delta_H1N = delta_HN.where(is_inside_HN, delta_HN.detach().clamp(-2 * math.pi, 0))[:, None]
            # cos(a + δ) and sin(a + δ), so that a, which may be large, is not rounded to the precision of δ.
            cos, sin = (
                cos * delta_H1N.cos() - sin * delta_H1N.sin(),
                sin * delta_H1N.cos() + cos * delta_H1N.sin(),
            )
        magnitude_BHTN = F.softplus(x_BHTK[..., :N])
        cos, sin = cos.to(x_BHTK.dtype), sin.to(x_BHTK.dtype)
        return torch.cat((magnitude_BHTN * cos, magnitude_BHTN * sin, x_BHTK[..., N:]), dim=-1)
