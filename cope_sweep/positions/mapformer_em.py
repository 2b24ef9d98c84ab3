"""MapFormer-EM (Rambaud et al. 2025): attention to content times attention to positions.

    a_ij = softmax_j(A_X·A_P),  A_X = q_i·k_j/√K,  A_P = (R_i·q⁰_h)·(R_j·k⁰_h)/√K        `product: os`
    a_ij = softmax_j(A_P)                                                                `product: s`

R_t turns by MapFormer-WM's angles at token t (`mapformer_wm.py`), and q⁰, k⁰ (H, K) are learned, or one vector, p⁰,
that is both (`shared`), which the text allows and says to be worse. Where A_P < 0, a match of content counts against
the key. The text does not say how they start: with N(0, 1), as here, A_P has the deviation of a product of unit normal
vectors; a known reproduction has N(0, 0.02²), with which attention starts uniform (`std`).

It is a product of two sums, not a sum: fused kernels do not compute it. Scores of other encodings are added to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Attention, Dims, Parameter, Tensors, computed
from cope_sweep.positions.mapformer_wm import SteppingEncoding
from cope_sweep.positions.rope import turned

if TYPE_CHECKING:
    from torch import Tensor


class MapFormerEM(SteppingEncoding):
    """Logits of content times logits of positions, which are running sums of signed steps."""

    SOURCE: ClassVar[str] = "arXiv 2511.19279"
    replaces: ClassVar[bool] = True

    kind: Literal["mapformer_em"] = "mapformer_em"
    product: Literal["os", "s"] = Field(
        default="os", description="What attention is the softmax of: content times positions, or positions alone."
    )
    shared: bool = Field(default=False, description="Whether queries and keys of positions are turned from one vector.")
    std: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Standard deviation of the vectors' normal initialisation."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        vector = Parameter((dims.heads, dims.head_dim), std=self.std, per_layer=True)
        vectors = {"p0": vector} if self.shared else {"q0": vector, "k0": vector}
        return {**super().parameters(dims), **vectors}

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        angle_BHSC = self.angles(parameters, computed(attention.features_BHSF))
        cos_BHSC, sin_BHSC = angle_BHSC.cos(), angle_BHSC.sin()
        q0, k0 = ("p0", "p0") if self.shared else ("q0", "k0")
        Q, K = attention.q_BHQK.shape[2:]
        q_BHSK, k_BHSK = (
            turned(parameters[name].to(cos_BHSC.dtype)[:, None].expand(-1, cos_BHSC.shape[2], -1), cos_BHSC, sin_BHSC)
            for name in (q0, k0)
        )
        positions_BHQS = q_BHSK[:, :, -Q:] @ k_BHSK.transpose(-1, -2) / math.sqrt(K)
        # Attention adds this to its logits, which it replaces.
        replaced_BHQS = positions_BHQS if self.product == "s" else positions_BHQS * attention.logits_BHQS
        return replaced_BHQS - attention.logits_BHQS
