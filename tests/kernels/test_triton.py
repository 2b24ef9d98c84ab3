"""The Triton kernels: interpreted in a separate process, and compiled for GPUs, which the machine need not have."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cope_benchmarks import sizes
from cope_benchmarks.gpu_problems import DTYPES, Problem

from cope_sweep.kernels import operator
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.triton_attention import launch, workspace
from cope_sweep.kernels.triton_attention.launch import precision
from cope_sweep.kernels.triton_attention.tile_sizes import FAR, KERNELS, NEAR, tile_sizes
from cope_sweep.kernels.triton_attention.workspace import divide
from tests.helpers.processes import output_of

pytestmark = pytest.mark.slow


# 55 s of an idle core; a busy machine took more than the usual 300 s.
@pytest.mark.timeout(1500)
def test_interpreted_kernels_equal_the_reference():
    file = Path(__file__).with_name("test_triton_interpreted.py")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
    output_of(*words, cwd=file.parents[2], timeout_s=1440, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {"batch": 2, "heads": 2, "tokens": 1024}
"""Triton makes special kernels for sizes of 1."""


@pytest.fixture
def near_and_far(monkeypatch):
    """Plain tiles have kernels of their own."""
    monkeypatch.setattr(launch, "NEAR_AND_FAR", True)


def compile_ahead(capability, problem):
    """The kernels of a problem by name, compiled for a GPU that this machine need not have."""
    with sizes.target(capability):
        return {kernel: each.result for kernel, each in sizes.compiled(problem).items()}


@pytest.mark.parametrize(("capability", "dtype"), [(80, "bfloat16"), (90, "bfloat16"), (90, "float32")])
def test_compiles(capability, dtype):
    compiled = compile_ahead(capability, Problem(**SIZES, dtype=dtype))
    assert set(compiled) == set(KERNELS)
    shared = {80: 163, 90: 227}[capability] * 1024  # of a block, at most
    assert all(each.metadata.shared <= shared for each in compiled.values())
    if dtype == "bfloat16":
        products = {80: "mma.sync", 90: "wgmma"}[capability]
        assert all(products in each.asm["ptx"] for each in compiled.values())


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_large_heads_fit_the_shared_memory(dtype, head_dim):
    compiled = compile_ahead(90, Problem(**SIZES, dtype=dtype, head_dim=head_dim))
    assert all(each.metadata.shared <= 227 * 1024 for each in compiled.values())


def test_compiles_with_all_terms():
    problem = Problem(
        **SIZES, head_dim=32, p_max=1025, per_head=True, gate="keys", gate_bias=True, slope=True, relative=100, far="last", buckets=129,
        alibi=True, key_bias=True, dropout=0.1, lengths=(5, 7),
    )  # fmt: skip
    assert len(compile_ahead(90, problem)) == 3


def test_compiles_with_segments():
    assert len(compile_ahead(90, Problem(**SIZES, p_max=None, knots=64))) == 3


def test_compiles_near_and_far(near_and_far):
    problem = Problem(
        **SIZES, head_dim=32, p_max=1025, per_head=True, gate="keys", gate_bias=True, relative=100, far="last", buckets=129,
        alibi=True, key_bias=True, dropout=0.1, lengths=(5, 7),
    )  # fmt: skip
    assert set(compile_ahead(90, problem)) == {*NEAR, *FAR}
    assert set(compile_ahead(90, Problem(**SIZES, p_max=None, knots=64))) == {*NEAR, *FAR}
    assert set(compile_ahead(80, Problem(**SIZES))) == {*NEAR, *FAR}


@pytest.mark.parametrize("problem", [{"p_max": None}, {"p_max": None, "alibi": True}, {"slope": True}], ids=str)
def test_one_kernel_visits_all_tiles_where_two_would_not_help(near_and_far, problem):
    assert set(compile_ahead(90, Problem(**SIZES, **problem))) == set(KERNELS)


def test_kernels_of_plain_tiles_are_as_small_as_those_without_positions():
    rows = sizes.measure(64, (sizes.WITHOUT, sizes.TWO))["rows"]
    for kernel in KERNELS:
        far, without = rows[f"{sizes.TWO}: {kernel}_far"], rows[f"{sizes.WITHOUT}: {kernel}"]
        assert far["registers"] <= without["registers"], kernel
        assert far["stack, bytes"] == 0, kernel
        assert far["warps at once"] >= without["warps at once"], kernel
        assert far["waits for them"] < far["products"] / 2, kernel  # the tensor cores are not waited for one by one


MULTIPLES = (
    (("forward", "PLAIN_S"), ("forward", "BLOCK_S")),
    (("forward", "BLOCK_S"), ("backward_rows", "BLOCK_S")),
    (("forward", "BLOCK_T"), ("backward_rows", "BLOCK_T")),
    (("forward", "BLOCK_T"), ("backward_keys", "BLOCK_T")),
    (("forward", "PLAIN_S"), ("backward_rows", "PLAIN_S")),
    (("backward_rows", "BLOCK_T"), ("backward_keys", "BLOCK_T")),
    (("backward_rows", "PLAIN_S"), ("backward_rows", "BLOCK_S")),
    (("backward_keys", "BLOCK_S"), ("backward_rows", "BLOCK_S")),
    (("backward_keys", "PLAIN_T"), ("backward_keys", "BLOCK_T")),
)
"""Tile sizes of which the first is a multiple of the second."""
OF_FAR = (
    *((("forward_near", size), (kernel, size)) for size in ("BLOCK_T", "PLAIN_S") for kernel in FAR[:2]),
    *((("backward_keys_near", size), ("backward_keys_far", size)) for size in ("BLOCK_T", "BLOCK_S", "PLAIN_T")),
    *((("backward_keys_far", size), ("backward_keys_near", size)) for size in ("BLOCK_T", "BLOCK_S", "PLAIN_T")),
)


@pytest.mark.parametrize("head_dim", [1, 64, 65, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tiles_of_the_kernels_fit_together(dtype, head_dim):
    of = {kernel: tile_sizes(kernel, dtype, head_dim) for kernel in (*KERNELS, *NEAR, *FAR)}
    near = tuple(((f"{one}_near", size), (f"{two}_near", other)) for (one, size), (two, other) in MULTIPLES)
    for (kernel, size), (other, other_size) in (*MULTIPLES, *near, *OF_FAR):
        assert of[kernel][size] % of[other][other_size] == 0, (kernel, size)
    assert all(of[kernel]["BLOCK_S"] <= 64 for kernel in (*KERNELS, *NEAR))  # sums of so many gates are exact
    assert all(each["BLOCK_T"] <= 128 for each in of.values())  # `launch._LARGEST_TILE`


def allocated(monkeypatch, *, batch, heads, tokens, p_max, head_dim):
    """Bytes that a forward and a backward pass of CoPE allocate beside inputs, outputs and gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocations(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            if function.overloadpacket in (
                torch.ops.aten.new_empty,
                torch.ops.aten.empty_like,
                torch.ops.aten.new_zeros,
            ):
                self.total += result.numel() * result.element_size()
            return result

    monkeypatch.setattr(launch, "run", lambda *_: None)
    q, k, v = (torch.empty(batch, heads, tokens, head_dim, dtype=BF16, device="meta") for _ in range(3))
    given = Arguments(q, k, v, e=torch.empty(p_max, head_dim, dtype=BF16, device="meta"))
    outputs, gradients = operator.empty_outputs(given, "triton"), operator.empty_gradients(given, "triton")
    with Allocations() as forward:
        launch.forward(given, *outputs)
    with Allocations() as backward:
        launch.backward(given, q, *outputs, gradients)
    return forward.total, backward.total


@pytest.mark.parametrize("full", [False, True], ids=["p_max 64", "p_max full"])
def test_memory_is_linear_in_tokens(monkeypatch, full):
    bytes_of = {
        tokens: max(
            allocated(monkeypatch, batch=4, heads=8, tokens=tokens, p_max=tokens + 1 if full else 64, head_dim=64)
        )
        for tokens in (32768, 65536, 131072, 262144)
    }
    for tokens in list(bytes_of)[:-1]:
        assert bytes_of[2 * tokens] <= 2.05 * bytes_of[tokens], bytes_of


def test_scratch_memory_has_the_stated_size(monkeypatch):
    given = {"batch": 1, "heads": 3, "tokens": 1024, "p_max": 64, "head_dim": 64}
    block_t, edge = 64, 64  # of bfloat16 and head dim 64
    forward, backward = 4 * 64, 12 * 64 + 4 * 64 * 64 / block_t + 16 + 16 * (1024 / edge + 1)
    other = 64 * 64 * 4  # the sum of the gradient of e
    assert allocated(monkeypatch, **given) == (3 * 1024 * forward, 3 * 1024 * backward + other)
    # With less memory, launches have two heads, and then 256 queries of one, with float32 sums of dk and dv.
    monkeypatch.setattr(workspace, "MIN_BYTES", 1)
    monkeypatch.setattr(launch, "_bytes", lambda _: 0)
    monkeypatch.setattr(workspace, "MIN_ROWS", 2048)
    assert allocated(monkeypatch, **given) == (2048 * forward, 2048 * backward + other)
    monkeypatch.setattr(workspace, "MIN_ROWS", 256)
    assert allocated(monkeypatch, **given) == (256 * forward, 256 * backward + other + 1024 * 64 * 8)


def test_scratch_memory_between_near_and_far_has_the_stated_size(monkeypatch, near_and_far):
    given = {"batch": 1, "heads": 3, "tokens": 1024, "p_max": 64, "head_dim": 64}
    forward = 4 * 64 + 4 * (1 + 64)
    backward = 12 * 64 + 4 * 64 * 64 / 64 + 16 + 16 * (1024 / 64 + 1) + 3 * 4 * 64
    other = 64 * 64 * 4
    assert allocated(monkeypatch, **given) == (3 * 1024 * forward, 3 * 1024 * backward + other)


def test_launches_cover_every_head_and_query_once():
    for heads, rows, row_bytes in [(5, 300, 10**6), (700, 256, 2000), (3, 40000, 9000), (70000, 16, 0)]:
        parts = divide(heads, rows, row_bytes, 0, 128)
        covered = sum(part.heads * part.rows for part in parts)
        assert covered == heads * rows
        ends = {(part.first_head + part.heads, part.first_row + part.rows) for part in parts}
        assert max(ends) == (heads, rows)
        assert all(part.first_row % 128 == 0 and part.rows <= parts.rows_each for part in parts)
        assert all(part.heads <= parts.heads_each <= 65535 for part in parts)


def test_float32_precision_follows_torch_s_settings():
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert precision(FP32) == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert precision(FP32) == "tf32"
        assert precision(BF16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
