"""The scores of a tile, term by term, and their gradients: what the three kernels compute alike.

Scores are in base 2: multiplied by log₂ e, so that a weight is `exp2` of a score. Terms of positions are returned
without that factor. A term that a problem does not have is None.

Shapes: a tile is (queries, keys), or with KEYS_FIRST (keys, queries). What is given for each query, (queries,), or key,
(keys,), is broadcast. In names, r rows (queries) and c columns (keys) of a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import tables, tiles
from cope_sweep.kernels.triton_attention.tables import gather
from cope_sweep.kernels.triton_attention.tiles import LOG2E


@triton.jit
def by_query(x, KEYS_FIRST: tl.constexpr):
    """Broadcast numbers of the queries over a tile."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def by_key(x, KEYS_FIRST: tl.constexpr):
    """Broadcast numbers of the keys over a tile."""
    return x[:, None] if KEYS_FIRST else x[None, :]


# Logits and terms -----------------------------------------------------------------------------------------------------


@triton.jit
def logits(first, second, scale, at, seen_to, hides, PRECISION: tl.constexpr):
    """The products of two tiles of vectors, (first, second), in base 2.

    If a key of the tile is hidden from a query (`hides`), −∞ where `at` > `seen_to`.
    """
    s = tiles.dot(first, tl.trans(second), PRECISION) * (scale * LOG2E)
    if hides:
        s = tl.where(at <= seen_to, s, float("-inf"))
    return s


@triton.jit
def plain(
    first, second, scale, far, slope_h, i, j, bias_c, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The scores of a plain tile. `far`: each query's bias beyond its tables (`far_score`). `i`: queries. `j`: keys."""
    s = tiles.dot(first, tl.trans(second), PRECISION) * (scale * LOG2E) + by_query(far, KEYS_FIRST)
    if slope_h is not None:
        s += (slope_h * LOG2E) * (by_query(i, KEYS_FIRST) - by_key(j, KEYS_FIRST)).to(tl.float32)
    if bias_c is not None:
        s += by_key(bias_c, KEYS_FIRST)
    return s


@triton.jit
def with_gate_bias(gate_logits, gate_bias, h):
    """The logits of gates, in base 2, with the bias of head `h` added, where there is one."""
    if gate_bias is not None:
        gate_logits += LOG2E * tl.load(gate_bias + h)
    return gate_logits


@triton.jit
def gates_and_sums(gate_logits, from_here, KEYS_FIRST: tl.constexpr):
    """Gates as in `tiles.gate_of`, their two halves, and SHARE·sums of them from each key of the tile on."""
    gate = tiles.gate_of(gate_logits)
    high, low = tiles.halves(gate)
    return gate, high, low, tiles.sums_from(high, low, from_here, KEYS_FIRST)


@triton.jit
def of_table(table, origin, to_last, last, positions, PAIRS: tl.constexpr):
    """The term of a table at positions, and its slope: at a whole number, the one to the right.

    `origin`, `to_last`: those of `tables.table_row`. `last`: the index of the last entry. Returns the index, floor
    and fraction of `tables.entry_of`, the slope and the value.
    """
    index, floor, frac = tables.entry_of(origin, to_last, positions)
    entry, slope = tables.entry_and_step(table, index, last, PAIRS)
    return index, floor, frac, slope, entry + frac * slope


@triton.jit
def segment_of(knots, p, STEPS: tl.constexpr):
    """The number of knots ≤ p, by a binary search among 2^STEPS − 1."""
    n = tl.zeros_like(p).to(tl.int32)
    for step in tl.static_range(STEPS):
        following = n + (1 << (STEPS - 1 - step))
        n = tl.where(gather(knots - 1, following).to(tl.float32, bitcast=True) <= p, following, n)
    return n


@triton.jit
def segments_of_queries(slopes, intercepts, first_row, present, M):
    """The tables of a tile of queries from row `first_row` (of B·H·T) on: slopes, intercepts, and each row's start.

    Rows that are not `present` read the first one's.
    """
    starts = tl.where(present, tl.arange(0, present.shape[0]), 0) * M
    return slopes + first_row * M, intercepts + first_row * M, starts


@triton.jit
def of_segments(knots, slopes, intercepts, starts, p, limit, STEPS: tl.constexpr):
    """The term of segments at positions p, and its slope. `slopes`, `intercepts`, `starts`: see `segments_of_queries`.

    Returns the positions up to the limit, their segments, the slope (0 from the limit on) and the value.
    """
    clamped = tl.minimum(p, limit)
    segment = segment_of(knots, clamped, STEPS)
    index = starts + segment
    slope = gather(slopes, index).to(tl.float32, bitcast=True)
    value = slope * clamped + gather(intercepts, index).to(tl.float32, bitcast=True)
    return clamped, segment, tl.where(p < limit, slope, 0.0), value


@triton.jit
def with_other_terms(
    s, distance, relative_rows, R, bias_h, D, slope_h, bias_c,
    FAR_LAST: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Scores with the terms of distances and keys added. Where `distance` < 0, the result is any number.

    `relative_rows`: the tile's rows of R numbers. `bias_h`: D numbers.
    """
    if (relative_rows is not None) or (bias_h is not None) or (slope_h is not None):
        terms = tl.zeros_like(distance).to(tl.float32)
        if relative_rows is not None:
            t = tl.arange(0, distance.shape[1 if KEYS_FIRST else 0])
            near = tl.minimum(tl.maximum(distance, 0), R - 1)
            value = gather(by_query(relative_rows + t * R, KEYS_FIRST), near).to(tl.float32, bitcast=True)
            terms += value if FAR_LAST else tl.where(distance < R, value, 0.0)
        if bias_h is not None:
            near = tl.minimum(tl.maximum(distance, 0), D - 1)
            terms += gather(bias_h, near).to(tl.float32, bitcast=True)
        if slope_h is not None:
            terms += slope_h * distance.to(tl.float32)
        s += LOG2E * terms
    if bias_c is not None:
        s += by_key(bias_c, KEYS_FIRST)
    return s


@triton.jit
def load_key_bias(biases, j, S):
    """The biases of keys `j` of a head, in base 2; 0 beyond the last key."""
    return tl.load(biases + j, mask=j < S, other=0.0) * LOG2E


@triton.jit
def far_score(
    z_rows, P, relative_rows, R, bias_h, D, knots, slopes, intercepts, segment_starts, limit, inside,
    FAR_LAST: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Each row's bias of keys beyond all its tables, in base 2, without that by slope; 0 where not `inside`."""
    t = tl.arange(0, BLOCK_T)
    s = tl.zeros((BLOCK_T,), tl.float32)
    if z_rows is not None:
        s += tables.last_entry(z_rows, t * P, P - 1, inside, PAIRS)
    if (relative_rows is not None) and FAR_LAST:
        s += tables.last_entry(relative_rows, t * R, R - 1, inside, "")
    if bias_h is not None:
        s += tl.load(bias_h + D - 1).to(tl.float32, bitcast=True)
    if knots is not None:
        at = segment_starts + segment_of(knots, tl.zeros((BLOCK_T,), tl.float32) + limit, STEPS)
        slope = tl.load(slopes + at, mask=inside, other=0).to(tl.float32, bitcast=True)
        intercept = tl.load(intercepts + at, mask=inside, other=0).to(tl.float32, bitcast=True)
        s += tl.where(inside, slope * limit + intercept, 0.0)
    return s * LOG2E


# Gradients ------------------------------------------------------------------------------------------------------------


@triton.jit
def gradients(
    a, da, delta, row_keys, j, threshold, survival, DROPOUT: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """The weights after dropout, and the gradients of the scores, from weights `a` and gradients `da` of dropped ones.

    `delta`: each query's Σ do·o. `row_keys`: see `tiles.keys_of_rows`.
    """
    kept_a = a
    if DROPOUT:
        kept = tiles.kept(by_query(row_keys, KEYS_FIRST), by_key(j, KEYS_FIRST), threshold)
        kept_a = tl.where(kept, a / survival, 0.0)
        da = tl.where(kept, da / survival, 0.0)
    return kept_a, a * (da - by_query(delta, KEYS_FIRST))


@triton.jit
def position_gradients(ds, slope, m_h):
    """The gradients of positions from those of scores, where tables or segments have a `slope`, and the head `m_h`."""
    dp = tl.zeros_like(ds)
    if slope is not None:
        dp += ds * slope
    if m_h is not None:
        dp += ds * m_h
    return dp
