"""Short programs of PTX for the emulator's tests."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.ptx.machine import forwards, run
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.translate import translate

LANES = np.arange(32)


def words(values, dtype=np.uint32):
    """Values of the lanes as a tensor of 32-bit words."""
    return torch.from_numpy(np.broadcast_to(np.asarray(values, dtype), 32).copy().view(np.int32))


def program(body, parameters, warps=1):
    types = ",\n".join(f".param .u64 p{index}" for index in range(parameters))
    return translate(
        parse(f""".visible .entry kernel(
        {types}
        )
        .reqntid {32 * warps}
        .extern .shared .align 16 .b8 global_smem[];
        {{
        .reg .pred %p<8>; .reg .b16 %rs<16>; .reg .b32 %r<64>; .reg .b64 %rd<32>;
        mov.u32 %r0, %tid.x;
        mul.wide.u32 %rd0, %r0, 4;
        {body}
        }}
        """)
    )


def execute(code, inputs, outputs, warps=1, shared=0, order=forwards, grid=(1, 1)):
    """Run code that finds inputs (a word of each thread) in %r1, %r2, …; the words in the registers `outputs` after it."""
    tensors = [*inputs, *(torch.zeros(32 * warps, dtype=torch.int32) for _ in outputs)]
    registers = range(1, len(tensors) + 1)
    lines = [f"ld.param.b64 %rd{n}, [p{n - 1}]; add.s64 %rd{n}, %rd{n}, %rd0;" for n in registers]
    lines += [f"ld.global.b32 %r{index + 1}, [%rd{index + 1}];" for index in range(len(inputs))]
    lines.append(code)
    lines += [f"st.global.b32 [%rd{len(inputs) + n + 1}], {name};" for n, name in enumerate(outputs)]
    run(program("\n".join([*lines, "ret;"]), len(tensors), warps), grid, tensors, shared, order)
    return [x.numpy().view(np.uint32) for x in tensors[len(inputs) :]]


def compute(code, *inputs, dtype=np.float32):
    """The first lane of %r9 after code, which finds each input in all lanes of %r1, %r2, …"""
    given = [words(x, np.float32) if isinstance(x, float) else words(x & 0xFFFFFFFF) for x in inputs]
    (result,) = execute(code, given, ["%r9"])
    return result.view(dtype)[0]
