"""Tables in scratch memory, and the numbers that one kernel stores for another.

**Tables are products of queries and embeddings**, z = q·e, for the queries of one tile: a kernel computes as many
chunks of BLOCK_P entries as its positions reach, and writes them, row after row, as 32-bit words (`fill_table`). Scores
read single entries (`gather`). The words of a 16-bit table hold an entry and its difference from the next one, because
interpolation needs both.

**Positions become indices without a conversion.** A sum with 2²³ that is rounded down is an integer, and its bits are
those of 2²³ (`OFFSET`) plus the integer part. Tables are addressed with these bits.

Shapes: in names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention.tiles import INTERPRETED, add_truncated, dot, load

MAGIC = tl.constexpr(8388608.0)
"""2²³: float32 numbers from here to 2²⁴ are integers, and their bits are consecutive."""
OFFSET = tl.constexpr(0x4B000000)
"""The bits of MAGIC."""


# Indices --------------------------------------------------------------------------------------------------------------


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
def load_record(at):
    """Load four float32 numbers, which another kernel has stored.

    The assembly is called pure, so that each thread loads what it needs, not by way of shared memory.
    """
    if INTERPRETED:
        first, second, third, fourth = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l",
            [at.to(tl.int64)],
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
    if INTERPRETED:
        inside = following < floor
        tl.store(row + (index - OFFSET - 1) * 2, first, mask=inside)
        tl.store(row + (index - OFFSET - 1) * 2 + 1, second, mask=inside)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .b64 address; .reg .pred inside; setp.lt.f32 inside, $3, $4; mad.wide.s32 address, $2, 8, $1; "
            "@inside st.global.v2.b32 [address], {$5, $6}; mov.b32 $0, 0; }",
            "=r,l,r,f,f,r,r",
            [row.to(tl.int64) - 8 * (OFFSET + 1), index, following, floor, first, second],
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

    PAIRS: "bf16" or "fp16" if a word is a pair of an entry and its difference from the next one (0 after the last); ""
    if it is one float32. The caller has to pass a barrier before it reads the words.

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
def fill_chunks(
    table, end, q_tile, e, scale, P,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write all chunks of a table that have an entry below `end`, as `fill_table`."""
    for start in tl.range(0, end, BLOCK_P, num_stages=1):
        fill_table(table, start, q_tile, e, scale, P, PAIRS, PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_P)


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
