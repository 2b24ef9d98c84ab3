"""Functions that the Triton kernels share: products, positions, dropout.

**Positions are fixed-point numbers**: gates are rounded to multiples of 2⁻¹⁸, so their sums are exact in any order, and
all kernels compute the same positions. Within a tile they are summed by products with a triangular matrix of ones. This
needs no scan, hence no shuffles. The factors are g/64 as the sum of two float16 numbers: those below 2⁻¹⁴ are multiples
of 2⁻²⁴, so the second number rounds g to a multiple of 64·2⁻²⁴, and sums of up to 64 gates are below 1, or exact at 1,
in the 24 bits of a float32. A gate is at most 1, so neighbours differ by at most one table entry.

Shapes: in names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1 when Triton is imported)."""
LOG2E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(1 << 18)
"""Positions are counted in 1/UNITS."""
UNIT_BITS = tl.constexpr(18)
SHARE = tl.constexpr(1 / 64)
"""Gates are multiplied by it, so that float16 rounds them to 1/UNITS."""
FAR = tl.constexpr(1 << 30)
"""Larger than any position or token index."""
NONE_YET = tl.constexpr(-1e30)
"""The maximum of no scores; finite, so that a row without visible keys in a tile gives no NaN."""
SIZES = ["H", "T", "S", "P", "R", "D", "M", "N", "saturation", "threshold", "first_head", "first_row", "launch_rows"]
"""Arguments of the kernels whose values Triton compiles no special kernels for."""


# Programs -------------------------------------------------------------------------------------------------------------


@triton.jit
def head_of_program(first_head, H):
    """The program's head (of B·H), and its sequence and head within that: B·H numbers fit 32 bits, offsets need 64."""
    head = first_head + tl.program_id(1)
    return head, (head // H).to(tl.int64), (head % H).to(tl.int64)


@triton.jit
def queries_from(first_i, lengths, b, T, S, BLOCK_T: tl.constexpr):
    """The tokens of BLOCK_T queries from `first_i` on, their rows of T, and whether they are no padding; (BLOCK_T,)."""
    i = first_i + tl.arange(0, BLOCK_T)
    row = i - (S - T)
    valid = row < T
    if lengths is not None:
        valid = valid & (i < tl.load(lengths + b))
    return i, row, valid


# Tiles of matrices ----------------------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, accumulated in float32."""
    if INTERPRETED:  # NumPy has no bfloat16: the interpreter would multiply its bits as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load(base, at, stride, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the vectors with indices `at` as rows; 0 where not `inside` and beyond the head dim."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None]
    if HEAD_DIM != BLOCK_K:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(base + at.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store(base, at, value, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr = False):
    """Store rows as contiguous vectors with indices `at`; with ADD, add them to what is there."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    pointers = base + at.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    if ADD:
        value += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def again(x):
    """A copy of an integer. What is computed from it is computed again: it occupies no registers in between."""
    if INTERPRETED:
        copy = x
    else:
        copy = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return copy


@triton.jit
def exp2(x):
    """2ˣ; results below 2⁻¹²⁶ are 0. By assembly, because Triton's exp2 spends three instructions on those."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def multiply_add_truncated(a, b, c):
    """a·b + c for numbers ≥ 0, rounded down."""
    if INTERPRETED:
        exact = a.to(tl.float64) * b + c.to(tl.float64)
        nearest = exact.to(tl.float32)
        below = (nearest.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        return tl.where(nearest.to(tl.float64) > exact, below, nearest)
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def add_truncated(a, b):
    """The sum a + b of numbers ≥ 0, rounded down."""
    if INTERPRETED:
        return multiply_add_truncated(a, 1.0, b)
    return tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def without_low_bits(values):
    """Values cut off to the 8 significant bits of bfloat16."""
    return (values.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def cumulative(values, triangle, KEYS_FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Sums of the tile's values up to each key, by a product with a triangle of ones (bfloat16).

    PARTS: number of bfloat16 numbers that represent each value: 1 holds 8 bits of it, 3 all 24 of a float32.
    """
    if PARTS == 1:
        part = values.to(tl.bfloat16)
        total = dot(triangle, part, "ieee") if KEYS_FIRST else dot(part, triangle, "ieee")
    else:
        high = without_low_bits(values)
        part = high.to(tl.bfloat16)
        total = dot(triangle, part, "ieee") if KEYS_FIRST else dot(part, triangle, "ieee")
        total += cumulative(values - high, triangle, KEYS_FIRST, PARTS - 1)
    return total


@triton.jit
def column(x, index: tl.constexpr):
    """A column of a tile.

    Others count as the integer 0, not 0.0: the compiler knows which columns a thread has, and deletes sums with 0.
    """
    here = (tl.arange(0, x.shape[1]) == index)[None, :]
    return tl.sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


# Positions ------------------------------------------------------------------------------------------------------------


@triton.jit
def gate_of(logits):
    """SHARE·σ of logits in base 2."""
    if INTERPRETED:
        odds = tl.exp2(-logits)
    else:
        odds = tl.inline_asm_elementwise(
            "{ .reg .f32 x; neg.f32 x, $1; ex2.approx.ftz.f32 $0, x; }",
            "=f,f",
            [logits],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return reciprocal(odds * (1.0 / SHARE) + 1.0 / SHARE)


@triton.jit
def halves(gate):
    """Two float16 numbers: their sum is the gate of `gate_of`, rounded to a multiple of SHARE/UNITS."""
    if INTERPRETED:
        high = gate.to(tl.float16)
        low = (gate - high.to(tl.float32)).to(tl.float16)
    else:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .f16 a, b; .reg .f32 x, y; cvt.rn.f16x2.f32 $0, $3, $2; mov.b32 {a, b}, $0; cvt.f32.f16 x, a; "
            "cvt.f32.f16 y, b; sub.f32 x, $2, x; sub.f32 y, $3, y; cvt.rn.f16x2.f32 $1, y, x; }",
            "=r,=r,f,f",
            [gate],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return high, low


@triton.jit
def gate_slope(gate):
    """The derivative of the gate, σ·(1 − σ), from `gate_of`."""
    return gate * (gate * (-1.0 / (SHARE * SHARE)) + 1.0 / SHARE)


@triton.jit
def sums_from(high, low, triangle, KEYS_FIRST: tl.constexpr):
    """SHARE·sums of the tile's gates from each key on; exact."""
    if KEYS_FIRST:
        sums = dot(triangle, high, "ieee") + dot(triangle, low, "ieee")
    else:
        sums = dot(high, triangle, "ieee") + dot(low, triangle, "ieee")
    return sums


@triton.jit
def advance(pos_int, pos_frac, sums):
    """A row's position, an integer and units from there on, plus a sum of SHARE·gates, which may be negative."""
    pos_frac += (sums * (UNITS / SHARE)).to(tl.int32)
    return pos_int + (pos_frac >> UNIT_BITS), pos_frac & (UNITS - 1)


@triton.jit
def fraction(pos_frac):
    return pos_frac.to(tl.float32) * (1.0 / UNITS)


@triton.jit
def positions_of(sums, start):
    """Positions from a row's integer on. `start`: the row's fraction. `sums`: those of `sums_from`."""
    return multiply_add_truncated(sums, 1.0 / SHARE, start)


# Dropout --------------------------------------------------------------------------------------------------------------


@triton.jit
def keys_of_rows(seeds, b, h, i):
    """The key of each query's row in `dropout.dropout_mask`. `seeds` is a pointer: graphs replay with other seeds."""
    seed = tl.load(seeds + b)
    x = ((tl.zeros_like(i) + h).to(tl.uint64) << 32) | i.to(tl.uint64)
    x = x * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32)


@triton.jit
def kept(row_keys, j, threshold):
    """`dropout.dropout_mask` of a tile; `row_keys` and key indices `j` are broadcast."""
    x = row_keys + j.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold
