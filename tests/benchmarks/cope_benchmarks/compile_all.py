"""Compiles everything that `make gpu` launches, for a GPU that need not be there: does this Triton compile all of it?

    python -m cope_benchmarks.compile_all [--capability 90] [tests] [tune] [bench] [small]

The kernels are specialised as on the GPU: only Triton's driver is replaced. Prints each failure, and exits with 1 if there
is one. Takes several minutes of one core for each part; what is compiled stays in Triton's cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from cope_benchmarks import gpu, gpu_small, tune
from cope_benchmarks.gpu_compile import compile_kernels
from cope_benchmarks.gpu_problems import Problem
from cope_sweep.kernels import triton_attention, tuning
from cope_sweep.kernels.triton_attention import launch
from cope_sweep.kernels.tuning import Configurations

PARTS = ("tests", "bench", "small", "tune")

Work = Iterator[tuple[str, Problem, Configurations | None]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compile_all", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90, help="80 for A100, 90 for H100 and H200")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, unless named")
    given = parser.parse_args(arguments)
    start, failed, done = time.monotonic(), 0, 0
    with compiling_for(given.capability):
        for part in given.parts or PARTS:
            for name, problem, configurations in _work(part):
                done += 1
                try:
                    compile_kernels(problem, configurations, "cpu")
                except Exception as error:  # Triton's errors have many types
                    failed += 1
                    text = str(error).strip().splitlines()
                    _say(f"{part}: {name}: {type(error).__name__}: {text[-1] if text else ''}")
    _say(
        f"Triton {triton.__version__}, torch {torch.__version__}, sm_{given.capability}: {done} problems, {failed} failed, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if failed else 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let Triton compile for this GPU within a `with` block, on a machine that has none."""

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    architecture = f"sm_{capability}"
    with ExitStack() as stack:
        stack.callback(triton.runtime.driver.set_active, None)  # then Triton looks for a GPU at its next launch
        triton.runtime.driver.set_active(Driver())
        stack.enter_context(mock.patch.object(launch, "architecture_of", return_value=architecture))
        stack.enter_context(mock.patch.object(tuning, "architecture_of", return_value=architecture))
        # `why_not` asks for a GPU unless Triton interprets.
        stack.enter_context(mock.patch.object(triton_attention, "INTERPRETED", True))
        yield


def _work(part: str) -> Work:
    if part == "tests":
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            from tests.kernels import test_triton_gpu

        for name, problem in test_triton_gpu.CASES.items():
            if triton_attention.why_not(problem.build(problem.leaves()[0])) is None:
                yield name, problem, None
    elif part == "bench":
        for case in gpu.CASES:
            yield case.name, case.problem, None
    elif part == "small":
        for problem in gpu_small.PROBLEMS:
            yield problem.name, problem, None
    else:
        for kind in tune.KINDS:
            for trial in tune.trials_of(kind.problem, "cuda"):
                yield f"{kind.name}: {trial}", kind.problem, trial


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
