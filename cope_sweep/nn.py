"""Attention with position encodings for ordinary PyTorch code: a function, and a module that holds the parameters.

    attention = PositionalAttention([CoPE(p_max=64)], heads=8, head_dim=64)
    attended = attention(q, k, v)  # instead of F.scaled_dot_product_attention(q, k, v, is_causal=True)

The kernels are those of the project's runs: fused ones where they fit (`cope_sweep.kernels`).

Shapes: B batch, T new tokens, S all tokens (those of the cache first), H heads, G heads of keys and values, K head dim,
D components of the layer's input, N tokens without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cope_sweep.errors import InvalidValue
from cope_sweep.kernels import LayerEncoding, LayerEncodings
from cope_sweep.model.attention import LayerCache, appended, by_head, cached_attention
from cope_sweep.model.parameters import PositionParameters
from cope_sweep.positions import ENCODINGS, Dims, Encoding, check_together

__all__ = ["LayerCache", "LayerEncoding", "PositionalAttention", "check_encodings", "positional_attention"]

UNKNOWN_CONTEXT = 10**9
"""The context of sizes that have none: longer than any that an encoding is given."""

PADDED = "padded_"
"""Prefix of the names in a cache that was filled with a mask: its tokens have not got their positions yet."""


def positional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encodings: LayerEncodings,
    *,
    kv_heads: int | None = None,
    past: LayerCache | None = None,
    hidden: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention with position encodings, softmax(q·k/√K + Σ scores)·v, as (B, H, T, K).

    Args:
        q: queries, (B, H, T, K), before any rotation.
        k: keys, (B, G, S, K); with `past`, of the new tokens alone, (B, G, T, K). G divides H: the first H/G heads
            share the first head of keys (grouped-query attention). If S > T, the queries are of the last T tokens;
            an encoding that mixes queries of several tokens (short convolution) needs those of all tokens.
        v: values, as the keys.
        encodings: each with its parameters: `LayerEncoding(CoPE(p_max=64), {"e": table})`.
        kv_heads: G. None: as many as the keys have.
        past: the earlier tokens, a dictionary that is empty before the first call; the new tokens are added to it.
        hidden: the layer's input, (B, S, D), with `past` (B, T, D): what queries, keys and values are projections of.
            Encodings that decide by it need it (FoX, PaTH, DaRoPE and others).
        mask: true, or 1, at tokens and false at padding, (B, S), those in `past` included. Padding is anywhere: it has
            no position, no query sees it, and its own output is 0. None: all are tokens.
        dropout: probability of dropping a weight.

    Raises:
        InvalidValue: Arguments do not fit each other, or an encoding needs one that is missing (`data["argument"]`).

    """
    _check_shapes(q, k, v, kv_heads, past)
    _check_dropout(dropout)
    mixing = [position.encoding.kind for position in encodings if position.encoding.mixes]
    if mixing and past is None and q.shape[2] < k.shape[2]:
        raise InvalidValue(
            f"{mixing[0]} mixes each query with those before it, and q lacks the earlier ones: pass the queries of all "
            "tokens, or use past",
            code="missing_argument",
            argument="q",
            kind=mixing[0],
        )
    if (
        mask is not None
        and mask.dtype.is_floating_point
        and not torch.compiler.is_compiling()
        and bool((mask < 0).any())
    ):
        raise InvalidValue(
            "mask has negative numbers, as one that is added to scores; pass true at tokens and false at padding",
            code="invalid_mask",
            argument="mask",
        )
    features = [_features(position, q, k, hidden) for position in encodings]
    is_padded = past is not None and f"{PADDED}v" in past
    if past and is_padded != (mask is not None):
        raise InvalidValue(
            "a cache that was filled with a mask needs one in every call, and one without a mask takes none; pass "
            f"mask={'…' if is_padded else 'None'}, or start with an empty cache",
            code="another_cache",
            argument="mask",
        )
    if mask is None:
        return cached_attention(q, k, v, encodings, features, cache=past, dropout=dropout)
    new = {"k": k, "v": v} | {f"features{index}": x for index, x in enumerate(features) if x is not None}
    T = q.shape[2]
    if mixing:
        new["q"] = q  # of all tokens: each is mixed with those before it
    cached = past or {}
    tokens = appended({name.removeprefix(PADDED): x for name, x in cached.items()}, new)
    if mask.shape != (len(q), tokens["v"].shape[2]):
        raise InvalidValue(
            f"mask has the shape {tuple(mask.shape)}, expected {(len(q), tokens['v'].shape[2])}: a row for each "
            "sequence, and a column for each token, those of the cache included",
            code="invalid_shape",
            argument="mask",
        )
    if past is not None:
        past.update({f"{PADDED}{name}": x for name, x in tokens.items()})
    q = tokens.pop("q", q)
    features = [tokens.get(f"features{index}") for index in range(len(encodings))]
    of_all = _Padded(q, tokens["k"], tokens["v"], features, mask.bool())
    return of_all.attention(encodings, dropout)[:, :, -T:]


class PositionalAttention(nn.Module):
    """Causal attention of one layer with position encodings and their parameters; projections are yours.

    Parameters start as the project's runs start them: CoPE's table with zeros. A sequence may be as long as you like.
    """

    def __init__(
        self,
        encodings: Sequence[Encoding | str | dict[str, Any]],
        *,
        heads: int,
        head_dim: int,
        hidden_dim: int | None = None,
        context: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Make the parameters.

        Args:
            encodings: such as `[CoPE(p_max=64)]`, `[RoPE(), CoPE(p_max=16)]` or `["alibi"]`; none: plain attention.
            heads: heads of queries.
            head_dim: components of a query.
            hidden_dim: components of `hidden`. None: heads·head_dim.
            context: tokens of the longest sequence, for tables with an entry for each (`cope` with `p_max: full`), and
                for the `span` of a `gate_bias`.
            dropout: probability of dropping an attention weight in training.

        Raises:
            InvalidValue: An encoding does not act in attention, does not fit the sizes, or needs `context`.

        """
        super().__init__()
        _check_dropout(dropout)
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        checked = [ENCODINGS.validate(encoding) for encoding in encodings]
        check_encodings(checked)
        for encoding in checked:
            if getattr(encoding, "layers", None) is not None:
                raise InvalidValue(
                    f"{encoding.kind}.layers names layers of a whole model, and this is one layer; leave it out, and "
                    "give the encoding to the layers that use it",
                    key=f"{encoding.kind}.layers",
                )
        self.dims = Dims(heads * head_dim, heads, 1, context or UNKNOWN_CONTEXT, hidden_dim=hidden_dim)
        self._check_together(checked)
        check_context(checked, self.dims)
        self.position = nn.ModuleList(PositionParameters(encoding, self.dims) for encoding in checked)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values, from torch's global generator."""
        for position in self._positions():
            if not any(parameter.is_meta for parameter in position.parameters()):
                position.initialise(self.dims, torch.default_generator)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        kv_heads: int | None = None,
        past: LayerCache | None = None,
        hidden: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attention, (B, H, T, K). Arguments and errors: see `positional_attention`."""
        if q.dim() == 4 and (q.shape[1], q.shape[3]) != (self.heads, self.head_dim):
            raise InvalidValue(
                f"q has the shape {tuple(q.shape)}, expected (batch, {self.heads} heads, tokens, {self.head_dim})",
                code="invalid_shape",
                argument="q",
            )
        if hidden is not None and hidden.shape[-1:] != (self.dims.input_dim,):
            raise InvalidValue(
                f"hidden has the shape {tuple(hidden.shape)}, expected (batch, tokens, {self.dims.input_dim})",
                code="invalid_shape",
                argument="hidden",
            )
        return positional_attention(
            q,
            k,
            v,
            self.layer_encodings(),
            kv_heads=kv_heads,
            past=past,
            hidden=hidden,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
        )

    def layer_encodings(self) -> list[LayerEncoding]:
        """The encodings with their current parameters, as `positional_attention` takes them."""
        return [LayerEncoding(position.encoding, position.of_layer(0)) for position in self._positions()]

    def _check_together(self, encodings: Sequence[Encoding]) -> None:
        check_together(encodings, self.dims)

    def extra_repr(self) -> str:
        encodings = ", ".join(repr(position.encoding) for position in self._positions())
        return f"[{encodings}], heads={self.heads}, head_dim={self.head_dim}, dropout={self.dropout}"

    def _positions(self) -> list[PositionParameters]:
        return [position for position in self.position if isinstance(position, PositionParameters)]


def check_encodings(encodings: Sequence[Encoding]) -> None:
    """Raise InvalidValue for an encoding that does not act on queries, keys and values of one layer."""
    for encoding in encodings:
        if type(encoding).embed is not Encoding.embed:
            raise InvalidValue(
                f"{encoding.kind} adds to the model's input embeddings, not in attention; add it there yourself, or "
                "leave it out",
                code="not_in_attention",
                kind=encoding.kind,
            )
        if encoding.samples:
            raise InvalidValue(
                f"{encoding.kind}.sampled draws positions once for all layers of a model; leave it out",
                code="not_in_attention",
                key=f"{encoding.kind}.sampled",
                kind=encoding.kind,
            )


def check_context(encodings: Sequence[Encoding], dims: Dims) -> None:
    """Raise InvalidValue for an encoding whose parameters depend on the context, if that is unknown."""
    if dims.context != UNKNOWN_CONTEXT:
        return
    for encoding in encodings:
        if encoding.parameters(dims) != encoding.parameters(replace(dims, context=2 * UNKNOWN_CONTEXT)):
            raise InvalidValue(
                f"{encoding.kind} depends on the tokens of the longest sequence: pass context=, their number",
                code="missing_argument",
                argument="context",
                kind=encoding.kind,
            )


def needs_hidden(encoding: Encoding, heads: int, head_dim: int) -> bool:
    """The encoding computes features from the layer's input."""
    if type(encoding).features is Encoding.features:
        return False
    dims = Dims(heads * head_dim, heads, 1, UNKNOWN_CONTEXT)
    declared = encoding.parameters(dims).items()
    parameters = {name: torch.empty(parameter.shape, device="meta") for name, parameter in declared}
    return encoding.features(parameters, torch.empty(1, 1, dims.dim, device="meta")) is not None


def _features(position: LayerEncoding, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor | None:
    """The features of the tokens of the keys, (B, H, S or T, F)."""
    encoding, heads = position.encoding, q.shape[1]
    if hidden is None:
        if needs_hidden(encoding, heads, q.shape[3]):
            raise InvalidValue(
                f"{encoding.kind} decides by the layer's input: pass hidden=, of shape (batch, tokens, components), "
                "from which queries, keys and values are projected",
                code="missing_argument",
                argument="hidden",
                kind=encoding.kind,
            )
        return None
    if hidden.dim() != 3 or hidden.shape[:2] != (k.shape[0], k.shape[2]):
        raise InvalidValue(
            f"hidden has the shape {tuple(hidden.shape)}, expected ({k.shape[0]}, {k.shape[2]}, components): the "
            "tokens of the keys",
            code="invalid_shape",
            argument="hidden",
        )
    features_BTX = encoding.features(position.parameters, hidden)
    return None if features_BTX is None else by_head(features_BTX, heads)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, kv_heads: int | None, past: LayerCache | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InvalidValue(
                f"{name} has the shape {tuple(x.shape)}, expected (batch, heads, tokens, components of a head)",
                code="invalid_shape",
                argument=name,
            )
    B, H, T, K = q.shape
    G = k.shape[1] if kv_heads is None else kv_heads
    if G < 1 or H % G:
        raise InvalidValue(
            f"{H} heads of queries cannot share {G} heads of keys evenly; choose a divisor of {H}",
            code="invalid_heads",
            argument="kv_heads",
            heads=H,
            kv_heads=G,
        )
    S = k.shape[2]
    too_few = S != T if past is not None else S < T
    if k.shape != v.shape or k.shape != (B, G, S, K) or too_few:
        tokens = f"{T} tokens" if past is not None else f"at least {T} tokens"
        raise InvalidValue(
            f"keys have the shape {tuple(k.shape)} and values {tuple(v.shape)}, expected ({B}, {G}, {tokens}, {K}) "
            f"for queries of the shape {tuple(q.shape)}",
            code="invalid_shape",
            argument="k",
        )


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout <= 1:
        raise InvalidValue(f"dropout = {dropout} is no probability", argument="dropout", value=dropout)


class _Padded:
    """Queries, keys, values and features of sequences with padding."""

    def __init__(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, features: Sequence[Tensor | None], is_token_BS: Tensor
    ) -> None:
        self.q_BHTK, self.k_BGSK, self.v_BGSK, self.features = q_BHTK, k_BGSK, v_BGSK, features
        self.is_token_BS = is_token_BS
        self.order_BS = _tokens_first(is_token_BS)

    def attention(self, encodings: LayerEncodings, dropout: float) -> Tensor:
        """Attention, (B, H, T, K): 0 at padding."""
        T, S = self.q_BHTK.shape[2], self.k_BGSK.shape[2]
        if T < S and not torch.compiler.is_compiling():
            return self._by_length(encodings, dropout)
        # With the padding behind the tokens all sequences are one problem: each has a length. A compiler cannot group
        # sequences by their lengths, so that it gets queries for all tokens.
        q_BHSK = self._sorted(F.pad(self.q_BHTK, (0, 0, S - T, 0)))
        out_BHSK = cached_attention(
            q_BHSK,
            self._sorted(self.k_BGSK),
            self._sorted(self.v_BGSK),
            encodings,
            [None if x is None else self._sorted(x) for x in self.features],
            dropout=dropout,
            lengths_B=self.is_token_BS.sum(dim=1),
        )
        return _taken(out_BHSK, self.order_BS.argsort(dim=1))[:, :, S - T :]

    def _by_length(self, encodings: LayerEncodings, dropout: float) -> Tensor:
        """Sequences with the same number of tokens and of queries together, without any padding."""
        T, S = self.q_BHTK.shape[2], self.k_BGSK.shape[2]
        is_query_BT = self.is_token_BS[:, S - T :]
        query_order_BT = _tokens_first(is_query_BT)
        counts = torch.stack((self.is_token_BS.sum(dim=1), is_query_BT.sum(dim=1)), dim=1).tolist()
        out_BHTK = torch.zeros_like(self.q_BHTK, dtype=self.v_BGSK.dtype)
        for tokens, queries in sorted({(tokens, queries) for tokens, queries in counts if queries}):
            rows = [row for row, count in enumerate(counts) if count == [tokens, queries]]
            part = torch.tensor(rows, device=out_BHTK.device)
            order_BN, queries_BN = self.order_BS[part, :tokens], query_order_BT[part, :queries]
            attended = cached_attention(
                _taken(self.q_BHTK[part], queries_BN),
                _taken(self.k_BGSK[part], order_BN),
                _taken(self.v_BGSK[part], order_BN),
                encodings,
                [None if x is None else _taken(x[part], order_BN) for x in self.features],
                dropout=dropout,
            )
            index = queries_BN[:, None, :, None].expand_as(attended)
            out_BHTK = out_BHTK.index_copy(0, part, torch.zeros_like(out_BHTK[part]).scatter(2, index, attended))
        return out_BHTK

    def _sorted(self, x_BHSF: Tensor) -> Tensor:
        return _taken(x_BHSF, self.order_BS)


def _tokens_first(is_token_BS: Tensor) -> Tensor:
    """The places of the tokens of each sequence in their order, and then those of its padding."""
    return is_token_BS.logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def _taken(x_BHSF: Tensor, places_BN: Tensor) -> Tensor:
    """What is at these places of each sequence, (B, H, N, F)."""
    return x_BHSF.gather(2, places_BN[:, None, :, None].expand(-1, x_BHSF.shape[1], -1, x_BHSF.shape[3]))
