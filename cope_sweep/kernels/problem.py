"""Attention with fusable scores, as all fused kernels take it.

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
"""Queries and keys of the gates; None: gates see the attention logits."""


@dataclass(frozen=True)
class Problem:
    """One attention. At most one term of each kind, and one source of gates for all contextual ones."""

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
    """int64 scalar on the CPU: which weights dropout takes (see `dropout.py`)."""
    lengths_B: Tensor | None = None

    @property
    def contextual(self) -> bool:
        """Whether there are gates at all."""
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


def problem_of(inputs: Inputs, positions: Positions, dropout: float, seed: Tensor | None) -> Problem | None:
    """The problem that these inputs and encodings pose, or None where fused kernels have no words for it."""
    if inputs.hard:
        return None
    problem = Problem(
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
        term = position.encoding.term(position.parameters, inputs.q_BHTK)
        if term is None or getattr(problem, _FIELDS[type(term)]) is not None:
            return None
        problem = _with(problem, term)
        if isinstance(term, ContextualTerm):
            sources.append(_gates(inputs, term, index))
    if any(not _same(source, sources[0]) for source in sources):
        return None
    return replace(problem, gates=sources[0] if sources else None)


def _with(problem: Problem, term: Term) -> Problem:
    fields = {_FIELDS[type(term)]: term}
    return replace(problem, **fields)  # type: ignore[arg-type] # mypy does not see that the type names the field


def _gates(inputs: Inputs, term: ContextualTerm, index: int) -> Gates:
    if term.gate == "logits" or (term.gate == "keys" and not inputs.rotated):
        return None
    keys_BHSK: Tensor | None = inputs.k_BHSK
    if term.gate != "keys":
        keys_BHSK = inputs.v_BHSK if term.gate == "values" else inputs.gate_k_BHSK[index]
    if keys_BHSK is None:
        raise ValueError("an encoding has gates by keys of its own, and none came with the inputs")
    return inputs.q_BHTK, keys_BHSK


def _same(one: Gates, other: Gates) -> bool:
    return one is other or (one is not None and other is not None and one[1] is other[1])
