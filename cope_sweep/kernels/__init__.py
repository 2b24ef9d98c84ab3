"""Attention with position scores: a reference and fused kernels that compute the same.

This package depends on `cope_sweep.positions`, torch and numpy only. README.md in this folder describes the
implementations, when each is used, and what was measured.
"""

from cope_sweep.kernels.arguments import Arguments, make_problem
from cope_sweep.kernels.choice import Implementation, observing, set_implementation, using
from cope_sweep.kernels.dispatch import attend
from cope_sweep.kernels.inputs import Inputs, Position, Positions
from cope_sweep.kernels.path import which
from cope_sweep.kernels.reference import attention_weights, reference, seen, visible

__all__ = [
    "Arguments",
    "Implementation",
    "Inputs",
    "Position",
    "Positions",
    "attend",
    "attention_weights",
    "make_problem",
    "observing",
    "reference",
    "seen",
    "set_implementation",
    "using",
    "visible",
    "which",
]
