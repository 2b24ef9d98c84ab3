"""The Triton kernels compiled for GPUs that the machine need not have: registers, spills, and instructions of a tile.

The kernels are launched with a small problem, and each launch is replaced by a compilation, so the measured kernels are
those that a training step would run. A kernel's inner loops are found in its machine code by their backward branches. The
*general* loop computes gates, which need a reciprocal; the *plain* one computes weights without gates.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from cope_sweep.kernels import operator
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.triton_attention import launch

if TYPE_CHECKING:
    from rich.table import Table

CAPABILITIES = (80, 90)
TILE, WARPS = 64 * 32, 4
"""Instructions are counted for a tile of 64 × 32 scores, in each of 4 warps."""

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one GPU."""

    kernel: str
    capability: int
    dtype: str
    head_dim: int
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that are stored to local memory because registers are lacking."""
    shared: int
    """Bytes of shared memory of a block."""
    general: float | None
    """Instructions of each of 4 warps for 64 × 32 scores in a general tile that is not on the diagonal.

    Without those that store records for `backward_keys`, which are skipped at every second tile.
    """
    plain: float | None
    """The same in a plain tile."""

    @property
    def ratio(self) -> float | None:
        return None if self.general is None or self.plain is None else self.general / self.plain


def measure(head_dims: tuple[int, ...] = (64, 128), dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Compile CoPE's kernels (p_max 64) for all `CAPABILITIES`, and count."""
    kernels = [k for capability in CAPABILITIES for dim in head_dims for k in compile_ahead(capability, dtype, dim)]
    return {
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "kernels": [{**asdict(kernel), "ratio": kernel.ratio} for kernel in kernels],
    }


def table(measured: Mapping[str, Any]) -> Table:
    from rich.table import Table

    result = Table(title="Kernels compiled ahead; instructions of a warp for 64 × 32 scores")
    columns = ("kernel", "GPU", "type", "head dim", "registers", "spilled B", "shared B", "general", "plain", "ratio")
    for name in columns:
        result.add_column(name, justify="left" if name in columns[:3] else "right")
    for kernel in measured["kernels"]:
        numbers = ("head_dim", "registers", "spilled", "shared")
        counts = [f"{kernel[name]:.0f}" if kernel[name] is not None else "–" for name in ("general", "plain")]
        ratio = "–" if kernel["ratio"] is None else f"{kernel['ratio']:.2f}"
        given = (kernel["kernel"], f"sm_{kernel['capability']}", kernel["dtype"])
        result.add_row(*given, *(str(kernel[name]) for name in numbers), *counts, ratio)
    return result


def compile_ahead(
    capability: int, dtype: torch.dtype, head_dim: int, p_max: int = 64, tokens: int = 1024, **changes: Any
) -> list[Compiled]:
    """Compile the kernels of CoPE for a GPU of this compute capability. `changes`: other fields of `Arguments`."""
    q, k, v = torch.zeros(3, 1, 1, tokens, head_dim, dtype=dtype)
    none = dict.fromkeys(Arguments._fields)
    none |= {"limit": float("inf"), "e_scale": 1.0, "relative_scale": 1.0, "far_last": False, "dropout": 0.0}
    e = torch.zeros(p_max, head_dim, dtype=dtype) if p_max else None
    given = Arguments(**{**none, "q": q, "k": k, "v": v, "e": e, "scale": head_dim**-0.5, **changes})
    compiled: dict[str, Compiled] = {}

    def compile_instead(kernel: str, grid: Any, arguments: dict[str, Any], sizes: Mapping[str, int]) -> None:
        compiled[kernel] = compiled_kernel(kernel, arguments, sizes, capability)

    with (
        mock.patch.object(launch, "run", compile_instead),
        mock.patch.object(launch, "architecture_of", return_value=f"sm_{capability}"),
    ):
        outputs = operator.empty_outputs(given, "triton")
        launch.forward(given, *outputs)
        launch.backward(given, q, *outputs, operator.empty_gradients(given, "triton"))
    return list(compiled.values())


def compiled_kernel(kernel: str, arguments: Mapping[str, Any], sizes: Mapping[str, int], capability: int) -> Compiled:
    """Compile one kernel for these arguments, specialised as a launch would specialise them."""
    function = launch.KERNELS[kernel]
    given = {**arguments, **sizes}
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(position,)] = "constexpr", value
            continue
        signature[name] = _TYPES[value.dtype] if isinstance(value, torch.Tensor) else _number_type(value)
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if divisible and not parameter.do_not_specialize:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {name: sizes[name] for name in ("num_warps", "num_stages")} | launch.OPTIONS
    source = ASTSource(function, signature, constants, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _footprint(done.asm["cubin"])
    rows, keys = (sizes["BLOCK_T"], sizes["BLOCK_S"])
    plain = sizes["PLAIN_T"] * keys if "PLAIN_T" in sizes else rows * sizes["PLAIN_S"]
    loops = loop_lengths(_printed("nvdisasm", "--print-code", done.asm["cubin"]))
    per_tile = [
        None if length is None else length * (sizes["num_warps"] / WARPS) * TILE / scores
        for length, scores in zip(loops, (rows * keys, plain), strict=True)
    ]
    dtype = str(arguments["q"].dtype).removeprefix("torch.")
    return Compiled(
        kernel, capability, dtype, arguments["HEAD_DIM"], registers, spilled, done.metadata.shared, *per_tile
    )


def _number_type(value: float) -> str:
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _footprint(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, to which registers are spilled: the kernels have no other use for it."""
    usage = _printed("cuobjdump", "--dump-resource-usage", cubin)
    numbers = [re.search(pattern, usage) for pattern in (r"REG:(\d+)", r"STACK:(\d+)")]
    if None in numbers:
        raise ValueError(f"cuobjdump reports no registers or stack:\n{usage}")
    registers, spilled = (int(match[1]) for match in numbers if match is not None)
    return registers, spilled


def _printed(tool: str, option: str, cubin: bytes) -> str:
    """What one of the tools that Triton brings prints of a compiled kernel."""
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
