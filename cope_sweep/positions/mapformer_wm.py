"""MapFormer-WM (Rambaud et al. 2025): rotations by signed steps, which a token can take back.

    angle of pair c at token t: ω_hc·Σ_{l ≤ t} Δ_lc        Δ_t = W_out,h·W_in,h·x_t

Δ is not squashed: steps have a sign, so a walk that returns to its start has the start's angles. That is the
difference from encodings whose steps have one sign (CoPE, FoX, CARoPE). Δ = 1 is RoPE. W_in (r, D) and W_out (C, r) of
each head have no biases; their rank r is the dimension of the world in the paper's formal tasks (1 or 2), and 4 in its
language model.

ω is learned, and starts as a geometric series from ω_max down to 2π/n, n being the largest distance to represent (the
width of a grid; 1,024 in the language model):

    ω_c = ω_max·(1/Δ_max)^(c/(C − 1)),  Δ_max = n·ω_max/2π

Equation 18 prints the exponent −c/C, whose series rises up to 2πn, against the bounds beside it. In worlds of several
`dimensions` the pairs are shared out among them, each with a series of its own. The text does not say how W_in and
W_out start (here as the family's linear layers, or as torch's), nor whether x is each layer's input, as here, or the
token's embedding, as in a known reproduction, whose heads share W_in and whose pairs are neighbours.

The sum is taken of W_in·x, r numbers for each head, in float32 or more: W_out and ω are linear.

Shapes: C = K/2 pairs of components; R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, computed
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor


class SteppingEncoding(RotaryEncoding):
    """The base of MapFormer's encodings: angles that are running sums of signed steps."""

    rank: int = Field(default=2, ge=1, le=10**6, description="r, rank of the projection to steps.")
    distance: float = Field(default=64.0, gt=1, description="n, the largest distance to represent, in steps of 1.")
    fastest: float = Field(
        default=2 * math.pi,
        gt=1,
        le=2 * math.pi,
        description="ω_max, the initial angle of the fastest pair, in radians.",
    )
    dimensions: int = Field(
        default=1, ge=1, le=10**6, description="Dimensions of the world; each has its share of the pairs."
    )
    start: Literal["family", "torch"] = Field(
        default="family",
        description="Initialisation of W_in and W_out: the family's linear layers' or torch's.",
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        pairs = dims.head_dim // 2
        if pairs % self.dimensions:
            raise InvalidValue(
                f"{self.kind}.dimensions = {self.dimensions} does not divide the {pairs} pairs of a head; choose a "
                "divisor",
                key=f"{self.kind}.dimensions",
                value=self.dimensions,
                pairs=pairs,
            )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        pairs = dims.head_dim // 2
        bounds = (dims.linear_bound,) * 2
        if self.start == "torch":
            bounds = (dims.input_dim**-0.5, self.rank**-0.5)
        return {
            "into": Parameter((dims.heads, self.rank, dims.input_dim), std=0.02, per_layer=True, bound=bounds[0]),
            "out": Parameter((dims.heads, pairs, self.rank), std=0.02, per_layer=True, bound=bounds[1]),
            "omega": Parameter((dims.heads, pairs), per_layer=True, centre=self.frequencies(pairs)),
        }

    def frequencies(self, pairs: int) -> tuple[float, ...]:
        """The initial ω of a head's pairs, in radians."""
        share = pairs // self.dimensions
        ratio = 2 * math.pi / (self.distance * self.fastest)
        return tuple(self.fastest * ratio ** (c / max(1, share - 1)) for c in range(share)) * self.dimensions

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """W_in·x, r numbers for each head."""
        return h_BTD @ parameters["into"].flatten(0, 1).T

    def angles(self, parameters: Tensors, features_BHSF: Tensor) -> Tensor:
        """The angles of all tokens, (B, H, S, C)."""
        sum_BHSR = at_least_float32(features_BHSF).cumsum(2)
        out_HCR, omega_HC = (parameters[name].to(sum_BHSR.dtype) for name in ("out", "omega"))
        return sum_BHSR @ (omega_HC[..., None] * out_HCR).transpose(-1, -2)


class MapFormerWM(SteppingEncoding):
    """Rotations by running sums of signed steps, which each token decides, with learned frequencies."""

    SOURCE: ClassVar[str] = "arXiv 2511.19279"

    kind: Literal["mapformer_wm"] = "mapformer_wm"

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        angle_BHTC = self.angles(parameters, computed(features_BHSF))[:, :, start : start + x_BHTK.shape[2]]
        return turned(x_BHTK, angle_BHTC.cos(), angle_BHTC.sin())
