"""Stick-breaking attention (Tan et al. 2025): each key takes its share of what nearer keys have left.

    A_ij = σ(s_ij)·Π_{j < k < i} (1 − σ(s_ik))     for j < i,        s_ij = q_i·k_j/√K

It replaces the softmax. A query's own key is left out, and the remainder 1 − Σ_j A_ij is dropped, or given to the
query's own value (`remainder: self`). The product is the sum of log σ(−s) in logarithms, from the query to earlier
tokens, as CoPE's positions are. There are no parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import Attention, AttentionEncoding, Tensors
from cope_sweep.positions.relative import distances
from cope_sweep.terms import StickBreak

if TYPE_CHECKING:
    from torch import Tensor


class StickBreaking(AttentionEncoding):
    """Weights that break a stick of length 1 from the nearest key to earlier ones, instead of the softmax."""

    SOURCE: ClassVar[str] = "arXiv 2410.17980"

    kind: Literal["stick_breaking"] = "stick_breaking"
    remainder: Literal["drop", "self"] = Field(
        default="drop",
        description="What becomes of the weight that no key has taken: dropped, or of the query's token.",
    )

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> StickBreak:
        return StickBreak(keep_remainder=self.remainder == "self")

    def weights(self, parameters: Tensors, attention: Attention, logits_BHQS: Tensor) -> Tensor:
        import torch.nn.functional as F

        distance_QS = distances(attention)
        earlier_QS = distance_QS > 0
        # In logarithms: in float32, 1 − σ(s) is 0 from s = 17 on.
        left_BHQS = F.logsigmoid(-logits_BHQS).masked_fill(~earlier_QS, 0)  # log (1 − σ(s))
        from_key_BHQS = left_BHQS.flip(-1).cumsum(-1).flip(-1)
        nearer_BHQS = from_key_BHQS - left_BHQS
        weights_BHQS = (F.logsigmoid(logits_BHQS) + nearer_BHQS).exp().masked_fill(~earlier_QS, 0)
        if self.remainder == "drop":
            return weights_BHQS
        return weights_BHQS + from_key_BHQS[..., :1].exp() * (distance_QS == 0)
