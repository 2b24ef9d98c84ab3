"""The decoder of the counting runs in CoPE's released code (facebookresearch/RAM, projects/cope, `--post-norm`).

    x ← dropout(e[token])                                                     e[token] + p[position] with `absolute`
    x ← LayerNorm(x + dropout(attention(x)))
    x ← LayerNorm(x + dropout(W_down·dropout(ReLU(W_up·x))))
    logits = W_head·x                                                         no norm before it

As in `src/models/transformer.py` and `src/models/simple_transformer.py` of that code, read in 2026:

- Linear layers are `nn.Linear`'s uniform on ±1/√(number of inputs), biases included: queries, keys, values, output,
  feed-forward net, CoPE's separate gate keys, and an output layer that is not tied, which has no bias.
- Token embeddings and absolute positions are N(0, 1/D), that is, with a standard deviation of 1/√D.
- One dropout probability for the sum of embeddings, attention weights, hidden units after the ReLU, and both branches.

Options of encodings choose the rest of that code: `{kind: relative, scale_positions: true, share_layers: true, std:
1/sqrt(d)}` and `{kind: cope, p_max: full, scale_positions: true}`. Its `--pos-emb rope` has no effect; ours rotates.
The order in which initial values are drawn, the dropout masks and the random data differ from that code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

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

    # 2: dropout after the ReLU, absolute positions N(0, 1/D), uniform gate keys and untied output layer.
    VERSION: ClassVar[int] = 2

    kind: Literal["post_norm"] = "post_norm"

    def absolute_std(self, dim: int) -> float:
        return float(dim**-0.5)

    def linear_bound(self, inputs: int) -> float:
        return float(inputs**-0.5)

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
        if sizes.tied:
            return {}
        return linear_parameters("head", sizes.dim, sizes.vocabulary, Uniform(sizes.dim**-0.5), None)

    def block(
        self, parameters: Parameters, x_BTD: Tensor, attention: TensorFunction, dropout: TensorFunction
    ) -> Tensor:
        x_BTD = layer_norm(parameters, "attention_norm", x_BTD + dropout(attention(x_BTD)))
        h_BTF = dropout(linear(parameters, "feed_forward.up", x_BTD).relu())
        x_BTD = x_BTD + dropout(linear(parameters, "feed_forward.down", h_BTF))
        return layer_norm(parameters, "ffn_norm", x_BTD)


def _linear_parameters(name: str, inputs: int, outputs: int) -> Declarations:
    initialisation = Uniform(inputs**-0.5)
    return linear_parameters(name, inputs, outputs, initialisation, initialisation)
