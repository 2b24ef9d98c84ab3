"""The interface of a position encoding: a frozen spec, the parameters that it declares, and hooks.

An encoding is data and pure functions of tensors. The model owns the parameters, passes them to the hooks, and calls
each hook of each encoding in its list. So encodings compose, and their scores are summed. This module does not import
torch, so that a plan can count a model's parameters without it.

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
    """The sizes of the model that uses an encoding."""

    dim: int
    heads: int
    layers: int
    context: int
    """Tokens in the longest sequence."""
    absolute_std: float = 0.02
    """With which standard deviation the model's family initialises learned absolute positions."""
    linear_bound: float | None = None
    """The family initialises linear layers uniformly on ± this, with biases; None: weights N(0, 0.02²), biases 0."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter: its shape and its initialisation."""

    shape: tuple[int, ...]
    std: float = 0.0
    """Standard deviation of the normal initialisation; 0 means zeros."""
    per_layer: bool = False
    """True: one for each layer that the encoding serves. False: one that all layers share."""
    bound: float | None = None
    """The initialisation is uniform on ± this; None: it is normal, with `std`."""


@dataclass(frozen=True)
class Attention:
    """The tensors of one attention layer that a `score` hook receives.

    The queries belong to the last Q of the S tokens: Q = S in a full pass, Q = 1 in a step of cached decoding.
    """

    q_BHQK: Tensor
    """Queries, before any rotation unless the encoding uses rotated ones (`uses_rotated_query`)."""
    k_BHSK: Tensor
    """Keys, as the queries."""
    v_BHSK: Tensor
    """Values."""
    logits_BHQS: Tensor
    """q·k/√K, after rotation, before scores are added and before the mask."""
    visible_QS: Tensor
    """bool: key s is not after query q."""
    gate_k_BHSK: Tensor | None = None
    """The result of this encoding's `gate_keys`, split into heads; None if it has none."""
    rotated: bool = False
    """Whether queries and keys were rotated after these. If so, `logits_BHQS` is not q·k/√K of the tensors above."""


class Encoding(Kind):
    """A position encoding. Subclasses set `kind` and override the hooks that they need; each default does nothing."""

    @property
    def scores(self) -> bool:
        """Whether this encoding adds to the attention logits."""
        return type(self).score is not Encoding.score

    @property
    def rotates(self) -> bool:
        """Whether this encoding rotates queries and keys."""
        return type(self).rotate is not Encoding.rotate

    @property
    def has_term(self) -> bool:
        """Whether `term` describes the score, so that fused kernels can compute it without a T × T array."""
        return type(self).term is not Encoding.term

    @property
    def uses_rotated_query(self) -> bool:
        """Whether `score` and `term` receive queries and keys after the rotation (RoPE), not before it."""
        return False

    def serves(self, layer: int) -> bool:
        """Whether attention layer `layer` (counted from 0) uses this encoding."""
        return True

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        """The declarations of the parameters, by name."""
        return {}

    def check(self, dims: Dims) -> None:
        """Raise ValueError, saying what to change, if a model of these sizes cannot use this encoding."""

    def embed(self, parameters: Mapping[str, Tensor], x_BTD: Tensor, start: int) -> Tensor:
        """The input embeddings with positions added, (B, T, D).

        Args:
            parameters: The parameters of layer 0, by name.
            x_BTD: The input embeddings of the tokens at positions `start`, `start` + 1, …
            start: The position of the first token.

        Raises:
            ValueError: The encoding has no embedding for one of these positions.
        """
        return x_BTD

    def rotate(self, parameters: Mapping[str, Tensor], x_BHTK: Tensor, start: int) -> Tensor:
        """Queries or keys, (B, H, T, K), rotated by their positions `start`, `start` + 1, …"""
        return x_BHTK

    def gate_keys(self, parameters: Mapping[str, Tensor], h_BTD: Tensor) -> Tensor | None:
        """Separate keys for this encoding's gates, (B, T, D), computed from the attention layer's input; or None."""
        return None

    def score(self, parameters: Mapping[str, Tensor], attention: Attention) -> Tensor | None:
        """A bias to add to the attention logits, broadcastable to (B, H, Q, S); or None.

        Entries of keys after the query are ignored: attention masks them.
        """
        return None

    def term(self, parameters: Mapping[str, Tensor], q_BHQK: Tensor) -> Term | None:
        """The same bias as `score`, in the form that the fused kernels understand (see `terms`).

        `q_BHQK` are the queries that `score` receives. None means that no term expresses the bias: attention with this
        encoding then calls `score`.
        """
        return None


Layers = Annotated[tuple[Annotated[int, Field(ge=0, le=10**9)], ...], Field(min_length=1), Strict(False)]
"""Accepts a list too: files have no tuples."""


class AttentionEncoding(Encoding):
    """An encoding that acts in attention layers: in all of them, or in those of `layers`."""

    layers: Layers | None = Field(default=None, description="The layers that use it, counted from 0; null: all.")

    def serves(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def check(self, dims: Dims) -> None:
        beyond = [layer for layer in self.layers or () if layer >= dims.layers]
        if beyond:
            raise ValueError(
                f"{self.kind}.layers names layer {beyond[0]}, and model.layers = {dims.layers}; "
                f"the layers are 0 to {dims.layers - 1}"
            )
