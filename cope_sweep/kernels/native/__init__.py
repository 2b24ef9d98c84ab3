"""Attention in C++ for CPUs: compiled at first use, computes in float32, same bits at any number of threads."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.native import operator
from cope_sweep.kernels.native.build import BuildError
from cope_sweep.kernels.problem import AttentionProblem


def why_not(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute this problem here, for a log message; None: they can."""
    q, k, v = problem.q_BHTK, problem.k_BHSK, problem.v_BHSK
    if q.device.type != "cpu":
        return f"it runs on CPUs, and the tensors are on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32, and the tensors are {q.dtype}"
    if problem.look_up is not None and problem.piecewise is not None:
        return "it computes CoPE or CoPE-MLP in a layer, not both"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] or 0 in q.shape:
        return f"q, k and v need the same head dim, which are {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
    return _build_error()


def attend(problem: AttentionProblem) -> Tensor:
    """Return attention for the problem, (B, H, T, K), in the type of the values."""
    with torch.autocast("cpu", enabled=False):
        out: Tensor = operator.attention(*Arguments.of(problem, torch.float32))[0]
    return out.to(problem.v_BHSK.dtype)


@functools.cache
def _build_error() -> str | None:
    try:
        operator.native()
    except BuildError as error:
        return str(error)
    return None
