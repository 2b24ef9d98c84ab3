"""Llama (Touvron et al. 2023), with one key and value for each query head.

    x ← x + attention(RMSNorm(x))
    x ← x + W_down·(SiLU(W_gate·RMSNorm(x)) ⊙ W_up·RMSNorm(x))        SwiGLU (Shazeer 2020)
    logits = W_head·RMSNorm(x)

No biases. Weights are N(0, 0.02²).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from cope_sweep.families.base import (
    ONES,
    Declarations,
    Family,
    ModelSizes,
    Normal,
    ParameterDeclaration,
    Parameters,
    TensorFunction,
    embedding_parameters,
    linear,
    linear_parameters,
)

if TYPE_CHECKING:
    from torch import Tensor

STD = 0.02


class Llama(Family):
    """Pre-norm, RMSNorm, SwiGLU, no biases."""

    kind: Literal["llama"] = "llama"

    def default_feed_forward_dim(self, dim: int) -> int:
        """8/3 of `dim`, so that three matrices have the parameters of two of 4·dim, rounded up to a multiple of 64."""
        return 64 * math.ceil(8 * dim / 3 / 64)

    def input_parameters(self, sizes: ModelSizes) -> Declarations:
        return embedding_parameters("embedding", sizes, STD)

    def block_parameters(self, sizes: ModelSizes) -> Declarations:
        D, F, weight = sizes.dim, sizes.feed_forward_dim, Normal(STD)
        return {
            **linear_parameters("attention.qkv", D, 3 * D, weight, None),
            **linear_parameters("attention.out", D, D, weight, None),
            **rms_norm_parameters("attention_norm", D),
            **linear_parameters("feed_forward.gate", D, F, weight, None),
            **linear_parameters("feed_forward.up", D, F, weight, None),
            **linear_parameters("feed_forward.down", F, D, weight, None),
            **rms_norm_parameters("ffn_norm", D),
        }

    def output_parameters(self, sizes: ModelSizes) -> Declarations:
        head = {} if sizes.tied else embedding_parameters("head", sizes, STD)
        return rms_norm_parameters("norm", sizes.dim) | head

    def block(
        self, parameters: Parameters, x_BTD: Tensor, attention: TensorFunction, dropout: TensorFunction
    ) -> Tensor:
        import torch.nn.functional as F

        x_BTD = x_BTD + dropout(attention(rms_norm(parameters, "attention_norm", x_BTD)))
        h_BTD = rms_norm(parameters, "ffn_norm", x_BTD)
        gate_BTF = F.silu(linear(parameters, "feed_forward.gate", h_BTD))
        up_BTF = linear(parameters, "feed_forward.up", h_BTD)
        return x_BTD + dropout(linear(parameters, "feed_forward.down", gate_BTF * up_BTF))

    def final_norm(self, parameters: Parameters, x_BTD: Tensor) -> Tensor:
        return rms_norm(parameters, "norm", x_BTD)


def rms_norm_parameters(name: str, dim: int) -> Declarations:
    """Declaration of an RMSNorm: gain 1."""
    return {f"{name}.weight": ParameterDeclaration((dim,), ONES)}


def rms_norm(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    """The RMSNorm `name` over the last dimension of `x` (Zhang & Sennrich 2019)."""
    import torch.nn.functional as F

    weight = parameters[f"{name}.weight"]
    return F.rms_norm(x, weight.shape, weight, 1e-5)
