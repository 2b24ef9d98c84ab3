"""Relative position encoding on keys, learned (Shaw et al. 2018; Golovneva et al. 2024, eq. 1 and section 5.4).

    a_ij = softmax_j(q_i·k_j/√K + q_i·e[i − j])

A distance beyond the table adds nothing (`far: none`), or uses the last embedding (`far: last`), which is the paper's
"relative-capped".

The released code (facebookresearch/RAM, projects/cope, `RelPosEmb`) divides q·e by √K, starts e at N(0, 1/K), and has
one table for all layers: `scale_positions: true`, `std: 1/sqrt(d)`, `share_layers: true`. The defaults are equation 1
as printed: not divided, zeros, a table for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import Attention, AttentionEncoding, Cut, Dims, Parameter, Tensors
from cope_sweep.terms import RelativeLookUp

if TYPE_CHECKING:
    from torch import Tensor


class Relative(AttentionEncoding):
    """A learned vector for each distance i − j, shared by the heads or for each of them."""

    SOURCE: ClassVar[str] = "arXiv 1803.02155"

    kind: Literal["relative"] = "relative"
    positions: Positive | Literal["full"] = Field(
        default="full", description="Number of embeddings, for distances 0 … positions − 1; full: the context."
    )
    far: Literal["none", "last"] = Field(
        default="none", description="The embedding of larger distances: none, or the last one."
    )
    share_layers: bool = Field(default=False, description="One table for all layers, or one for each layer.")
    per_head: bool = Field(default=False, description="One table for each head, or one for all heads of a layer.")
    scale_positions: bool = Field(default=False, description="Also divide q·e by √K, as the released code does.")
    std: Annotated[float, Field(ge=0)] | Literal["1/sqrt(d)"] = Field(
        default=0.0,
        description="Standard deviation of the embeddings' normal initialisation; 1/sqrt(d): with d the head "
        "dimension, as the released code does.",
    )
    cut: Cut = Field(
        default=None,
        description="Only the first so many embeddings are used, and larger distances have what `far` says; null: all. "
        "In `evaluate.variants`, this measures a table that is cut after training.",
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        rows = dims.context if self.positions == "full" else self.positions
        heads = (dims.heads,) if self.per_head else ()
        std = dims.head_dim**-0.5 if self.std == "1/sqrt(d)" else self.std
        return {"e": Parameter((*heads, rows, dims.head_dim), std, per_layer=not self.share_layers)}

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.cut is not None and self.positions != "full" and self.cut >= self.positions:
            self.refuse(("cut",), f"relative.positions is {self.positions}")

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        e_PK = self._used(parameters)  # e_HPK with a table for each head
        distance_QS = distances(attention)
        z_BHQP = attention.q_BHQK @ e_PK.transpose(-1, -2) * self._scale(e_PK)
        rows = e_PK.shape[-2]
        index_QS = distance_QS.clamp(0, rows - 1)
        bias_BHQS = z_BHQP.gather(-1, index_QS.expand(*z_BHQP.shape[:2], *index_QS.shape))
        return bias_BHQS if self.far == "last" else bias_BHQS * (distance_QS < rows)

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> RelativeLookUp:
        e_PK = self._used(parameters)
        return RelativeLookUp(q_BHQK, e_PK, self._scale(e_PK), self.far)

    def _used(self, parameters: Tensors) -> Tensor:
        e_PK = parameters["e"]
        return e_PK if self.cut is None else e_PK[..., : self.cut, :].contiguous()

    def _scale(self, e_PK: Tensor) -> float:
        return e_PK.shape[-1] ** -0.5 if self.scale_positions else 1.0


def distances(attention: Attention) -> Tensor:
    """Distances i − j for the last Q of S tokens, (Q, S) int64; negative for keys after the query."""
    import torch

    Q, S = attention.visible_QS.shape
    i = torch.arange(S - Q, S, device=attention.visible_QS.device)
    return i[:, None] - torch.arange(S, device=attention.visible_QS.device)
