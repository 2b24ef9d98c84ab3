"""The interface of a position encoding: a frozen spec, the parameters that it declares, and hooks.

An encoding is data and pure functions of tensors. The model owns the parameters, passes them to the hooks, and calls
each hook of each encoding in its list. So encodings compose, and their scores are summed. This module does not import
torch, so that a plan can count a model's parameters without it.

Shapes: B batch, T tokens, D model dim, H heads, K head dim, Q queries, S keys ("sources").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, Strict

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Count, Frozen, Positive
from cope_sweep.registry import Kind
from cope_sweep.terms import Term

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32_BYTES = 4

Tensors = Mapping[str, "Tensor"]
"""Tensors by name: the values of an encoding's parameters."""


@dataclass(frozen=True)
class Dims:
    """The sizes of the model that uses an encoding."""

    dim: int
    heads: int
    layers: int
    context: int
    """Tokens in the longest sequence."""
    absolute_std: float = 0.02
    """Standard deviation with which the model's family initialises learned absolute positions."""
    linear_bound: float | None = None
    """The family initialises linear layers uniformly on ± this, with biases; None: weights N(0, 0.02²), biases 0."""
    hidden_dim: int | None = None
    """Components of the input of an attention layer, which `features` get; None: `dim`."""

    @property
    def input_dim(self) -> int:
        """Components of the input of an attention layer."""
        return self.dim if self.hidden_dim is None else self.hidden_dim

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter: its shape and its initialisation."""

    shape: tuple[int, ...]
    std: float = 0.0
    """Standard deviation of the normal initialisation; 0: all are `centre`."""
    per_layer: bool = False
    """True: one for each layer that the encoding serves. False: one that all layers share."""
    bound: float | None = None
    """The initialisation is uniform on ± this; None: it is normal, with `std`."""
    centre: float | tuple[float, ...] = 0.0
    """Mean of the initialisation; several: one for each entry of the last dimension."""
    cut: float | None = None
    """The normal initialisation ends at this many standard deviations; None: nowhere."""
    learned: bool = True
    """False: a constant of the model, which keeps its initial value."""


@dataclass(frozen=True)
class Attention:
    """The tensors of one attention layer that the hooks `score` and `weights` receive.

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
    features_BHSF: Tensor | None = None
    """The result of this encoding's `features`, split into heads; None if it has none."""
    rotated: bool = False
    """Queries and keys were rotated after these: `logits_BHQS` is not q·k/√K of the tensors above."""

    def nearest(self, keys: int) -> Attention:
        """The attention of the same queries to the last keys."""
        return replace(
            self,
            k_BHSK=self.k_BHSK[:, :, -keys:],
            v_BHSK=self.v_BHSK[:, :, -keys:],
            logits_BHQS=self.logits_BHQS[..., -keys:],
            visible_QS=self.visible_QS[:, -keys:],
            features_BHSF=None if self.features_BHSF is None else self.features_BHSF[:, :, -keys:],
        )


class Encoding(Kind):
    """A position encoding. Subclasses set `kind` and override the hooks that they need; each default does nothing.

    Under autocast `embed` and `features` are, like linear layers, in its type. All other hooks are called without
    autocast: queries, keys and features may then be in half precision, and parameters in float32.
    """

    SOURCE: ClassVar[str] = ""
    """Where it was published: `arXiv NUMBER`, or, without a paper, year and GitHub repository: `2026 OWNER/NAME`."""

    @property
    def scores(self) -> bool:
        """The encoding adds to the attention logits."""
        return type(self).score is not Encoding.score

    @property
    def rotates(self) -> bool:
        """The encoding rotates queries and keys."""
        return type(self).rotate is not Encoding.rotate

    @property
    def widens(self) -> bool:
        """`rotate` gives queries and keys another number of components; products are divided by √K all the same."""
        return False

    @property
    def weighs(self) -> bool:
        """The encoding replaces the softmax."""
        return type(self).weights is not Encoding.weights

    @property
    def replaces(self) -> bool:
        """`score` replaces q·k/√K by a function of it, or by other logits: it returns these minus q·k/√K.

        A layer can have one such encoding.
        """
        return False

    @property
    def samples(self) -> bool:
        """Positions are random floats (`sampled.py`), and not the tokens' numbers.

        The features of a token are then its position as a share of the range, the same number for each head. The model
        draws it; `features` is not called.
        """
        return False

    @property
    def mixes(self) -> bool:
        """The encoding mixes the queries and keys of several tokens."""
        return type(self).mix is not Encoding.mix

    @property
    def uses_rotated_query(self) -> bool:
        """`score` and `term` receive queries and keys after the rotation (RoPE), not before it."""
        return False

    def has_term(self, head_dim: int) -> bool:
        """`term` describes the score, or the weights, in heads of this size, so that fused kernels can compute them."""
        return type(self).term is not Encoding.term

    def serves(self, layer: int) -> bool:
        """Attention layer `layer` (counted from 0) uses this encoding."""
        return True

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        """The declarations of the parameters, by name."""
        return {}

    def check(self, dims: Dims) -> None:
        """Raise ValueError, saying what to change, if a model of these sizes cannot use this encoding."""

    def version(self, dims: Dims) -> int:
        """The `VERSION` of what this spec computes in a model of these sizes; it is part of a run's identity.

        Override it where a change of the code changes the numbers of some specs only: the other runs keep their ids.
        """
        return self.VERSION

    def embed(self, parameters: Tensors, x_BTD: Tensor, start: int) -> Tensor:
        """The input embeddings with positions added, (B, T, D).

        Args:
            parameters: The parameters of layer 0, by name.
            x_BTD: The input embeddings of the tokens at positions `start`, `start` + 1, …
            start: The position of the first token.

        Raises:
            ValueError: The encoding has no embedding for one of these positions.
        """
        return x_BTD

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor | None:
        """Features of each token for `rotate`, `score`, `term` and `weights`, (B, T, H·F), or None.

        They are computed from the attention layer's input, for each token alone: decoding keeps them with the keys.
        Attention splits them into heads, (B, H, S, F). What mixes tokens, such as a running sum or a convolution, is
        computed where it is used, from the features of all S tokens.
        """
        return None

    def mix(self, parameters: Tensors, x_BHSK: Tensor, *, keys: bool) -> Tensor:
        """Queries, or `keys`, of the tokens 0 … S − 1, mixed along the tokens: no token takes from a later one.

        The result replaces them in all other hooks. Decoding keeps the earlier tokens' as they were before.
        """
        return x_BHSK

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        """Queries, or `keys`, (B, H, T, K), rotated by their positions `start`, `start` + 1, …

        Where the encoding `widens`, the result has more components.
        `features_BHSF` are this encoding's `features` of the tokens 0 … S − 1, with S ≥ `start` + T.
        """
        return x_BHTK

    def score(self, parameters: Tensors, attention: Attention) -> Tensor | None:
        """A bias to add to the attention logits, broadcastable to (B, H, Q, S); or None.

        Entries of keys after the query are ignored: attention masks them.
        """
        return None

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> Term | None:
        """The same bias as `score`, or the same `weights`, in the form that the fused kernels take (see `terms`).

        `q_BHQK` are the queries that `score` receives, and `keys` is S. None means that no term expresses them:
        attention with this encoding then calls `score` and `weights`. Not called unless `has_term`.
        """
        return None

    def weights(self, parameters: Tensors, attention: Attention, logits_BHQS: Tensor) -> Tensor:
        """The attention weights, (B, H, Q, S), ≥ 0, from the logits with all scores added; 0 for keys after the query.

        Not called unless overridden: the default is the softmax, which attention computes itself.
        """
        raise NotImplementedError


Cut = Positive | None
"""The number of positions that are told apart when a trained model is evaluated; None: all that it was trained with."""


class Every(Frozen):
    """Each n-th layer: with n = 4 the layers 3, 7, 11, …"""

    every: Annotated[int, Field(ge=2, le=10**9)]

    def __contains__(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0


class AllButEvery(Frozen):
    """All layers but each n-th: with n = 4 the layers 0, 1, 2, 4, 5, 6, 8, …"""

    all_but_every: Annotated[int, Field(ge=2, le=10**9)]

    def __contains__(self, layer: int) -> bool:
        return (layer + 1) % self.all_but_every != 0


def _check_layers(layers: Any) -> Any:
    """The value, with numbers in order: which layers decides the run's id. Raises ValueError here, and not in each
    member of the union that it could be.
    """
    if isinstance(layers, list | tuple):
        is_valid = bool(layers) and all(type(layer) is int and 0 <= layer <= 10**9 for layer in layers)
        if is_valid and len(set(layers)) < len(layers):
            raise InvalidValue(f"{layers!r} names a layer twice; list each layer once", key="layers")
        layers = tuple(sorted(layers)) if is_valid else layers
    elif isinstance(layers, Mapping):
        (form, period), *others = layers.items() or [("", None)]
        is_valid = not others and form in ("every", "all_but_every") and type(period) is int and 2 <= period <= 10**9
    else:
        is_valid = isinstance(layers, Every | AllButEvery)
    if is_valid:
        return layers
    raise InvalidValue(
        f"{layers!r} does not name layers; write their numbers, counted from 0, as in [0, 1, 2], or {{every: 4}} or "
        "{all_but_every: 4}, with 2 or more",
        key="layers",
    )


LayerNumbers = Annotated[tuple[Count, ...], Field(min_length=1), Strict(False)]
"""Accepts a list too: files have no tuples."""
Layers = Annotated[LayerNumbers | Every | AllButEvery, BeforeValidator(_check_layers)]


class AttentionEncoding(Encoding):
    """An encoding that acts in attention layers: in all of them, or in `layers`."""

    layers: Layers | None = Field(
        default=None,
        description="The layers that use it: their numbers, counted from 0; {every: 4}: 3, 7, 11, …; "
        "{all_but_every: 4}: the others; null: all.",
    )

    def serves(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def check(self, dims: Dims) -> None:
        if isinstance(self.layers, Every | AllButEvery):
            ((form, period),) = self.layers.model_dump().items()
            if period > dims.layers:
                means = "no layer" if form == "every" else "all layers"
                raise InvalidValue(
                    f"{self.kind}.layers is {{{form}: {period}}}, which means {means} of the {dims.layers} of "
                    f"model.layers; choose at most {dims.layers}, or name the layers",
                    key=f"{self.kind}.layers",
                    value=period,
                    layers=dims.layers,
                )
            return
        beyond = [layer for layer in self.layers or () if layer >= dims.layers]
        if beyond:
            raise InvalidValue(
                f"{self.kind}.layers names layer {beyond[0]}, and model.layers = {dims.layers}; "
                f"the layers are 0 to {dims.layers - 1}",
                key=f"{self.kind}.layers",
                layer=beyond[0],
                layers=dims.layers,
            )


def projection(name: str, rows: int, dims: Dims) -> dict[str, Parameter]:
    """A linear layer of each attention layer, from its input to `rows` numbers, initialised as the family's."""
    bound = dims.linear_bound
    return {
        f"{name}_weight": Parameter((rows, dims.input_dim), std=0.02, per_layer=True, bound=bound),
        f"{name}_bias": Parameter((rows,), per_layer=True, bound=bound),
    }


def project(parameters: Tensors, name: str, h_BTD: Tensor) -> Tensor:
    """The output of the linear layer `name` of `projection`, (B, T, rows)."""
    return h_BTD @ parameters[f"{name}_weight"].T + parameters[f"{name}_bias"]


def computed(features: Tensor | None) -> Tensor:
    """The result of an encoding's `features`, which the model computes before it calls the hooks that take it."""
    assert features is not None  # noqa: S101 - a type alone: encodings without features have hooks that ignore them
    return features


def at_least_float32(x: Tensor) -> Tensor:
    """The same numbers; float32 if they have fewer bits."""
    return x.float() if x.element_size() < FLOAT32_BYTES else x


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """A vector of these numbers, in the type and on the device of `like`.

    On a GPU they are filled in there: a copy from the host would wait, and cannot be part of a CUDA graph.
    """
    import torch

    if like.is_cuda:
        return torch.stack([like.new_full((), value) for value in values])
    return like.new_tensor(values)


def causal_convolution(x_BHSF: Tensor, taps_XW: Tensor) -> Tensor:
    """Each feature of each head convolved along the tokens with its own W taps, the last for the token itself.

    `taps_XW` has X = H·F rows; tokens before the first are zeros.
    """
    import torch.nn.functional as F

    if x_BHSF.shape[2] == 0:
        return x_BHSF  # torch has no convolution of 0 tokens
    B, H, S, features = x_BHSF.shape
    # Zeros on the left only, so that no token sees a later one.
    padded = F.pad(x_BHSF.transpose(2, 3).reshape(B, H * features, S), (taps_XW.shape[1] - 1, 0))
    convolved = F.conv1d(padded, taps_XW[:, None].to(padded.dtype), groups=H * features)
    return convolved.view(B, H, features, S).transpose(2, 3)
