"""A problem as a flat list of tensors and numbers: the arguments of the operator `cope_sweep::attention`.

`Arguments` is the only list of them: the operator's schema is made from it.

Tables stay factored, z = scale·q·e: kernels compute the products for a block of queries at a time.

Shapes: B batch, H heads, T queries, K head dim, P positions, M segments, R distances, N knots.
"""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

from torch import Tensor

from cope_sweep.kernels.problem import AttentionProblem


class Arguments(NamedTuple):
    """The arguments of attention. The first `DIFFERENTIABLE` have gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    base_q: Tensor | None
    """Queries before rotation, for tables and for gates with other keys; None: q."""
    gate_k: Tensor | None
    """Keys of the gates; None: gates use the attention logits."""
    e: Tensor | None
    """LookUp: (P, K) or (H, P, K)."""
    segment_slope: Tensor | None
    """PiecewiseLinear: (B, H, T, M), as its intercept."""
    segment_intercept: Tensor | None
    m: Tensor | None
    """Slope: (H,)."""
    relative: Tensor | None
    """RelativeLookUp: (R, K) or (H, R, K)."""
    distance_bias: Tensor | None
    """DistanceBias: (H, R)."""
    knots: Tensor | None
    """PiecewiseLinear: (N,). This and what follows has no gradient."""
    distance_slope: Tensor | None
    """DistanceSlope: (H,)."""
    seed: Tensor | None
    lengths: Tensor | None
    scale: float
    limit: float
    """Largest position of PiecewiseLinear; infinite if there is none."""
    e_scale: float
    relative_scale: float
    far_last: bool
    """RelativeLookUp: whether distances beyond the table use its last entry."""
    dropout: float

    @staticmethod
    def of(problem: AttentionProblem) -> Arguments:
        """The arguments of the problem."""
        table, relative, piecewise = problem.look_up, problem.relative, problem.piecewise
        base_queries = [term.q_BHQK for term in (table, relative) if term is not None]
        base_queries += [problem.gates[0]] if problem.gates else []
        base_q = base_queries[0] if base_queries and base_queries[0] is not problem.q_BHTK else None
        slope, distance_bias, distance_slope = problem.slope, problem.distance_bias, problem.distance_slope
        return Arguments(
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
            distance_bias=distance_bias.b_HR if distance_bias else None,
            knots=piecewise.knots_N if piecewise else None,
            distance_slope=distance_slope.m_H if distance_slope else None,
            seed=problem.seed if problem.dropout else None,
            lengths=problem.lengths_B,
            scale=problem.scale,
            limit=float("inf") if piecewise is None or piecewise.limit is None else piecewise.limit,
            e_scale=table.scale if table else 1.0,
            relative_scale=relative.scale if relative else 1.0,
            far_last=bool(relative and relative.far == "last"),
            dropout=problem.dropout,
        )


DIFFERENTIABLE = 11
"""Number of fields of `Arguments`, from the first, that have gradients."""
QUERIES_AND_KEYS = 5
"""Number of fields, from the first, of shape (B, H, T or S, K)."""

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool"}


def schema() -> str:
    """The arguments in the language of torch's operator schemas: `Tensor q, Tensor k, …`."""
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(Arguments).items())


def unit_stride(x: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy if its last dimension has a stride other than 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
