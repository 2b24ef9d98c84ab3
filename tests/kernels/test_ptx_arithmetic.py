"""How the PTX emulator of `ptx/` rounds, on single instructions with results worked by hand.

Its other instructions compute the kernels of `test_triton_compiled.py`, whose results would not be right without them.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ptx.arithmetic import mma_16, mma_16_truncating, widen_float16
from tests.kernels.ptx.snippets import compute, execute, words

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
