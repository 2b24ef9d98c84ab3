"""The launches of the Triton kernels, compiled for a GPU and run by the emulator on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from cope_benchmarks.compiling import compiling_for

from cope_sweep.kernels.triton_attention import launch
from tests.kernels.ptx.machine import Executed, Order, forwards, run
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.translate import Program, translate


@contextmanager
def emulated(
    order: Order = forwards,
    change: Callable[[str], str] = lambda ptx: ptx,
    truncating: Container[str] = (),
    capability: int = 80,
) -> Iterator[dict[str, Executed]]:
    """Within it, `launch.forward` and `launch.backward` compute what they would on a GPU: sm_80, or sm_90.

    `change`: changes the PTX. `truncating`: kernels whose products of matrices are rounded as `mma_16_truncating` says,
    for sm_80. Yields what was executed, by kernel.
    """
    executed: dict[str, Executed] = {}

    def run_emulated(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: Mapping[str, int]) -> None:
        given = {**arguments, **sizes}
        done = launch.KERNELS[kernel].warmup(grid=grid, **given, **launch.OPTIONS)
        program = _program(change(done.asm["ptx"]), kernel in truncating)
        if kernel not in executed or executed[kernel].program is not program:
            executed[kernel] = Executed(program)
        names = [name for name, kind in done.src.signature.items() if kind != "constexpr"]
        run(program, grid, [given[n] for n in names], done.metadata.shared, order, names, executed[kernel])

    with compiling_for(capability), mock.patch.object(launch, "run", run_emulated):
        yield executed


@cache
def _program(ptx: str, truncating: bool) -> Program:
    return translate(parse(ptx), truncating)
