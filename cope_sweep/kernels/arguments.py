"""An attention: what a layer gives (`Inputs`, `LayerEncoding`), and what all fused kernels compute (`Arguments`).

The problem of the fused kernels is a flat list of tensors and numbers:

    a_ij = softmax_j(s_ij + Σ terms),  s_ij = scale·q_i·k_j,  o_i = Σ_j dropout(a_ij)·v_j,  j ≤ i

with the terms of `cope_sweep.terms`, and gates σ(s_ij + gate_bias_h) or σ(scale·base_q_i·gate_k_j + gate_bias_h).

`Arguments` is the only list of them: the schema of the operator `cope_sweep::attention` and the structure of the C++
kernels are made from it. A new kind of term adds its fields there and in `_fields_of`. Tables stay factored,
z = scale·q·e: kernels compute the products for a block of queries at a time.

Shapes: B batch, H heads, T queries (the last of the S tokens), S all tokens, K head dim, P positions, N knots,
M = N + 1 segments, R distances, F numbers of a feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from cope_sweep.terms import (
    ContextualTerm,
    DistanceBias,
    KeyBias,
    LogSlope,
    LookUp,
    PiecewiseLinear,
    RelativeLookUp,
    ShareBias,
    Slope,
    StickBreak,
    Term,
    Window,
)

if TYPE_CHECKING:
    from cope_sweep.positions import Encoding

R = TypeVar("R")
P = ParamSpec("P")


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result`, which imports the whole compiler (1.5 s) in order to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class LayerEncoding:
    """An encoding of a layer, with its parameters in that layer."""

    encoding: Encoding
    parameters: Mapping[str, Tensor] = field(default_factory=dict)


LayerEncodings = Sequence[LayerEncoding]


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of one attention layer. Queries are the last T of the S tokens."""

    q_BHTK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor
    rotated_q_BHTK: Tensor
    rotated_k_BHSK: Tensor
    features_BHSF: Sequence[Tensor | None]
    """The features of all tokens of each encoding, as gate keys; None if it has none."""
    hard: bool = False
    """One-hot attention to the largest logit; the gradient is the softmax's ("straight through")."""
    lengths_B: Tensor | None = None
    """int64: the number of tokens of each sequence; later ones are padding. None: all S. The output at padding is 0 and
    has no gradient."""

    @staticmethod
    def plain(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Inputs:
        """Inputs without rotation and without features."""
        return Inputs(q_BHTK, k_BHSK, v_BHSK, q_BHTK, k_BHSK, ())

    @property
    def rotated(self) -> bool:
        """An encoding has rotated queries and keys."""
        return self.rotated_q_BHTK is not self.q_BHTK

    @property
    def widened(self) -> int:
        """How many more components queries and keys have since they were rotated."""
        return self.rotated_q_BHTK.shape[-1] - self.q_BHTK.shape[-1]

    def of_queries(self, start: int, stop: int) -> Inputs:
        """Of a full pass (T = S): queries `start` … `stop` − 1, and keys 0 … `stop` − 1."""
        q_BHTK, k_BHSK = self.q_BHTK[:, :, start:stop], self.k_BHSK[:, :, :stop]
        return replace(
            self,
            q_BHTK=q_BHTK,
            k_BHSK=k_BHSK,
            v_BHSK=self.v_BHSK[:, :, :stop],
            # `rotated` compares identities: without rotation these must be the same tensors.
            rotated_q_BHTK=self.rotated_q_BHTK[:, :, start:stop] if self.rotated else q_BHTK,
            rotated_k_BHSK=self.rotated_k_BHSK[:, :, :stop] if self.rotated else k_BHSK,
            features_BHSF=[features if features is None else features[:, :, :stop] for features in self.features_BHSF],
        )


class Arguments(NamedTuple):
    """One attention: at most one term of each kind, and one source of gates for all contextual terms.

    The first `DIFFERENTIABLE` have gradients.
    """

    q: Tensor
    """(B, H, T, K), after any rotation, as k."""
    k: Tensor
    v: Tensor
    base_q: Tensor | None = None
    """Queries before rotation, for tables and for gates with other keys; None: q."""
    gate_k: Tensor | None = None
    """Keys of the gates; None: gates use the attention logits."""
    e: Tensor | None = None
    """LookUp: (P, K) or (H, P, K)."""
    segment_slope: Tensor | None = None
    """PiecewiseLinear: (B, H, T, M), as its intercept."""
    segment_intercept: Tensor | None = None
    m: Tensor | None = None
    """Slope: (H,)."""
    gate_bias: Tensor | None = None
    """(H,): added to the logits of the gates; None: nothing is."""
    relative: Tensor | None = None
    """RelativeLookUp: (R, K) or (H, R, K)."""
    distance_bias: Tensor | None = None
    """DistanceBias: (H, R)."""
    key_bias: Tensor | None = None
    """KeyBias: (B, H, S)."""
    share_distance: Tensor | None = None
    """ShareBias: (S,), and the other factor of each query, (T,)."""
    share_query: Tensor | None = None
    share_slope: Tensor | None = None
    """ShareBias: (H, M), as its intercept."""
    share_intercept: Tensor | None = None
    knots: Tensor | None = None
    """PiecewiseLinear: (N,). This and what follows has no gradient."""
    distance_slope: Tensor | None = None
    """DistanceSlope: (H,)."""
    share_knots: Tensor | None = None
    """ShareBias: (N,)."""
    seeds: Tensor | None = None
    """(B,) int64: each sequence's seed of its dropout mask (see `dropout.py`)."""
    lengths: Tensor | None = None
    """(B,) int64: the number of tokens of each sequence; None: all S."""
    scale: float = 1.0
    limit: float = math.inf
    """Largest position of PiecewiseLinear; infinite if there is none."""
    e_scale: float = 1.0
    relative_scale: float = 1.0
    far_last: bool = False
    """RelativeLookUp: distances beyond the table use its last entry."""
    dropout: float = 0.0
    log_gates: bool = False
    """Slope: positions are Σ log σ(gate logit) of the keys after the key, up to the query, instead of CoPE's."""
    stick_breaking: bool = False
    """The weights are σ(s_ij)·Π_{j < k < i} (1 − σ(s_ik)), s with all terms added, instead of the softmax."""
    keep_remainder: bool = False
    """Stick-breaking: the query's own value gets the weight that no key has taken."""
    window: int = 0
    """Keys at this distance or more have no weight: `distance_bias` ends with `HIDDEN` there, so kernels may leave them
    out. 0: there is no window."""

    @property
    def contextual(self) -> bool:
        """A term depends on gates."""
        return self.e is not None or self.segment_slope is not None or self.m is not None


QUERIES_AND_KEYS = Arguments._fields.index("e")
"""Number of fields of `Arguments`, from the first, of shape (B, H, T or S, K)."""
DIFFERENTIABLE = Arguments._fields.index("knots")
"""Number of fields, from the first, that have gradients."""

HIDDEN = -1e30
"""The bias of keys beyond a window. It is finite: where a tile has no other keys, a softmax with −∞ would be NaN."""

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool", int: "int"}


def schema() -> str:
    """The arguments in the language of torch's operator schemas: `Tensor q, Tensor k, …`."""
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(Arguments).items())


def make_problem(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> Arguments | str:
    """The problem for these inputs and encodings, or why the fused kernels cannot express it, for a log message.

    They cannot express hard attention, an encoding without a `term`, two terms of a kind, contextual encodings whose
    gates differ, a table of rotated queries beside one (or gates) of unrotated ones, gates with separate queries
    beside a table, and contextual encodings or a bias of keys beside stick-breaking. Raises ValueError if gate keys of
    an encoding are missing from the inputs.
    """
    if inputs.hard:
        return "attention is hard, and fused kernels compute the softmax only"
    fields: dict[str, Any] = {}
    table_queries: list[Tensor] = []
    gate_keys: list[Tensor | None] = []
    gate_queries: list[Tensor] = []
    gate_biases: list[Tensor | None] = []
    for index, position in enumerate(positions):
        encoding = position.encoding
        if not (encoding.scores or encoding.weighs):
            continue
        query_BHTK = inputs.rotated_q_BHTK if encoding.uses_rotated_query else inputs.q_BHTK
        features_BHSF = inputs.features_BHSF[index] if inputs.features_BHSF else None
        term = None
        if encoding.has_term(query_BHTK.shape[-1]):
            term = encoding.term(position.parameters, query_BHTK, inputs.k_BHSK.shape[2], features_BHSF)
        if term is None:
            what = "weights" if encoding.weighs else "score"
            return f"{encoding.kind} has no `term` for its {what} with these fields"
        of_term = _fields_of(term)
        if any(name in fields for name in of_term):
            return f"{encoding.kind} is not the only encoding with a {type(term).__name__} term"
        fields |= of_term
        if isinstance(term, LookUp | RelativeLookUp):
            table_queries.append(term.q_BHQK)
        if isinstance(term, LogSlope):
            gate_keys.append(_widened(term.k_BHSF, inputs))
            # Kernels multiply products by 1/√K, which those of a LogSlope do not have.
            gate_queries.append(_widened(term.q_BHQF * inputs.q_BHTK.shape[-1] ** 0.5, inputs))
            gate_biases.append(None)
        elif isinstance(term, ContextualTerm):
            gate_keys.append(_gate_keys(inputs, term, index))
            gate_biases.append(term.gate_bias_H)
    if any(of_gates[n] is not of_gates[0] for of_gates in (gate_keys, gate_biases) for n in range(len(of_gates))):
        return "the gates of contextual encodings differ"
    if gate_keys and fields.get("stick_breaking"):
        return "stick-breaking does not compute contextual positions"
    if "key_bias" in fields and fields.get("stick_breaking"):
        # A term may leave out what is the same for all keys of a query, which cancels in the softmax only.
        return "a bias of keys stands for a score in the softmax only, and stick-breaking replaces it"
    if gate_queries and table_queries:
        return "gates have separate queries, beside a table of the attention's queries"
    gate_k = gate_keys[0] if gate_keys else None
    base_queries = table_queries if gate_k is None else [*table_queries, *(gate_queries or [inputs.q_BHTK])]
    base_q = base_queries[0] if base_queries else inputs.rotated_q_BHTK
    if any(query is not base_q for query in base_queries):
        return "tables, or a table and the gates, take different queries (rotated, unrotated, or an encoding's own)"
    v_BHSK = inputs.v_BHSK
    if inputs.widened:
        # Kernels read as many components of all of these as queries and keys have; the others are 0.
        v_BHSK, base_q, gate_k = (_widened(x, inputs) for x in (v_BHSK, base_q, gate_k))
        fields |= {name: _widened(fields[name], inputs) for name in ("e", "relative") if name in fields}
    if "window" in fields:
        fields["distance_bias"] = _in_window(fields.get("distance_bias"), fields["window"], inputs)
    return Arguments(
        inputs.rotated_q_BHTK,
        inputs.rotated_k_BHSK,
        v_BHSK,
        base_q=None if base_q is inputs.rotated_q_BHTK else base_q,
        gate_k=gate_k,
        gate_bias=gate_biases[0] if gate_biases else None,
        seeds=seeds_B if dropout else None,
        lengths=inputs.lengths_B,
        scale=inputs.q_BHTK.shape[-1] ** -0.5,
        dropout=dropout,
        **fields,
    )


def _fields_of(term: Term) -> dict[str, Any]:
    if isinstance(term, LookUp):
        return {"e": term.e_PK, "e_scale": term.scale}
    if isinstance(term, PiecewiseLinear):
        limit = math.inf if term.limit is None else term.limit
        tables = {"segment_slope": term.slope_BHQM, "segment_intercept": term.intercept_BHQM}
        return {**tables, "knots": term.knots_N, "limit": limit}
    if isinstance(term, Slope):
        return {"m": term.m_H}
    if isinstance(term, RelativeLookUp):
        return {"relative": term.e_RK, "relative_scale": term.scale, "far_last": term.far == "last"}
    if isinstance(term, DistanceBias):
        return {"distance_bias": term.b_HR}
    if isinstance(term, LogSlope):
        return {"m": term.m_H, "log_gates": True}
    if isinstance(term, ShareBias):
        tables = {"share_slope": term.slope_HM, "share_intercept": term.intercept_HM, "share_knots": term.knots_N}
        return {**tables, "share_distance": term.u_S, "share_query": term.r_Q}
    if isinstance(term, KeyBias):
        return {"key_bias": term.b_BHS}
    if isinstance(term, Window):
        return {"window": term.size}
    if isinstance(term, StickBreak):
        return {"stick_breaking": True, "keep_remainder": term.keep_remainder}
    return {"distance_slope": term.m_H}


def _widened(x: Any, inputs: Inputs) -> Any:
    """The tensor with zeros as its last components, as many as rotated queries have, if it has fewer; None for None."""
    missing = 0 if x is None else inputs.rotated_q_BHTK.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing > 0 else x


def _in_window(b_HR: Tensor | None, size: int, inputs: Inputs) -> Tensor:
    """A bias of distances, with `HIDDEN` for those outside of a window as its last entry."""
    q_BHTK, distances = inputs.q_BHTK, min(size, inputs.k_BHSK.shape[2])
    if b_HR is None:
        b_HR = q_BHTK.new_zeros((q_BHTK.shape[1], distances), dtype=torch.float32)
    else:
        # Distances beyond its table have its last entry.
        b_HR = b_HR[:, torch.arange(distances, device=b_HR.device).clamp(max=b_HR.shape[1] - 1)]
        b_HR = b_HR.to(torch.promote_types(b_HR.dtype, torch.float32))  # float16 ends at 65,504
    return torch.nn.functional.pad(b_HR, (0, 1), value=HIDDEN)


def _gate_keys(inputs: Inputs, term: LookUp | PiecewiseLinear | Slope, index: int) -> Tensor | None:
    """The keys of a term's gates; None: gates use the attention logits."""
    if term.gate == "logits" or (term.gate == "keys" and not inputs.rotated):
        return None
    if term.gate == "keys":
        return inputs.k_BHSK
    if term.gate == "values":
        return inputs.v_BHSK
    keys_BHSK = inputs.features_BHSF[index]
    if keys_BHSK is None:
        raise ValueError(
            f"encoding {index} has gate: separate, and Inputs.features_BHSF[{index}] is None: pass its gate keys"
        )
    return keys_BHSK


def unit_stride(x: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy if its last dimension has a stride other than 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def head_stride(table: Tensor | None) -> int:
    """The distance of two heads' tables in memory, of a table (P, K) or (H, P, K); 0 if they share one."""
    return table.stride(0) if table is not None and table.dim() == 3 else 0
