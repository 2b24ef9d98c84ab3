"""Attention on a CPU, in C++: compiled at first use, float32 within, the same bits at any number of threads."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.native import operator
from cope_sweep.kernels.native.build import BuildError
from cope_sweep.kernels.problem import Problem


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot compute this problem here; None: they can."""
    q, k, v = problem.q_BHTK, problem.k_BHSK, problem.v_BHSK
    if q.device.type != "cpu":
        return f"it runs on CPUs and the tensors are on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in float32 and the tensors are {q.dtype}"
    if problem.look_up is not None and problem.piecewise is not None:
        return "it has one of CoPE and CoPE-MLP in a layer, not both"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] or 0 in q.shape:
        return f"it wants heads of one dimension, and {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]} came"
    return _no_library()


def attend(problem: Problem) -> Tensor:
    """Attention of the problem, (B, H, T, K)."""
    with torch.autocast("cpu", enabled=False):
        out: Tensor = operator.attention(*Arguments.of(problem, torch.float32))[0]
    return out.to(problem.v_BHSK.dtype)


@functools.cache
def _no_library() -> str | None:
    try:
        operator.native()
    except BuildError as error:
        return str(error)
    return None
