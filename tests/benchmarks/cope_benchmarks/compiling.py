"""Compiles the Triton kernels without launching them: ahead of a measurement, and for GPUs that need not be there.

    python -m cope_benchmarks.compiling [--capability 90]      everything that `make gpu` launches, some minutes of a core

It prints each failure, and exits with 1 if there is one. `cope-sweep bench instructions` counts what the kernels compile to:
registers, spills, and the instructions of a tile. Inner loops are found in the machine code by their backward branches. The
*general* loop computes gates, which need a reciprocal; the *plain* one computes weights without gates.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.report import Measured, Row, Rows
from cope_sweep.kernels import tuning
from cope_sweep.kernels.tuning import Configurations, using_configurations

PROCESSES = 8
CAPABILITIES = (80, 90)
TILE, WARPS = 64 * 32, 4
"""Instructions are counted for a tile of 64 × 32 scores, in each of 4 warps."""

# Ahead of a measurement -----------------------------------------------------------------------------------------------


@contextmanager
def compiled_ahead(device: str) -> Iterator[Callable[[Problem, Sequence[Configurations]], None]]:
    """A function that compiles a problem's kernels with each of these configurations, in several processes.

    Triton keeps the kernels on disk, for all processes. On a CPU the function does nothing. What cannot be compiled raises
    its error where it is launched.
    """
    if device == "cpu":
        yield lambda problem, configurations: None
        return
    processes = min(PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:

        def compile_all(problem: Problem, configurations: Sequence[Configurations]) -> None:
            for _ in pool.map(partial(_tried, problem), configurations):
                pass

        yield compile_all


def _tried(problem: Problem, configurations: Configurations) -> None:
    with suppress(Exception):
        compile_kernels(problem.one_sequence(), configurations, "cuda")


def compile_kernels(
    problem: Problem, configurations: Configurations | None, device: str
) -> dict[str, tuple[Any, Mapping[str, int]]]:
    """Compile the kernels that a problem launches, forward and backward, without running them.

    Returns each kernel's result of Triton, and its tile sizes. Configurations None: those of the table.
    """
    from cope_sweep.kernels.triton_attention import launch

    compiled: dict[str, tuple[Any, Mapping[str, int]]] = {}

    def compile_instead(kernel: str, grid: Any, arguments: dict[str, Any], sizes: Mapping[str, int]) -> None:
        compiled[kernel] = launch.KERNELS[kernel].warmup(grid=grid, **arguments, **sizes, **launch.OPTIONS), sizes

    leaves, weight = problem.leaves(device)
    chosen = using_configurations(configurations) if configurations else nullcontext()
    with chosen, mock.patch.object(launch, "run", compile_instead):
        computed_by(problem.attend, leaves, weight)
    return compiled


# For a GPU that is not there ------------------------------------------------------------------------------------------


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let Triton compile for this GPU within a `with` block, on a machine that has none."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

    from cope_sweep.kernels import triton_attention
    from cope_sweep.kernels.triton_attention import launch

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
        for kernel in launch.KERNELS.values():  # what this process has compiled, for whichever GPU
            kernel.device_caches.clear()
            stack.callback(kernel.device_caches.clear)
        triton.runtime.driver.set_active(Driver())
        stack.enter_context(mock.patch.object(launch, "architecture_of", return_value=architecture))
        stack.enter_context(mock.patch.object(tuning, "architecture_of", return_value=architecture))
        # `why_not` asks for a GPU unless Triton interprets.
        stack.enter_context(mock.patch.object(triton_attention, "INTERPRETED", True))
        yield


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="80 for A100, 90 for H100 and H200")
    given = parser.parse_args(arguments)
    done = failed = 0
    with compiling_for(given.capability):
        for name, problem, configurations in everything():
            done += 1
            try:
                compile_kernels(problem.one_sequence(), configurations, "cpu")
            except Exception as error:  # Triton's errors have many types
                failed += 1
                text = str(error).strip().splitlines()
                sys.stdout.write(f"{name}: {type(error).__name__}: {text[-1] if text else ''}\n")
    sys.stdout.write(f"sm_{given.capability}: {done} problems, {failed} failed\n")
    return 1 if failed else 0


def everything() -> Iterator[tuple[str, Problem, Configurations | None]]:
    """The problems that `make gpu` launches: of its tests, of the cases that it measures, and of what it tunes."""
    from cope_benchmarks import attention, tune
    from cope_sweep.kernels import triton_attention

    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        test_triton_gpu = importlib.import_module("tests.kernels.test_triton_gpu")
    for name, problem in test_triton_gpu.CASES.items():
        if triton_attention.why_not(problem.build(problem.leaves()[0])) is None:
            yield f"test: {name}", problem, None
    for case in attention.GPU_CASES:
        yield f"case: {case.name}", case.problem, None
    for kind in tune.KINDS:
        for trial in tune.trials_of(kind, "cuda"):
            yield f"tuned: {kind.name}: {trial}", kind, trial


# What the kernels compile to ------------------------------------------------------------------------------------------


def measure() -> Measured:
    """Compile CoPE's kernels (bfloat16, p_max 64) for all `CAPABILITIES`, and count."""
    rows = Rows("instructions")
    for capability in CAPABILITIES:
        for head_dim in (64, 128):
            # Two sequences and heads: Triton makes special kernels for sizes of 1.
            problem = Problem(batch=2, heads=2, tokens=1024, head_dim=head_dim)
            for kernel, counts in compile_ahead(capability, problem).items():
                rows.rows[f"{kernel}, sm_{capability}, head dim {head_dim}"] = counts
    return rows.measured()


def compile_ahead(capability: int, problem: Problem) -> dict[str, Row]:
    """The resources that each kernel of a problem uses on a GPU of this compute capability.

    `registers` and `spilled` bytes, stored to local memory for lack of registers, are those of a thread, `shared` bytes
    those of a block. `general`, `plain`: instructions of each of 4 warps for 64 × 32 scores in a tile that is not on the
    diagonal, without those that store records for `backward_keys`, which are skipped at every second tile.
    """
    with compiling_for(capability):
        compiled = compile_kernels(problem, None, "cpu")
    return {kernel: _counted(*found) for kernel, found in compiled.items()}


def _counted(done: Any, sizes: Mapping[str, int]) -> Row:
    """The resources of a compiled kernel; `general` and `plain` only of loops that are there."""
    usage = _printed("cuobjdump", "--dump-resource-usage", done.asm["cubin"])
    # Registers are spilled to the stack; the kernels have no other use for it.
    registers, spilled = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    rows, keys = (sizes["BLOCK_T"], sizes["BLOCK_S"])
    plain = sizes["PLAIN_T"] * keys if "PLAIN_T" in sizes else rows * sizes["PLAIN_S"]
    loops = loop_lengths(_printed("nvdisasm", "--print-code", done.asm["cubin"]))
    found: Row = {"registers": registers, "spilled": spilled, "shared": done.metadata.shared}
    for name, length, scores in zip(("general", "plain"), loops, (rows * keys, plain), strict=True):
        if length is not None:
            found[name] = length * (sizes["num_warps"] / WARPS) * TILE / scores
    if {"general", "plain"} <= found.keys():
        found["general ÷ plain"] = found["general"] / found["plain"]
    return found


def _printed(tool: str, option: str, cubin: bytes) -> str:
    """The output of one of the tools that Triton brings, for a compiled kernel."""
    import triton

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def loop_lengths(code: str) -> tuple[int | None, int | None]:
    """Instructions of the general and of the plain loop in disassembled code; None for a loop that is not there.

    Of a loop with branches, those of the shortest way through it.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            instructions.append(instruction[1])
    targets = {at: labels[found[1]] for at, text in enumerate(instructions) if (found := _BRANCH.search(text))}
    general: list[int] = []
    plain: list[int] = []
    for end, start in targets.items():
        body = " ".join(instructions[start : end + 1])
        # What has an EXIT is no loop: the compiler has moved code away.
        if start < end and "MMA" in body and "MUFU.EX2" in body and "EXIT" not in body:
            length = _shortest_way(instructions, targets, start, end)
            (general if "MUFU.RCP" in body else plain).append(length)
    return max(general, default=None), max(plain, default=None)


_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")


def _shortest_way(instructions: Sequence[str], targets: Mapping[int, int], start: int, end: int) -> int:
    """The number of instructions on the shortest way from one to another, with both."""
    steps = {start: 1}
    waiting = deque([start])
    while waiting:
        at = waiting.popleft()
        following = [] if re.match(r"(BRA|EXIT)\b", instructions[at]) else [at + 1]
        following += [targets[at]] if at in targets else []
        for each in following:
            if each not in steps and each < len(instructions):
                steps[each] = steps[at] + 1
                waiting.append(each)
    return steps[end]


if __name__ == "__main__":
    sys.exit(main())
