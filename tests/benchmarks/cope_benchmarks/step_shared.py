"""Several processes that train on one GPU at the same time, as groups with `gpus: 0.25` do: steps/s of all together."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 5
START_LIMIT_S = 240.0
"""Longest time until all processes have compiled, and begin together."""

Step = Callable[[], object]


def together(make: Callable[[], Step], processes: int, device: str, seconds: float) -> tuple[float, float | None]:
    """Steps/s of all processes together, and their peak memory in MiB (None on a CPU).

    `make` is called in each process and returns its training step; it can be pickled. A process takes at least one step.
    Raises RuntimeError with the first error of a process.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=_train, args=(make, barrier, results, device, seconds), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    try:
        found = [_next(results, children, START_LIMIT_S + 10 * seconds) for _ in children]
    finally:
        for child in children:
            child.kill()
            child.join()
    errors = [result["error"] for result in found if "error" in result]
    if errors:
        raise RuntimeError(errors[0])
    peaks = [result["peak_mib"] for result in found]
    return sum(result["steps_per_s"] for result in found), None if None in peaks else sum(peaks)


def _next(results: Any, children: list[Any], limit_s: float) -> dict[str, Any]:
    end = time.monotonic() + limit_s
    while True:
        try:
            found: dict[str, Any] = results.get(timeout=1.0)
            return found
        except queue.Empty:
            dead = [child.exitcode for child in children if child.exitcode]
            if dead:
                return {"error": f"a process ended with {dead[0]}"}
            if time.monotonic() > end:
                return {"error": f"no result of a process after {limit_s:.0f} s"}


def _train(make: Callable[[], Step], barrier: Any, results: Any, device: str, seconds: float) -> None:
    try:
        step = make()
        for _ in range(WARM_UPS if device == "cuda" else 1):
            step()
        _wait(device)
        barrier.wait(START_LIMIT_S)
        steps, start = 0, time.perf_counter()
        while not steps or time.perf_counter() - start < seconds:
            step()
            steps += 1
            if steps % 10 == 0:
                _wait(device)  # else the host would run ahead, and steps be counted that are not done
        _wait(device)
        taken = time.perf_counter() - start
        peak_mib = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
        results.put({"steps_per_s": steps / taken, "peak_mib": peak_mib})
    except Exception as error:  # whatever training raises; the parent reports it
        barrier.abort()
        results.put({"error": f"{type(error).__name__}: {error}"})
    results.close()
    results.join_thread()
    os._exit(0)  # threads that make batches may still run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
