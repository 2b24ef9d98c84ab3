"""Timing of alternatives on a machine that runs other work, too.

The alternatives take turns, so that a slow moment affects all of them. With one thread, CPU time is measured.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cope_sweep.train.memory import peak_bytes, reset_peak

Step = Callable[[], Any]


def interleaved(steps: dict[str, tuple[Step, ...]], repetitions: int) -> dict[str, list[dict[str, float]]]:
    """Time each alternative's phases: median, least and spread (of the middle half), in milliseconds.

    An alternative is a tuple of phases, functions without arguments. The first turn is not measured.
    """
    clock = clock_of(torch.get_num_threads())
    taken: dict[str, list[list[float]]] = {name: [[] for _ in phases] for name, phases in steps.items()}
    for turn in range(repetitions + 1):
        for name, phases in steps.items():
            for phase, times in zip(phases, taken[name], strict=True):
                start = clock()
                phase()
                if turn:
                    times.append(1e3 * (clock() - start))
    return {name: [_summary(times) for times in phases] for name, phases in taken.items()}


def clock_of(threads: int) -> Callable[[], float]:
    """CPU time with one thread, else wall-clock time, in seconds."""
    return time.process_time if threads == 1 else time.perf_counter


def _summary(times: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {
        "median_ms": round(statistics.median(times), 3),
        "least_ms": round(min(times), 3),
        "spread_ms": round(quarters[2] - quarters[0], 3),
    }


def extra_peak_mb(step: Step, result_bytes: int) -> float:
    """Peak memory of a step in MB, beyond what was allocated before and the bytes of its results."""
    _release_free_memory()
    step()  # allocates the buffers that libraries keep
    _release_free_memory()
    reset_peak("cpu")
    before = peak_bytes("cpu")
    step()
    return round(max(0, peak_bytes("cpu") - before - result_bytes) / 1e6, 1)


def _release_free_memory() -> None:
    """Return free memory to the system (with glibc), so that a later step's allocations raise the peak."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: from now on, large blocks are returned when they are freed
        libc.malloc_trim(0)


def machine() -> dict[str, Any]:
    """Processor, threads, load and versions, which the measured times depend on."""
    return {
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall clock",
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
