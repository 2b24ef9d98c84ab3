"""The Triton kernels: interpreted in a separate process, and compiled for GPUs, which the machine need not have."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")


# 55 s of an idle core; a busy machine took more than the usual 300 s.
@pytest.mark.timeout(1500)
def test_interpreted_kernels_equal_the_reference():
    file = Path(__file__).with_name("test_triton_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        timeout=1440,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


def compiled(kernel, arguments, capability):
    """Compile a kernel for these arguments; returns registers, bytes spilled and bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cope_sweep.kernels import triton_attention, triton_kernels

    config = triton_attention.choices(kernel, arguments["q"].dtype)[0]
    arguments = {**arguments, **config.kwargs}
    function = getattr(triton_kernels, kernel)
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(position,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if signature[name] not in ("constexpr", "fp32") and divisible:
            attributes[(position,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    target = GPUTarget("cuda", capability, 32)
    done = triton.compile(ASTSource(function, signature, constants, attributes), target=target, options=options)
    return *footprint(done.asm["ptx"], capability), done.metadata.shared


def footprint(ptx, capability):
    from triton.backends.nvidia.compiler import get_ptxas

    arch = {80: "sm_80", 90: "sm_90a"}[capability]
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", "-o", os.devnull, "/dev/stdin"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return tuple(
        int(re.search(pattern, report)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(monkeypatch, capsys, capability, dtype):
    # CoPE with head dim 64 and p_max 64. No kernel runs: each launch is replaced by a compilation.
    from cope_sweep.kernels import triton_attention

    compiled_kernels = {}

    def compile_instead(kernel, grid, arguments):
        compiled_kernels[kernel] = compiled(kernel, arguments, capability)

    monkeypatch.setattr(triton_attention, "launch", compile_instead)
    q, k, v, do = torch.zeros(4, 1, 1, 1024, 64, dtype=dtype)
    z = torch.zeros(1, 1, 1024, 64, dtype=dtype)
    call = triton_attention.KernelCall((q, k, v, None, None, z, *[None] * 5, 0.125, 0.0, False))
    outputs = triton_attention.empty_outputs(q)
    triton_attention.launch_forward(call, outputs)
    triton_attention.launch_backward(call, do, outputs)
    assert sorted(compiled_kernels) == ["backward_keys", "backward_rows", "forward"]
    with capsys.disabled():
        for kernel, (registers, spilled, shared) in compiled_kernels.items():
            sizes = f"{registers} registers, {spilled} bytes spilled, {shared} bytes shared"
            sys.stdout.write(f"\nsm_{capability} {str(dtype)[6:]} {kernel}: {sizes}")
    assert all(shared <= 163 * 1024 for _, _, shared in compiled_kernels.values())  # what an sm_80 block may have
    assert all(spilled <= 512 for _, spilled, _ in compiled_kernels.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_tile_sizes_of_the_tuner_s_choices_are_compatible(dtype):
    from cope_sweep.kernels import triton_attention

    def sizes(kernel):
        return [config.kwargs for config in triton_attention.choices(kernel, dtype)]

    for forward in sizes("forward"):
        assert forward["PLAIN_S"] % forward["BLOCK_S"] == 0
        assert forward["BLOCK_S"] % triton_attention.EDGE == 0
        for rows in sizes("backward_rows"):
            assert forward["BLOCK_T"] % rows["BLOCK_T"] == 0
            assert forward["PLAIN_S"] % rows["PLAIN_S"] == 0
            assert rows["PLAIN_S"] % triton_attention.EDGE == 0
    for keys in sizes("backward_keys"):
        assert keys["BLOCK_S"] % triton_attention.EDGE == 0
        assert keys["PLAIN_T"] % keys["BLOCK_T"] == 0
        assert keys["BLOCK_T"] >= triton_attention.MIN_BLOCK_T
