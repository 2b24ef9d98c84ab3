"""The arithmetic of PTX on arrays of 32 lanes: roundings, conversions, and products of matrices.

Registers are arrays of bits: functions take and return arrays of the type that their names or docstrings say.

Approximations of a GPU (`ex2.approx`, `rcp.approx`, `lg2.approx`, `div.full`) are the correctly rounded results here.
`fma.rn` is rounded twice, from the exact product to float64 and then to float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

f2, f4, f8 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
u2, u4, u8 = np.dtype("u2"), np.dtype("u4"), np.dtype("u8")
i2, i4, i8 = np.dtype("i2"), np.dtype("i4"), np.dtype("i8")
Array = NDArray[np.generic]

SMALLEST_NORMAL = np.float32(2.0**-126)


def flushed(x: Array) -> Array:
    """`.ftz`: float32 numbers below 2⁻¹²⁶ become 0 with their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """`fma.rn.f32`: the product is exact in float64; the sum is rounded to float64, then to float32."""
    return (a.astype(f8) * b + c).astype(f4)


def truncated(exact: Array, rest: Array) -> Array:
    """The float64 numbers `exact` + `rest`, |rest| below half a unit of `exact`, rounded to float32 towards 0."""
    nearest = exact.astype(f4)
    wide = nearest.astype(f8)
    beyond = np.abs(wide) > np.abs(exact)
    beyond |= (wide == exact) & (rest != 0) & (np.signbit(rest) != np.signbit(exact)) & (exact != 0)
    below = (nearest.view(u4) - np.uint32(1)).view(f4)
    return np.where(beyond & (nearest != 0), below, nearest)


def fma_truncated(a: Array, b: Array, c: Array) -> Array:
    """`fma.rz.f32`, and with b = 1 `add.rz.f32`; exact."""
    product, c = a.astype(f8) * b, c.astype(f8)
    total = product + c
    second = total - product
    rest = (product - (total - second)) + (c - second)  # of the sum, by Knuth's algorithm
    return truncated(total, rest)


def exp2(x: Array) -> Array:
    """`ex2.approx.ftz.f32`."""
    return flushed(np.exp2(flushed(x).astype(f8)).astype(f4))


def reciprocal(x: Array) -> Array:
    """`rcp.approx.ftz.f32`."""
    return flushed((1.0 / flushed(x).astype(f8)).astype(f4))


def log2(x: Array) -> Array:
    """`lg2.approx.f32`: of numbers below 2⁻¹²⁶, too."""
    return np.log2(x.astype(f8)).astype(f4)


def divide(a: Array, b: Array) -> Array:
    """`div.full.f32`."""
    return (a.astype(f8) / b).astype(f4)


def divide_integers(a: Array, b: Array) -> Array:
    """`div.s32`: towards 0."""
    quotient = np.abs(a.astype(i8)) // np.maximum(np.abs(b.astype(i8)), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """`rem.s32`: with the sign of a."""
    return (a - divide_integers(a, b) * b).astype(a.dtype)


def to_integer(x: Array) -> Array:
    """`cvt.rzi.s32.f32`: towards 0, clamped; NaN gives 0."""
    return np.clip(np.nan_to_num(np.trunc(x.astype(f8)), nan=0.0), -(2.0**31), 2.0**31 - 1).astype(i8).astype(i4)


def bfloat16(x: Array) -> Array:
    """`cvt.rn.bf16.f32`: to the nearest, in ties to the even one; NaN is 0x7fff. uint16."""
    bits = x.view(u4)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(u2)


def float16(x: Array) -> Array:
    """`cvt.rn.f16.f32`: to the nearest, in ties to the even one; NaN is 0x7fff. uint16."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(f2).view(u2))


def pair(upper: Array, lower: Array) -> Array:
    """One word of two of 16 bits, uint32."""
    return (upper.astype(u4) << np.uint32(16)) | lower


def from_bfloat16(x: Array) -> Array:
    """float32 from the uint16 bits of bfloat16 numbers."""
    return (x.astype(u4) << np.uint32(16)).view(f4)


def tf32(x: Array) -> Array:
    """`cvt.rna.tf32.f32`: to 11 significant bits, in ties away from 0. float32 bits."""
    bits = x.view(u4)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))


def shift_left(x: Array, by: Array) -> Array:
    """`shl`: shifts by the width and more give 0. Unsigned x."""
    width = x.itemsize * 8
    return np.where(by < width, x << np.minimum(by, width - 1).astype(x.dtype), x.dtype.type(0))


def shift_right(x: Array, by: Array) -> Array:
    """`shr`: shifts by the width and more give 0, or the sign of a signed x."""
    width = x.itemsize * 8
    shifted = x >> np.minimum(by, width - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by < width, shifted, x.dtype.type(0))


def bit_field(x: Array, start: Array, length: Array) -> Array:
    """`bfe`: the bits from `start` on; of a signed x with the sign of the last of them, or of x itself."""
    start, length = (start & 255).astype(i8), (length & 255).astype(i8)
    width = x.itemsize * 8
    bits = (x.astype(i8) if x.dtype.kind == "i" else x.astype(u8).astype(i8)) >> np.minimum(start, 63)
    bits &= (np.int64(1) << np.minimum(length, 62)) - 1
    if x.dtype.kind == "i":
        last = np.clip(start + length - 1, 0, width - 1)
        negative = ((x.astype(i8) >> last) & 1).astype(bool) & (length > 0)
        bits = np.where(negative, bits | -(np.int64(1) << np.minimum(length, 62)), bits)
    return bits.astype(x.dtype)


def funnel_left(low: Array, high: Array, by: Array) -> Array:
    """`shf.l.wrap.b32`: the upper word of high:low, shifted to the left."""
    by = (by & np.uint32(31)).astype(u8)
    both = (high.astype(u8) << np.uint64(32)) | low
    return ((both << by) >> np.uint64(32)).astype(u4)


def permuted_bytes(a: Array, b: Array, selector: Array) -> Array:
    """`prmt.b32` in its default mode."""
    both = (b.astype(u8) << np.uint64(32)) | a
    result = np.zeros(a.shape, u8)
    for index in range(4):
        choice = (selector.astype(u8) >> np.uint64(4 * index)) & np.uint64(15)
        byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * index)
    return result.astype(u4)


# Products of matrices. Lane l is in group g = l // 4, and is its thread t = l % 4.


def widen_bfloat16(x: Array) -> Array:
    return from_bfloat16(x).astype(f8)


def widen_float16(x: Array) -> Array:
    return x.view(f2).astype(f8)


def mma_16(widen, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]) -> Array:  # type: ignore[no-untyped-def]
    """`mma.m16n8k16`: four registers of results, float32 (4, 32).

    A register of a or b has a matrix of 8 × 8 numbers in its lanes, row after row. Those of a are its upper left, lower
    left, upper right and lower right; those of b, whose rows are columns of the matrix, its upper and lower half.
    """
    left, right = _matrices_16(widen, a, b)
    return _accumulated(left @ right.T, c)


def mma_16_truncating(widen, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]) -> Array:  # type: ignore[no-untyped-def]
    """The same with the least exact sums that were measured on tensor cores.

    For each half of 8 products: they and the sum so far are cut off below the 24th bit of the largest of them, and so is
    the total (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
    """
    left, right = _matrices_16(widen, a, b)
    total = np.concatenate(c).view(f4).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8).astype(f8)
    for half in (slice(0, 8), slice(8, 16)):
        terms = np.concatenate([left[:, None, half] * right[None, :, half], total[:, :, None]], 2)
        _, exponent = np.frexp(np.abs(terms).max(2))
        unit = np.ldexp(1.0, np.maximum(exponent, -100) - 24)
        total = np.trunc(terms / unit[:, :, None]).sum(2) * unit
        total = truncated(total, np.zeros_like(total)).astype(f8)
    return total.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32).astype(f4)


def _matrices_16(widen, a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, Array]:  # type: ignore[no-untyped-def]
    """The matrix of a, 16 × 16, and that of b with its rows and columns exchanged, 8 × 16."""
    left = widen(np.concatenate(a).view(u2)).reshape(2, 2, 8, 8).transpose(1, 2, 0, 3).reshape(16, 16)
    right = widen(np.concatenate(b).view(u2)).reshape(2, 8, 8).transpose(1, 0, 2).reshape(8, 16)
    return left, right


def mma_8(a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]) -> Array:
    """`mma.m16n8k8` of TF32 numbers, whose lower 13 bits do not count."""
    left, right = ((np.concatenate(x) & np.uint32(0xFFFFE000)).view(f4).astype(f8).reshape(-1, 8, 4) for x in (a, b))
    left = left.reshape(2, 2, 8, 4).transpose(1, 2, 0, 3).reshape(16, 8)
    right = right.transpose(1, 0, 2).reshape(8, 8)
    return _accumulated(left @ right.T, c)


def _accumulated(product: Array, c: tuple[Array, ...]) -> Array:
    """The sum with c, rounded once. Registers 0 and 1 have columns 2t and 2t + 1 of row g, 2 and 3 those of row g + 8."""
    mine = product.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    return (mine + np.concatenate(c).view(f4).reshape(4, 32)).astype(f4)


# Between lanes.


def shuffled(kind: str, x: Array, by: Array, control: Array) -> tuple[Array, Array]:
    """`shfl.sync.bfly` or `.idx` of a whole warp, and whether the source was in the range (else: the lane's own)."""
    lanes = np.arange(32)
    clamp, segment = (control & 31).astype(i8), ((control >> 8) & 31).astype(i8)
    first, last = lanes & segment, (lanes & segment) | (clamp & ~segment)
    by = (by & 31).astype(i8)
    source = lanes ^ by if kind == "bfly" else first | (by & ~segment)
    inside = source <= last
    return x[np.where(inside, source, lanes)], inside


def reduced(reduce, x: Array, mask: Array) -> Array:  # type: ignore[no-untyped-def]
    """`redux.sync` of a whole warp."""
    if not (mask == 0xFFFFFFFF).all():
        raise ValueError(f"redux.sync of some lanes: {mask}")
    return np.full(32, reduce(x), x.dtype)
