"""The attention problem that all fused kernels take.

    a_ij = softmax_j(s_ij + Σ terms),  s_ij = scale·q_i·k_j,  o_i = Σ_j dropout(a_ij)·v_j,  j ≤ i

with the terms of `cope_sweep.positions.terms`, and gates σ(s_ij) or σ(scale·gate_q_i·gate_k_j).

Shapes: B batch, H heads, T queries (the last of the S tokens), K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from cope_sweep.kernels.inputs import Inputs, Positions
from cope_sweep.positions.terms import (
    ContextualTerm,
    DistanceBias,
    DistanceSlope,
    LookUp,
    PiecewiseLinear,
    RelativeLookUp,
    Slope,
    Term,
)

Gates: TypeAlias = tuple[Tensor, Tensor] | None
"""Queries and keys whose products are the gates' logits; None: the attention logits themselves."""


@dataclass(frozen=True)
class AttentionProblem:
    """One attention: at most one term of each kind, and one source of gates for all contextual terms."""

    q_BHTK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor
    scale: float
    gates: Gates = None
    look_up: LookUp | None = None
    piecewise: PiecewiseLinear | None = None
    slope: Slope | None = None
    relative: RelativeLookUp | None = None
    distance_bias: DistanceBias | None = None
    distance_slope: DistanceSlope | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    """int64 scalar: the seed of the dropout mask (see `dropout.py`)."""
    lengths_B: Tensor | None = None

    @property
    def contextual(self) -> bool:
        """Whether any term depends on gates."""
        return bool(self.look_up or self.piecewise or self.slope)

    @property
    def has_terms(self) -> bool:
        return self.contextual or bool(self.relative or self.distance_bias or self.distance_slope)


_FIELDS: dict[type, str] = {
    LookUp: "look_up",
    PiecewiseLinear: "piecewise",
    Slope: "slope",
    RelativeLookUp: "relative",
    DistanceBias: "distance_bias",
    DistanceSlope: "distance_slope",
}


def make_problem(inputs: Inputs, positions: Positions, dropout: float, seed: Tensor | None) -> AttentionProblem | str:
    """The problem for these inputs and encodings, or why the fused kernels cannot express it, for a log message.

    They cannot express hard attention, an encoding without a `term`, two terms of a kind, contextual encodings whose
    gates differ, and a table of rotated queries beside one (or gates) of unrotated ones. Raises ValueError if gate keys
    of an encoding are missing from the inputs.
    """
    if inputs.hard:
        return "attention is hard"
    problem = AttentionProblem(
        inputs.rotated_q_BHTK,
        inputs.rotated_k_BHSK,
        inputs.v_BHSK,
        inputs.q_BHTK.shape[-1] ** -0.5,
        dropout=dropout,
        seed=seed,
        lengths_B=inputs.lengths_B,
    )
    sources: list[Gates] = []
    for index, position in enumerate(positions):
        if not position.encoding.scores:
            continue
        encoding = position.encoding
        query_BHTK = inputs.rotated_q_BHTK if encoding.uses_rotated_query else inputs.q_BHTK
        term = encoding.term(position.parameters, query_BHTK)
        if term is None:
            return f"the score of {encoding.kind} with these options has no form for fused kernels"
        if getattr(problem, _FIELDS[type(term)]) is not None:
            return f"{encoding.kind} is not the only encoding with a {type(term).__name__} term"
        problem = _add_term(problem, term)
        if isinstance(term, ContextualTerm):
            sources.append(_gate_tensors(inputs, term, index))
    if any(not _same_gates(source, sources[0]) for source in sources):
        return "the gates of contextual encodings differ"
    problem = replace(problem, gates=sources[0] if sources else None)
    queries = [term.q_BHQK for term in (problem.look_up, problem.relative) if term is not None]
    queries += [problem.gates[0]] if problem.gates else []
    if any(query is not queries[0] for query in queries):
        return "one table has rotated queries, and another table or the gates have queries before the rotation"
    return problem


def _add_term(problem: AttentionProblem, term: Term) -> AttentionProblem:
    fields = {_FIELDS[type(term)]: term}
    return replace(problem, **fields)  # type: ignore[arg-type] # the type of the term determines the field


def _gate_tensors(inputs: Inputs, term: ContextualTerm, index: int) -> Gates:
    if term.gate == "logits" or (term.gate == "keys" and not inputs.rotated):
        return None
    keys_BHSK: Tensor | None = inputs.k_BHSK
    if term.gate != "keys":
        keys_BHSK = inputs.v_BHSK if term.gate == "values" else inputs.gate_k_BHSK[index]
    if keys_BHSK is None:
        raise ValueError(
            f"encoding {index} has gate: separate, and Inputs.gate_k_BHSK[{index}] is None: pass its gate keys"
        )
    return inputs.q_BHTK, keys_BHSK


def _same_gates(one: Gates, other: Gates) -> bool:
    """Whether two sources of gates are the same tensors; the queries always are."""
    return one is other or (one is not None and other is not None and one[1] is other[1])
