"""GPT-2 (Radford et al. 2019).

    x ← x + attention(LayerNorm(x))
    x ← x + W_down·GELU(W_up·LayerNorm(x))        GELU in its tanh approximation
    logits = W_head·LayerNorm(x)

Weights are N(0, 0.02²) and biases 0. The weights at the end of a residual branch are N(0, 0.02² / (2·layers)).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from cope_sweep.families.base import (
    ZEROS,
    Declarations,
    Family,
    ModelSizes,
    Normal,
    Parameters,
    TensorFunction,
    embedding_parameters,
    layer_norm,
    layer_norm_parameters,
    linear,
    linear_parameters,
    recomputed,
)

if TYPE_CHECKING:
    from torch import Tensor

STD = 0.02


class GPT2(Family):
    """Pre-norm, LayerNorm, GELU."""

    kind: Literal["gpt2"] = "gpt2"

    def input_parameters(self, sizes: ModelSizes) -> Declarations:
        return embedding_parameters("embedding", sizes, STD)

    def block_parameters(self, sizes: ModelSizes) -> Declarations:
        D, F = sizes.dim, sizes.feed_forward_dim
        inner, branch_end = Normal(STD), Normal(STD / math.sqrt(2 * sizes.layers))
        return {
            **linear_parameters("attention.qkv", D, 3 * D, inner, ZEROS),
            **linear_parameters("attention.out", D, D, branch_end, ZEROS),
            **layer_norm_parameters("attention_norm", D),
            **linear_parameters("feed_forward.up", D, F, inner, ZEROS),
            **linear_parameters("feed_forward.down", F, D, branch_end, ZEROS),
            **layer_norm_parameters("ffn_norm", D),
        }

    def output_parameters(self, sizes: ModelSizes) -> Declarations:
        head = {} if sizes.tied else embedding_parameters("head", sizes, STD)
        return layer_norm_parameters("norm", sizes.dim) | head

    def block(
        self, parameters: Parameters, x_BTD: Tensor, attention: TensorFunction, dropout: TensorFunction
    ) -> Tensor:
        import torch.nn.functional as F

        x_BTD = x_BTD + dropout(attention(layer_norm(parameters, "attention_norm", x_BTD)))
        h_BTF = linear(parameters, "feed_forward.up", layer_norm(parameters, "ffn_norm", x_BTD))

        def down(h_BTF: Tensor) -> Tensor:
            return linear(parameters, "feed_forward.down", F.gelu(h_BTF, approximate="tanh"))

        return x_BTD + dropout(recomputed(down, h_BTF))

    def final_norm(self, parameters: Parameters, x_BTD: Tensor) -> Tensor:
        return layer_norm(parameters, "norm", x_BTD)
