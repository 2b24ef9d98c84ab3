"""The arithmetic of the PTX emulator of `ptx/`, on single instructions with results worked by hand."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ptx.snippets import compute, execute, words


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
