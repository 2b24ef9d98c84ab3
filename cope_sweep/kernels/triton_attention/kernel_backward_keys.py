"""The backward kernel along columns: a program computes a tile of keys, and visits the tiles of queries that see it.

It computes the gradients of keys, values and gate keys from what `backward_rows` has stored. No two programs write to
the same memory, so gradients have the same bits in every run. Keys are the first axis of a tile, so that the factors of
q and do need no transposition.

**Records** of four float32 numbers hold what it needs of a query, so that a thread gets each with one load:

- in `row_records`: Σ_k do·o; the log-sum-exp; the bias of plain tiles minus that; the fourth is not used;
- in `edge_records`, for each tile of keys: of the position at its right edge, the fraction, and the first number of
  `table_row`, plus the row's start in the table, if not WIDE; Σ dp of all keys before the tile; the second number of
  `table_row`, or with `m` or segments the integer of the position. In place of a tile after the last, those of any tile
  whose keys are all saturated.

Shapes: as in `kernel_forward.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import tables, tiles
from cope_sweep.kernels.triton_attention.tiles import FAR, LOG2E

TILES = tl.constexpr(128)
"""Tiles of queries of which a program reads at a time whether they are plain."""


@triton.jit
def score_gradients(
    a, da, delta, row_keys, j, threshold, survival, DROPOUT: tl.constexpr
):  # fmt: skip
    """The weights after dropout, and the gradients of the scores."""
    kept_a = a
    if DROPOUT:
        kept = tiles.kept(row_keys[None, :], j[:, None], threshold)
        kept_a = tl.where(kept, a / survival, 0.0)
        da = tl.where(kept, da / survival, 0.0)
    return kept_a, a * (da - delta[None, :])


@triton.jit(
    do_not_specialize=["H", "T", "S", "P", "R", "D", "M", "threshold", "first_head", "launch_rows", "first_row"]
)
def backward_keys(
    q, k, v, base_q, gate_k, e, m, knots, segment_slope, segment_intercept,
    relative, distance_bias, distance_slope, key_bias, lengths, seeds,
    do, plain_end,
    z_table, relative_table,  # as in `backward_rows`
    row_records,  # (heads of this launch, launch_rows, 4)
    edge_records,  # (heads of this launch, tiles of keys + 1, launch_rows, 4); or None
    dk, dv,
    dgate_k,  # None: gates see the logits
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
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of general tiles
    PLAIN_T: tl.constexpr,  # of plain tiles: a multiple of BLOCK_T
):  # fmt: skip
    n = tl.program_id(0)
    head = first_head + tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    j = n * BLOCK_S + tl.arange(0, BLOCK_S)
    CONTEXTUAL: tl.constexpr = (e is not None) or (m is not None) or (knots is not None)
    WITH_INTEGER: tl.constexpr = (m is not None) or (knots is not None)
    OWN_GATES: tl.constexpr = gate_k is not None

    k_tile = tiles.load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
    v_tile = tiles.load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
    dk_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    dv_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if OWN_GATES:
        gate_k_tile = tiles.load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
        dgate_k_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if key_bias is not None:
        bias_c = tables.load_key_bias(key_bias + head.to(tl.int64) * S, j, S)
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

    # Tiles of queries, counted from the first of the launch: before `start` none sees a key, from `end` on there are no
    # tokens, and from `general_end` on this tile is plain for all queries.
    rows_end = T
    if lengths is not None:
        rows_end = tl.minimum(T, (tl.load(lengths + b) - (S - T)).to(tl.int32))
    sees = n * BLOCK_S - (S - T) < rows_end  # whether any query sees the tile
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

    t = tl.arange(0, BLOCK_T)
    of_t = t.to(tl.int64) * 4
    q_rows = q + b * q_b + h * q_h
    do_rows = do + b * do_b + h * do_h
    for tile in tl.range(start, tl.minimum(general_end, end)):
        tile_row = first_row + tile * BLOCK_T
        valid = tile_row + t < rows_end
        q_tile = tiles.load(q_rows, tile_row + t, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = tiles.load(do_rows, tile_row + t, do_t, valid, HEAD_DIM, BLOCK_K)
        delta_r, lse_r, _far, _none = tables.load_record(row_records + (scratch_rows + tile * BLOCK_T) * 4 + of_t)
        s = tiles.dot(k_tile, tl.trans(q_tile), PRECISION) * (scale * LOG2E)
        # Rows without a token see keys, too: their lse is infinite, so their weights are 0.
        first_i = tile_row + (S - T)
        on_diagonal = n * BLOCK_S + BLOCK_S - 1 > first_i
        if on_diagonal:
            s = tl.where((j - first_i)[:, None] <= t[None, :], s, float("-inf"))
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
                gate_logits = tiles.dot(gate_k_tile, tl.trans(gate_q_tile), PRECISION) * (scale * LOG2E)
                if on_diagonal:
                    gate_logits = tl.where((j - first_i)[:, None] <= t[None, :], gate_logits, float("-inf"))
            gate = tiles.gate_of(gate_logits)
            high, low = tiles.halves(gate)
            gate_slope = tiles.gate_slope(gate)
            # A tile that is plain for these rows, but not for later ones, has no record: its keys are saturated. Tiles
            # become plain for as many rows at a time as the forward kernel's tiles have, a multiple of BLOCK_T.
            begin = tables.gather(plain_end + head.to(tl.int64) * T, tile_row)
            edge = edges + tl.where(begin < (n + 1) * BLOCK_S, n, key_tiles).to(tl.int64) * launch_rows * 4
            pos_frac, origin, dp_before, last_place = tables.load_record(edge + tile * (BLOCK_T * 4) + of_t)
            sums_from = tiles.sums_from(high, low, from_here, True)
            positions = tiles.positions_of(sums_from, pos_frac[None, :])
            if e is not None:
                row_starts = (tile * BLOCK_T - tile_of_rows + t) * P
                table = (z_rows + row_starts)[None, :] if WIDE else z_rows
                last = P - 1 if WIDE else (row_starts + P - 1)[None, :]
                to_last = tl.maximum(P - 1 - last_place, 0.0) if WITH_INTEGER else last_place
                index, _floor, frac = tables.entry_of(origin[None, :], to_last[None, :], positions)
                entry, step = tables.entry_and_step(table, index, last, PAIRS)
                slope = tl.where(frac > 0, step, 0.0)
                s += LOG2E * (entry + frac * step)
            if WITH_INTEGER:
                p = last_place[None, :] + positions
            if m is not None:
                s += LOG2E * m_h * p
            if knots is not None:
                clamped = tl.minimum(p, limit)
                of_tile = (head.to(tl.int64) * T + tile_row) * M
                index = (tl.where(valid, t, 0) * M)[None, :] + tables.segment_of(knots, clamped, STEPS)
                slope, value = tables.slope_and_score(
                    segment_slope + of_tile, segment_intercept + of_tile, index, clamped
                )
                slope = tl.where(p <= limit, slope, 0.0)
                s += LOG2E * value
        if (relative is not None) or (distance_bias is not None) or (distance_slope is not None):
            row_tables = (relative_rows + t * R)[None, :] if relative is not None else None
            distance = tl.where(valid, tile_row + (S - T) + t, -1)[None, :] - j[:, None]
            s += LOG2E * tables.distance_scores(distance, row_tables, R, bias_h, D, slope_h, FAR_LAST)
        if key_bias is not None:
            s += bias_c[:, None]
        a = tiles.exp2(s - lse_r[None, :])
        da = tiles.dot(v_tile, tl.trans(do_tile), PRECISION)
        row_keys = tiles.keys_of_rows(seeds, b, h, tile_row + (S - T) + t) if DROPOUT else None
        kept_a, ds = score_gradients(a, da, delta_r, row_keys, j, threshold, survival, DROPOUT)
        if key_bias is not None:
            dbias_c += tl.sum(ds, 1)
        dv_tile += tiles.dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        if CONTEXTUAL:
            dp = tl.zeros_like(ds)
            if (e is not None) or (knots is not None):
                dp += ds * slope
            if m is not None:
                dp += ds * m_h
            dgate = dp_before[None, :] + tiles.cumulative(dp, up_to_here, True, PARTS)
            dlogits = dgate * gate_slope
            if OWN_GATES:
                dgate_k_tile += tiles.dot(dlogits.to(gate_q_tile.dtype), gate_q_tile, PRECISION)
            else:
                ds += dlogits
        dk_tile += tiles.dot(ds.to(q_tile.dtype), q_tile, PRECISION)

    for plain in range(general_end * BLOCK_T // PLAIN_T, tl.cdiv(end * BLOCK_T, PLAIN_T)):
        tile_row = first_row + plain * PLAIN_T
        r = tl.arange(0, PLAIN_T)
        i = tile_row + (S - T) + r
        valid = r < rows_end - tile_row
        q_tile = tiles.load(q_rows + tile_row.to(tl.int64) * q_t, r, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = tiles.load(do_rows + tile_row.to(tl.int64) * do_t, r, do_t, valid, HEAD_DIM, BLOCK_K)
        delta_r, _lse, far, _none = tables.load_record(
            row_records + (scratch_rows + plain * PLAIN_T) * 4 + r.to(tl.int64) * 4
        )
        s = tiles.dot(k_tile, tl.trans(q_tile), PRECISION) * (scale * LOG2E) + far[None, :]
        if slope_h is not None:
            s += (slope_h * LOG2E) * (i[None, :] - j[:, None]).to(tl.float32)
        if key_bias is not None:
            s += bias_c[:, None]
        da = tiles.dot(v_tile, tl.trans(do_tile), PRECISION)
        row_keys = tiles.keys_of_rows(seeds, b, h, i) if DROPOUT else None
        kept_a, ds = score_gradients(tiles.exp2(s), da, delta_r, row_keys, j, threshold, survival, DROPOUT)
        if key_bias is not None:
            dbias_c += tl.sum(ds, 1)
        dv_tile += tiles.dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        dk_tile += tiles.dot(ds.to(q_tile.dtype), q_tile, PRECISION)

    keys = (tl.program_id(1) if ADD else head).to(tl.int64) * S + j
    tiles.store(dk, keys, dk_tile * scale, j < S, HEAD_DIM, BLOCK_K, ADD)
    tiles.store(dv, keys, dv_tile, j < S, HEAD_DIM, BLOCK_K, ADD)
    if OWN_GATES:
        tiles.store(dgate_k, keys, dgate_k_tile * scale, j < S, HEAD_DIM, BLOCK_K, ADD)
    if key_bias is not None:
        if ADD:
            dbias_c += tl.load(dkey_bias + keys, mask=j < S, other=0.0)
        tl.store(dkey_bias + keys, dbias_c.to(dkey_bias.dtype.element_ty), mask=j < S)
