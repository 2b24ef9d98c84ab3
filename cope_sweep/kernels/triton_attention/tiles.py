"""Functions that the Triton kernels share: products, positions, tables in scratch memory, dropout.

**Positions are fixed-point numbers**: gates are rounded to multiples of 2⁻¹⁸, so their sums are exact in any order, and
all kernels compute the same positions. Within a tile they are summed by products with a triangular matrix of ones. This
needs no scan, hence no shuffles. The factors are g/64 as the sum of two float16 numbers: those below 2⁻¹⁴ are multiples
of 2⁻²⁴, so the second number rounds g to a multiple of 64·2⁻²⁴, and sums of up to 64 gates are below 1, or exact at 1,
in the 24 bits of a float32. A gate is at most 1, so neighbours differ by at most one table entry.

**Integer parts** come from sums with 2²³, truncated: the bits of the result are those of 2²³ plus an integer. Tables are
addressed with these bits (`OFFSET`), so no number is converted.

**Tables are products of queries and embeddings**, z = q·e, for the queries of one tile: a kernel computes as many
chunks of BLOCK_P entries as its positions reach, and writes them to scratch memory, row after row, as 32-bit words
(`fill_table`). Scores read single entries of it (`gather`). The words of a 16-bit table hold an entry and its difference
from the next one, because interpolation needs both.

Shapes: in names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1 when Triton is imported)."""
LOG2E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(1 << 18)
"""Positions are counted in 1/UNITS."""
UNIT_BITS = tl.constexpr(18)
SHARE = tl.constexpr(1 / 64)
"""Gates are multiplied by it, so that float16 rounds them to 1/UNITS."""
MAGIC = tl.constexpr(8388608.0)
"""2²³: float32 numbers from here to 2²⁴ are integers, and their bits are consecutive."""
OFFSET = tl.constexpr(0x4B000000)
"""The bits of MAGIC."""
FAR = tl.constexpr(1 << 30)
"""Larger than any position or token index."""
NONE_YET = tl.constexpr(-1e30)
"""The maximum of no scores; finite, so that a row without visible keys in a tile gives no NaN."""


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
    """a + b for numbers ≥ 0, rounded down."""
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

    Others count as the integer 0, not 0.0: the compiler knows which columns a thread has, and deletes sums with integers 0.
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
    """A row's position, an integer and units from there to the next, plus a sum of SHARE·gates, which may be negative."""
    pos_frac += (sums * (UNITS / SHARE)).to(tl.int32)
    return pos_int + (pos_frac >> UNIT_BITS), pos_frac & (UNITS - 1)


@triton.jit
def fraction(pos_frac):
    return pos_frac.to(tl.float32) * (1.0 / UNITS)


@triton.jit
def positions_of(sums, start):
    """Positions from a row's integer on. `start`: the row's fraction. `sums`: those of `sums_from`."""
    return multiply_add_truncated(sums, 1.0 / SHARE, start)


@triton.jit
def table_row(pos_int, last):
    """MAGIC plus the table entry at a row's position, and the distance from there to the last entry."""
    entry = tl.minimum(pos_int, last)
    return entry.to(tl.float32) + MAGIC, (last - entry).to(tl.float32)


@triton.jit
def entry_of(origin, limit, positions):
    """The table entries at or below positions: indices plus OFFSET, distances from the row's integer, and fractions.

    `origin` and `limit` are those of `table_row`: from the last entry on, the fraction is 0.
    """
    positions = tl.minimum(positions, limit)
    at = add_truncated(positions, origin)
    floor = at - origin
    return at.to(tl.int32, bitcast=True), floor, positions - floor


# Scratch memory -------------------------------------------------------------------------------------------------------


@triton.jit
def gather(base, index):
    """Load 32-bit words. By assembly, because Triton would move a tile to another layout for it, and back."""
    if INTERPRETED:
        words = tl.load(base + index)
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .b64 address; mad.wide.s32 address, $2, 4, $1; ld.global.b32 $0, [address]; }",
            "=r,l,r",
            [base.to(tl.int64), index],
            dtype=tl.int32,
            is_pure=False,  # so that it stays behind the barrier after the stores
            pack=1,
        )
    return words


@triton.jit
def scatter(base, index, value):
    """Store 32-bit numbers where the index is ≥ 0."""
    if INTERPRETED:
        tl.store(base + index, value, mask=index >= 0)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .b64 address; .reg .pred inside; setp.ge.s32 inside, $2, 0; mad.wide.s32 address, $2, 4, $1; "
            "@inside st.global.b32 [address], $3; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [base.to(tl.int64), index, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_record(records, index):
    """Load four float32 numbers, which another kernel has stored.

    The assembly is called pure, so that each thread loads what it needs, not by way of shared memory.
    """
    if INTERPRETED:
        at = records + index * 4
        first, second, third, fourth = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "{ .reg .b64 address; mad.wide.s32 address, $5, 16, $4; ld.global.v4.f32 {$0, $1, $2, $3}, [address]; }",
            "=f,=f,=f,=f,l,r",
            [records.to(tl.int64), index],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second, third, fourth


@triton.jit
def scatter_at_borders(row, index, floor, following, first, second):
    """Store pairs of float32 numbers at index − OFFSET − 1 where the next key's position is below this key's entry.

    `row`: the start of each row.
    """
    row -= 2 * OFFSET + 2
    if INTERPRETED:
        inside = following < floor
        tl.store(row + index * 2, first, mask=inside)
        tl.store(row + index * 2 + 1, second, mask=inside)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .b64 address; .reg .pred inside; setp.lt.f32 inside, $3, $4; mad.wide.s32 address, $2, 8, $1; "
            "@inside st.global.v2.b32 [address], {$5, $6}; mov.b32 $0, 0; }",
            "=r,l,r,f,f,r,r",
            [row.to(tl.int64), index, following, floor, first, second],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# Tables ---------------------------------------------------------------------------------------------------------------


@triton.jit
def fill_table(
    table, start, q_tile, e, scale, P,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write entries start … start + BLOCK_P − 1 of scale·q·e to the rows of `table`, (BLOCK_T, P) words.

    PAIRS: "bf16" or "fp16" if a word is a pair of an entry and its difference from the next one (0 after the last); "" if
    it is one float32. The caller has to pass a barrier before it reads the words.

    The first number of a bfloat16 pair is the whole word, read as a float32: its lower half is part of what is rounded.
    """
    n = start + tl.arange(0, BLOCK_P)
    e_tile = load(e, n, HEAD_DIM, n < P, HEAD_DIM, BLOCK_K)
    words = dot(q_tile, tl.trans(e_tile), PRECISION) * scale
    if PAIRS == "":
        words = words.to(tl.int32, bitcast=True)
    else:
        e_tile = load(e, tl.minimum(n + 1, P - 1), HEAD_DIM, n < P, HEAD_DIM, BLOCK_K)
        step = dot(q_tile, tl.trans(e_tile), PRECISION) * scale - words
        if PAIRS == "bf16":
            low = step.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
            bits = words.to(tl.int32, bitcast=True)
            high = tl.maximum((bits & 0x7FFFFFFF) - low + 32768, 0) & 0x7FFF0000
            words = (bits & -2147483648) | high | low
        else:
            low = words.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
            words = low | (step.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    at = tl.arange(0, BLOCK_T)[:, None] * P + n[None, :]
    tl.store(table + at, words, mask=(n < P)[None, :])


@triton.jit
def unpack(word, PAIRS: tl.constexpr):
    """The entry of a word of 16-bit numbers, and its difference from the next one."""
    if PAIRS == "bf16":
        entry = word.to(tl.float32, bitcast=True)
        step = (word << 16).to(tl.float32, bitcast=True)
    else:
        entry = (word & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        step = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return entry, step


@triton.jit
def entry_and_step(row, index, last, PAIRS: tl.constexpr):
    """Entries of a table, at indices plus OFFSET, and their differences from the next ones.

    `row`: the start of each row. `last`: the index of the last entry, whose difference is 0.
    """
    row -= OFFSET
    if PAIRS == "":
        entry = gather(row, index).to(tl.float32, bitcast=True)
        step = gather(row, tl.minimum(index + 1, last + OFFSET)).to(tl.float32, bitcast=True) - entry
    else:
        entry, step = unpack(gather(row, index), PAIRS)
    return entry, step


@triton.jit
def last_entry(table, row_starts, last, inside, PAIRS: tl.constexpr):
    """Each row's last entry of a table; 0 where not `inside`."""
    word = tl.load(table + row_starts + last, mask=inside, other=0)
    if PAIRS == "":
        value = word.to(tl.float32, bitcast=True)
    else:
        value, _step = unpack(word, PAIRS)
    return value


@triton.jit
def distance_scores(
    distance, relative_rows, R, bias_h, D, slope_h, FAR_LAST: tl.constexpr
):  # fmt: skip
    """The sum of the biases that depend on the distance from the query to the key; any number where that is < 0."""
    s = tl.zeros_like(distance).to(tl.float32)
    if relative_rows is not None:
        near = tl.minimum(tl.maximum(distance, 0), R - 1)
        value = gather(relative_rows, near).to(tl.float32, bitcast=True)
        s += value if FAR_LAST else tl.where(distance < R, value, 0.0)
    if bias_h is not None:
        near = tl.minimum(tl.maximum(distance, 0), D - 1)
        s += gather(bias_h, near).to(tl.float32, bitcast=True)
    if slope_h is not None:
        s += slope_h * distance.to(tl.float32)
    return s


@triton.jit
def far_score(
    z_rows, z_starts, P, relative_rows, relative_starts, R, bias_h, D, inside,
    FAR_LAST: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Each row's bias of keys beyond all its tables, in base 2, without that by slope; 0 where not `inside`."""
    s = tl.zeros((BLOCK_T,), tl.float32)
    if z_rows is not None:
        s += last_entry(z_rows, z_starts, P - 1, inside, PAIRS)
    if (relative_rows is not None) and FAR_LAST:
        s += last_entry(relative_rows, relative_starts, R - 1, inside, "")
    if bias_h is not None:
        s += tl.load(bias_h + D - 1).to(tl.float32, bitcast=True)
    return s * LOG2E


# Dropout --------------------------------------------------------------------------------------------------------------


@triton.jit
def keys_of_rows(seed, head, i):
    """The key of each query's row in `dropout.dropout_mask`. `seed` is a pointer: graphs replay with another seed."""
    seed = tl.load(seed)
    x = ((tl.zeros_like(i) + head).to(tl.uint64) << 32) | i.to(tl.uint64)
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
