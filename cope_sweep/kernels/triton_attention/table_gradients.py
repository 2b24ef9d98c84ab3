"""Gradients of tables and records, which the backward kernel along rows computes from its prefix sums.

Shapes: in names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import tables, tiles


@triton.jit
def scatter_at_knots(sums, starts, segment, next_segment, both, above):
    """Store both prefix sums, (r, c), for each knot between a key's segment and the next key's; there may be several.

    `starts`: the first segment of each row, (r, 1).
    """
    for passed in range(tl.max(tl.max(segment - next_segment, 1), 0)):
        at = segment - 1 - passed
        at = tl.where(at >= next_segment, starts + at, -1)
        tables.scatter(sums, tl.where(at >= 0, at * 2, -1), both)
        tables.scatter(sums, tl.where(at >= 0, at * 2 + 1, -1), above)


@triton.jit
def of_entries(sums, starts, n, both_sum, above_sum, first_entry, valid):
    """Σ ds and Σ ds·w of the keys of entries `n`, (1, entries), of the rows' tables: differences of prefix sums.

    Also returns the second prefix sum at n − 1. Prefix sums at the first key's entry and above are 0, and were not
    stored; the one at −1 is for the whole row.
    """
    here = valid[:, None] & (n < first_entry)
    both_n = tl.load(sums + starts + n * 2, mask=here, other=0.0)
    above_n = tl.load(sums + starts + n * 2 + 1, mask=here, other=0.0)
    before = valid[:, None] & (n >= 1) & (n - 1 < first_entry)
    both_1 = tl.where(n < 1, both_sum[:, None], tl.load(sums + starts + n * 2 - 2, mask=before, other=0.0))
    above_1 = tl.where(n < 1, above_sum[:, None], tl.load(sums + starts + n * 2 - 1, mask=before, other=0.0))
    return both_1 - both_n, above_1 - above_n, above_1


@triton.jit
def from_prefix_sums(sums, starts, n, both_sum, above_sum, first_entry, valid, P):
    """The gradients of entries `n` of the rows' tables, float32 (rows, entries)."""
    n = n[None, :]
    both, above, above_1 = of_entries(sums, starts, n, both_sum, above_sum, first_entry, valid)
    before = valid[:, None] & (n >= 2) & (n - 2 < first_entry)
    above_2 = tl.where(n <= 1, above_sum[:, None], tl.load(sums + starts + n * 2 - 3, mask=before, other=0.0))
    return tl.where(n < P, both - above + (above_2 - above_1), 0.0)


@triton.jit
def store_segments(
    slope_gradient, intercept_gradient, rows, n, sums, starts, both_sum, above_sum, first_segment, valid, stored, M
):  # fmt: skip
    """Store the gradients of segments `n` of the rows' tables."""
    at = rows.to(tl.int64)[:, None] * M + n[None, :]
    n = n[None, :]
    both, above, _above_1 = of_entries(sums, starts, n, both_sum, above_sum, first_segment, valid)
    inside = stored[:, None] & (n < M)
    intercept, slope = tl.where(valid[:, None], both, 0.0), tl.where(valid[:, None], above, 0.0)
    tl.store(intercept_gradient + at, intercept.to(intercept_gradient.dtype.element_ty), mask=inside)
    tl.store(slope_gradient + at, slope.to(slope_gradient.dtype.element_ty), mask=inside)


@triton.jit
def of_distances(by_distance, starts, n, i, far_sum, valid, R, FAR_LAST: tl.constexpr):
    """The gradients of entries `n` of the rows' tables of distances, float32 (rows, entries)."""
    n = n[None, :]
    stored = R - 1 if FAR_LAST else R
    value = tl.load(by_distance + starts + n, mask=valid[:, None] & (n <= i[:, None]) & (n < stored), other=0.0)
    if FAR_LAST:
        value = tl.where(n == R - 1, tl.where(valid, far_sum, 0.0)[:, None], value)
    return value


@triton.jit
def of_embeddings(
    dz, n, q_tile, dq_tile, e, parts, scale, P, PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Queries' gradients with those through entries `n` of z = scale·q·e; stores those of the embeddings to `parts`."""
    dz = (dz * scale).to(e.dtype.element_ty)
    e_tile = tiles.load(e, n, HEAD_DIM, n < P, HEAD_DIM, BLOCK_K)
    tiles.store(parts, n, tiles.dot(tl.trans(dz), q_tile, PRECISION), n < P, HEAD_DIM, BLOCK_K)
    return dq_tile + tiles.dot(dz, e_tile, PRECISION)


@triton.jit
def store_zeros(
    parts, start, P, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Store 0 as the gradients of the embeddings from `start` on."""
    for first in tl.range(start, P, BLOCK_P, num_stages=1):
        n = first + tl.arange(0, BLOCK_P)
        tiles.store(parts, n, tl.zeros((BLOCK_P, BLOCK_K), tl.float32), n < P, HEAD_DIM, BLOCK_K)


@triton.jit
def store_edge(records, t, pos_int, pos_frac, P, WITH_INTEGER: tl.constexpr, WIDE: tl.constexpr):
    """Store positions at the right edge of a tile of keys, for `backward_keys`."""
    origin, limit = tables.table_row(pos_int, P - 1)
    if not WIDE:
        origin += (t * P).to(tl.float32)
    tables.scatter(records, t * 4, tiles.fraction(pos_frac))
    tables.scatter(records, t * 4 + 1, origin)
    tables.scatter(records, t * 4 + 3, pos_int.to(tl.float32) if WITH_INTEGER else limit)
