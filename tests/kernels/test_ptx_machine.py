"""The PTX emulator of `ptx/`: matrices, memory, barriers and faults, by the formulas of the PTX ISA."""

import numpy as np
import pytest
import torch

from tests.kernels.ptx.arithmetic import mma_16, mma_16_truncating, widen_float16
from tests.kernels.ptx.machine import Shuffled, backwards, forwards, run
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.snippets import LANES, execute, program, words

ORDERS = [forwards, backwards, Shuffled(1)]


# Lanes ----------------------------------------------------------------------------------------------------------------


def test_shuffles():
    code = (
        "shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1; shfl.sync.idx.b32 %r3, %r1, %r4, 31, -1; "
        "shfl.sync.bfly.b32 %r5|%p1, %r1, 16, 0x100f, -1;"
    )
    x = 100 + LANES
    code = "sub.s32 %r4, 31, %r0; " + code
    bfly, idx, segments = execute(code, [words(x)], ["%r2", "%r3", "%r5"])
    assert np.array_equal(bfly, x[LANES ^ 5])
    assert np.array_equal(idx, x[::-1])
    # Segments of 16 lanes: lane 16 above is in another one, lane 16 below is not.
    assert np.array_equal(segments, np.where(LANES < 16, x, x - 16))


def test_reductions():
    x = np.random.default_rng(0).integers(-1000, 1000, 32)
    highest, lowest = execute(
        "mov.b32 %r4, -1; redux.sync.max.s32 %r2, %r1, %r4; redux.sync.min.s32 %r3, %r1, %r4;",
        [words(x.astype(np.int32), np.int32)], ["%r2", "%r3"],
    )  # fmt: skip
    assert set(highest.view(np.int32)) == {x.max()}
    assert set(lowest.view(np.int32)) == {x.min()}


def packed(low, high, dtype):
    """Words of two numbers; bfloat16 numbers are the upper halves of float32 ones."""
    if dtype == "bf16":
        halves = [np.asarray(x, np.float32).view(np.uint32) >> 16 for x in (low, high)]
    else:
        halves = [np.asarray(x, np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return words(halves[0] | halves[1] << 16)


def c_rows_and_columns():
    """Of each register of an m16n8 result, by the formulas of the PTX ISA, section "Matrix Fragments for mma.m16n8k16"."""
    group, thread = LANES >> 2, LANES % 4
    return [(group if i < 2 else group + 8, thread * 2 + (i & 1)) for i in range(4)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma_of_16_bits_equals_a_matrix_product(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)) / 4, rng.integers(-8, 9, (16, 8)) / 4
    c = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    group, thread = LANES >> 2, LANES % 4

    def a_i(i):  # row, column of aᵢ
        return group if i in (0, 1, 4, 5) else group + 8, thread * 2 + (i & 1) + (8 if i >= 4 else 0)

    def b_i(i):
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group

    inputs = [packed(a[a_i(2 * n)], a[a_i(2 * n + 1)], dtype) for n in range(4)]
    inputs += [packed(b[b_i(2 * n)], b[b_i(2 * n + 1)], dtype) for n in range(2)]
    inputs += [words(c[at], np.float32) for at in c_rows_and_columns()]
    kind = f"f32.{dtype}.{dtype}.f32"
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.{kind} {{ %r11, %r12, %r13, %r14 }}, {{ %r1, %r2, %r3, %r4 }}, "
        "{ %r5, %r6 }, { %r7, %r8, %r9, %r10 };"
    )
    found = execute(code, inputs, ["%r11", "%r12", "%r13", "%r14"])
    expected = a @ b + c
    for at, register in zip(c_rows_and_columns(), found, strict=True):
        assert np.array_equal(register.view(np.float32), expected[at].astype(np.float32))


def test_mma_of_tf32_equals_a_matrix_product():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (16, 8)) / 4, rng.integers(-9, 9, (8, 8)) / 4
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    group, thread = LANES >> 2, LANES % 4
    places = [(group + 8 * (i & 1), thread + 4 * (i >> 1)) for i in range(4)]
    inputs = [words(a[at].astype(np.float32) * (1 + 2.0**-20), np.float32) for at in places]  # low bits do not count
    inputs += [words(b[thread + 4 * i, group], np.float32) for i in range(2)]
    inputs += [words(c[at], np.float32) for at in c_rows_and_columns()]
    code = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r11, %r12, %r13, %r14}, {%r1, %r2, %r3, %r4}, "
        "{%r5, %r6}, {%r7, %r8, %r9, %r10};"
    )
    found = execute(code, inputs, ["%r11", "%r12", "%r13", "%r14"])
    for at, register in zip(c_rows_and_columns(), found, strict=True):
        assert np.array_equal(register.view(np.float32), (a @ b + c)[at].astype(np.float32))


@pytest.mark.parametrize(
    ("product", "exact", "cut_off"),
    [(0.75 * 2.0**-23, 1 + 12 * 2.0**-23, 1.0), (1.75 * 2.0**-23, 1 + 28 * 2.0**-23, 1 + 16 * 2.0**-23)],
)
def test_sums_of_products_are_cut_off_below_the_last_bit_of_the_largest(product, exact, cut_off):
    # 1 and 16 products: in 24 bits from 1 on, a product is a multiple of 2⁻²³.
    a = np.full(32, 2.0**-8, np.float16).view(np.uint16)
    b = np.full(32, product * 2.0**8, np.float16).view(np.uint16)
    a, b = (x.astype(np.uint32) | x.astype(np.uint32) << 16 for x in (a, b))
    c = np.ones(32, np.float32)
    for multiply, expected in ((mma_16, exact), (mma_16_truncating, cut_off)):
        assert set(multiply(widen_float16, (a,) * 4, (b,) * 2, (c,) * 4).ravel()) == {np.float32(expected)}


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    # Thread t stores words 4t … 4t + 3: the 16-bit numbers n and n + 1 in word n / 2.
    fill = "".join(
        f"add.s32 %r{10 + n}, %r2, {n}; shl.b32 %r{10 + n}, %r{10 + n}, 1; add.s32 %r{20 + n}, %r{10 + n}, 1; "
        f"shl.b32 %r{20 + n}, %r{20 + n}, 16; or.b32 %r{10 + n}, %r{10 + n}, %r{20 + n}; "
        for n in range(4)
    )
    trans = ".trans" if transposed else ""
    code = (
        f"mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; {fill} shl.b32 %r3, %r0, 4; add.s32 %r4, %r3, %r1; "
        "st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13}; bar.warp.sync -1; "
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r30, %r31, %r32, %r33}}, [%r4];"
    )
    found = execute(code, [], ["%r30", "%r31", "%r32", "%r33"], shared=512)
    matrices = np.arange(256).reshape(4, 8, 8)
    row, column = LANES // 4, 2 * (LANES % 4)
    for matrix, register in zip(matrices, found, strict=True):
        pair = (matrix[row, column], matrix[row, column + 1])
        if transposed:
            pair = (matrix[column, row], matrix[column + 1, row])
        assert np.array_equal(register, pair[0] | pair[1] << 16)


# Memory and barriers --------------------------------------------------------------------------------------------------

STORE = "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; add.s32 %r4, %r0, 7; st.shared.b32 [%r3], %r4;"
NEIGHBOUR = "xor.b32 %r5, %r2, 128; add.s32 %r5, %r5, %r1; ld.shared.b32 %r6, [%r5];"


@pytest.mark.parametrize("order", ORDERS)
def test_warps_exchange_numbers_through_a_barrier(order):
    (found,) = execute(f"{STORE} bar.sync 0; {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    assert np.array_equal(found, (np.arange(64) ^ 32) + 7)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_is_a_fault(order):
    with pytest.raises(Fault, match=r"warp [01], line \d+ .*where nothing has stored"):
        execute(f"{STORE} {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    again = f"{STORE} bar.sync 0; st.shared.b32 [%r3], %r0;"
    execute(f"{again} bar.sync 0; {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)
    with pytest.raises(Fault, match=r"warp [01], line \d+ .*without a barrier"):
        execute(f"{again} {NEIGHBOUR}", [], ["%r6"], warps=2, shared=256, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_before_memory_is_used_again_is_a_fault(order):
    again = "st.shared.b32 [%r3], %r0;"
    code = f"{STORE} bar.sync 0; {NEIGHBOUR} {{}} {again}"
    execute(code.replace("{}", "bar.sync 0;"), [], ["%r6"], warps=2, shared=256, order=order)
    with pytest.raises(Fault, match="without a barrier"):
        execute(code.replace("{}", ""), [], ["%r6"], warps=2, shared=256, order=order)


def test_warps_may_store_the_same_bits():
    same = "mov.b32 %r1, global_smem; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3], {};"
    execute(same.format("%r2"), [], [], warps=2, shared=128)
    with pytest.raises(Fault, match="without a barrier"):
        execute(same.format("%r0"), [], [], warps=2, shared=128)


def test_lanes_must_not_store_different_bits_at_one_address():
    with pytest.raises(Fault, match="different bits at one address"):
        execute("mov.b32 %r1, global_smem; st.shared.b32 [%r1], %r0;", [], [], shared=128)


def test_blocks_must_not_read_what_others_store():
    code = "mov.u32 %r5, %ctaid.x; add.s32 %r1, %r1, %r5; st.global.b32 [%rd1], %r1;"
    execute("mov.b32 %r9, 5;", [], ["%r9"], grid=(2, 1))  # both store the same bits
    with pytest.raises(Fault, match=r"block \(1, 0\).*another block"):
        execute(code, [words(1)], [], grid=(2, 1))


COPY = (
    "mov.b32 %r2, global_smem; and.b32 %r3, %r0, 7; shl.b32 %r4, %r0, 4; add.s32 %r4, %r4, %r2; "
    "ld.param.b64 %rd9, [p0]; mul.wide.u32 %rd10, %r3, 16; add.s64 %rd10, %rd10, %rd9; "
    "mov.b32 %r8, 16; setp.ge.u32 %p1, %r0, 8; @%p1 mov.b32 %r8, 0; "
    "cp.async.cg.shared.global [ %r4 + 0 ], [ %rd10 + 0 ], 0x10, %r8; cp.async.commit_group; "
)
WAIT = "cp.async.wait_group 0; "
READ = "shl.b32 %r5, %r0, 4; xor.b32 %r5, %r5, {}; add.s32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5+4];"


def test_asynchronous_copies():
    source = words(np.arange(32) + 50)
    (found,) = execute(COPY + WAIT + READ.format(0), [source], ["%r6"], shared=512)
    # Threads from 8 on copy 0 of 16 bytes, and fill the rest with 0.
    assert np.array_equal(found, np.where(LANES < 8, 51 + 4 * LANES, 0))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (COPY + READ.format(0), "not waited for"),
        (COPY + "cp.async.wait_group 1; " + READ.format(0), "not waited for"),
        (COPY + COPY.replace("cp.async.commit", "// ") + WAIT, "not waited for"),
        (COPY, "pending"),
    ],
)
def test_an_asynchronous_copy_needs_a_wait(code, fault):
    with pytest.raises(Fault, match=fault):
        execute(code.replace("//", "\n//") + "\n", [words(0)], [], shared=512)


@pytest.mark.parametrize("order", ORDERS)
def test_other_warps_see_a_copy_after_a_barrier(order):
    source = [torch.arange(64, dtype=torch.int32)]
    code = COPY + WAIT + "{}" + READ.format(512)
    execute(code.replace("{}", "bar.sync 0;", 1), source, ["%r6"], warps=2, shared=1024, order=order)
    with pytest.raises(Fault, match="nothing has stored|without a barrier"):
        execute(code.replace("{}", "", 1), source, ["%r6"], warps=2, shared=1024, order=order)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("ld.global.b32 %r9, [%rd1+128];", "is in no tensor|offsets"),
        ("ld.global.b32 %r9, [%rd1+-4];", "is in no tensor|offsets"),
        ("ld.global.v2.b32 {%r9, %r10}, [%rd1];", "multiples"),
        ("mov.b32 %r1, global_smem; ld.shared.b32 %r9, [%r1+64];", "offsets"),
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra $L; $L: mov.b32 %r9, 1;".replace("$L:", "\n$L:"), "some lanes"),
    ],
)
def test_faults_name_the_instruction(code, fault):
    with pytest.raises(Fault, match=rf"kernel, block \(0, 0\), warp 0, line \d+ .*({fault})"):
        execute(code, [words(1)], [], shared=64)


def test_elements_between_those_of_a_tensor_are_not_accessed():
    rows = torch.zeros(32, 2, dtype=torch.int32)[:, 0]
    even = "ld.param.b64 %rd1, [p0]; mul.wide.u32 %rd2, %r0, 8; add.s64 %rd1, %rd1, %rd2; st.global.b32 [%rd1{}], %r0; ret;"
    run(program(even.format(""), 1), (1, 1), [rows], 0)
    assert rows.tolist() == list(range(32))
    with pytest.raises(Fault, match="between the elements"):
        run(program(even.format("+4"), 1), (1, 1), [rows], 0)


def test_loops():
    code = "mov.b32 %r9, 0; mov.b32 %r2, 0;\n$L1: add.s32 %r9, %r9, %r2; add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, 10; @%p1 bra $L1;"
    (found,) = execute(code, [], ["%r9"])
    assert set(found) == {45}


@pytest.mark.parametrize(
    "code", ["frobnicate.b32 %r1, %r2;", "bar.sync 1;", "mul.f32 %r1, %r2, banana;", "cvt.rp.f32.s32 %r1, %r2;"]
)
def test_unknown_instructions_are_refused_with_their_line(code):
    with pytest.raises(ValueError, match=r"kernel, line \d+: .*the emulator does not know"):
        program(code, 0)
