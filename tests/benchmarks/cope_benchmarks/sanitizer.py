"""compute-sanitizer on small problems: accesses outside memory, and races in shared memory.

    compute-sanitizer --tool memcheck python -m cope_benchmarks.sanitizer

The tool belongs to the CUDA toolkit. Where it is missing, or does not work (as under some virtual machines), its result is
missing; that is reported and nothing else. Only what it finds in the kernels is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import Problem

TOOLS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
FOUND = 86
"""The tool's exit code where it found an error; else it is that of the program."""
LIMIT_S = 120
"""Longest time of a check."""
PROBE = "import torch; print((torch.ones(4, device='cuda') + 1).sum().item())"

SIZE: dict[str, Any] = {"batch": 2, "heads": 2, "tokens": 250, "projection": True}
PROBLEMS = (
    Problem(**SIZE),
    Problem(p_max="full", dtype="float32", **SIZE),
    Problem(gate="separate", mean_gate=1 - 1e-7, dropout=0.1, relative=30, far="last", lengths=(250, 77), **SIZE),
    Problem(p_max=None, slope=True, head_dim=80, **SIZE),
    Problem(batch=2, tokens=90, cached=160, buckets=40, alibi=True, gate="keys", per_head=True, float32_tables=True),
)


def sanitize(folder: Path, program: tuple[str, ...] = ("-m", "cope_benchmarks.sanitizer")) -> tuple[str, bool]:
    """Run the checks on a Python program, which is started in `folder`: a note, and whether the kernels are wrong."""
    tool = next(filter(None, map(shutil.which, TOOLS)), None)
    if tool is None:
        return f"no {TOOLS[0]} on this machine", False
    if missing := _check(tool, "memcheck", ("-c", PROBE), folder):
        return f"no result of {TOOLS[0]}, which does not work here: {missing} on a sum of four numbers", False
    # Compiles the kernels, so that the checks only run them.
    subprocess.run([sys.executable, *program], cwd=folder, check=True)
    notes = []
    for check in ("memcheck", "racecheck"):
        missing = _check(tool, check, program, folder)
        if missing == f"exit code {FOUND}":
            return f"{TOOLS[0]} --tool {check} found errors", True
        if missing:
            notes.append(f"no result of {TOOLS[0]} --tool {check}: {missing}")
    return "; ".join(notes) or f"{TOOLS[0]} found nothing", False


def _check(tool: str, check: str, program: tuple[str, ...], folder: Path) -> str | None:
    """How a check ended; None: it found nothing."""
    command = [tool, "--tool", check, "--error-exitcode", str(FOUND), sys.executable, *program]
    # Each tensor gets memory of its own, so that an access beyond one is an error.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        code = subprocess.run(command, cwd=folder, env=environment, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_S} s"
    return f"exit code {code}" if code else None


def main(device: str = "cuda") -> None:
    """Compute output and gradients of each problem."""
    for problem in PROBLEMS:
        leaves, weight = problem.leaves(device)
        computed_by(problem.attend, leaves, weight)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
