"""What a position encoding is: a frozen spec, the parameters that it declares, and the hooks that a transformer calls.

An encoding is data plus pure functions of tensors. The model owns the parameters, hands them in, and calls each hook of
each encoding in its list, so encodings compose and scores add up. Nothing here imports torch: a plan counts the
parameters of a model without it.

Shapes: B batch, T tokens, D model dim, H heads, K head dim, Q queries, S keys ("sources").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, Strict

from cope_sweep.registry import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from cope_sweep.positions.terms import Term


@dataclass(frozen=True)
class Dims:
    """The sizes of the model that an encoding serves."""

    dim: int
    heads: int
    layers: int
    context: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclass(frozen=True)
class Parameter:
    """A parameter that an encoding asks for."""

    shape: tuple[int, ...]
    std: float = 0.0
    """Standard deviation of the normal init; 0: zeros."""
    per_layer: bool = False
    """One for each layer that the encoding serves, or one for all."""


@dataclass(frozen=True)
class Attention:
    """What a `score` hook sees of one attention layer.

    Queries are the LAST Q of the S tokens (Q = S in a full pass, Q = 1 in a cached decoding step).
    """

    q_BHQK: Tensor
    """Queries, before any rotation."""
    k_BHSK: Tensor
    """Keys, before any rotation."""
    v_BHSK: Tensor
    logits_BHQS: Tensor
    """q·k/√K, after rotation, before any score is added and before the mask."""
    visible_QS: Tensor
    """bool: key s is not after query q."""
    gate_k_BHSK: Tensor | None = None
    """What this encoding's `gate_keys` gave."""
    rotated: bool = False
    """Whether some encoding turned queries and keys, so that `logits_BHQS` is not q·k/√K of those above."""


class Encoding(Kind):
    """A position encoding. Subclasses set `kind`, and override the hooks that they need."""

    @property
    def scores(self) -> bool:
        """Whether this encoding adds to the attention logits."""
        return type(self).score is not Encoding.score

    @property
    def rotates(self) -> bool:
        """Whether this encoding turns queries and keys."""
        return type(self).rotate is not Encoding.rotate

    def serves(self, layer: int) -> bool:
        """Whether attention layer `layer` (from 0) has this encoding."""
        return True

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        """The parameters, by name."""
        return {}

    def check(self, dims: Dims) -> None:
        """Raise ValueError, with the way out, where these dims cannot hold this encoding."""

    def embed(self, parameters: Mapping[str, Tensor], x_BTD: Tensor, start: int) -> Tensor:
        """Input embeddings with positions `start`, `start` + 1, … worked in."""
        return x_BTD

    def rotate(self, parameters: Mapping[str, Tensor], x_BHTK: Tensor, start: int) -> Tensor:
        """Queries or keys, turned by their positions `start`, `start` + 1, …"""
        return x_BHTK

    def gate_keys(self, parameters: Mapping[str, Tensor], h_BTD: Tensor) -> Tensor | None:
        """Keys of this encoding's own, (B, T, D), from the attention layer's input; or None."""
        return None

    def score(self, parameters: Mapping[str, Tensor], attention: Attention) -> Tensor | None:
        """A bias of shape (B, H, Q, S) to add to the attention logits, or None."""
        return None

    def term(self, parameters: Mapping[str, Tensor], q_BHQK: Tensor) -> Term | None:
        """What `score` adds, said for the fused kernels, from the queries before any rotation.

        None: it cannot be said, and attention with this encoding is computed by `score`.
        """
        return None


Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Strict(False)]
"""Not strict of the tuple: a file's list is welcome."""


class AttentionEncoding(Encoding):
    """An encoding that works inside attention layers, in all of them or in some."""

    layers: Layers | None = Field(default=None, description="The layers that have it, from 0; null: all.")

    def serves(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def check(self, dims: Dims) -> None:
        beyond = [layer for layer in self.layers or () if layer >= dims.layers]
        if beyond:
            raise ValueError(
                f"{self.kind}.layers names layer {beyond[0]}, and model.layers = {dims.layers}; "
                f"layers are counted from 0 to {dims.layers - 1}"
            )
