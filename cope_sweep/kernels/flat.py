"""A problem as a flat list of tensors and numbers, which is what autograd functions and operators take."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cope_sweep.kernels.problem import Problem


class Flat(NamedTuple):
    """`Problem`, flattened. The first `DIFFERENTIABLE` have gradients, where they are tensors that ask for one."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate_q: Tensor | None
    gate_k: Tensor | None
    z: Tensor | None
    """LookUp."""
    segment_slope: Tensor | None
    """PiecewiseLinear."""
    segment_intercept: Tensor | None
    m: Tensor | None
    """Slope."""
    relative: Tensor | None
    distance_bias: Tensor | None
    knots: Tensor | None
    """PiecewiseLinear; no gradient from here on."""
    distance_slope: Tensor | None
    seed: Tensor | None
    lengths: Tensor | None
    scale: float
    limit: float
    """Where the positions of PiecewiseLinear stop; infinite where they do not."""
    far_last: bool
    """RelativeLookUp: distances beyond the table use its last entry."""
    dropout: float

    @staticmethod
    def of(problem: Problem) -> Flat:
        gates, piecewise, relative = problem.gates, problem.piecewise, problem.relative
        return Flat(
            problem.q_BHTK,
            problem.k_BHSK,
            problem.v_BHSK,
            gates[0] if gates else None,
            gates[1] if gates else None,
            problem.look_up.z_BHQP if problem.look_up else None,
            piecewise.slope_BHQM if piecewise else None,
            piecewise.intercept_BHQM if piecewise else None,
            problem.slope.m_H if problem.slope else None,
            relative.z_BHQR if relative else None,
            problem.distance_bias.b_HR if problem.distance_bias else None,
            piecewise.knots_N if piecewise else None,
            problem.distance_slope.m_H if problem.distance_slope else None,
            problem.seed if problem.dropout else None,
            problem.lengths_B,
            problem.scale,
            float("inf") if piecewise is None or piecewise.limit is None else piecewise.limit,
            bool(relative and relative.far == "last"),
            problem.dropout,
        )

    def in_one_type(self) -> Flat:
        """All floats in float32, or in float64 where queries are."""
        dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        floats: dict[str, Any] = {
            n: x.to(dtype) for n, x in self._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        return self._replace(**floats)


DIFFERENTIABLE = 11
"""How many of `Flat`'s fields, from the first, have gradients."""
