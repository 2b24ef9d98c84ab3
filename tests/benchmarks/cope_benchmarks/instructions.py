"""Limits a process to AVX2, so that a processor with AVX-512 measures as one without it."""

from __future__ import annotations

import os
import sys

from cope_sweep.errors import UserError

_LIMITS = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels; the native kernels choose their library by it
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # torch's matrix products, on Intel's processors
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def limit_to_avx2() -> None:
    """Let torch, the libraries of its matrix products, and the native kernels use no better instructions than AVX2.

    Torch reads the limits when it is imported. Raises UserError if it is imported already, or without AVX2.
    """
    if "torch" in sys.modules:
        raise UserError("--avx2 needs a process that has not imported torch; run the command by itself")
    os.environ.update(_LIMITS)
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        raise UserError(f"--avx2: this processor's best instructions are {capability}; measure without --avx2")
