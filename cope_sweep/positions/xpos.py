"""xPos (Sun et al. 2023): RoPE whose rotated pairs also decay with the distance.

    q_t is rotated and times ζ^(t/512), k_t is rotated and times ζ^(−t/512)       ζ_c = (2c/K + γ)/(1 + γ), γ = 0.4

so a score has the factor ζ_c^((i − j)/512) in pair c; 512 is `scale`. Powers are taken in float64 and end in the
tensor's type: in float32 keys overflow beyond about 70·`scale` tokens, which are 35,000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Tensors
from cope_sweep.positions.rope import RotaryEncoding, turned

if TYPE_CHECKING:
    from torch import Tensor

GAMMA = 0.4


class XPos(RotaryEncoding):
    """Extrapolatable rotary position embedding."""

    SOURCE: ClassVar[str] = "arXiv 2212.10554"

    kind: Literal["xpos"] = "xpos"
    base: float = Field(default=10_000.0, gt=1, description="As RoPE's.")
    scale: float = Field(
        default=512.0,
        gt=0,
        description="Tokens over which pair c decays to ζ_c. Keys overflow (NaN) beyond about 70 × scale tokens.",
    )

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

        K = x_BHTK.shape[-1]
        share_C = torch.arange(0, K, 2, dtype=torch.float64, device=x_BHTK.device) / K
        # float64 before the division by `scale`: torch divides integers in float32.
        position_T1 = torch.arange(start, start + x_BHTK.shape[2], device=x_BHTK.device)[:, None].double()
        angle_TC = position_T1 * self.base**-share_C
        decay_TC = ((share_C + GAMMA) / (1 + GAMMA)) ** ((-position_T1 if keys else position_T1) / self.scale)
        return turned(x_BHTK, angle_TC.cos() * decay_TC, angle_TC.sin() * decay_TC)
