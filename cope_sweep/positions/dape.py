"""DAPE (Zheng et al. 2024): an additive bias that an MLP over the heads adapts to the attention logits.

    a_ij = softmax_j(s_ij + b_ij + f([s_ij; b_ij]))        s_ij = q_i·k_j/√K of all heads, b_ij a static bias

f has 2·H inputs, N hidden units with LeakyReLU and H outputs. The static bias comes from ALiBi, Kerple or FIRE (whose
own hidden units then have LeakyReLU, as in the released code).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.alibi import ALiBi
from cope_sweep.positions.base import Attention, AttentionEncoding, Dims, Parameter, Tensors
from cope_sweep.positions.fire import FIRE, SLOPE
from cope_sweep.positions.kerple import Kerple

if TYPE_CHECKING:
    from torch import Tensor

STATIC: dict[str, AttentionEncoding] = {"alibi": ALiBi(), "kerple": Kerple(), "fire": FIRE(activation="leaky_relu")}


class DAPE(AttentionEncoding):
    """Data-adaptive position encoding."""

    kind: Literal["dape"] = "dape"
    bias: Literal["alibi", "kerple", "fire"] = Field(default="kerple", description="The static bias.")
    hidden: int = Field(default=32, ge=1, le=10**6, description="Hidden units of the MLP.")

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        heads, outer, inner = dims.heads, (2 * dims.heads) ** -0.5, self.hidden**-0.5
        static = STATIC[self.bias].parameters(dims).items()
        return {
            **{f"{self.bias}_{name}": declared for name, declared in static},
            "mlp_w1": Parameter((self.hidden, 2 * heads), per_layer=True, bound=outer),
            "mlp_b1": Parameter((self.hidden,), per_layer=True, bound=outer),
            "mlp_w2": Parameter((heads, self.hidden), per_layer=True, bound=inner),
            "mlp_b2": Parameter((heads,), per_layer=True, bound=inner),
        }

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch
        import torch.nn.functional as F

        static = STATIC[self.bias]
        prefix = f"{self.bias}_"
        own = {name.removeprefix(prefix): x for name, x in parameters.items() if name.startswith(prefix)}
        b_BHQS = static.score(own, attention)
        assert b_BHQS is not None  # noqa: S101 - each static bias has a score
        s_BHQS = attention.logits_BHQS
        both_BQSX = torch.cat((s_BHQS, b_BHQS.expand_as(s_BHQS).to(s_BHQS.dtype)), dim=1).permute(0, 2, 3, 1)
        units_BQSN = F.leaky_relu(both_BQSX @ parameters["mlp_w1"].T + parameters["mlp_b1"], SLOPE)
        adapted_BQSH = units_BQSN @ parameters["mlp_w2"].T + parameters["mlp_b2"]
        return b_BHQS + adapted_BQSH.permute(0, 3, 1, 2)
