"""The post-norm decoder of the counting runs in CoPE's released code (Golovneva et al. 2024).

    x ← LayerNorm(x + attention(x))
    x ← LayerNorm(x + W_down·ReLU(W_up·x))
    logits = W_head·x

Linear layers are uniform on ±1/√(number of inputs), biases included. Embeddings and the output layer are N(0, 1/D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cope_sweep.families.base import (
    Declarations,
    Family,
    ModelSizes,
    Parameters,
    TensorFunction,
    Uniform,
    embedding_parameters,
    layer_norm,
    layer_norm_parameters,
    linear,
    linear_parameters,
)

if TYPE_CHECKING:
    from torch import Tensor


class PostNorm(Family):
    """Post-norm, LayerNorm, ReLU."""

    kind: Literal["post_norm"] = "post_norm"

    def input_parameters(self, sizes: ModelSizes) -> Declarations:
        return embedding_parameters("embedding", sizes, sizes.dim**-0.5)

    def block_parameters(self, sizes: ModelSizes) -> Declarations:
        D, F = sizes.dim, sizes.feed_forward_dim
        return {
            **_linear_parameters("attention.qkv", D, 3 * D),
            **_linear_parameters("attention.out", D, D),
            **layer_norm_parameters("attention_norm", D),
            **_linear_parameters("feed_forward.up", D, F),
            **_linear_parameters("feed_forward.down", F, D),
            **layer_norm_parameters("ffn_norm", D),
        }

    def output_parameters(self, sizes: ModelSizes) -> Declarations:
        return {} if sizes.tied else embedding_parameters("head", sizes, sizes.dim**-0.5)

    def block(
        self, parameters: Parameters, x_BTD: Tensor, attention: TensorFunction, dropout: TensorFunction
    ) -> Tensor:
        x_BTD = layer_norm(parameters, "attention_norm", x_BTD + dropout(attention(x_BTD)))
        h_BTF = linear(parameters, "feed_forward.up", x_BTD).relu()
        x_BTD = x_BTD + dropout(linear(parameters, "feed_forward.down", h_BTF))
        return layer_norm(parameters, "ffn_norm", x_BTD)


def _linear_parameters(name: str, inputs: int, outputs: int) -> Declarations:
    initialisation = Uniform(inputs**-0.5)
    return linear_parameters(name, inputs, outputs, initialisation, initialisation)
