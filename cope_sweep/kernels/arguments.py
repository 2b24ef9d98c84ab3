"""A problem as a flat list of tensors and numbers, which is what operators and autograd functions take.

Tables stay factored, z = scale·q·e: kernels make their products for a block of queries at a time.

Shapes: B batch, H heads, T queries, K head dim, P positions, M segments, R distances, N knots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cope_sweep.kernels.problem import Problem


class Arguments(NamedTuple):
    """What attention is computed from, all floats of one type. The first `DIFFERENTIABLE` have gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    base_q: Tensor | None
    """Queries before rotation, for tables and for gates by other keys; None: q."""
    gate_k: Tensor | None
    """None: gates see the attention logits."""
    e: Tensor | None
    """LookUp: (P, K) or (H, P, K)."""
    segment_slope: Tensor | None
    """PiecewiseLinear: (B, H, T, M), as its intercept."""
    segment_intercept: Tensor | None
    m: Tensor | None
    """Slope: (H,)."""
    relative: Tensor | None
    """RelativeLookUp: (R, K)."""
    distance_bias: Tensor | None
    """DistanceBias: (H, R)."""
    knots: Tensor | None
    """PiecewiseLinear: (N,); no gradient from here on."""
    distance_slope: Tensor | None
    """DistanceSlope: (H,)."""
    seed: Tensor | None
    lengths: Tensor | None
    scale: float
    limit: float
    """Where the positions of PiecewiseLinear stop; infinite where they do not."""
    e_scale: float
    relative_scale: float
    far_last: bool
    """RelativeLookUp: distances beyond the table use its last entry."""
    dropout: float

    @staticmethod
    def of(problem: Problem, dtype: torch.dtype) -> Arguments:
        """The problem's arguments, in this float type."""
        table, relative, piecewise = problem.look_up, problem.relative, problem.piecewise
        bases = [term.q_BHQK for term in (table, relative) if term is not None]
        bases += [problem.gates[0]] if problem.gates else []
        base_q = bases[0] if bases and bases[0] is not problem.q_BHTK else None
        slope, biases, by_distance = problem.slope, problem.distance_bias, problem.distance_slope
        given = Arguments(
            q=problem.q_BHTK,
            k=problem.k_BHSK,
            v=problem.v_BHSK,
            base_q=base_q,
            gate_k=problem.gates[1] if problem.gates else None,
            e=table.e_PK if table else None,
            segment_slope=piecewise.slope_BHQM if piecewise else None,
            segment_intercept=piecewise.intercept_BHQM if piecewise else None,
            m=slope.m_H if slope else None,
            relative=relative.e_RK if relative else None,
            distance_bias=biases.b_HR if biases else None,
            knots=piecewise.knots_N if piecewise else None,
            distance_slope=by_distance.m_H if by_distance else None,
            seed=problem.seed if problem.dropout else None,
            lengths=problem.lengths_B,
            scale=problem.scale,
            limit=float("inf") if piecewise is None or piecewise.limit is None else piecewise.limit,
            e_scale=table.scale if table else 1.0,
            relative_scale=relative.scale if relative else 1.0,
            far_last=bool(relative and relative.far == "last"),
            dropout=problem.dropout,
        )
        floats: dict[str, Any] = {
            name: x.to(dtype) for name, x in given._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        return given._replace(**floats)


DIFFERENTIABLE = 11
"""How many of `Arguments`' fields, from the first, have gradients."""
QUERIES_AND_KEYS = 5
"""How many of those, from the first, are (B, H, T or S, K)."""


def tidied(given: Arguments) -> Arguments:
    """All tensors in the layouts that the kernels read. Keep it alive while they run."""
    changed: dict[str, Any] = {
        name: readable(x) if name in Arguments._fields[:QUERIES_AND_KEYS] else x.contiguous()
        for name, x in given._asdict().items()
        if isinstance(x, Tensor)
    }
    if given.lengths is not None:
        changed["lengths"] = given.lengths.to(torch.int64).contiguous()
    return given._replace(**changed)


def readable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
