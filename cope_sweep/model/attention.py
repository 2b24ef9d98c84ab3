"""Causal self-attention with a list of position encodings.

Shapes: B batch, T new tokens, S all tokens (cached ones first), N keys that are not in the cache, D dim, H heads,
G heads of keys and values, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.families.base import GATE, KEY_NORM, QUERY_NORM, Parameters, linear
from cope_sweep.kernels import Inputs, LayerEncoding, LayerEncodings, attend
from cope_sweep.model.packing import Packing
from cope_sweep.positions.base import at_least_float32

LayerCache = dict[str, Tensor]
"""The cached tensors of one layer by name (keys, values), each (B, H, S, K); empty before the first token."""


def self_attention(
    parameters: Parameters,
    x_BTD: Tensor,
    positions: LayerEncodings,
    *,
    heads: int,
    dropout: float = 0.0,
    seeds_B: Tensor | None = None,
    hard: bool = False,
    cache: LayerCache | None = None,
    lengths_B: Tensor | None = None,
    packing: Packing | None = None,
    shares_BT: Tensor | None = None,
) -> Tensor:
    """Multi-head attention, softmax(q·k/√K + Σ scores)·v over the tokens up to each query, (B, T, D).

    Args:
        parameters: the layer's `attention.qkv` and `attention.out`, as its family declares them, and the options of
            `attention_parameters`.
        x_BTD: the input of the layer.
        positions: the encodings that serve this layer, with their parameters.
        heads: H.
        dropout: probability with which an attention weight is set to 0.
        seeds_B: of the dropout masks, one for each sequence; None: drawn from torch's global generator.
        hard: attend only to the token with the largest logit.
        cache: the tokens before `x_BTD`; the new tokens are appended.
        lengths_B: the number of tokens of each sequence, those in the cache included; None: all.
        packing: where the tokens of `x_BTD`, which then is (1, N, D) as the result, are in a batch of sequences.
        shares_BT: the positions of encodings that sample them; None without such an encoding.

    """
    qkv_BTX = linear(parameters, "attention.qkv", x_BTD)
    if packing is not None:
        qkv_BTX = packing.unpack(qkv_BTX)
    B, T, width = qkv_BTX.shape
    # Whole shapes, without −1, which torch cannot infer for 0 tokens.
    qkv_BT3HK = qkv_BTX.view(B, T, 3, heads, width // (3 * heads))
    q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4)
    if f"{QUERY_NORM}.weight" in parameters:
        q_BHTK = _head_norm(q_BHTK, parameters[f"{QUERY_NORM}.weight"])
        k_BHTK = _head_norm(k_BHTK, parameters[f"{KEY_NORM}.weight"])
    features: list[Tensor | None] = []
    for position in positions:
        if position.encoding.samples:
            assert shares_BT is not None  # noqa: S101 - the model gives them
            features.append(shares_BT[:, None, :, None].expand(B, heads, T, 1))
            continue
        features_BTX = position.encoding.features(position.parameters, x_BTD)
        if features_BTX is not None and packing is not None:
            features_BTX = packing.unpack(features_BTX)
        features.append(None if features_BTX is None else by_head(features_BTX, heads))
    attended_BHTK = cached_attention(
        q_BHTK,
        k_BHTK,
        v_BHTK,
        positions,
        features,
        cache=cache,
        dropout=dropout,
        seeds_B=seeds_B,
        hard=hard,
        lengths_B=lengths_B,
    )
    attended_BTD = attended_BHTK.transpose(1, 2).flatten(2)
    if packing is not None:
        attended_BTD = packing.pack(attended_BTD)
    if f"{GATE}.weight" in parameters:
        gate_BTX = linear(parameters, GATE, x_BTD).sigmoid()
        # A gate for each head is the same for all its components.
        attended_BTD = attended_BTD * gate_BTX.repeat_interleave(attended_BTD.shape[-1] // gate_BTX.shape[-1], dim=-1)
    return linear(parameters, "attention.out", attended_BTD)


def _head_norm(x_BHTK: Tensor, gain_K: Tensor) -> Tensor:
    """Each head's vectors divided by their root mean squares, times the gains; computed in float32 or more."""
    precise = at_least_float32(x_BHTK)
    return F.rms_norm(precise, gain_K.shape, gain_K.to(precise.dtype), 1e-6).to(x_BHTK.dtype)


def cached_attention(
    q_BHTK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    positions: LayerEncodings,
    features_BHNF: Sequence[Tensor | None],
    *,
    cache: LayerCache | None = None,
    dropout: float = 0.0,
    seeds_B: Tensor | None = None,
    hard: bool = False,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Attention of queries to the keys of all tokens, with the position encodings of a layer, (B, H, T, K).

    Args:
        q_BHTK: the queries, of the last T tokens, before any rotation.
        k_BGNK: the keys of the tokens that are not in the cache, N = T with a cache: of each head, or G for H, where
            H/G heads in a row share one.
        v_BGNK: the values, as the keys.
        positions: the encodings that serve this layer, with their parameters.
        features_BHNF: the features of the same tokens, of each encoding; None where it has none.
        cache: the earlier tokens; the new ones are appended.
        dropout: as in `self_attention`, and so are the others.
        seeds_B: of the dropout masks.
        hard: attend only to the token with the largest logit.
        lengths_B: the number of tokens of each sequence.

    """
    T, heads, groups = q_BHTK.shape[2], q_BHTK.shape[1], k_BGNK.shape[1]
    if groups != heads and any(_has_own_keys(position) for position in positions):
        k_BGNK, groups = _of_each_head(k_BGNK, heads), heads
    cached = {} if cache is None else cache
    start = cached["v"].shape[2] if cached else 0
    unmixed: dict[str, Tensor] = {}
    # Hooks choose their types themselves. Autocast would compute angles in half precision.
    with torch.autocast(q_BHTK.device.type, enabled=False):
        if any(position.encoding.mixes for position in positions):
            # The cache has them as they were: a later token mixes the last ones again.
            unmixed = appended(cached, {"unmixed_q": q_BHTK, "unmixed_k": k_BGNK})
            q_BHSK, k_BHSK = unmixed.values()
            for position in positions:
                q_BHSK = position.encoding.mix(position.parameters, q_BHSK, keys=False)
                k_BHSK = position.encoding.mix(position.parameters, k_BHSK, keys=True)
            q_BHTK, k_BGNK = q_BHSK[:, :, start:], k_BHSK[:, :, start:]
        new = {f"features{index}": x for index, x in enumerate(features_BHNF) if x is not None}
        sources = appended(cached, {"v": v_BGNK, "k": k_BGNK, **new})
        first = sources["k"].shape[2] - T
        features = [sources.get(f"features{index}") for index in range(len(positions))]
        rotated_q, rotated_k = q_BHTK, k_BGNK
        for position, features_BHSF in zip(positions, features, strict=True):
            rotated_q = position.encoding.rotate(position.parameters, rotated_q, first, features_BHSF)
            rotated_k = position.encoding.rotate(position.parameters, rotated_k, start, features_BHSF, keys=True)
    # Without a rotation the cache keeps the keys once.
    if rotated_k is not k_BGNK:
        sources |= appended(cached, {"rotated_k": rotated_k})
    if cache is not None:
        cache.update(unmixed | sources)
    k_BHSK, v_BHSK = _of_each_head(sources["k"], heads), _of_each_head(sources["v"], heads)
    rotated_k_BHSK = _of_each_head(sources["rotated_k"], heads) if "rotated_k" in sources else k_BHSK
    inputs = Inputs(q_BHTK, k_BHSK, v_BHSK, rotated_q, rotated_k_BHSK, features, hard, lengths_B)
    return attend(inputs, positions, dropout, seeds_B)


def by_head(features_BTX: Tensor, heads: int) -> Tensor:
    """The features of an encoding, (B, T, H·F), as (B, H, T, F)."""
    B, T, width = features_BTX.shape
    # Selecting index 0 makes the gradient contiguous. Without it, sums over the gradient round differently, and
    # runs no longer give the same numbers to the bit as before.
    return features_BTX.view(B, T, 1, heads, width // heads)[:, :, 0].transpose(1, 2)


def _has_own_keys(position: LayerEncoding) -> bool:
    """The encoding changes the keys of each head in another way, so that heads cannot share them before."""
    encoding = position.encoding
    return encoding.mixes or (encoding.rotates and bool(position.parameters))


def _of_each_head(x_BGSK: Tensor, heads: int) -> Tensor:
    """Keys or values of G groups of heads as (B, H, S, K): heads in a row share them."""
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == heads else x_BGSK.repeat_interleave(heads // groups, dim=1)


def appended(cached: LayerCache, new: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all tokens: those in the cache, if there are any, and then the new ones."""
    return {name: torch.cat((cached[name], x), dim=2) if name in cached else x for name, x in new.items()}
