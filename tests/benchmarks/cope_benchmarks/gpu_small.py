"""Runs the Triton kernels on small problems, forward and backward, for compute-sanitizer.

compute-sanitizer --tool memcheck python -m cope_benchmarks.gpu_small
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import Problem

SIZE: dict[str, Any] = {"batch": 2, "heads": 2, "tokens": 250, "projection": True}
PROBLEMS = (
    Problem(**SIZE),
    Problem(p_max="full", dtype="float32", **SIZE),
    Problem(gate="separate", mean_gate=1 - 1e-7, dropout=0.1, relative=30, far="last", lengths=(250, 77), **SIZE),
    Problem(p_max=None, slope=True, head_dim=80, **SIZE),
    Problem(batch=2, tokens=90, cached=160, buckets=40, alibi=True, gate="keys", per_head=True, float32_tables=True),
)


def main(device: str = "cuda") -> None:
    """Compute output and gradients of each problem."""
    from cope_sweep.kernels import triton_attention

    for problem in PROBLEMS:
        leaves, weight = problem.leaves(device)
        computed_by(triton_attention.attend, problem.build, leaves, weight)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
