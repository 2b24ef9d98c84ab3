"""A decoder-only transformer: a model family and a list of position encodings.

The family declares the parameters and computes each block (`cope_sweep.families`); this module owns the parameters and
adds token embedding, attention, dropout and the output layer.

Shapes: B batch, T tokens, D dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cope_sweep.config import RunSpec
from cope_sweep.errors import InvalidValue
from cope_sweep.kernels import LayerEncoding, LayerEncodings
from cope_sweep.kernels.dropout import apply_dropout, at_place, draw_seeds
from cope_sweep.model.attention import LayerCache, self_attention
from cope_sweep.model.loss import output_loss, predict
from cope_sweep.model.packing import Packing
from cope_sweep.model.parameters import ParametersByName, PositionParameters, add_parameters, initialise
from cope_sweep.model.shares import even_shares, sampled_shares
from cope_sweep.positions import Encoding

Cache = list[LayerCache]
"""The cached tensors of each layer; start a cached decoding with `[{} for _ in range(layers)]`."""
Hidden = Callable[[Tensor, Tensor | None], Tensor]
"""From token ids, (B, T), and the seeds of dropout, (B,), to the input of the output layer, (B, T, D)."""


class TokenEmbedding(nn.Module):
    """A table of token vectors; the family declares its `weight`, (V, D)."""

    weight: Tensor

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class Block(nn.Module):
    """One block of a family: attention and a feed-forward net, each with a residual connection and a norm."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__()
        self.spec = run.model
        self.of_family, self.of_options = run.model.family.block_parameters(run.sizes), run.attention_parameters
        self.declared = self.of_family | self.of_options
        add_parameters(self, self.declared)
        self.parameters_by_name = ParametersByName(self, self.declared)

    def forward(
        self,
        x_BTD: Tensor,
        positions: LayerEncodings,
        cache: LayerCache | None = None,
        lengths_B: Tensor | None = None,
        packing: Packing | None = None,
        seeds_B: Tensor | None = None,
        shares_BT: Tensor | None = None,
    ) -> Tensor:
        """`seeds_B`: of the dropout masks of this block, one for each sequence; None: no dropout."""
        spec, parameters = self.spec, self.parameters_by_name

        def attention(h_BTD: Tensor) -> Tensor:
            return self_attention(
                parameters,
                h_BTD,
                positions,
                heads=spec.heads,
                dropout=0.0 if seeds_B is None else spec.dropout,
                seeds_B=seeds_B,  # of place 0
                hard=spec.hard_attention,
                cache=cache,
                lengths_B=lengths_B,
                packing=packing,
                shares_BT=shares_BT,
            )

        # Each call of dropout is another place; 0 is attention.
        places = count(1)

        def dropout(h_BTD: Tensor) -> Tensor:
            if seeds_B is None:
                return h_BTD
            return apply_dropout(h_BTD, spec.dropout, at_place(seeds_B, next(places)))

        return spec.family.block(parameters, x_BTD, attention, dropout)


class Transformer(nn.Module):
    """The model of a run. Its initial weights depend on the run's seed alone."""

    checkpoint_activations = False
    """Save, in training, only the input of each block and compute the rest again in the backward pass. The numbers are
    the same to the bit, as dropout's masks are a function of seeds; it takes a third more time and less memory (Chen et
    al. 2016)."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__()
        spec, sizes = run.model, run.sizes
        self.family = spec.family
        self.vocabulary_size = sizes.vocabulary
        self.dropout = spec.dropout
        self.embedding = TokenEmbedding()
        add_parameters(self, self.family.input_parameters(sizes))
        self.blocks = nn.ModuleList(Block(run) for _ in range(spec.layers))
        self.norm, self.head = nn.Module(), nn.Module()
        output = self.family.output_parameters(sizes)
        add_parameters(self, output)
        self.output_parameters = ParametersByName(self, output)
        self.position = nn.ModuleList(PositionParameters(encoding, run.dims) for encoding in spec.position)
        if spec.tied:
            self.head.weight = self.embedding.weight
        # On the meta device a checkpoint gives the weights.
        if not self.embedding.weight.is_meta:
            self._initialise(run)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None, lengths_B: Tensor | None = None) -> Tensor:
        """Logits of the next token, shape (B, T, V).

        Args:
            tokens_BT: token ids; with a `cache`, those that follow the cached tokens.
            cache: one mapping for each layer, empty at first; the new tokens are appended.
            lengths_B: the number of tokens of each sequence, those in the cache included; None: all. Tokens after them
                are padding, and their logits are undefined.

        Raises ValueError where an encoding has no position for so many tokens.
        """
        return self.logits(self.hidden(tokens_BT, cache, lengths_B))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Logits of the next token from the output of `hidden`, with V instead of D as the last dimension."""
        return F.linear(x_BTD, cast(Tensor, self.head.weight))

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        seeds_B: Tensor | None = None,
        hidden: Hidden | None = None,
    ) -> Tensor:
        """The cross-entropy of the targets in nats, summed; without logits of all tokens at once if they are large.

        `seeds_B` are the seeds of dropout, as in `hidden`. The argument `hidden` replaces the method of this name, by a
        compiled one for example.
        """
        hidden_BTD = hidden(tokens_BT, seeds_B) if hidden else self.hidden(tokens_BT, seeds_B=seeds_B)
        return output_loss(hidden_BTD, cast(Tensor, self.head.weight), targets_BT)

    def predict(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The value of `loss` without a gradient, and the most probable token after each token, (B, T)."""
        return predict(self.hidden(tokens_BT), cast(Tensor, self.head.weight), targets_BT)

    def nats_of_stretches(self, tokens_BT: Tensor, targets_BT: Tensor, ends: Sequence[int]) -> Tensor:
        """The value of `loss` without a gradient, for each stretch of places that ends before one of `ends`, (S,)."""
        hidden_BTD, weight = self.hidden(tokens_BT), cast(Tensor, self.head.weight)
        stretches = pairwise((0, *ends))
        return torch.stack([predict(hidden_BTD[:, a:b], weight, targets_BT[:, a:b])[0] for a, b in stretches])

    def hidden(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        lengths_B: Tensor | None = None,
        packing: Packing | None = None,
        seeds_B: Tensor | None = None,
    ) -> Tensor:
        """The input of the output layer, (B, T, D); arguments and errors as in `forward`.

        With a `packing` of the tokens, without a cache, the padding is not computed, and the result is (1, N, D).
        `seeds_B`, int64, determine dropout masks and sampled positions of each sequence in training; None: they are
        drawn from torch's global generator. Raises ValueError for dropout with a `packing`, and for sampled positions
        with a `cache`.
        """
        shares_BT = self._shares(tokens_BT, cache, packing.lengths_B if packing else lengths_B, seeds_B)
        seeds_B = self._dropout_seeds(tokens_BT, packing, seeds_B)
        start = cache[0]["v"].shape[2] if cache and cache[0] else 0
        x_BTD = self.embedding(tokens_BT)
        for encoding_parameters in self._position_parameters():
            x_BTD = encoding_parameters.encoding.embed(encoding_parameters.of_layer(0), x_BTD, start)
        if packing is not None:
            x_BTD = packing.pack(x_BTD)
        if seeds_B is not None:
            x_BTD = apply_dropout(x_BTD, self.dropout, seeds_B)
        for layer, block in enumerate(self.blocks):
            layer_cache = cache[layer] if cache is not None else None
            # A block has 16 numbers for its places with dropout. The first 16 are the embedding's.
            block_seeds_B = None if seeds_B is None else at_place(seeds_B, (layer + 1) * 16)
            arguments = (x_BTD, self._positions(layer), layer_cache, lengths_B, packing, block_seeds_B, shares_BT)
            if self.checkpoint_activations and self.training and cache is None:
                # Dropout depends on the seeds alone: torch need not restore its generators.
                x_BTD = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = block(*arguments)
        return self.family.final_norm(self.output_parameters, x_BTD)

    def _shares(
        self, tokens_BT: Tensor, cache: Cache | None, lengths_B: Tensor | None, seeds_B: Tensor | None
    ) -> Tensor | None:
        """The positions of encodings that sample them, as shares of their range, (B, T); None if none does."""
        sampling = [
            encoding_parameters.encoding
            for encoding_parameters in self._position_parameters()
            if encoding_parameters.encoding.samples
        ]
        if not sampling:
            return None
        if cache is not None:
            kind = sampling[0].kind
            raise InvalidValue(
                f"with {kind}.sampled, positions depend on the number of tokens that follow, so tokens cannot be "
                "computed one after another: such a model cannot generate, nor score more tokens than fit into "
                "memory at once",
                key=f"{kind}.sampled",
                kind=kind,
            )
        B, T = tokens_BT.shape
        if self.training:
            return sampled_shares(draw_seeds(B, tokens_BT.device) if seeds_B is None else seeds_B, T)
        return even_shares(tokens_BT.new_full((B,), T) if lengths_B is None else lengths_B, T)

    def _dropout_seeds(self, tokens_BT: Tensor, packing: Packing | None, seeds_B: Tensor | None) -> Tensor | None:
        """The seeds of dropout in this forward pass; None: without dropout."""
        if not (self.training and self.dropout):
            return None
        if packing is not None:
            raise ValueError("dropout is not computed for packed sequences; set the model to evaluation mode, eval()")
        return draw_seeds(len(tokens_BT), tokens_BT.device) if seeds_B is None else seeds_B

    @contextmanager
    def encodings(self, encodings: Sequence[Encoding]) -> Iterator[None]:
        """Compute with these encodings within a `with` block: the run's encodings, with other fields.

        They have the same order and the same parameters.
        """
        parameters = self._position_parameters()
        before = [parameter.encoding for parameter in parameters]
        try:
            for encoding_parameters, encoding in zip(parameters, encodings, strict=True):
                encoding_parameters.encoding = encoding
            yield
        finally:
            for encoding_parameters, encoding in zip(parameters, before, strict=True):
                encoding_parameters.encoding = encoding

    def _positions(self, layer: int) -> LayerEncodings:
        return [
            LayerEncoding(encoding_parameters.encoding, encoding_parameters.of_layer(layer))
            for encoding_parameters in self._position_parameters()
            if encoding_parameters.encoding.serves(layer)
        ]

    def _position_parameters(self) -> list[PositionParameters]:
        return cast(list[PositionParameters], list(self.position))

    def _initialise(self, run: RunSpec) -> None:
        generator = torch.Generator().manual_seed(run.seed)
        initialise(self, self.family.input_parameters(run.sizes), generator)
        for block in cast(list[Block], list(self.blocks)):
            initialise(block, block.of_family, generator)
        initialise(self, self.family.output_parameters(run.sizes), generator)
        # Last, so that models that differ only in their encodings start with the same other weights.
        for encoding_parameters in self._position_parameters():
            encoding_parameters.initialise(run.dims, generator)
        # And those that differ only in the gate of attention's output, too.
        for block in cast(list[Block], list(self.blocks)):
            initialise(block, block.of_options, generator)


def check_reach(run: RunSpec, tokens: int) -> None:
    """Raise ValueError where an encoding of the run's model has no position for so many tokens in a row.

    Only encodings of the input can be too short; they are computed on the meta device, without memory.
    """
    x_BTD = torch.empty(1, tokens, run.model.dim, device="meta")
    for encoding in run.model.position:
        declared = encoding.parameters(run.dims).items()
        encoding.embed({name: torch.empty(parameter.shape, device="meta") for name, parameter in declared}, x_BTD, 0)
