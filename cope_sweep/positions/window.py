"""A sliding window: a query sees only the last keys.

    a_ij = softmax over the keys with i − j < w            w = `size`; the query's own key is one of them

Cohere 2, EXAONE 4 and AFMoE have RoPE in a window in three of four layers, and neither in the fourth:

    model.position: [{kind: rope, layers: {all_but_every: 4}}, {kind: window, size: 4096, layers: {all_but_every: 4}}]

Llama 4 has chunks instead (`chunks: true`): a query sees the keys of its own chunk, ⌊j/w⌋ = ⌊i/w⌋, so that the first
query of a chunk sees itself alone.

It is a mask: scores of other encodings stay as they are, and positions of CoPE count the same keys, since all of those
between a key and a query are in the window. Keys before it stay in the cache of decoding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import Attention, AttentionEncoding, Tensors
from cope_sweep.positions.relative import distances
from cope_sweep.terms import Window as WindowTerm

if TYPE_CHECKING:
    from torch import Tensor


class Window(AttentionEncoding):
    """A mask of all but the last keys."""

    SOURCE: ClassVar[str] = "arXiv 2004.05150"

    kind: Literal["window"] = "window"
    size: Positive = Field(default=4096, description="Number of keys that a query sees, its own included.")
    chunks: bool = Field(
        default=False,
        description="A query sees the earlier keys of its own chunk of `size` tokens; false: the last `size` keys.",
    )

    def has_term(self, head_dim: int) -> bool:
        return not self.chunks

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch

        distance_QS = distances(attention)
        reach_Q1: int | Tensor = self.size
        if self.chunks:
            Q, S = distance_QS.shape
            reach_Q1 = torch.arange(S - Q, S, device=distance_QS.device)[:, None] % self.size + 1
        zeros_QS = attention.logits_BHQS.new_zeros(distance_QS.shape)
        return zeros_QS.masked_fill(distance_QS >= reach_Q1, -math.inf)

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> WindowTerm:
        return WindowTerm(self.size)
