"""DAPE (Zheng et al. 2024): an additive bias that an MLP over the heads adapts to the attention logits.

    a_ij = softmax_j(s_ij + b_ij + f([s_ij; b_ij]))        s_ij = q_i·k_j/√K of all heads, b_ij a static bias

f has 2·H inputs, N hidden units with LeakyReLU and H outputs. The static bias comes from ALiBi, Kerple or FIRE (whose
own hidden units then have LeakyReLU, as in the released code).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

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

    SOURCE: ClassVar[str] = "arXiv 2405.14722"
    replaces: ClassVar[bool] = True

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
        B, H, Q, S = s_BHQS.shape
        both_BXP = torch.cat((s_BHQS, b_BHQS.expand_as(s_BHQS).to(s_BHQS.dtype)), dim=1).flatten(2)  # P = Q·S pairs
        units_BNP = F.leaky_relu(_layer(both_BXP, parameters["mlp_w1"], parameters["mlp_b1"]), SLOPE)
        return b_BHQS + _layer(units_BNP, parameters["mlp_w2"], parameters["mlp_b2"]).view(B, H, Q, S)


def _layer(x_BXP: Tensor, weight_YX: Tensor, bias_Y: Tensor) -> Tensor:
    """A linear layer along the second dimension: with the features in the last one, it takes twice the time."""
    import torch

    batch = x_BXP.shape[0]
    return torch.baddbmm(bias_Y[:, None].expand(batch, -1, 1), weight_YX.expand(batch, -1, -1), x_BXP)
