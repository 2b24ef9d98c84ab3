"""Attention with position scores, fused: one problem, several implementations, one answer."""

from cope_sweep.kernels.dispatch import (
    IMPLEMENTATIONS,
    Implementation,
    attend,
    fused,
    observing,
    set_implementation,
    using,
)
from cope_sweep.kernels.inputs import Inputs, Position, Positions
from cope_sweep.kernels.problem import Problem, problem_of
from cope_sweep.kernels.reference import attention_weights, reference, seen, visible

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "Inputs",
    "Position",
    "Positions",
    "Problem",
    "attend",
    "attention_weights",
    "fused",
    "observing",
    "problem_of",
    "reference",
    "seen",
    "set_implementation",
    "using",
    "visible",
]
