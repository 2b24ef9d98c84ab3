"""FoX, the Forgetting Transformer (Lin et al. 2025), and CABLE (Veisi et al. 2025): a decay that depends on the tokens.

    a_ij = softmax_j(q_i·k_j/√K + Σ_{j < l ≤ i} log σ(w_h·x_l + b_h))                      FoX

x_l is the input of the attention layer. With c_t = Σ_{l ≤ t} log σ(…) the bias is c_i − c_j, and c_i cancels in the
softmax: fused kernels add −c_j, one number for each key and head. Sums are in float32, whatever the model's precision.

Beside PaTH, `[path, fox]` is PaTH-FoX (Yang et al. 2025, version 2): its text has the gates outside of the bilinear
form, so that they are not divided by √K, and its code divides both, (k·H⋯H·q + c_i − c_j)/√K: `scale_positions: true`.
Beside Wall, gates start open: `[wall, {kind: fox, start: 8}]`.

CABLE as released is the same bias, since −softplus(−z) = log σ(z), beside q·k without the factor 1/√K:
`scaled: false`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import (
    Attention,
    AttentionEncoding,
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    computed,
    project,
    projection,
)
from cope_sweep.terms import KeyBias

if TYPE_CHECKING:
    from torch import Tensor


class FoX(AttentionEncoding):
    """Forget gates: each token decays the attention to all tokens before it."""

    SOURCE: ClassVar[str] = "arXiv 2503.02130"

    kind: Literal["fox"] = "fox"
    scaled: bool = Field(default=True, description="Whether q·k is divided by √K. false: CABLE, as released.")

    scale_positions: bool = Field(
        default=False, description="Also divide the sum of log gates by √K, as the code of PaTH-FoX does."
    )
    start: float = Field(default=0.0, description="Added to the gates' initial biases: 0: gates of about ½; 8: open.")

    @property
    def replaces(self) -> bool:
        return not self.scaled

    def has_term(self, head_dim: int) -> bool:
        return self.scaled

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        declared = projection("forget", dims.heads, dims)
        return declared | {"forget_bias": replace(declared["forget_bias"], centre=self.start)}

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """The logit of each head's forget gate."""
        return project(parameters, "forget", h_BTD)

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        c_BHS = self._decay(computed(attention.features_BHSF), attention.q_BHQK)
        Q, S = attention.visible_QS.shape
        bias_BHQS = c_BHS[:, :, S - Q :, None] - c_BHS[:, :, None]
        if self.scaled:
            return bias_BHQS
        # The logits are q·k/√K already: with √K − 1 times as much added, they are q·k.
        return bias_BHQS + (math.sqrt(attention.q_BHQK.shape[-1]) - 1) * attention.logits_BHQS

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> KeyBias | None:
        return None if features_BHSF is None else KeyBias(-self._decay(features_BHSF, q_BHQK))

    def _decay(self, features_BHSF: Tensor, q_BHQK: Tensor) -> Tensor:
        """c_t, the sum of the logarithms of all gates up to each token, (B, H, S)."""
        import torch.nn.functional as F

        c_BHS: Tensor = F.logsigmoid(at_least_float32(features_BHSF[..., 0])).cumsum(-1)
        return c_BHS / math.sqrt(q_BHQK.shape[-1]) if self.scale_positions else c_BHS
