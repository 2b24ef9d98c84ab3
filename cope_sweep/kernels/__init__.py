"""Attention with position scores: a reference and fused kernels that compute the same.

This package depends on `cope_sweep.positions`, torch and numpy only. README.md in this folder describes the
implementations, when each is used, and what was measured.
"""

from cope_sweep.kernels.arguments import Inputs, LayerEncoding, LayerEncodings, make_problem
from cope_sweep.kernels.dispatch import Implementation, attend, observing, set_implementation, using, which
from cope_sweep.kernels.reference import attention_weights, reference, seen, visible

__all__ = [
    "Implementation",
    "Inputs",
    "LayerEncoding",
    "LayerEncodings",
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
