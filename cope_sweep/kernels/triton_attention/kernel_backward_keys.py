"""The backward kernel along columns: a program visits the tiles of queries that attend to its tile of keys.

It computes the gradients of keys, values and gate keys from what `backward_rows` has stored. No two programs write to
the same memory, so gradients have the same bits in every run. Keys are the first axis of a tile, so that the factors of
q and do need no transposition. With NEAR, another kernel visits the plain tiles, and adds their gradients
(`kernels_far.py`).

**Records** of four float32 numbers hold what it needs of a query, so that a thread gets each with one load:

- in `row_records`: Σ_k do·o; the log-sum-exp; the bias of plain tiles minus that; with NEAR, Σ ds of plain tiles;
- in `edge_records`, for each tile of keys: of the position at its right edge, the fraction, and the first number of
  `table_row`, plus the row's start in the table, if not WIDE; Σ dp of all keys before the tile; the second number of
  `table_row`, or with `m` or segments the integer of the position. Instead of a tile after the last, those of any tile
  whose keys are all saturated.

Shapes: as in `kernel_forward.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import scores, tables, tiles
from cope_sweep.kernels.triton_attention.tiles import FAR, LOG2E

TILES = tl.constexpr(128)
"""Number of tiles of queries for which a program reads at once whether they are plain."""


@triton.jit
def tiles_of_queries(
    n, head, plain_end, lengths, b, T, S, first_row, launch_rows,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, PLAIN_T: tl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_T queries, counted from the first of the launch, and the row after the last token's.

    None before `start` attends to a key of tile `n`, from `end` on there are no tokens, and from `general_end` on this
    tile is plain for all queries. Returns rows_end, start, general_end, end.
    """
    rows_end = T
    if lengths is not None:
        rows_end = tl.minimum(T, (tl.load(lengths + b) - (S - T)).to(tl.int32))
    sees = n * BLOCK_S - (S - T) < rows_end  # whether any query attends to the tile
    end = tl.where(sees, tl.cdiv(tl.maximum(tl.minimum(rows_end - first_row, launch_rows), 0), BLOCK_T), 0)
    start = tl.maximum(n * BLOCK_S - (S - T) - first_row, 0) // BLOCK_T
    general_end = start
    for first in tl.range(start, end, TILES, num_stages=1):
        each = first + tl.arange(0, TILES)
        rows = first_row + each * BLOCK_T
        begins = tl.load(plain_end + head.to(tl.int64) * T + rows, mask=(rows < T) & (each < end), other=FAR)
        general_end = tl.maximum(general_end, tl.max(tl.where(begins < (n + 1) * BLOCK_S, each + 1, 0), 0))
    general_end = tl.maximum(start, tl.minimum(general_end, end))
    general_end = tl.cdiv(general_end, PLAIN_T // BLOCK_T) * (PLAIN_T // BLOCK_T)
    return rows_end, start, general_end, end


@triton.jit
def plain_tiles(
    dk_tile, dv_tile, dbias_c, start, end, k_tile, v_tile, q, q_t, do, do_t, records, bias_c, slope_h, seeds, b, h, j,
    T, S, first_row, rows_end, scale, threshold, survival,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, PLAIN_T: tl.constexpr,
):  # fmt: skip
    """The gradients of keys, values and biases of keys by tiles of PLAIN_T queries, added. `records`: of the launch."""
    for plain in range(start, end):
        tile_row = first_row + plain * PLAIN_T
        r = tl.arange(0, PLAIN_T)
        i = tile_row + (S - T) + r
        valid = r < rows_end - tile_row
        q_tile = tiles.load(q + tile_row.to(tl.int64) * q_t, r, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = tiles.load(do + tile_row.to(tl.int64) * do_t, r, do_t, valid, HEAD_DIM, BLOCK_K)
        delta_r, _lse, far, _ds = tables.load_record(records + plain * PLAIN_T * 4 + r.to(tl.int64) * 4)
        s = scores.plain(k_tile, q_tile, scale, far, slope_h, i, j, bias_c, True, PRECISION)
        da = tiles.dot(v_tile, tl.trans(do_tile), PRECISION)
        row_keys = tiles.keys_of_rows(seeds, b, h, i) if DROPOUT else None
        kept_a, ds = scores.gradients(tiles.exp2(s), da, delta_r, row_keys, j, threshold, survival, DROPOUT, True)
        if bias_c is not None:
            dbias_c += tl.sum(ds, 1)
        dv_tile += tiles.dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        dk_tile += tiles.dot(ds.to(q_tile.dtype), q_tile, PRECISION)
    return dk_tile, dv_tile, dbias_c


@triton.jit(do_not_specialize=tiles.SIZES)
def backward_keys(
    q, k, v, base_q, gate_k, e, m, gate_bias, knots, segment_slope, segment_intercept,
    relative, distance_bias, distance_slope, key_bias, lengths, seeds,
    do, plain_end,
    z_table, relative_table,  # as in `backward_rows`
    row_records,  # (heads of this launch, launch_rows, 4)
    edge_records,  # (heads of this launch, tiles of keys + 1, launch_rows, 4); or None
    dk, dv,
    dgate_k,  # None: gates use the logits
    dkey_bias,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bq_b, bq_h, bq_t, gk_b, gk_h, gk_t, do_b, do_h, do_t,
    H, T, S, P, R, D, M,
    scale, limit, threshold, survival,
    first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS_T: tl.constexpr,  # BLOCK_T of `backward_rows`
    WIDE: tl.constexpr,  # as there
    ADD: tl.constexpr,  # add to the gradients of the heads of this launch, which earlier launches have stored
    NEAR: tl.constexpr,  # then dk, dv and dkey_bias are float32, of the heads of this launch
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of general tiles
    PLAIN_T: tl.constexpr,  # of plain tiles: a multiple of BLOCK_T
):  # fmt: skip
    n = tl.program_id(0)
    head, b, h = tiles.head_of_program(first_head, H)
    j = n * BLOCK_S + tl.arange(0, BLOCK_S)
    CONTEXTUAL: tl.constexpr = (e is not None) or (m is not None) or (knots is not None)
    WITH_INTEGER: tl.constexpr = (m is not None) or (knots is not None)
    OWN_GATES: tl.constexpr = gate_k is not None

    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    k_tile = tiles.load(k, j, k_t, j < S, HEAD_DIM, BLOCK_K)
    v_tile = tiles.load(v, j, v_t, j < S, HEAD_DIM, BLOCK_K)
    dk_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    dv_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if OWN_GATES:
        gate_k_tile = tiles.load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
        dgate_k_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    bias_c = None
    if key_bias is not None:
        bias_c = scores.load_key_bias(key_bias + head.to(tl.int64) * S, j, S)
    dbias_c = tl.zeros((BLOCK_S,), tl.float32)
    scratch_rows = tl.program_id(1).to(tl.int64) * launch_rows
    if CONTEXTUAL:
        c = tl.arange(0, BLOCK_S)
        from_here = (c[:, None] <= c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] >= c[None, :]).to(tl.float32).to(tl.bfloat16)
        key_tiles = tl.cdiv(S, BLOCK_S)
        edges = edge_records + tl.program_id(1).to(tl.int64) * (key_tiles + 1) * launch_rows * 4
    m_h = tl.load(m + h) if m is not None else None
    slope_h = tl.load(distance_slope + h) if distance_slope is not None else None
    bias_h = distance_bias + h * D if distance_bias is not None else None

    rows_end, start, general_end, end = tiles_of_queries(
        n, head, plain_end, lengths, b, T, S, first_row, launch_rows, BLOCK_S, BLOCK_T, PLAIN_T
    )
    t = tl.arange(0, BLOCK_T)
    of_t = t.to(tl.int64) * 4
    for tile in tl.range(start, tl.minimum(general_end, end)):
        tile_row = first_row + tile * BLOCK_T
        valid = tile_row + t < rows_end
        q_tile = tiles.load(q, tile_row + t, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = tiles.load(do, tile_row + t, do_t, valid, HEAD_DIM, BLOCK_K)
        delta_r, lse_r, _far, _ds = tables.load_record(row_records + (scratch_rows + tile * BLOCK_T) * 4 + of_t)
        # Rows without a token attend to keys, too: their lse is infinite, so their weights are 0.
        first_i = tile_row + (S - T)
        on_diagonal = n * BLOCK_S + BLOCK_S - 1 > first_i
        s = scores.logits(k_tile, q_tile, scale, (j - first_i)[:, None], t[None, :], on_diagonal, PRECISION)
        z_rows, relative_rows = None, None
        if e is not None:
            tile_of_rows = tile * BLOCK_T // ROWS_T * ROWS_T
            z_rows = z_table + (scratch_rows + tile_of_rows) * P
        if relative is not None:
            relative_rows = relative_table + (scratch_rows + tile * BLOCK_T) * R
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_q_tile = q_tile
                if base_q is not None:
                    gate_q_rows = base_q + b * bq_b + h * bq_h
                    gate_q_tile = tiles.load(gate_q_rows, tile_row + t, bq_t, valid, HEAD_DIM, BLOCK_K)
                gate_logits = scores.logits(
                    gate_k_tile, gate_q_tile, scale, (j - first_i)[:, None], t[None, :], on_diagonal, PRECISION
                )
            gate_logits = scores.with_gate_bias(gate_logits, gate_bias, h)
            gate, _high, _low, sums_from = scores.gates_and_sums(gate_logits, from_here, True)
            gate_slope = tiles.gate_slope(gate)
            # A tile that is plain for these rows, but not for later ones, has no record: its keys are saturated. Tiles
            # become plain for as many rows at a time as the forward kernel's tiles have, a multiple of BLOCK_T.
            begin = tables.gather(plain_end + head.to(tl.int64) * T, tile_row)
            edge = edges + tl.where(begin < (n + 1) * BLOCK_S, n, key_tiles).to(tl.int64) * launch_rows * 4
            pos_frac, origin, dp_before, last_place = tables.load_record(edge + tile * (BLOCK_T * 4) + of_t)
            positions = tiles.positions_of(sums_from, pos_frac[None, :])
            slope = None
            if e is not None:
                row_starts = (tile * BLOCK_T - tile_of_rows + t) * P
                table = (z_rows + row_starts)[None, :] if WIDE else z_rows
                last = P - 1 if WIDE else (row_starts + P - 1)[None, :]
                to_last = tl.maximum(P - 1 - last_place, 0.0) if WITH_INTEGER else last_place
                _index, _floor, _frac, slope, value = scores.of_table(
                    table, origin[None, :], to_last[None, :], last, positions, PAIRS
                )
                s += LOG2E * value
            if WITH_INTEGER:
                p = last_place[None, :] + positions
            if m is not None:
                s += LOG2E * m_h * p
            if knots is not None:
                slopes, intercepts, starts = scores.segments_of_queries(
                    segment_slope, segment_intercept, head.to(tl.int64) * T + tile_row, valid, M
                )
                _clamped, _segment, slope, value = scores.of_segments(
                    knots, slopes, intercepts, starts[None, :], p, limit, STEPS
                )
                s += LOG2E * value
        distance = tl.where(valid, tile_row + (S - T) + t, -1)[None, :] - j[:, None]
        s = scores.with_other_terms(s, distance, relative_rows, R, bias_h, D, slope_h, bias_c, FAR_LAST, True)
        a = tiles.exp2(s - lse_r[None, :])
        da = tiles.dot(v_tile, tl.trans(do_tile), PRECISION)
        row_keys = tiles.keys_of_rows(seeds, b, h, tile_row + (S - T) + t) if DROPOUT else None
        kept_a, ds = scores.gradients(a, da, delta_r, row_keys, j, threshold, survival, DROPOUT, True)
        if key_bias is not None:
            dbias_c += tl.sum(ds, 1)
        dv_tile += tiles.dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        if CONTEXTUAL:
            dp = scores.position_gradients(ds, slope, m_h)
            dgate = dp_before[None, :] + tiles.cumulative(dp, up_to_here, True, PARTS)
            dlogits = dgate * gate_slope
            if OWN_GATES:
                dgate_k_tile += tiles.dot(dlogits.to(gate_q_tile.dtype), gate_q_tile, PRECISION)
            else:
                ds += dlogits
        dk_tile += tiles.dot(ds.to(q_tile.dtype), q_tile, PRECISION)

    if not NEAR:
        dk_tile, dv_tile, dbias_c = plain_tiles(
            dk_tile, dv_tile, dbias_c, general_end * BLOCK_T // PLAIN_T, tl.cdiv(end * BLOCK_T, PLAIN_T),
            k_tile, v_tile, q, q_t, do, do_t, row_records + scratch_rows * 4, bias_c, slope_h, seeds, b, h, j,
            T, S, first_row, rows_end, scale, threshold, survival, DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_T,
        )  # fmt: skip

    of_launch = tl.program_id(1).to(tl.int64) * S + j
    of_all = head.to(tl.int64) * S + j
    keys = of_launch if ADD or NEAR else of_all
    tiles.store(dk, keys, dk_tile * scale, j < S, HEAD_DIM, BLOCK_K, ADD)
    tiles.store(dv, keys, dv_tile, j < S, HEAD_DIM, BLOCK_K, ADD)
    if OWN_GATES:
        tiles.store(dgate_k, of_launch if ADD else of_all, dgate_k_tile * scale, j < S, HEAD_DIM, BLOCK_K, ADD)
    if key_bias is not None:
        if ADD:
            dbias_c += tl.load(dkey_bias + keys, mask=j < S, other=0.0)
        tl.store(dkey_bias + keys, dbias_c.to(dkey_bias.dtype.element_ty), mask=j < S)
