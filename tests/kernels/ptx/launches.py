"""The launches of the Triton kernels, compiled for sm_80 and run by the emulator on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.triton_attention import launch
from tests.kernels.ptx.machine import Executed, Order, forwards, run
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.translate import Program, translate

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip

executed: dict[tuple[Any, ...], Executed] = {}
"""By compiled kernel, the instructions that ran since it was compiled."""
_compiled: dict[tuple[Any, ...], tuple[Program, list[str], int]] = {}


@contextmanager
def emulated(order: Order = forwards) -> Iterator[None]:
    """Within it, `launch.forward` and `launch.backward` compute what they would on a GPU of compute capability 8.0."""

    def run_emulated(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: Mapping[str, int]) -> None:
        program, names, shared_bytes = compiled(kernel, arguments, sizes)
        given = {**arguments, **sizes}
        run(program, grid, [given[name] for name in names], shared_bytes, order, names, _counts(program))

    with (
        mock.patch.object(launch, "run", run_emulated),
        mock.patch.object(launch, "architecture_of", return_value="sm_80"),
    ):
        yield


def compiled(kernel: str, arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Program, list[str], int]:
    """The program of a launch, the names of its arguments, and its bytes of shared memory."""
    function = launch.KERNELS[kernel]
    given = {**arguments, **sizes}
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        name, value = parameter.name, given[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[name], constants[(position,)] = "constexpr", value
            continue
        signature[name] = _type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if special and isinstance(number, int) and number % 16 == 0:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {name: sizes[name] for name in ("num_warps", "num_stages")}
    key = (kernel, *map(str, (signature, constants, attributes, options)))
    if key not in _compiled:
        source = ASTSource(function, signature, constants, attributes)
        done = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        names = [name for name, kind in signature.items() if kind != "constexpr"]
        _compiled[key] = translate(parse(done.asm["ptx"])), names, done.metadata.shared
    return _compiled[key]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _counts(program: Program) -> Executed:
    return executed.setdefault(id(program), Executed(program))
