"""Compiles the Triton kernels of problems in other processes; Triton keeps what they compile on disk, for all processes.

Nothing is launched there, so times that are measured meanwhile are not disturbed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import Problem
from cope_sweep.kernels.tuning import Configurations, using_configurations

PROCESSES = 8


class Compiling:
    """Compiles within a `with` block; without a GPU it does nothing."""

    def __init__(self, work: Mapping[str, Sequence[tuple[Problem, Configurations | None]]], device: str) -> None:
        """`work`: by a name for `wait`, problems and configurations of the kernels; None: those of the table."""
        self._work, self._device = work, device
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[str, list[Future[None]]] = {}

    def __enter__(self) -> Compiling:
        if self._device != "cuda" or not self._work:
            return self
        processes = min(PROCESSES, os.cpu_count() or 1)
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        for name, problems in self._work.items():
            futures = self._futures.setdefault(name, [])
            try:
                futures += [self._pool.submit(compile_kernels, *each, self._device) for each in problems]
            except BrokenProcessPool:  # then kernels are compiled where they are launched
                break
        return self

    def wait(self, name: str) -> None:
        """Wait until the kernels of this name are compiled, or cannot be: then their launch raises the error."""
        wait(self._futures.get(name, []))

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)


def compile_kernels(problem: Problem, configurations: Configurations | None, device: str) -> None:
    """Compile the kernels that a problem launches, forward and backward, by launches of a small problem of its kind."""
    from cope_sweep.kernels import triton_attention
    from cope_sweep.kernels.triton_attention import launch

    small = one_sequence(problem)
    leaves, weight = small.leaves(device)
    chosen = using_configurations(configurations) if configurations else nullcontext()
    compiled = {name: _CompiledOnly(kernel) for name, kernel in launch.KERNELS.items()}
    with chosen, mock.patch.dict(launch.KERNELS, compiled):
        computed_by(triton_attention.attend, small.build, leaves, weight)


class _CompiledOnly:
    """Takes the place of a kernel: its launches compile it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._kernel.warmup, grid=grid)


def one_sequence(problem: Problem) -> Problem:
    """The problem with one sequence and at most two heads: the same kernels, in little memory."""
    lengths = problem.lengths and problem.lengths[:1]
    return replace(problem, batch=1, heads=min(2, problem.heads), lengths=lengths)
