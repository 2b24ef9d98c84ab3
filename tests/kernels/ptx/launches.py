"""The launches of the Triton kernels, compiled for a GPU and run by the emulator on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cope_sweep.kernels.triton_attention import launch
from tests.kernels.ptx.machine import Executed, Order, forwards, run
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.translate import Program, translate

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip

_compiled: dict[tuple[Any, ...], Compiled] = {}


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for the arguments of a launch."""

    ptx: str
    names: list[str]
    """The arguments that are its parameters, in order."""
    shared_bytes: int

    @cached_property
    def program(self) -> Program:
        return translate(parse(self.ptx))


@contextmanager
def emulated(
    order: Order = forwards,
    change: Callable[[str], str] | None = None,
    truncating: Container[str] = (),
    capability: int = 80,
) -> Iterator[dict[str, Executed]]:
    """Within it, `launch.forward` and `launch.backward` compute what they would on a GPU: sm_80, or sm_90.

    `change`: changes the PTX. `truncating`: kernels whose products of matrices are rounded as `mma_16_truncating` says,
    for sm_80. Yields what was executed, by kernel.
    """
    executed: dict[str, Executed] = {}

    def run_emulated(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: Mapping[str, int]) -> None:
        made = compiled(kernel, arguments, sizes, capability)
        program = made.program
        if change is not None or kernel in truncating:
            program = translate(parse(change(made.ptx) if change else made.ptx), kernel in truncating)
        given = {**arguments, **sizes}
        if kernel not in executed or executed[kernel].program is not program:
            executed[kernel] = Executed(program)
        run(program, grid, [given[n] for n in made.names], made.shared_bytes, order, made.names, executed[kernel])

    with (
        mock.patch.object(launch, "run", run_emulated),
        mock.patch.object(launch, "architecture_of", return_value=f"sm_{capability}"),
    ):
        yield executed


def compiled(kernel: str, arguments: Mapping[str, Any], sizes: Mapping[str, int], capability: int = 80) -> Compiled:
    """The kernel of a launch, specialised as Triton does it."""
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
    key = (kernel, capability, *map(str, (signature, constants, attributes, options)))
    if key not in _compiled:
        source = ASTSource(function, signature, constants, attributes)
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        names = [name for name, kind in signature.items() if kind != "constexpr"]
        _compiled[key] = Compiled(done.asm["ptx"], names, done.metadata.shared)
    return _compiled[key]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
