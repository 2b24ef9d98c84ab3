"""GRAPE-AP (Zhang et al. 2025): a running sum of gates, as CoPE-ALiBi, with gates log σ and separate, rotated keys.

    a_ij = softmax_j(q_i·k_j/√K + m_h·Σ_{j < l ≤ i} log σ(p_i·R(l)·p̂_l/P))      p = W_p·x, P numbers for each head

with m_h ALiBi's slopes, and R(l) a rotation of all pairs of components by l radians (the base of its frequencies is 1).
Text and released code differ: in the text both p are divided by their root mean squares, pairs are neighbours and the
rotation is by +l; in the code (`reading: released`) only the key's is normalised, pairs are (c, c + P/2), and the
rotation is by −l, with sines and cosines rounded to bfloat16, which this file leaves out. Its W_p starts from
N(0, 1/(4·D)), ours as the family's linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.alibi import standard_slopes
from cope_sweep.positions.base import (
    Attention,
    AttentionEncoding,
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    computed,
    constants,
)
from cope_sweep.terms import LogSlope

if TYPE_CHECKING:
    from torch import Tensor


class GrapeAP(AttentionEncoding):
    """Path-integral additive bias: the decay along the path from key to query depends on the query."""

    SOURCE: ClassVar[str] = "arXiv 2512.07805"

    kind: Literal["grape_ap"] = "grape_ap"
    reading: Literal["text", "released"] = Field(default="text", description="Where text and released code differ.")
    size: Annotated[int, Field(ge=2, le=10**6, multiple_of=2)] | Literal["head"] = Field(
        default="head", description="P, the numbers for each head; head: the head dimension."
    )

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.size == "head" and dims.head_dim % 2:
            raise InvalidValue(
                f"grape_ap rotates pairs of components, and the head dimension {dims.head_dim} is odd; give an even "
                "grape_ap.size",
                key="grape_ap.size",
                head_dim=dims.head_dim,
            )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        size = dims.head_dim if self.size == "head" else self.size
        return {
            "path": Parameter((dims.heads * size, dims.input_dim), std=0.02, per_layer=True, bound=dims.linear_bound)
        }

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor:
        """The vector p of each head."""
        return h_BTD @ parameters["path"].T

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch.nn.functional as F

        gates = self._gates(computed(attention.features_BHSF), attention.q_BHQK.shape[2])
        logits_BHQS = gates.q_BHQF @ gates.k_BHSF.transpose(-1, -2)
        decay_BHQS = F.logsigmoid(logits_BHQS).masked_fill(~attention.visible_QS, 0)
        sums_BHQS = decay_BHQS.flip(-1).cumsum(-1).flip(-1) - decay_BHQS  # of the keys after j
        return gates.m_H[:, None, None] * sums_BHQS

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> LogSlope | None:
        return None if features_BHSF is None else self._gates(features_BHSF, q_BHQK.shape[2])

    def _gates(self, features_BHSF: Tensor, queries: int) -> LogSlope:
        """The slopes, and the vectors whose products are the logits of the gates of the last queries."""
        import torch.nn.functional as F

        p_BHSF = at_least_float32(features_BHSF)
        _, H, S, size = p_BHSF.shape
        normed_BHSF = F.rms_norm(p_BHSF, (size,))
        of_query_BHQF = (normed_BHSF if self.reading == "text" else p_BHSF)[:, :, S - queries :]
        return LogSlope(constants(standard_slopes(H), p_BHSF), of_query_BHQF / size, self._rotated(normed_BHSF))

    def _rotated(self, x_BHSF: Tensor) -> Tensor:
        """The vector of token l with every pair rotated by l, or −l, radians."""
        import torch

        angle_S1 = torch.arange(x_BHSF.shape[2], dtype=torch.float64, device=x_BHSF.device)[:, None]
        cos_S1, sin_S1 = angle_S1.cos().to(x_BHSF.dtype), angle_S1.sin().to(x_BHSF.dtype)
        if self.reading == "released":
            a, b = x_BHSF.chunk(2, dim=-1)
            return torch.cat((a * cos_S1 + b * sin_S1, b * cos_S1 - a * sin_S1), dim=-1)
        a, b = x_BHSF[..., ::2], x_BHSF[..., 1::2]
        return torch.stack((a * cos_S1 - b * sin_S1, b * cos_S1 + a * sin_S1), dim=-1).flatten(-2)
