"""RePo (Li et al. 2025): RoPE at real positions that each token decides for itself.

    angle of pair c at token t: θ_c·z_th        z_t = W_z·(SiLU(W_g·x_t) ⊙ W_c·x_t),  θ_c = base^(−2c/K)

There is no running sum, and z may be anything: a score depends on its two tokens alone, and a model knows their order
only from the causal mask, and from other encodings. The released model, OLMo 2 continued from RoPE, has RePo from
layer 5 of 16 on, and RoPE in the layers below, with the same base. Encodings for different layers say that:

    position: [{kind: rope, base: 5e5, layers: [0, 1, 2, 3, 4]}, {kind: repo, layers: [5, 6, …, 15]}]

RePo below and RoPE above is said to be unstable. Its code can also blend z with the token's number while training goes
on, (1 − p)·z + p·t with p falling to 0, which this file leaves out. From scratch no results were published. All three
matrices start from N(0, 0.02²), cut at 3 standard deviations.

Shapes: C = K/2 pairs of components; M hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Dims, Parameter, Tensors, at_least_float32, computed
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor


class RePo(RotaryEncoding):
    """Re-positioning: rotations by a position that the content of a token decides, without an order."""

    SOURCE: ClassVar[str] = "arXiv 2512.14391"

    kind: Literal["repo"] = "repo"
    base: float = Field(default=500_000.0, gt=1, description="As RoPE's.")
    hidden: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        default=None, description="Hidden units of the net that gives positions; null: an eighth of the layer's input."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        hidden = max(1, dims.input_dim // 8) if self.hidden is None else self.hidden

        def matrix(rows: int, columns: int) -> Parameter:
            return Parameter((rows, columns), std=0.02, per_layer=True, cut=3)

        return {
            "gate": matrix(hidden, dims.input_dim),
            "content": matrix(hidden, dims.input_dim),
            "position": matrix(dims.heads, hidden),
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """The position z of each token, for each head."""
        import torch.nn.functional as F

        hidden_BTM = F.silu(h_BTD @ parameters["gate"].T) * (h_BTD @ parameters["content"].T)
        return hidden_BTM @ parameters["position"].T

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
        z_BHT1 = at_least_float32(computed(features_BHSF)[:, :, start : start + T])
        rate_C = self.base ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x_BHTK.device) / K)
        angle_BHTC = z_BHT1 * rate_C.to(z_BHT1.dtype)
        return turned(x_BHTK, angle_BHTC.cos(), angle_BHTC.sin())
