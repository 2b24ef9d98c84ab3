"""Sizes of the Triton kernels, as compiled for a GPU that this machine need not have. Nothing is timed.

The kernels of CoPE in their two forms, one kernel for all tiles, or one for the tiles near the diagonal and one for the plain ones
beyond (`kernels_far.py`), beside the kernels without positions. Instructions are those of one warp in one pass of a loop.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.report import Measured, Row, Rows
from cope_sweep.kernels.triton_attention import launch
from cope_sweep.kernels.triton_attention.tile_sizes import TileSizes

PROBLEM = Problem(batch=2, heads=2, tokens=1024)
"""Triton makes special kernels for sizes of 1."""
REGISTERS, SHARED_BYTES, THREADS = 65536, 227 * 1024, 2048
"""Of a multiprocessor of compute capability 9.0."""
RESERVED_BYTES = 1024
"""Shared memory of each block that the driver takes."""


class Driver:
    """Lets Triton compile for a GPU that this machine need not have."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """A kernel: Triton's result, and the sizes that it was compiled with."""

    result: Any
    sizes: TileSizes


@contextmanager
def target(capability: int) -> Iterator[None]:
    """Triton compiles for this compute capability, and forgets afterwards what it has compiled."""

    def forget() -> None:
        for kernel in launch.KERNELS.values():
            kernel.device_caches.clear()

    forget()
    triton.runtime.driver.set_active(Driver(capability))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)  # then Triton looks for a GPU at its next launch
        forget()


def compiled(problem: Problem) -> dict[str, Compiled]:
    """The kernels of a problem, forward and backward, by name, compiled for `target` and not run."""
    found: dict[str, Compiled] = {}

    def compile_instead(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: TileSizes) -> None:
        result = launch.KERNELS[kernel].warmup(grid=grid, **arguments, **sizes, **launch.OPTIONS)
        found[kernel] = Compiled(result, sizes)

    with patch.object(launch, "run", compile_instead):
        computed_by(problem.attend, *problem.leaves())
    return found


WITHOUT, ONE, TWO = "no positions", "CoPE, one kernel", "CoPE, two"


def measure(head_dim: int, forms: Sequence[str] = (WITHOUT, ONE, TWO)) -> Measured:
    """Registers, memory and instructions of all kernels for this head dim, in bfloat16, compute capability 9.0."""
    rows = Rows("sizes")
    with target(90):
        for form in forms:
            problem = replace(PROBLEM, head_dim=head_dim, p_max=None if form == WITHOUT else PROBLEM.p_max)
            with patch.object(launch, "NEAR_AND_FAR", form == TWO):
                found = {kernel: row_of(kernel, each) for kernel, each in sorted(compiled(problem).items())}
            rows.add_rows(form, found)
    return rows.measured(head_dim=head_dim, triton=triton.__version__)


def row_of(kernel: str, of: Compiled) -> Row:
    """The sizes of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(of.result.asm["cubin"])
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
        listing = _output(triton.knobs.nvidia.nvdisasm.path, "-c", cubin)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    shared, threads = of.result.metadata.shared, 32 * of.sizes["num_warps"]
    blocks = min(
        REGISTERS // (-(-registers // 8) * 8 * threads), SHARED_BYTES // (shared + RESERVED_BYTES), THREADS // threads
    )
    products = len(re.findall(r"\bHGMMA\b", listing))
    general, plain = loops(kernel, listing)
    return {
        "tiles, warps, stages": " ".join(map(str, of.sizes.values())),
        "registers": registers,
        "stack, bytes": stack,
        "shared memory, bytes": f"{shared:,}",
        "warps at once": blocks * of.sizes["num_warps"],
        "general loop": general or "–",
        "plain loop": plain or "–",
        "products": products,
        "waits for them": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", listing)),
    }


def loops(kernel: str, listing: str) -> tuple[int | None, int | None]:
    """The instructions in the loops over general tiles, whose gates are reciprocals, and over plain ones."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
    jumps = ((n, re.search(r"\bBRA `\((\.L_x_\d+)\)", line)) for n, line in enumerate(instructions))
    ranges = [(labels[to[1]], n + 1) for n, to in jumps if to and labels[to[1]] <= n]
    found: dict[tuple[int, int], bool] = {}
    for n, line in enumerate(instructions):
        around = [(start, end) for start, end in ranges if start <= n < end]
        if "MUFU.EX2" in line and around:
            start, end = min(around, key=lambda each: each[1] - each[0])
            found[start, end] = any("MUFU.RCP" in each for each in instructions[start:end])
    general = [end - start for (start, end), gates in found.items() if gates]
    plain = [end - start for (start, end), gates in found.items() if not gates]
    # Without positions the tiles on the diagonal have no gates either. Rows visit them last, the others first.
    first = kernel.startswith("backward_rows")
    return max(general, default=None), (plain[0 if first else -1] if plain else None)


def _output(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout
