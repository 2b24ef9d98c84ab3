"""The forward kernel: a program computes a tile of queries, and visits keys from the query to earlier tokens.

A position is the sum of the gates from the key to the query, so the sum of a row grows as the program proceeds. Tiles
are *general* until every query has passed the last position and the last distance of its tables. From there on they are
*plain*: the bias is one number per query, and the computation is flash attention (Dao et al. 2022). With NEAR, another
kernel visits them (`kernels_far.py`).

Shapes: T queries (the last of S tokens), S keys, K head dim, P positions, R relative positions, D distances with a
bias. Tensors are (B, H, T or S, ·), contiguous where no strides are given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import scores, tables, tiles
from cope_sweep.kernels.triton_attention.tiles import FAR, LOG2E, NONE_YET


@triton.jit
def accumulate(
    s, j, v_tile, row_max, weight, sums, row_keys, threshold, DROPOUT: tl.constexpr, PRECISION: tl.constexpr
):
    """A step of the softmax, with scores `s` in base 2, and of the weighted sum of values."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    rescale = tiles.exp2(row_max - new_max)
    a = tiles.exp2(s - new_max[:, None])
    weight = weight * rescale + tl.sum(a, 1)
    if DROPOUT:
        a = tl.where(tiles.kept(row_keys[:, None], j[None, :], threshold), a, 0.0)
    sums = sums * rescale[:, None] + tiles.dot(a.to(v_tile.dtype), v_tile, PRECISION)
    return new_max, weight, sums


@triton.jit
def plain_tiles(
    row_max, weight, sums, end, q_tile, k, k_t, v, v_t, key_biases, far, slope_h, row_keys, i, S, scale, threshold,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, PLAIN_S: tl.constexpr,
):  # fmt: skip
    """The steps of the softmax with the keys before `end`. `far`: each query's bias."""
    for plain in range(end // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = tiles.load(k, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        bias_c = scores.load_key_bias(key_biases, j, S) if key_biases is not None else None
        s = scores.plain(q_tile, k_tile, scale, far, slope_h, i, j, bias_c, False, PRECISION)
        v_tile = tiles.load(v, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        row_max, weight, sums = accumulate(s, j, v_tile, row_max, weight, sums, row_keys, threshold, DROPOUT, PRECISION)
    return row_max, weight, sums


@triton.jit
def finish(
    o, lse, rows, inside, valid, row_max, weight, sums, survival, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Store the output and the log-sum-exp of the rows that are `inside`: 0 for those that are not `valid`."""
    weight = tl.where(valid, weight, 1.0)
    out = tl.where(valid[:, None], sums / (weight * survival)[:, None], 0.0)
    tiles.store(o, rows, out, inside, HEAD_DIM, BLOCK_K)
    tl.store(lse + rows, tl.where(valid, row_max + tl.log2(weight), 0.0), mask=inside)


@triton.jit(do_not_specialize=tiles.SIZES)
def forward(
    q, k, v,
    base_q,  # None: q
    gate_k,  # None: gates use the logits
    e,  # of the contextual table; or None
    m,  # slope of positions, float32; or None
    gate_bias,  # added to the logits of gates, float32; or None
    knots,  # ascending, padded with ∞ to 2^STEPS − 1, float32 as int32; or None
    segment_slope, segment_intercept,  # (B, H, T, M), float32 as int32; or None
    relative,  # embeddings of distances; or None
    distance_bias,  # (H, D), float32 as int32; or None
    distance_slope,  # float32; or None
    key_bias,  # (B, H, S), float32; or None
    lengths,  # or None
    seeds,  # int64; or None
    o,
    lse,  # of the rows' scores, in base 2
    plain_end,  # int32: the first key that is not in a plain tile
    end_pos_int,  # int32: integer part of the position of that key
    end_pos_frac,  # int32: its fraction, in units
    far_bias,  # float32: each row's bias of keys in plain tiles, in base 2
    near_weight,  # scratch (heads of this launch, launch_rows): with NEAR, Σ weights; then `lse` has their maximum
    near_sums,  # scratch (heads of this launch, launch_rows, K): with NEAR, Σ weights·v
    z_table,  # scratch (heads of this launch, launch_rows, P): q·e
    relative_table,  # scratch (heads of this launch, launch_rows, R)
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bq_b, bq_h, bq_t, gk_b, gk_h, gk_t,
    e_h, r_h,  # distances in memory of the tables of two heads; 0 if they share one
    H, T, S, P, R, D, M,
    scale, e_scale, relative_scale,
    limit,  # of the positions in segments
    saturation,  # positions from this integer on have one score
    threshold,  # `dropout.threshold` − 2³¹
    survival,  # 1 − the dropout
    first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STEPS: tl.constexpr,  # of the search for a segment
    ONE_CHUNK: tl.constexpr,  # P ≤ BLOCK_P
    NEAR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of general tiles
    PLAIN_S: tl.constexpr,  # of plain tiles, which need fewer registers: a multiple of BLOCK_S
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head, b, h = tiles.head_of_program(first_head, H)
    t = tl.arange(0, BLOCK_T)
    first_i = first_row + tile * BLOCK_T + (S - T)
    i, row, valid = tiles.queries_from(first_i, lengths, b, T, S, BLOCK_T)
    CONTEXTUAL: tl.constexpr = (e is not None) or (m is not None) or (knots is not None)
    OWN_GATES: tl.constexpr = gate_k is not None

    rows = head.to(tl.int64) * T + row
    scratch_row = tl.program_id(1).to(tl.int64) * launch_rows + tile * BLOCK_T
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    q_tile = tiles.load(q, row, q_t, valid, HEAD_DIM, BLOCK_K)
    base_q_tile = q_tile
    if base_q is not None:
        base_q += b * bq_b + h * bq_h
        base_q_tile = tiles.load(base_q, row, bq_t, valid, HEAD_DIM, BLOCK_K)
    triangle = (tl.arange(0, BLOCK_S)[:, None] >= tl.arange(0, BLOCK_S)[None, :]).to(tl.float16)
    m_h = tl.load(m + h) if m is not None else None
    slope_h = tl.load(distance_slope + h) if distance_slope is not None else None
    bias_h = distance_bias + h * D if distance_bias is not None else None
    key_biases = key_bias + head.to(tl.int64) * S if key_bias is not None else None
    slopes, intercepts, segment_starts = None, None, None
    if knots is not None:
        slopes, intercepts, segment_starts = scores.segments_of_queries(
            segment_slope, segment_intercept, head.to(tl.int64) * T + first_i - (S - T), row < T, M
        )
    row_keys = tiles.keys_of_rows(seeds, b, h, i) if DROPOUT else None

    row_max = tl.full((BLOCK_T,), NONE_YET, tl.float32)
    weight = tl.zeros((BLOCK_T,), tl.float32)
    sums = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    # Rows without a token are past the last position, so that other rows do not wait for them.
    pos_int = tl.where(valid, 0, FAR)
    pos_frac = tl.zeros((BLOCK_T,), tl.int32)
    seen_to = tl.where(valid, i, -1)  # rows without a token attend to nothing, and read the first entries of tables
    last_i = tl.max(seen_to, 0)

    z_rows = None
    filled = 0
    if e is not None:
        z_rows = z_table + scratch_row * P
        e += h * e_h
        if ONE_CHUNK:
            tables.fill_table(
                z_rows, 0, base_q_tile, e, e_scale, P, PAIRS, PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_P
            )
    relative_rows = None
    if relative is not None:
        relative_rows = relative_table + scratch_row * R
        tables.fill_chunks(
            relative_rows, tl.minimum(R, last_i + 1), base_q_tile, relative + h * r_h, relative_scale, R,
            "", PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    if (relative is not None) or (e is not None):
        tl.debug_barrier()

    n = tl.cdiv(last_i + 1, BLOCK_S) - 1
    any_key = n >= 0
    is_general = any_key
    while is_general:
        j = n * BLOCK_S + tl.arange(0, BLOCK_S)
        k_tile = tiles.load(k, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        on_diagonal = n * BLOCK_S + BLOCK_S - 1 > first_i
        s = scores.logits(q_tile, k_tile, scale, j[None, :], seen_to[:, None], on_diagonal, PRECISION)
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_k_tile = tiles.load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
                gate_logits = scores.logits(
                    base_q_tile, gate_k_tile, scale, j[None, :], seen_to[:, None], on_diagonal, PRECISION
                )
            gate_logits = scores.with_gate_bias(gate_logits, gate_bias, h)
            _gate, _high, _low, sums_from = scores.gates_and_sums(gate_logits, triangle, False)
            positions = tiles.positions_of(sums_from, tiles.fraction(pos_frac)[:, None])
            start_int = pos_int
            pos_int, pos_frac = tiles.advance(pos_int, pos_frac, tiles.column(sums_from, 0))
            if e is not None:
                if not ONE_CHUNK:
                    top = tl.minimum(tl.max(tl.where(valid, pos_int, 0), 0) + 1, P - 1)
                    if filled <= top:
                        while filled <= top:
                            tables.fill_table(
                                z_rows, filled, base_q_tile, e, e_scale, P,
                                PAIRS, PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_P,
                            )  # fmt: skip
                            filled += BLOCK_P
                        tl.debug_barrier()
                origin, to_last = tables.table_row(start_int, P - 1)
                _index, _floor, _frac, _slope, value = scores.of_table(
                    (z_rows + t * P)[:, None], origin[:, None], to_last[:, None], P - 1, positions, PAIRS
                )
                s += LOG2E * value
            if (m is not None) or (knots is not None):
                p = start_int.to(tl.float32)[:, None] + positions
                if m is not None:
                    s += LOG2E * m_h * p
                if knots is not None:
                    _clamped, _segment, _slope, value = scores.of_segments(
                        knots, slopes, intercepts, segment_starts[:, None], p, limit, STEPS
                    )
                    s += LOG2E * value
        bias_c = scores.load_key_bias(key_biases, j, S) if key_bias is not None else None
        distance = seen_to[:, None] - j[None, :]
        s = scores.with_other_terms(s, distance, relative_rows, R, bias_h, D, slope_h, bias_c, FAR_LAST, False)
        v_tile = tiles.load(v, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        row_max, weight, sums = accumulate(s, j, v_tile, row_max, weight, sums, row_keys, threshold, DROPOUT, PRECISION)
        n -= 1
        # The next tile is plain if all its keys are visible, saturated, and farther than the tables of distances.
        last_j = n * BLOCK_S + BLOCK_S - 1
        general = last_j > first_i
        if m is not None:
            general = True
        elif CONTEXTUAL:
            general = general | (tl.min(pos_int, 0) < saturation)
        if relative is not None:
            general = general | (first_i - last_j < R)
        if distance_bias is not None:
            general = general | (first_i - last_j < D)
        is_general = (n >= 0) & (general | ((n + 1) % (PLAIN_S // BLOCK_S) != 0))

    begin = (n + 1) * BLOCK_S
    tl.store(plain_end + rows, tl.where(any_key, begin, FAR) + tl.zeros_like(row), mask=row < T)
    if CONTEXTUAL:
        tl.store(end_pos_int + rows, pos_int, mask=row < T)
        tl.store(end_pos_frac + rows, pos_frac, mask=row < T)

    far = scores.far_score(
        z_rows, P, relative_rows, R, bias_h, D, knots, slopes, intercepts, segment_starts, limit,
        valid & (begin + tl.zeros_like(row) > 0), FAR_LAST, PAIRS, STEPS, BLOCK_T,
    )  # fmt: skip
    tl.store(far_bias + rows, far, mask=row < T)
    if not NEAR:
        row_max, weight, sums = plain_tiles(
            row_max, weight, sums, begin, q_tile, k, k_t, v, v_t, key_biases, far, slope_h, row_keys, i, S, scale,
            threshold, DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_S,
        )  # fmt: skip
        finish(o, lse, rows, row < T, valid, row_max, weight, sums, survival, HEAD_DIM, BLOCK_K)
    elif begin > 0:
        tl.store(lse + rows, row_max, mask=valid)
        tl.store(near_weight + scratch_row + t, weight, mask=valid)
        tiles.store(near_sums, scratch_row + t, sums, valid, HEAD_DIM, BLOCK_K)
    else:
        finish(o, lse, rows, row < T, valid, row_max, weight, sums, survival, HEAD_DIM, BLOCK_K)
