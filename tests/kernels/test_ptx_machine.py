"""The PTX emulator of `ptx/`, on short programs with results worked by hand, or by the formulas of the PTX ISA."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ptx.arithmetic import mma_16, mma_16_truncating, widen_float16
from tests.kernels.ptx.machine import Shuffled, backwards, forwards, run
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.translate import translate

LANES = np.arange(32)
ORDERS = [forwards, backwards, Shuffled(1)]


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


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "inputs", "expected"),
    [
        ("shl.b32 %r9, %r1, 31;", (3,), -(2**31)),
        ("shl.b32 %r9, %r1, %r2;", (3, 32), 0),
        ("shr.u32 %r9, %r1, 40;", (-1,), 0),
        ("shr.s32 %r9, %r1, 40;", (-5,), -1),
        ("shr.s32 %r9, %r1, 1;", (-5,), -3),
        ("bfe.u32 %r9, %r1, 4, 8;", (0xABCD,), 0xBC),
        ("bfe.s32 %r9, %r1, 4, 8;", (0xABCD,), 0xBC - 256),
        ("bfe.s32 %r9, %r1, 0, 0;", (-1,), 0),
        ("div.s32 %r9, %r1, %r2;", (-7, 2), -3),
        ("rem.s32 %r9, %r1, %r2;", (-7, 2), -1),
        ("mul.wide.s32 %rd20, %r1, 2; cvt.u32.u64 %r9, %rd20;", (-7,), -14),
        ("mad.wide.s32 %rd20, %r1, -3, 5; shr.u64 %rd20, %rd20, 32; cvt.u32.u64 %r9, %rd20;", (7,), -1),
        ("mul.wide.u32 %rd20, %r1, 2; shr.u64 %rd20, %rd20, 32; cvt.u32.u64 %r9, %rd20;", (-1,), 1),
        ("cvt.s64.s32 %rd20, %r1; shr.s64 %rd20, %rd20, 32; cvt.u32.u64 %r9, %rd20;", (-7,), -1),
        ("cvt.u64.u32 %rd20, %r1; shr.s64 %rd20, %rd20, 32; cvt.u32.u64 %r9, %rd20;", (-7,), 0),
        ("shl.b64 %rd20, %rd0, 60; cvt.u64.u32 %rd21, %r1; or.b64 %rd20, %rd20, %rd21; cvt.s64.s32 %rd21, %rd20; shr.s64 %rd21, %rd21, 32; cvt.u32.u64 %r9, %rd21;", (-7,), -1),
        ("mad.lo.s32 %r9, %r1, %r2, 1;", (2**30, 4), 1),
        ("max.s32 %r9, %r1, 3;", (-7,), 3),
        ("min.u32 %r9, %r1, 3;", (-7,), 3),
        ("not.b32 %r9, %r1;", (5,), -6),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};", (0x1234ABC,), 0x4ABC0123),
        ("shf.l.wrap.b32 %r9, %r1, %r2, 8;", (0x7A000000, 0x123456), 0x1234567A),
        ("prmt.b32 %r9, %r1, %r2, 0x5410;", (0x33221100, 0x77665544), 0x55441100),
        ("prmt.b32 %r9, %r1, %r2, 0x8000;", (0x332211F0, 0), 0xFFF0F0F0 - 2**32),
        ("setp.lt.s32 %p1|%p2, %r1, 3; selp.b32 %r9, 10, 20, %p2;", (5,), 10),
        ("setp.lt.u32 %p1, %r1, 3; selp.b32 %r9, 10, 20, %p1;", (-5,), 20),
        ("setp.eq.b32 %p1, %r1, 5; mov.b32 %r9, 1; @%p1 mov.b32 %r9, 2; @!%p1 mov.b32 %r9, 3;", (5,), 2),
        ("setp.eq.b32 %p1, %r1, 4; mov.b32 %r9, 1; @%p1 mov.b32 %r9, 2; @!%p1 mov.b32 %r9, 3;", (5,), 3),
        ("{ .reg .b32 x; add.s32 x, %r1, 1; { .reg .b32 x; mov.b32 x, 70; } mov.b32 %r9, x; }", (5,), 6),
        ("{ .reg .b32 x, y; mov.b32 y, 2; add.s32 x, %r1, y; mov.b32 %r9, x; }", (5,), 7),
        ("cvt.rzi.s32.f32 %r9, %r1;", (-2.75,), -2),
        ("cvt.rzi.s32.f32 %r9, %r1;", (3e10,), 2**31 - 1),
    ],
)  # fmt: skip
def test_integers(code, inputs, expected):
    assert compute(code, *inputs, dtype=np.int32) == expected


NAN = float("nan")


@pytest.mark.parametrize(
    ("code", "inputs", "expected"),
    [
        ("fma.rn.f32 %r9, %r1, %r2, %r3;", (1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11), 2.0**-24),
        ("fma.rz.f32 %r9, %r1, %r2, %r3;", (1.0, 1.0, 1 - 2.0**-24), 2 - 2.0**-23),
        ("fma.rn.f32 %r9, %r1, %r2, %r3;", (1.0, 1.0, 1 - 2.0**-24), 2.0),
        ("fma.rz.f32 %r9, %r1, %r2, %r3;", (1.0, 1.0, 2.0**-80), 1.0),
        ("fma.rz.f32 %r9, %r1, %r2, %r3;", (1.0, 1.0, -(2.0**-80)), 1 - 2.0**-24),
        ("add.rz.f32 %r9, %r1, %r2;", (8388608.0, 3.75), 8388611.0),
        ("add.rz.f32 %r9, %r1, %r2;", (-8388608.0, -3.75), -8388611.0),
        ("add.f32 %r9, %r1, %r2;", (8388608.0, 3.75), 8388612.0),
        ("add.f32 %r9, %r1, 0f3F800000;", (2.0,), 3.0),
        ("max.f32 %r9, %r1, %r2;", (NAN, 2.0), 2.0),
        ("min.f32 %r9, %r1, %r2;", (-3.0, 2.0), -3.0),
        ("ex2.approx.ftz.f32 %r9, %r1;", (-126.0,), 2.0**-126),
        ("ex2.approx.ftz.f32 %r9, %r1;", (-127.0,), 0.0),
        ("ex2.approx.ftz.f32 %r9, %r1;", (-float("inf"),), 0.0),
        ("rcp.approx.ftz.f32 %r9, %r1;", (2.0**127,), 0.0),
        ("rcp.approx.ftz.f32 %r9, %r1;", (float("inf"),), 0.0),
        ("mul.f32 %r9, %r1, %r2;", (2.0**-100, 2.0**-30), 2.0**-130),
        ("mul.ftz.f32 %r9, %r1, %r2;", (2.0**-100, 2.0**-30), 0.0),
        ("fma.rn.ftz.f32 %r9, %r1, %r2, %r3;", (1.0, 2.0**-130, 1.0), 1.0),
        ("div.full.f32 %r9, %r1, %r2;", (1.0, 3.0), np.float32(1) / np.float32(3)),
        ("setp.num.f32 %p1, %r1, %r1; selp.f32 %r9, 0f3F800000, 0f40000000, %p1;", (NAN,), 2.0),
        ("setp.lt.f32 %p1, %r1, %r2; selp.f32 %r9, 0f3F800000, 0f40000000, %p1;", (NAN, 1.0), 2.0),
        ("setp.geu.f32 %p1, %r1, %r2; selp.f32 %r9, 0f3F800000, 0f40000000, %p1;", (NAN, 1.0), 1.0),
        ("cvt.rn.f32.s32 %r9, %r1;", (2**24 + 1,), 2.0**24),
        ("cvt.rn.f32.s32 %r9, %r1;", (-3,), -3.0),
        ("cvt.rn.f32.u32 %r9, %r1;", (-1,), 2.0**32),
    ],
)  # fmt: skip
def test_floats(code, inputs, expected):
    assert compute(code, *inputs) == np.float32(expected)


@pytest.mark.parametrize(
    ("bits", "bf16", "f16", "tf32"),
    [
        (0x3F808000, 0x3F80, 0x3C04, 0x3F808000),  # 1 + 2⁻⁸: a tie of bfloat16, to the even one below
        (0x3F818000, 0x3F82, 0x3C0C, 0x3F818000),  # the next tie: to the even one above
        (0x3F808001, 0x3F81, 0x3C04, 0x3F808000),
        (
            0x3F801000,
            0x3F80,
            0x3C00,
            0x3F802000,
        ),  # 1 + 2⁻¹¹: a tie of float16, and of TF32, which rounds it away from 0
        (0x3F803000, 0x3F80, 0x3C02, 0x3F804000),
        (0x33000000, 0x3300, 0x0000, 0x33000000),  # 2⁻²⁵: a tie of subnormal numbers of float16
        (0x33C00000, 0x33C0, 0x0002, 0x33C00000),  # 3·2⁻²⁵
        (0x477FF000, 0x4780, 0x7C00, 0x47800000),  # 65520, which float16 rounds to infinity
        (0xBF808001, 0xBF81, 0xBC04, 0xBF808000),
        (0x7F800000, 0x7F80, 0x7C00, 0x7F800000),
        (0x7F800001, 0x7FFF, 0x7FFF, 0x7FFFFFFF),
    ],
)
def test_conversions(bits, bf16, f16, tf32):
    one = 0x3F800000
    assert compute("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", bits, one, dtype=np.uint32) == bf16 << 16 | 0x3F80
    assert compute("cvt.rn.f16x2.f32 %r9, %r1, %r2;", one, bits, dtype=np.uint32) == 0x3C00 << 16 | f16
    assert compute("cvt.rn.bf16.f32 %rs1, %r1; cvt.u32.u16 %r9, %rs1;", bits, dtype=np.uint32) == bf16
    assert compute("cvt.rna.tf32.f32 %r9, %r1;", bits, dtype=np.uint32) == tf32
    back = compute("mov.b32 {%rs1, %rs2}, %r1; cvt.f32.bf16 %r9, %rs2;", bits, dtype=np.uint32)
    assert back == bits & 0xFFFF0000
    half = np.array(f16, np.uint16).view(np.float16).astype(np.float32)
    widened = compute("mov.b32 {%rs1, %rs2}, %r1; cvt.f32.f16 %r9, %rs1;", f16)
    assert np.array_equal(widened, half, equal_nan=True)


numbers = st.floats(2.0**-40, 2.0**40, width=32) | st.just(0.0)


@settings(max_examples=60)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=32, max_size=32))
def test_truncated_sums_are_exact(rows):
    a, b, c = np.array(rows, np.float32).T
    (result,) = execute("fma.rz.f32 %r9, %r1, %r2, %r3;", [words(x, np.float32) for x in (a, b, c)], ["%r9"])
    for x, y, z, found in zip(a, b, c, result.view(np.float32), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(found)) <= exact
        assert Fraction(float(np.nextafter(found, np.float32(np.inf)))) > exact


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
