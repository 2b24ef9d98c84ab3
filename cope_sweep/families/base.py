"""The base of model families: the parameters that a family declares and the functions that compute with them.

A family is data plus pure functions of tensors. The model owns the parameters: it builds them from the declarations,
initialises them in the declared order and passes them to the functions by name. This module does not import torch, so a
plan counts the parameters of a model without it.

The model adds what all families share: token embedding, attention with position encodings, dropout and the output
layer. It expects these names:

    embedding.weight                (V, D)
    attention.qkv.weight, .bias     (3·D, D), (3·D,)    in each block; the biases are optional
    attention.out.weight, .bias     (D, D), (D,)
    head.weight                     (V, D)              unless it is tied to the embedding

`attention_parameters` declares what options of the model add to the attention of any family.

Shapes: B batch, T tokens, D model dim, F hidden units of the feed-forward net, V vocabulary, H heads, K head dim.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from cope_sweep.registry import Kind
from cope_sweep.sizes import RECOMPUTED_ELEMENTS

if TYPE_CHECKING:
    from torch import Tensor

TensorFunction = Callable[["Tensor"], "Tensor"]
Parameters = Mapping[str, "Tensor"]
"""Parameters by the names under which they were declared."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that decide the shapes of a family's parameters."""

    vocabulary: int
    dim: int
    layers: int
    feed_forward_dim: int
    tied: bool
    """The output layer uses the token embedding, and has no parameter itself."""


@dataclass(frozen=True)
class ConstantValue:
    """Initialise every element to `value`."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Initialise from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Initialise from the uniform distribution on [−bound, bound]."""

    bound: float


Initialisation = ConstantValue | Normal | Uniform
ZEROS, ONES = ConstantValue(0.0), ConstantValue(1.0)


@dataclass(frozen=True)
class ParameterDeclaration:
    """The shape and the initial values of one parameter."""

    shape: tuple[int, ...]
    initialisation: Initialisation = ZEROS

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


Declarations = dict[str, ParameterDeclaration]
"""Declared parameters by name, in the order in which the model initialises them."""


class Family(Kind):
    """A model family. Subclasses set `kind`, declare the parameters and compute a block."""

    BARE: ClassVar[bool] = True

    def default_feed_forward_dim(self, dim: int) -> int:
        """F where `model.ffn_dim` is not set."""
        return 4 * dim

    def absolute_std(self, dim: int) -> float:
        """Standard deviation of the initial learned absolute positions where the encoding gives none (`std: null`)."""
        return 0.02

    def linear_bound(self, inputs: int) -> float | None:
        """The linear layers of encodings (separate gate keys) are initialised uniformly on ± this, biases included.

        None: weights N(0, 0.02²), biases 0.
        """
        return None

    @abstractmethod
    def input_parameters(self, sizes: ModelSizes) -> Declarations:
        """The parameters before the first block: the token embedding."""

    @abstractmethod
    def block_parameters(self, sizes: ModelSizes) -> Declarations:
        """The parameters of each block."""

    @abstractmethod
    def output_parameters(self, sizes: ModelSizes) -> Declarations:
        """The parameters after the last block: the final norm, if any, and `head.weight` unless `sizes.tied`."""

    @abstractmethod
    def block(
        self, parameters: Parameters, x_BTD: Tensor, attention: TensorFunction, dropout: TensorFunction
    ) -> Tensor:
        """The output of one block, (B, T, D).

        `attention` maps (B, T, D) to (B, T, D): projections, heads and position encodings. `dropout` is the model's
        dropout, for the residual branches and wherever else the family has it, at most 15 times. Its calls are counted:
        each one has its own masks. So call it outside of functions that are computed again (`recomputed`).
        """

    def final_norm(self, parameters: Parameters, x_BTD: Tensor) -> Tensor:
        """The input of the output layer, from the last block's output."""
        return x_BTD


# -- Options of the attention of all families --------------------------------------------------------------------------

GATE, QUERY_NORM, KEY_NORM = "attention.gate", "attention.query_norm", "attention.key_norm"
OutputGate = Literal["channel", "head"]


def attention_parameters(
    family: Family, *, dim: int, heads: int, output_gate: OutputGate | None, qk_norm: bool
) -> Declarations:
    """Declarations of `model.output_gate`, (D, D) or (H, D), and of `model.qk_norm`, a gain of K for queries and keys.

    The gate starts as the family's other linear layers.
    """
    declared: Declarations = {}
    if output_gate is not None:
        bound = family.linear_bound(dim)
        rows = dim if output_gate == "channel" else heads
        declared |= linear_parameters(GATE, dim, rows, Normal(0.02) if bound is None else Uniform(bound), None)
    if qk_norm:
        for name in (QUERY_NORM, KEY_NORM):
            declared[f"{name}.weight"] = ParameterDeclaration((dim // heads,), ONES)
    return declared


# -- Parts that several families use -----------------------------------------------------------------------------------


def linear_parameters(
    name: str, inputs: int, outputs: int, weight: Initialisation, bias: Initialisation | None
) -> Declarations:
    """Declarations of a linear layer: `name.weight`, (outputs, inputs), and `name.bias` unless `bias` is None."""
    declared = {f"{name}.weight": ParameterDeclaration((outputs, inputs), weight)}
    if bias is not None:
        declared[f"{name}.bias"] = ParameterDeclaration((outputs,), bias)
    return declared


def layer_norm_parameters(name: str, dim: int) -> Declarations:
    """Declarations of a LayerNorm: gain 1, bias 0."""
    return {f"{name}.weight": ParameterDeclaration((dim,), ONES), f"{name}.bias": ParameterDeclaration((dim,), ZEROS)}


def embedding_parameters(name: str, sizes: ModelSizes, std: float) -> Declarations:
    """Declarations of a table of token vectors, (V, D): the token embedding or the output layer."""
    return {f"{name}.weight": ParameterDeclaration((sizes.vocabulary, sizes.dim), Normal(std))}


def linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    """The linear layer `name` applied to the last dimension of `x`; without a bias where none was declared."""
    import torch.nn.functional as F

    # A model whose linear layers are modules, which others may have replaced, computes them itself (`cope_sweep.hf`).
    called: Callable[[str, Tensor], Tensor] | None = getattr(parameters, "linear", None)
    if called is not None:
        return called(name, x)
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def recomputed(function: TensorFunction, x: Tensor) -> Tensor:
    """`function(x)`, whose intermediate results are computed again in the backward pass if `x` is large.

    For a norm or an activation function and the linear layer after it: their result is cheap to compute and as large as
    `x`, and the linear layer itself is not computed again. The numbers are the same to the bit.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    if x.numel() < RECOMPUTED_ELEMENTS or not torch.is_grad_enabled():
        return function(x)
    # No random numbers, and no tensors of other shapes: nothing has to be saved or compared.
    result: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    return result


def layer_norm(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    """The LayerNorm `name` over the last dimension of `x` (Ba et al. 2016)."""
    import torch.nn.functional as F

    weight = parameters[f"{name}.weight"]
    return F.layer_norm(x, weight.shape, weight, parameters[f"{name}.bias"], 1e-5)
