"""The peak memory of one run in a process that trains many."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

import torch


def reset_peak(device: str) -> None:
    """Reset the peak, where the system can: always on CUDA, under Linux on a CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5): resets VmHWM


def peak_bytes(device: str) -> int:
    """The largest number of bytes since `reset_peak`: of tensors on CUDA, of the whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
