"""Causal self-attention with a list of position encodings.

Shapes: B batch, T new tokens, S all tokens (cached ones first), D dim, H heads, K head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cope_sweep.families.base import Parameters, linear
from cope_sweep.kernels import Inputs, LayerEncodings, attend
from cope_sweep.model.packing import Packing

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
        parameters: the layer's `attention.qkv` and `attention.out`, as its family declares them.
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
    cached = {} if cache is None else cache
    start = cached["v"].shape[2] if cached else 0
    unmixed: dict[str, Tensor] = {}
    if any(position.encoding.mixes for position in positions):
        # The cache has them as they were: a later token mixes the last ones again.
        unmixed = _append(cached, {"unmixed_q": q_BHTK, "unmixed_k": k_BHTK})
        q_BHSK, k_BHSK = unmixed.values()
        for position in positions:
            q_BHSK = position.encoding.mix(position.parameters, q_BHSK, keys=False)
            k_BHSK = position.encoding.mix(position.parameters, k_BHSK, keys=True)
        q_BHTK, k_BHTK = q_BHSK[:, :, start:], k_BHSK[:, :, start:]
    sources: dict[str, Tensor] = {"v": v_BHTK, "k": k_BHTK}
    for index, position in enumerate(positions):
        if position.encoding.samples:
            assert shares_BT is not None  # noqa: S101 - the model gives them
            sources[f"features{index}"] = shares_BT[:, None, :, None].expand(B, heads, T, 1)
            continue
        features_BTX = position.encoding.features(position.parameters, x_BTD)
        if features_BTX is not None:
            if packing is not None:
                features_BTX = packing.unpack(features_BTX)
            # Selecting index 0 makes the gradient contiguous. Without it, sums over the gradient round differently, and
            # runs no longer give the same numbers to the bit as before.
            features_BT1HX = features_BTX.view(B, T, 1, heads, features_BTX.shape[-1] // heads)
            sources[f"features{index}"] = features_BT1HX[:, :, 0].transpose(1, 2)
    sources = _append(cached, sources)
    features = [sources.get(f"features{index}") for index in range(len(positions))]
    rotated_q, rotated_k = q_BHTK, k_BHTK
    for position, features_BHSF in zip(positions, features, strict=True):
        rotated_q = position.encoding.rotate(position.parameters, rotated_q, start, features_BHSF)
        rotated_k = position.encoding.rotate(position.parameters, rotated_k, start, features_BHSF, keys=True)
    # Without a rotation the cache keeps the keys once.
    if rotated_k is not k_BHTK:
        sources |= _append(cached, {"rotated_k": rotated_k})
    if cache is not None:
        cache.update(unmixed | sources)
    inputs = Inputs(
        q_BHTK,
        sources["k"],
        sources["v"],
        rotated_q,
        sources.get("rotated_k", sources["k"]),
        features,
        hard,
        lengths_B,
    )
    attended_BHTK = attend(inputs, positions, dropout, seeds_B)
    attended_BTD = attended_BHTK.transpose(1, 2).flatten(2)
    return linear(parameters, "attention.out", attended_BTD if packing is None else packing.pack(attended_BTD))


def _append(cached: LayerCache, new: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all tokens: those in the cache, if there are any, and then the new ones."""
    return {name: torch.cat((cached[name], x), dim=2) if name in cached else x for name, x in new.items()}
