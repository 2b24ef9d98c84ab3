"""CoPE, Contextual Position Encoding (Golovneva et al. 2024, section 4 and appendix B).

    g_ij    = σ(q_i·k_j/√K)                    gate: how much query i counts key j        (eq. 3)
    p_ij    = Σ_{j ≤ k ≤ i} g_ik               position of key j relative to query i      (eq. 4)
    z_i[p]  = q_i·e[p]                         for the integer positions p                (eq. 7)
    z_i[p_ij] = (p_ij − ⌊p_ij⌋)·z_i[⌈p_ij⌉] + (1 − p_ij + ⌊p_ij⌋)·z_i[⌊p_ij⌋]             (eq. 8)
    a_ij    = softmax_j(q_i·k_j/√K + z_i[p_ij])                                           (eq. 9)

√K is from the paper's listing; equations 3 and 9 are printed without it. Positions are clamped to the last embedding
(the paper's "limited positions"). The text clamps them to p_max, so it has p_max + 1 embeddings; the listing has p_max
of them, as here, and clamps to p_max − 1. If all gates are 1, p_ij = i − j + 1: token-based relative positions. Gates
can be computed from values or from separate keys ("val-gates", "sep-keys").

The paper does not say which queries CoPE uses in a model with RoPE. By default gates and q·e use queries and keys
before the rotation. `gate_after_rotation` computes gates from the rotated ones. `rotated_query` is the paper's listing
used as the attention of a model with RoPE (Llama): gates are σ of its attention logits; q·e uses the rotated query.

At a whole number p the interpolation has a kink, and its derivative is the one to the right, z[p + 1] − z[p] (0 at the
last embedding). The paper's listing, whose floor and ceiling are then the same entry, has 0 there: where many gates are
exactly 0, ½ or 1, no gradient would reach them.

Gates start near σ(0) = ½, so a row of T keys reaches position T/2. Beyond the last embedding the derivative is 0:
gates of keys farther than about 2·p_max tokens do not learn. `gate_bias` adds a constant b to the argument of all
gates, g_ij = σ(q_i·k_j/√K + b). Where logits are about 0, a row then spans T·σ(b) positions: N of them if
b = log(N/(T − N)), which is `gate_bias: {span: N}`, with T the model's context.

Gates are computed and positions are summed in float32, whatever the model's precision: a bfloat16 has 8 bits, so a sum
of 512 gates would be off by more than 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Frozen, Positive
from cope_sweep.positions.base import (
    Attention,
    AttentionEncoding,
    Cut,
    Dims,
    Parameter,
    Tensors,
    at_least_float32,
    computed,
    project,
    projection,
)
from cope_sweep.terms import GateSource, LookUp

if TYPE_CHECKING:
    from torch import Tensor

Gate = Literal["keys", "values", "separate"]


class GateSpan(Frozen):
    """The bias of gates at which a row of the model's context spans so many positions, if its logits are 0."""

    span: Annotated[float, Field(gt=0)]


class ContextualEncoding(AttentionEncoding):
    """The base of all variants of CoPE: gates, and the positions that are sums of gates."""

    gate: Gate = Field(
        default="keys", description="What gates compare the query with: keys, values, or separate keys (W_g·h)."
    )
    gate_after_rotation: bool = Field(
        default=False, description="If queries and keys are rotated (RoPE): whether gates use the rotated ones."
    )
    rotated_query: bool = Field(
        default=False,
        description="In a model with RoPE: both gates and q·e use the rotated queries (and gates the rotated keys), as "
        "the paper's listing does instead of the model's attention.",
    )

    gate_bias: float | GateSpan = Field(
        default=0.0,
        description="Added to the gates' logits: a number; {span: N}: log(N/(T − N)), at which a row of T tokens, "
        "the task's longest sequence (`model.context`), spans N positions if its other logits are 0.",
    )
    gate_bias_learned: bool = Field(
        default=False, description="`gate_bias` is the initial value of a learned bias, for each head and layer."
    )

    @property
    def uses_rotated_query(self) -> bool:
        return self.rotated_query

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.rotated_query and self.gate_after_rotation:
            raise InvalidValue(
                f"{self.kind}.rotated_query includes gate_after_rotation; remove gate_after_rotation",
                key=f"{self.kind}.rotated_query",
                other="gate_after_rotation",
            )
        for field in ("rotated_query", "gate_after_rotation"):
            if getattr(self, field) and self.gate != "keys":
                raise InvalidValue(
                    f"{self.kind}.{field} needs gate: keys, and gate is {self.gate}, which RoPE does not rotate",
                    key=f"{self.kind}.{field}",
                    gate=self.gate,
                )
        if isinstance(self.gate_bias, GateSpan) and self.gate_bias.span >= dims.context:
            raise InvalidValue(
                f"{self.kind}.gate_bias.span = {self.gate_bias.span:g}, and the context has {dims.context} tokens; "
                f"gates are less than 1, so choose a span below {dims.context}",
                key=f"{self.kind}.gate_bias",
                value=self.gate_bias.span,
                below=dims.context,
            )

    def gate_parameters(self, dims: Dims) -> dict[str, Parameter]:
        """W_g and its bias, for each layer, if gates have separate keys; the bias of the gates of each head, if any."""
        separate = projection("gate", dims.dim, dims) if self.gate == "separate" else {}
        bias = self.gate_bias
        if isinstance(bias, GateSpan):
            bias = math.log(bias.span / (dims.context - bias.span))
        if not bias and not self.gate_bias_learned:
            return separate
        shift = Parameter((dims.heads,), per_layer=True, centre=bias, learned=self.gate_bias_learned)
        return {**separate, "shift": shift}

    def features(self, parameters: Tensors, h_BTD: Tensor) -> Tensor | None:
        """The separate keys of the gates."""
        return project(parameters, "gate", h_BTD) if self.gate == "separate" else None

    def gates(self, parameters: Tensors, attention: Attention) -> Tensor:
        """g_ij, shape (B, H, Q, S), float32 or float64; 0 for keys after the query."""
        return self._gate_logits(parameters, attention).sigmoid().masked_fill(~attention.visible_QS, 0)

    def positions(self, parameters: Tensors, attention: Attention) -> Tensor:
        """p_ij, shape (B, H, Q, S), not clamped, float32 or float64; 0 for keys after the query."""
        from cope_sweep.positions.contextual import sum_gates

        return sum_gates(self._gate_logits(parameters, attention), attention.visible_QS)

    def limit(self, parameters: Tensors) -> int | None:
        """The largest position, p_max − 1; None if positions are not clamped."""
        return None

    @property
    def gate_source(self) -> GateSource:
        """The input of this encoding's gates, as `terms` names it."""
        return "logits" if self.gate_after_rotation or self.rotated_query else self.gate

    def _gate_logits(self, parameters: Tensors, attention: Attention) -> Tensor:
        logits_BHQS = at_least_float32(self._logits_without_bias(attention))
        shift_H = self.gate_shift(parameters)
        return logits_BHQS if shift_H is None else logits_BHQS + at_least_float32(shift_H)[:, None, None]

    def gate_shift(self, parameters: Tensors) -> Tensor | None:
        """The bias of each head's gates, (H,); None: there is none."""
        return parameters.get("shift")

    def _logits_without_bias(self, attention: Attention) -> Tensor:
        if self.gate == "keys" and (self.gate_after_rotation or not attention.rotated):
            return attention.logits_BHQS
        keys_BHSK = attention.k_BHSK
        if self.gate != "keys":
            keys_BHSK = attention.v_BHSK if self.gate == "values" else computed(attention.features_BHSF)
        q_BHQK, keys_BHSK = at_least_float32(attention.q_BHQK), at_least_float32(keys_BHSK)
        return q_BHQK @ keys_BHSK.transpose(-1, -2) / math.sqrt(keys_BHSK.shape[-1])


class CoPE(ContextualEncoding):
    """Contextual position encoding: an embedding for each integer position, interpolated linearly between them."""

    SOURCE: ClassVar[str] = "arXiv 2405.18719"

    kind: Literal["cope"] = "cope"
    p_max: Positive | Literal["full"] = Field(
        default=64,
        description="Number of position embeddings, for positions 0 … p_max − 1; full: context + 1. For sequences "
        "longer than in training take the largest count that matters: later embeddings are hardly trained.",
    )
    share_layers: bool = Field(default=False, description="One table for all layers, or one for each layer.")
    per_head: bool = Field(default=False, description="One table for each head, or one for all heads of a layer.")
    scale_positions: bool = Field(
        default=False,
        description="Also divide q·e[p] by √K, as the released code does by default; the paper's listing does not.",
    )
    std: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Standard deviation of the embeddings' normal initialisation; 0: zeros, as in the paper's listing.",
    )
    cut: Cut = Field(
        default=None,
        description="Only the first so many embeddings are used, and larger positions have the last of them; null: "
        "all. In `evaluate.variants`, this measures a table that is cut after training.",
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        p_max = dims.context + 1 if self.p_max == "full" else self.p_max
        heads = (dims.heads,) if self.per_head else ()
        e = Parameter((*heads, p_max, dims.head_dim), self.std, per_layer=not self.share_layers)
        return {"e": e, **self.gate_parameters(dims)}

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.cut is not None and self.p_max != "full" and self.cut >= self.p_max:
            self.refuse(("cut",), f"cope.p_max is {self.p_max}")

    def limit(self, parameters: Tensors) -> int:
        return self._used(parameters).shape[-2] - 1

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        import torch
        import torch.nn.functional as F

        from cope_sweep.positions.contextual import linear_pieces

        e_PK = self._used(parameters)  # e_HPK with a table for each head
        limit = self.limit(parameters)
        z_BHQP = attention.q_BHQK @ e_PK.transpose(-1, -2) * self._scale(e_PK)  # eq. 7
        p_BHQU = self.near_positions(parameters, attention, limit)
        # A position that is not a number would be an index of any size. Its fraction makes its score NaN.
        index_BHQU = p_BHQU.detach().long().clamp_(0, limit)
        # The step to the next entry is 0 at the last one. At a whole number it is the derivative to the right.
        step_BHQP = F.pad(z_BHQP.diff(dim=-1), (0, 1))
        near_BHQU = linear_pieces(z_BHQP, step_BHQP, index_BHQU, p_BHQU - index_BHQU)  # eq. 8
        # Beyond the limit every key has the last entry, whatever its gate.
        earlier = attention.visible_QS.shape[1] - near_BHQU.shape[-1]
        if not earlier:
            return near_BHQU
        return torch.cat((z_BHQP[..., -1:].expand(-1, -1, -1, earlier), near_BHQU), dim=-1)

    def near_positions(self, parameters: Tensors, attention: Attention, limit: int) -> Tensor:
        """p_ij of the last U keys, (B, H, Q, U): at all keys before them, every query's position is beyond the limit.

        In a full pass U is S: the first query has counted nothing.
        """
        Q, S = attention.visible_QS.shape
        keys = Q + 3 * limit  # with gates of ½, two keys count as one
        while keys < S:
            p_BHQU = self.positions(parameters, attention.nearest(keys))
            if bool((p_BHQU[..., 0] >= limit).all()):
                return p_BHQU
            keys = keys * 3 // 2
        return self.positions(parameters, attention)

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> LookUp:
        e_PK, shift_H = self._used(parameters), self.gate_shift(parameters)
        return LookUp(q_BHQK, e_PK, self._scale(e_PK), self.gate_source, shift_H)

    def _used(self, parameters: Tensors) -> Tensor:
        e_PK = parameters["e"]
        return e_PK if self.cut is None else e_PK[..., : self.cut, :].contiguous()

    def _scale(self, e_PK: Tensor) -> float:
        return e_PK.shape[-1] ** -0.5 if self.scale_positions else 1.0
