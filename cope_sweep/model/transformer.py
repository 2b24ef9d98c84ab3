"""A decoder-only transformer that holds a list of position encodings.

Three families, each with its own order, feed-forward net and initialisation:

- `gpt2` (Radford et al. 2019): x + f(LN(x)), GELU, weights N(0, 0.02), divided by √(2·layers) where they end a residual
  branch;
- `llama` (Touvron et al. 2023): x + f(RMSNorm(x)), SwiGLU, no biases, weights N(0, 0.02);
- `post_norm`, the decoder of the released CoPE counting runs: LN(x + f(x)), ReLU, linear layers uniform ±1/√fan_in,
  embeddings N(0, 1/√D).

Shapes: B batch, T tokens, D dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cope_sweep.model.attention import LayerCache, Position, Positions, SelfAttention
from cope_sweep.positions import Dims, Encoding
from cope_sweep.spec import ModelSpec, RunSpec

Cache = list[LayerCache]
"""What each layer keeps of the tokens before; start a cached decoding with `[{} for _ in range(layers)]`."""


class PositionParameters(nn.Module):
    """The parameters of one encoding: those that all layers share, and those of each layer that it serves."""

    def __init__(self, encoding: Encoding, dims: Dims) -> None:
        super().__init__()
        self.encoding = encoding
        declared = encoding.parameters(dims)
        self.shared = nn.ParameterDict({n: torch.zeros(p.shape) for n, p in declared.items() if not p.per_layer})
        own = {name: p.shape for name, p in declared.items() if p.per_layer}
        self.layers = nn.ModuleDict()
        for layer in range(dims.layers):
            if own and encoding.serves(layer):
                self.layers[str(layer)] = nn.ParameterDict({name: torch.zeros(shape) for name, shape in own.items()})

    def of(self, layer: int) -> Mapping[str, Tensor]:
        """What serves layer `layer`."""
        own = cast(Mapping[str, Tensor], self.layers[str(layer)]) if str(layer) in self.layers else {}
        return {**cast(Mapping[str, Tensor], self.shared), **own}

    @torch.no_grad()
    def initialise(self, dims: Dims, rng: torch.Generator) -> None:
        """Normal, of the declared standard deviation; zeros where that is 0."""
        declared = self.encoding.parameters(dims)
        for name, parameter in self.named_parameters():
            std = declared[name.split(".")[-1]].std
            if std:
                parameter.normal_(0, std, generator=rng)


class MLP(nn.Module):
    """down(activation(up(x))): GELU for gpt2, ReLU for post_norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.dim, spec.feed_forward_dim)
        self.down = nn.Linear(spec.feed_forward_dim, spec.dim)
        self.activation = nn.GELU(approximate="tanh") if spec.family == "gpt2" else nn.ReLU()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class SwiGLU(nn.Module):
    """down(silu(gate(x))·up(x)), without biases (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.feed_forward_dim, bias=False)
        self.up = nn.Linear(spec.dim, spec.feed_forward_dim, bias=False)
        self.down = nn.Linear(spec.feed_forward_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def _norm(spec: ModelSpec) -> nn.Module:
    return nn.RMSNorm(spec.dim, eps=1e-5) if spec.family == "llama" else nn.LayerNorm(spec.dim)


class Block(nn.Module):
    """Attention and a feed-forward net, each with a residual connection and a norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.pre_norm = spec.family != "post_norm"
        bias = spec.family != "llama"
        self.attention = SelfAttention(spec.dim, spec.heads, spec.dropout, bias=bias, hard=spec.hard_attention)
        self.attention_norm = _norm(spec)
        self.feed_forward = SwiGLU(spec) if spec.family == "llama" else MLP(spec)
        self.ffn_norm = _norm(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self, x_BTD: Tensor, positions: Positions, cache: LayerCache | None = None, lengths_B: Tensor | None = None
    ) -> Tensor:
        if self.pre_norm:
            x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), positions, cache, lengths_B))
            return x_BTD + self.dropout(self.feed_forward(self.ffn_norm(x_BTD)))
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, positions, cache, lengths_B)))
        return self.ffn_norm(x_BTD + self.dropout(self.feed_forward(x_BTD)))


class Transformer(nn.Module):
    """The model of a run. All randomness of the initialisation comes from the run's seed."""

    checkpoint_activations = False
    """In training, keep of each block its input only, and compute the rest again for the backward pass: the same
    numbers to the bit, dropout included, for a third more work and a fraction of the memory (Chen et al. 2016)."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__()
        spec = run.model
        self.vocabulary_size = run.task.vocabulary_size
        self.embedding = nn.Embedding(self.vocabulary_size, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = _norm(spec) if spec.family != "post_norm" else nn.Identity()
        self.head = nn.Linear(spec.dim, self.vocabulary_size, bias=False)
        self.dropout = nn.Dropout(spec.dropout)
        self.position = nn.ModuleList(PositionParameters(encoding, run.dims) for encoding in spec.position)
        if spec.tied:
            self.head.weight = self.embedding.weight
        if not self.embedding.weight.is_meta:
            self._initialise(run)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None, lengths_B: Tensor | None = None) -> Tensor:
        """Logits of the next token, shape (B, T, V).

        With a `cache`, `tokens_BT` are the tokens that follow those already in it. `lengths_B`, where sequences differ:
        how many tokens each has, those in the cache included; what is after them is padding, its logits mean nothing.
        Raises ValueError where an encoding cannot reach that far.
        """
        start = cache[0]["v"].shape[2] if cache and cache[0] else 0
        x_BTD = self.embedding(tokens_BT)
        for parameters in self._position_parameters():
            x_BTD = parameters.encoding.embed(parameters.of(0), x_BTD, start)
        x_BTD = self.dropout(x_BTD)
        for layer, block in enumerate(self.blocks):
            layer_cache = cache[layer] if cache is not None else None
            arguments = (x_BTD, self._positions(layer), layer_cache, lengths_B)
            if self.checkpoint_activations and self.training and cache is None:
                x_BTD = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x_BTD = block(*arguments)
        return self.head(self.norm(x_BTD))

    def _positions(self, layer: int) -> Positions:
        """Each encoding with the parameters that serve this layer."""
        return [
            Position(parameters.encoding, parameters.of(layer))
            for parameters in self._position_parameters()
            if parameters.encoding.serves(layer)
        ]

    def _position_parameters(self) -> list[PositionParameters]:
        return cast(list[PositionParameters], list(self.position))

    @torch.no_grad()
    def _initialise(self, run: RunSpec) -> None:
        spec, rng = run.model, torch.Generator().manual_seed(run.seed)
        embedding_std = spec.dim**-0.5 if spec.family == "post_norm" else 0.02
        self.embedding.weight.normal_(0, embedding_std, generator=rng)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                _initialise_linear(module, spec, rng, ends_branch=name.endswith((".out", ".down")))
        if not spec.tied:
            self.head.weight.normal_(0, embedding_std, generator=rng)
        # Last, so that models that differ in their encodings only begin with the same other weights.
        for parameters in self._position_parameters():
            parameters.initialise(run.dims, rng)


def _initialise_linear(linear: nn.Linear, spec: ModelSpec, rng: torch.Generator, *, ends_branch: bool) -> None:
    if spec.family == "post_norm":
        bound = linear.in_features**-0.5
        linear.weight.uniform_(-bound, bound, generator=rng)
        linear.bias.uniform_(-bound, bound, generator=rng)
        return
    std = 0.02 / math.sqrt(2 * spec.layers) if ends_branch and spec.family == "gpt2" else 0.02
    linear.weight.normal_(0, std, generator=rng)
    if spec.family == "gpt2":
        linear.bias.zero_()


def check_reach(run: RunSpec, tokens: int) -> None:
    """Raise ValueError where an encoding of the run's model has no position for so many tokens in a row.

    Asks the encodings of the input alone, without memory: those of attention reach as far as they are asked to.
    """
    x_BTD = torch.empty(1, tokens, run.model.dim, device="meta")
    for encoding in run.model.position:
        declared = encoding.parameters(run.dims).items()
        encoding.embed({name: torch.empty(each.shape, device="meta") for name, each in declared}, x_BTD, 0)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The summed cross-entropy over the tokens that have a target, in float32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
