"""Abilities of a worker's device: bfloat16 on a CPU, peak speeds of GPUs; and the needs of training steps."""

from __future__ import annotations

import logging

import torch

from cope_sweep.config import RunSpec

log = logging.getLogger(__name__)

PEAK_BF16_FLOPS_PER_S = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
}
"""Dense bfloat16 matrix products, from NVIDIA's data sheets, by a part of the device's name. The first match counts."""


def has_bf16(capabilities: dict[str, bool] | None = None) -> bool:
    """Whether this CPU multiplies matrices in bfloat16: AVX512-BF16 or AMX on x86, BF16 on Arm."""
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return any(bool(present) for name, present in found.items() if "bf16" in name)


def warn_of_emulated_bf16(device: str, precision: str) -> None:
    """Log a warning where a CPU has to emulate bfloat16."""
    if device == "cpu" and precision == "bf16" and not has_bf16():
        log.warning(
            "resources.precision = bf16, but this CPU has no bfloat16 instructions, so it is emulated and slower than "
            "float32; use fp32 here"
        )


def model_flops_per_token(run: RunSpec, parameters: dict[str, int]) -> int:
    """Floating-point operations of a forward and backward pass for each token of a training sequence.

    6 for each parameter that is multiplied with the token's vectors, and 12·layers·dim·tokens for the products of
    attention (Chowdhery et al. 2022, PaLM, appendix B). Tables in which rows are looked up, and what encodings, dropout
    or recomputed activations add, do not count. `parameters` has the number of elements by name.
    """
    looked_up = ("position.",) if run.model.tied else ("position.", "embedding.")
    multiplied = sum(size for name, size in parameters.items() if not name.startswith(looked_up))
    return 6 * multiplied + 12 * run.model.layers * run.model.dim * run.task.length("train")


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """The peak of a device in matrix products of this precision; None where it is not known."""
    if precision != "bf16":
        return None
    return next((peak for part, peak in PEAK_BF16_FLOPS_PER_S.items() if part in device_name), None)
