"""Functions that the Triton kernels share: products, positions, tables in scratch memory, dropout.

**Positions are fixed-point numbers**, integers (`pos_int`) and fractions (`pos_frac`) in units of 2⁻²²: their sums are
exact in any order. Within a tile they are summed by a product with a triangular matrix of ones, in two halves of 11
bits that float16 holds exactly. This needs no scan, hence no shuffles. A gate is at most 1, so neighbours differ by at
most one table entry.

**Tables are products of queries and embeddings**, z = q·e, for the queries of one tile: a kernel computes as many
chunks of BLOCK_P entries as its positions reach, and writes them to scratch memory, row after row, as 32-bit words
(`fill_table`). Scores read single entries of it (`gather`). The words of a 16-bit table hold an entry and the next one,
because interpolation needs both.

Shapes: in names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1 when Triton is imported)."""
LOG2E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(4194304)
"""2²²: positions are counted in 1/UNITS."""
UNIT_BITS = tl.constexpr(22)
HALF = tl.constexpr(2048)
HALF_BITS = tl.constexpr(11)
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
def without_low_bits(values):
    """Values cut off to the 8 significant bits of bfloat16."""
    return (values.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(values, PARTS: tl.constexpr):
    """What `cumulative` sums: the values as the sum of PARTS bfloat16 numbers, which hold 8 bits each."""
    if PARTS == 1:
        values = values.to(tl.bfloat16).to(tl.float32)
    return values


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


# Positions ------------------------------------------------------------------------------------------------------------


@triton.jit
def gate_of(logits):
    """σ of logits in base 2."""
    return reciprocal(1.0 + exp2(-logits))


@triton.jit
def units_of(gate):
    """Gates in units of 1/UNITS, rounded.

    At most UNITS: a quotient that was rounded up may exceed 1, and positions would skip an entry of the prefix sums.
    """
    return (tl.minimum(gate, 1.0) * UNITS + 0.5).to(tl.int32)


@triton.jit
def units_from(units, triangle, KEYS_FIRST: tl.constexpr):
    """Sums of the tile's units from each key on; exact, because float16 and float32 hold both halves exactly."""
    high = (units >> HALF_BITS).to(tl.float16)
    low = (units & (HALF - 1)).to(tl.float16)
    if KEYS_FIRST:
        high_sum = dot(triangle, high, "ieee")
        low_sum = dot(triangle, low, "ieee")
    else:
        high_sum = dot(high, triangle, "ieee")
        low_sum = dot(low, triangle, "ieee")
    return (high_sum.to(tl.int32) << HALF_BITS) + low_sum.to(tl.int32)


@triton.jit
def advance(pos_int, pos_frac, units):
    """A position plus some units, which may be negative."""
    pos_frac = pos_frac + units
    return pos_int + (pos_frac >> UNIT_BITS), pos_frac & (UNITS - 1)


@triton.jit
def to_float(pos_int, units):
    """The position some units after an integer."""
    pos_int, pos_frac = advance(pos_int, units, 0)
    return pos_int.to(tl.float32) + pos_frac.to(tl.float32) * (1.0 / UNITS)


@triton.jit
def table_row(start, pos_int, last):
    """A row's position as an index of its table, which starts at `start`, and the units from there to the last entry.

    The units are at most 511 entries, more than the gates of a tile.
    """
    entry = tl.minimum(pos_int, last)
    return start + entry, tl.minimum(last - entry, 511) << UNIT_BITS


@triton.jit
def entry_of(row_index, limit, units):
    """The table entry at or below the position `units` after the row's, and the fraction to the next entry.

    `row_index` and `limit` are those of `table_row`: from the last entry on, the fraction is 0.
    """
    units = tl.minimum(units, limit)
    return row_index + (units >> UNIT_BITS), (units & (UNITS - 1)).to(tl.float32) * (1.0 / UNITS)


# Scratch memory -------------------------------------------------------------------------------------------------------


@triton.jit
def gather(base, index):
    """Load 32-bit words. By assembly, because Triton would move a tile to another layout for it, and back."""
    if INTERPRETED:
        return tl.load(base + index)
    return tl.inline_asm_elementwise(
        "{ .reg .b64 address; mad.wide.s32 address, $2, 4, $1; ld.global.b32 $0, [address]; }",
        "=r,l,r",
        [base.to(tl.int64), index],
        dtype=tl.int32,
        is_pure=False,  # so that it stays behind the barrier after the stores
        pack=1,
    )


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
def scatter_pairs(base, index, first, second):
    """Store pairs of float32 numbers, pair after pair, where the index is ≥ 0."""
    if INTERPRETED:
        tl.store(base + index * 2, first, mask=index >= 0)
        tl.store(base + index * 2 + 1, second, mask=index >= 0)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .b64 address; .reg .pred inside; setp.ge.s32 inside, $2, 0; mad.wide.s32 address, $2, 8, $1; "
            "@inside st.global.v2.b32 [address], {$3, $4}; mov.b32 $0, 0; }",
            "=r,l,r,r,r",
            [base.to(tl.int64), index, first, second],
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

    PAIRS: "bf16" or "fp16" if a word is a pair of an entry and the next one (the last with itself); "" if it is one
    float32. The caller has to pass a barrier before it reads the words.
    """
    n = start + tl.arange(0, BLOCK_P)
    e_tile = load(e, n, HEAD_DIM, n < P, HEAD_DIM, BLOCK_K)
    words = dot(q_tile, tl.trans(e_tile), PRECISION) * scale
    if PAIRS == "":
        words = words.to(tl.int32, bitcast=True)
    else:
        e_tile = load(e, tl.minimum(n + 1, P - 1), HEAD_DIM, n < P, HEAD_DIM, BLOCK_K)
        following = dot(q_tile, tl.trans(e_tile), PRECISION) * scale
        kind: tl.constexpr = tl.bfloat16 if PAIRS == "bf16" else tl.float16
        low = words.to(kind).to(tl.uint16, bitcast=True).to(tl.int32)
        words = low | (following.to(kind).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    at = tl.arange(0, BLOCK_T)[:, None] * P + n[None, :]
    tl.store(table + at, words, mask=(n < P)[None, :])


@triton.jit
def unpack(word, PAIRS: tl.constexpr):
    """The two entries of a word of 16-bit numbers."""
    if PAIRS == "bf16":
        below = (word << 16).to(tl.float32, bitcast=True)
        above = (word & -65536).to(tl.float32, bitcast=True)
    else:
        below = (word & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        above = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return below, above


@triton.jit
def neighbours(table, entry, row_last, PAIRS: tl.constexpr):
    """A table's entries at `entry` and after it, at most at `row_last`, the row's last entry."""
    if PAIRS == "":
        below = gather(table, entry).to(tl.float32, bitcast=True)
        above = gather(table, tl.minimum(entry + 1, row_last)).to(tl.float32, bitcast=True)
    else:
        below, above = unpack(gather(table, entry), PAIRS)
    return below, above


@triton.jit
def look_up(table, entry, frac, row_last, PAIRS: tl.constexpr):
    """The interpolated table entry at a position."""
    below, above = neighbours(table, entry, row_last, PAIRS)
    return below + frac * (above - below)


@triton.jit
def look_up_with_slope(table, entry, frac, row_last, PAIRS: tl.constexpr):
    """The same, and its slope: 0 where ⌈p⌉ = ⌊p⌋, as in the paper's listing."""
    below, above = neighbours(table, entry, row_last, PAIRS)
    slope = tl.where(frac > 0, above - below, 0.0)
    return below + frac * slope, slope


@triton.jit
def last_entry(table, row_starts, last, inside, PAIRS: tl.constexpr):
    """Each row's last entry of a table; 0 where not `inside`."""
    word = tl.load(table + row_starts + last, mask=inside, other=0)
    if PAIRS == "":
        value = word.to(tl.float32, bitcast=True)
    else:
        value, _next = unpack(word, PAIRS)
    return value


@triton.jit
def distance_scores(
    distance, relative_table, relative_rows, R, bias_h, D, slope_h, FAR_LAST: tl.constexpr
):  # fmt: skip
    """The sum of the biases that depend on the distance from the query to the key; any number where that is < 0."""
    s = tl.zeros_like(distance).to(tl.float32)
    if relative_table is not None:
        near = tl.minimum(tl.maximum(distance, 0), R - 1)
        value = gather(relative_table, relative_rows + near).to(tl.float32, bitcast=True)
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
    """Each row's bias of keys beyond all its tables, in base 2; 0 where not `inside`. The slope of distances is apart."""
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
