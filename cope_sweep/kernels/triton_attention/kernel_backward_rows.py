"""The backward kernel along rows: a program computes a tile of queries, and visits keys from the first to the query.

It computes the gradients of queries, and this tile's part of the gradients of all tables. For `backward_keys` it stores
tables, and positions and Σ dp at the edges of tiles. With NEAR, it goes on from what another kernel has computed of
plain tiles (`kernels_far.py`).

Gates are subtracted from the position here: the gradient of a gate is the sum over all positions from the row's first
key to its own, dg_ik = Σ_{j ≤ k} dp_ij.

**The gradient of a table needs no atomics.** Let f_j = ⌊p_ij⌋, which does not increase along a row, and w_j the
fraction: a key adds ds·(1 − w) to entry f and ds·w to entry f + 1. Two prefix sums over the keys so far, of ds and of
ds·w, are stored where f goes from n + 1 to n, once for each n, in `prefix_sums`. With C[n] = Σ_{f_j > n} ds, and W[n]
the same of ds·w, entry n gets (C[n − 1] − C[n]) − (W[n − 1] − W[n]) + (W[n − 2] − W[n − 1]). Parts of tiles are summed
afterwards, in a fixed order, so gradients have the same bits in every run.

Shapes: as in `kernel_forward.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import scores, table_gradients, tables, tiles
from cope_sweep.kernels.triton_attention.tiles import FAR, LOG2E


@triton.jit
def plain_tiles(
    dq_tile, end, q_tile, do_tile, k, k_t, v, v_t, key_biases, far, slope_h, delta_r, row_keys, i, S,
    scale, threshold, survival,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, PLAIN_S: tl.constexpr,
):  # fmt: skip
    """Adds queries' gradients by the keys before `end`; also returns their Σ ds. `far`: each query's bias minus lse."""
    ds_plain = tl.zeros_like(far)
    for plain in range(end // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = tiles.load(k, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        v_tile = tiles.load(v, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        bias_c = scores.load_key_bias(key_biases, j, S) if key_biases is not None else None
        s = scores.plain(q_tile, k_tile, scale, far, slope_h, i, j, bias_c, False, PRECISION)
        da = tiles.dot(do_tile, tl.trans(v_tile), PRECISION)
        _kept_a, ds = scores.gradients(tiles.exp2(s), da, delta_r, row_keys, j, threshold, survival, DROPOUT, False)
        ds_plain += tl.sum(ds, 1)
        dq_tile += tiles.dot(ds.to(k_tile.dtype), k_tile, PRECISION)
    return dq_tile, ds_plain


@triton.jit
def delta_of(o, rows, do_tile, valid, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each query's Σ do·o."""
    o_tile = tiles.load(o, rows, HEAD_DIM, valid, HEAD_DIM, BLOCK_K)
    return tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)


@triton.jit(do_not_specialize=tiles.SIZES)
def backward_rows(
    q, k, v, base_q, gate_k, e, m, gate_bias, knots, segment_slope, segment_intercept,
    relative, distance_bias, distance_slope, key_bias, lengths, seeds,
    o, do, lse, plain_end, end_pos_int, end_pos_frac, far_bias,
    far_dq,  # scratch (heads of this launch, launch_rows, K): with NEAR, dq by plain tiles
    dq,
    dbase_q,  # None: added to dq
    dm_rows,  # each row's part of the gradient of m
    dgate_bias_rows,  # and of the bias of the gates
    z_table, relative_table,  # scratch, as in the forward kernel; the column kernel reads them
    prefix_sums,  # scratch (heads of this launch, launch_rows, P or M, 2): both, where the keys of an entry end
    by_distance,  # scratch (heads of this launch, launch_rows, N): ds by distance
    slope_gradient, intercept_gradient,  # out (B, H, T, M); or None
    e_parts,  # out (heads of this launch, tiles, P, K): each tile's part of the gradient of e
    relative_parts,  # out (heads of this launch, tiles, R, K)
    bias_parts,  # out (heads of this launch, tiles, D)
    row_records,  # out (heads of this launch, launch_rows, 4): see `backward_keys`; with NEAR, they are there already
    edge_records,  # out (heads of this launch, tiles of keys + 1, launch_rows, 4); or None
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bq_b, bq_h, bq_t, gk_b, gk_h, gk_t, do_b, do_h, do_t,
    e_h, r_h,
    H, T, S, P, R, D, M,
    N,  # the larger of R and D
    scale, e_scale, relative_scale, limit, saturation, threshold, survival,
    first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of general tiles
    PLAIN_S: tl.constexpr,  # of plain tiles: a multiple of BLOCK_S, and a divisor of the forward kernel's
    WIDE: tl.constexpr,  # indices of a tile's tables are too large for `table_row`
    EDGE: tl.constexpr,  # keys in a tile of the column kernel: a multiple of BLOCK_S
    NEAR: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, b, h = tiles.head_of_program(first_head, H)
    t = tl.arange(0, BLOCK_T)
    first_i = first_row + tile * BLOCK_T + (S - T)
    i, row, valid = tiles.queries_from(first_i, lengths, b, T, S, BLOCK_T)
    CONTEXTUAL: tl.constexpr = (e is not None) or (m is not None) or (knots is not None)
    WITH_INTEGER: tl.constexpr = (m is not None) or (knots is not None)
    OWN_GATES: tl.constexpr = gate_k is not None
    DISTANCES: tl.constexpr = (relative is not None) or (distance_bias is not None)

    rows = head.to(tl.int64) * T + row
    scratch_row = tl.program_id(1).to(tl.int64) * launch_rows + tile * BLOCK_T
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    q_tile = tiles.load(q, row, q_t, valid, HEAD_DIM, BLOCK_K)
    base_q_tile = q_tile
    if base_q is not None:
        base_q += b * bq_b + h * bq_h
        base_q_tile = tiles.load(base_q, row, bq_t, valid, HEAD_DIM, BLOCK_K)
    do_tile = tiles.load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
    lse_r = tl.load(lse + rows, mask=valid, other=float("inf"))  # rows without a token have weights 0
    dbase_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32) if OWN_GATES else None
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

    # Tables, as far as positions reach.
    seen_to = tl.where(valid, i, -1)  # rows without a token attend to nothing, and read the first entries of tables
    last_i = tl.max(seen_to, 0)
    some_invalid = tl.min(seen_to, 0) < 0
    begin = tl.load(plain_end + head.to(tl.int64) * T + first_i - (S - T), mask=first_i < S, other=FAR)
    begin = tl.where(begin < FAR, begin, 0)
    if CONTEXTUAL:
        pos_int = tl.load(end_pos_int + rows, mask=valid, other=0)
        pos_frac = tl.load(end_pos_frac + rows, mask=valid, other=0)
    z_rows = None
    if e is not None:
        z_rows = z_table + scratch_row * P
        e += h * e_h
        top = tl.minimum(tl.max(tl.where(valid, pos_int, 0), 0) + 1, P - 1)
        tables.fill_chunks(
            z_rows, top + 1, base_q_tile, e, e_scale, P, PAIRS, PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_P
        )
    relative_rows = None
    if relative is not None:
        relative_rows = relative_table + scratch_row * R
        relative += h * r_h
        tables.fill_chunks(
            relative_rows, tl.minimum(R, last_i + 1), base_q_tile, relative, relative_scale, R,
            "", PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    if (relative is not None) or (e is not None):
        tl.debug_barrier()

    # Plain tiles.
    record = (row_records + scratch_row * 4) + t * 4
    if NEAR:
        delta_r = tl.load(record, mask=valid, other=0.0)
        ds_plain = tl.load(record + 3, mask=valid, other=0.0)
        stored = valid & (begin + tl.zeros_like(row) > 0)
        dq_tile = tiles.load(far_dq, scratch_row + t, HEAD_DIM, stored, HEAD_DIM, BLOCK_K)
    else:
        delta_r = delta_of(o, rows, do_tile, valid, HEAD_DIM, BLOCK_K)
        far = tl.load(far_bias + rows, mask=valid, other=0.0) - lse_r
        tl.store(record, delta_r)
        tl.store(record + 1, lse_r)
        tl.store(record + 2, far)
        dq_tile, ds_plain = plain_tiles(
            tl.zeros((BLOCK_T, BLOCK_K), tl.float32), begin, q_tile, do_tile, k, k_t, v, v_t, key_biases, far, slope_h,
            delta_r, row_keys, i, S, scale, threshold, survival, DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_S,
        )  # fmt: skip

    # General tiles, in the same direction.
    c = tl.arange(0, BLOCK_S)
    if CONTEXTUAL:
        from_here = (c[:, None] >= c[None, :]).to(tl.float16)
        after_here = (c[:, None] > c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] <= c[None, :]).to(tl.float32).to(tl.bfloat16)
        dp_before = tl.zeros((BLOCK_T,), tl.float32)
        key_tiles = tl.cdiv(S, EDGE)
        edges = edge_records + (tl.program_id(1).to(tl.int64) * (key_tiles + 1) * launch_rows + tile * BLOCK_T) * 4
        saturated = edges + key_tiles.to(tl.int64) * launch_rows * 4
        none = tl.zeros((BLOCK_T,), tl.int32)
        table_gradients.store_edge(saturated, t, none + saturation, none, P, WITH_INTEGER, WIDE)
        tables.scatter(saturated, t * 4 + 2, dp_before)
        tables.scatter(edges + (begin // EDGE).to(tl.int64) * launch_rows * 4, t * 4 + 2, dp_before)
        dm_r = tl.zeros((BLOCK_T,), tl.float32)
        dgate_bias_r = tl.zeros((BLOCK_T,), tl.float32)
    if (e is not None) or (knots is not None):
        prefix_sums += scratch_row * (P if e is not None else M) * 2
        both_sum = ds_plain
        above_sum = tl.where(begin > 0, ds_plain * limit, 0.0) if knots is not None else tl.zeros_like(ds_plain)
    if DISTANCES:
        by_distance += scratch_row * N
        relative_far = ds_plain
        bias_far = ds_plain
    last = tl.cdiv(last_i + 1, BLOCK_S) - 1
    for n in tl.range(begin // BLOCK_S, last + 1):
        first_j = n * BLOCK_S
        seen = (seen_to - first_j)[:, None]  # the last key of the tile that a row attends to
        present = c < S - first_j
        k_tile = tiles.load(k + first_j.to(tl.int64) * k_t, c, k_t, present, HEAD_DIM, BLOCK_K)
        v_tile = tiles.load(v + first_j.to(tl.int64) * v_t, c, v_t, present, HEAD_DIM, BLOCK_K)
        some_hidden = (first_j + BLOCK_S - 1 > first_i) | some_invalid
        s = scores.logits(q_tile, k_tile, scale, c[None, :], seen, some_hidden, PRECISION)
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_k_rows = gate_k + b * gk_b + h * gk_h + first_j.to(tl.int64) * gk_t
                gate_k_tile = tiles.load(gate_k_rows, c, gk_t, present, HEAD_DIM, BLOCK_K)
                gate_logits = scores.logits(base_q_tile, gate_k_tile, scale, c[None, :], seen, some_hidden, PRECISION)
            gate_logits = scores.with_gate_bias(gate_logits, gate_bias, h)
            gate, high, low, sums_from = scores.gates_and_sums(gate_logits, from_here, False)
            pos_int, pos_frac = tiles.advance(pos_int, pos_frac, -tiles.column(sums_from, 0))
            # Gates may differ from the forward kernel's by a unit, where its products use other instructions.
            pos_frac = tl.where(pos_int < 0, 0, pos_frac)
            pos_int = tl.maximum(pos_int, 0)
            edge = edges + launch_rows.to(tl.int64) * (n // (EDGE // BLOCK_S)) * 4
            if n % (EDGE // BLOCK_S) == 0:
                tables.scatter(edge, t * 4 + 2, dp_before)
            if (n % (EDGE // BLOCK_S) == EDGE // BLOCK_S - 1) | (n == last):
                table_gradients.store_edge(edge, t, pos_int, pos_frac, P, WITH_INTEGER, WIDE)
            positions = tiles.positions_of(sums_from, tiles.fraction(pos_frac)[:, None])
            # Computed before the products below, so that fewer registers are live during them.
            gate_slope = tiles.gate_slope(gate)
            if (e is not None) or (knots is not None):
                following = tiles.positions_of(
                    tiles.sums_from(high, low, after_here, False), tiles.fraction(pos_frac)[:, None]
                )
            slope = None
            if e is not None:
                origin, to_last = tables.table_row(pos_int, P - 1)
                index, floor, frac, slope, value = scores.of_table(
                    (z_rows + t * P)[:, None], origin[:, None], to_last[:, None], P - 1, positions, PAIRS
                )
                s += LOG2E * value
            if WITH_INTEGER:
                p = pos_int.to(tl.float32)[:, None] + positions
            if m is not None:
                s += LOG2E * m_h * p
            if knots is not None:
                clamped, segment, slope, value = scores.of_segments(
                    knots, slopes, intercepts, segment_starts[:, None], p, limit, STEPS
                )
                s += LOG2E * value
                next_p = tl.minimum(pos_int.to(tl.float32)[:, None] + following, limit)
                next_segment = scores.segment_of(knots, next_p, STEPS)
        bias_c = scores.load_key_bias(key_biases, first_j + c, S) if key_bias is not None else None
        distance = seen - c[None, :]
        s = scores.with_other_terms(s, distance, relative_rows, R, bias_h, D, slope_h, bias_c, FAR_LAST, False)
        a = tiles.exp2(s - lse_r[:, None])
        da = tiles.dot(do_tile, tl.trans(v_tile), PRECISION)
        _kept_a, ds = scores.gradients(a, da, delta_r, row_keys, first_j + c, threshold, survival, DROPOUT, False)
        if DISTANCES:
            inside = (distance >= 0) & (distance < N)
            tables.scatter(by_distance, tl.where(inside, (t * N)[:, None] + distance, -1), ds)
            if relative is not None:
                relative_far += tl.sum(tl.where(distance >= R - 1, ds, 0.0), 1)
            if distance_bias is not None:
                bias_far += tl.sum(tl.where(distance >= D - 1, ds, 0.0), 1)
        if CONTEXTUAL:
            dp = scores.position_gradients(ds, slope, m_h)
            if m is not None:
                dm_r += tl.sum(ds * p, 1)
            dp_up_to = tiles.cumulative(dp, up_to_here, False, PARTS)
            dlogits = (dp_before[:, None] + dp_up_to) * gate_slope
            if gate_bias is not None:
                dgate_bias_r += tl.sum(dlogits, 1)
            dp_before += tiles.column(dp_up_to, BLOCK_S - 1)
            if (e is not None) or (knots is not None):
                both_up_to = tiles.cumulative(ds, up_to_here, False, PARTS)
                above_up_to = tiles.cumulative(ds * (frac if e is not None else clamped), up_to_here, False, PARTS)
                both, above = both_sum[:, None] + both_up_to, above_sum[:, None] + above_up_to
                if e is not None:
                    tables.scatter_at_borders((prefix_sums + t * P * 2)[:, None], index, floor, following, both, above)
                else:
                    table_gradients.scatter_at_knots(prefix_sums, (t * M)[:, None], segment, next_segment, both, above)
                both_sum += tiles.column(both_up_to, BLOCK_S - 1)
                above_sum += tiles.column(above_up_to, BLOCK_S - 1)
            if OWN_GATES:
                dbase_tile += tiles.dot(dlogits.to(gate_k_tile.dtype), gate_k_tile, PRECISION)
            else:
                ds += dlogits
        dq_tile += tiles.dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    # Tables.
    i, row, valid = tiles.queries_from(tiles.again(first_i), lengths, b, T, S, BLOCK_T)
    rows = head.to(tl.int64) * T + row
    if m is not None:
        tl.store(dm_rows + rows, tl.where(valid, dm_r, 0.0), mask=row < T)
    if gate_bias is not None:
        tl.store(dgate_bias_rows + rows, tl.where(valid, dgate_bias_r, 0.0), mask=row < T)
    if base_q is not None:
        tiles.store(dq, rows, dq_tile * scale, row < T, HEAD_DIM, BLOCK_K)
        dq = dbase_q
        dq_tile = dbase_tile if OWN_GATES else tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    elif OWN_GATES:
        dq_tile += dbase_tile
    dq_tile *= scale
    if (e is not None) or (knots is not None) or DISTANCES:
        tl.debug_barrier()  # the stores above are read below by other threads of this program
    base_q_tile = tiles.load(
        q if base_q is None else base_q, row, q_t if base_q is None else bq_t, valid, HEAD_DIM, BLOCK_K
    )
    if e is not None:
        first_entry = tl.minimum(tl.load(end_pos_int + rows, mask=valid, other=0), P - 1)
        e_parts += part * P * HEAD_DIM
        table_gradients.store_zeros(e_parts, tl.cdiv(top + 1, BLOCK_P) * BLOCK_P, P, HEAD_DIM, BLOCK_K, BLOCK_P)
        for start in tl.range(0, top + 1, BLOCK_P, num_stages=1):
            entries = start + tl.arange(0, BLOCK_P)
            dz = table_gradients.from_prefix_sums(
                prefix_sums, (t * P * 2)[:, None], entries, both_sum, above_sum, first_entry[:, None], valid, P
            )
            dq_tile = table_gradients.of_embeddings(
                dz, entries, base_q_tile, dq_tile, e, e_parts, e_scale, P, PRECISION, HEAD_DIM, BLOCK_K
            )
    if knots is not None:
        end = tl.load(end_pos_int + rows, mask=valid, other=0).to(tl.float32)
        end += tiles.fraction(tl.load(end_pos_frac + rows, mask=valid, other=0))
        first_segment = scores.segment_of(knots, tl.minimum(end, limit), STEPS)
        for start in tl.range(0, M, BLOCK_P, num_stages=1):
            table_gradients.store_segments(
                slope_gradient, intercept_gradient, rows, start + tl.arange(0, BLOCK_P),
                prefix_sums, (t * M * 2)[:, None], both_sum, above_sum, first_segment[:, None], valid, row < T, M,
            )  # fmt: skip
    if DISTANCES:
        starts = (t * N)[:, None]
        if relative is not None:
            relative_parts += part * R * HEAD_DIM
            last = tl.minimum(R, last_i + 1)
            table_gradients.store_zeros(relative_parts, tl.cdiv(last, BLOCK_R) * BLOCK_R, R, HEAD_DIM, BLOCK_K, BLOCK_R)
            for start in tl.range(0, last, BLOCK_R, num_stages=1):
                entries = start + tl.arange(0, BLOCK_R)
                dz = table_gradients.of_distances(by_distance, starts, entries, i, relative_far, valid, R, FAR_LAST)
                dq_tile = table_gradients.of_embeddings(
                    dz, entries, base_q_tile, dq_tile, relative, relative_parts, relative_scale, R,
                    PRECISION, HEAD_DIM, BLOCK_K,
                )  # fmt: skip
        if distance_bias is not None:
            for start in tl.range(0, D, BLOCK_R, num_stages=1):
                entries = start + tl.arange(0, BLOCK_R)
                db = tl.sum(table_gradients.of_distances(by_distance, starts, entries, i, bias_far, valid, D, True), 0)
                tl.store(bias_parts + part * D + entries, db, mask=entries < D)
    tiles.store(dq, rows, dq_tile, row < T, HEAD_DIM, BLOCK_K)
