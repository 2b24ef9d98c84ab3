"""The backward kernel along rows: a program computes a tile of queries, and visits keys from the first to the query.

It computes the gradients of queries, and this tile's part of the gradients of all tables. For `backward_keys` it stores
tables, and positions and Σ dp at the edges of tiles.

Gates are subtracted from the position here: the gradient of a gate is the sum over all positions from the row's first
key to its own, dg_ik = Σ_{j ≤ k} dp_ij.

**The gradient of a table needs no atomics.** Let f_j = ⌊p_ij⌋, which does not increase along a row. The prefix sum C of
ds over the keys so far, stored where f goes from n + 1 to n, is C[n] = Σ_{f_j > n} ds; entry n gets C[n − 1] − C[n].
Each is stored once, in `prefix_sums`. There are two: of ds·(1 − w) for entry f, and of ds·w for entry f + 1, where w is
the fraction. Parts of tiles are summed afterwards, in a fixed order, so gradients have the same bits in every run.

Shapes: as in `kernel_forward.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import tiles
from cope_sweep.kernels.triton_attention.tiles import FAR, LOG2E


@triton.jit
def from_prefix_sums(sums, starts, n, below_sum, above_sum, first_entry, valid, P):
    """The gradients of entries `n` of the rows' tables, float32 (rows, entries).

    Prefix sums at the first key's entry and above are 0, and were not stored; the one at −1 is that of the whole row.
    """
    n = n[None, :]
    below_n = tl.load(sums + starts + n * 2, mask=valid[:, None] & (n < first_entry), other=0.0)
    inside = valid[:, None] & (n >= 1) & (n - 1 < first_entry)
    below_1 = tl.where(n < 1, below_sum[:, None], tl.load(sums + starts + n * 2 - 2, mask=inside, other=0.0))
    above_1 = tl.load(sums + starts + n * 2 - 1, mask=inside, other=0.0)
    inside = valid[:, None] & (n >= 2) & (n - 2 < first_entry)
    above_2 = tl.where(n == 1, above_sum[:, None], tl.load(sums + starts + n * 2 - 3, mask=inside, other=0.0))
    return tl.where(n < P, below_1 - below_n + above_2 - above_1, 0.0)


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
def table_gradients(
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


@triton.jit(do_not_specialize=["H", "T", "S", "P", "R", "D", "N", "threshold", "first_head", "launch_rows", "first_row"])
def backward_rows(
    q, k, v, base_q, gate_k, e, m, relative, distance_bias, distance_slope, lengths, seed,
    o, do, lse, plain_end, end_pos_int, end_pos_frac,
    delta,  # out: Σ_k do·o, for the column kernel
    far_score,  # out: the bias of plain tiles minus lse, in base 2, for the column kernel
    dq,
    dbase_q,  # None: added to dq
    dm_rows,  # each row's part of the gradient of m
    z_table, relative_table,  # scratch, as in the forward kernel; the column kernel reads them
    prefix_sums,  # scratch (heads of this launch, launch_rows, P, 2): the two prefix sums where an entry's keys end
    by_distance,  # scratch (heads of this launch, launch_rows, N): ds by distance
    e_parts,  # out (heads of this launch, tiles, P, K): each tile's part of the gradient of e
    relative_parts,  # out (heads of this launch, tiles, R, K)
    bias_parts,  # out (heads of this launch, tiles, D)
    edge_pos_int,  # out (heads of this launch, tile of keys, launch_rows): the position at its right edge
    edge_pos_frac,
    edge_dp,  # Σ dp of all keys before the tile
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bq_b, bq_h, bq_t, gk_b, gk_h, gk_t, do_b, do_h, do_t,
    e_h, r_h,
    H, T, S, P, R, D,
    N,  # the larger of R and D
    scale, e_scale, relative_scale, threshold, survival,
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
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of general tiles
    PLAIN_S: tl.constexpr,  # of plain tiles: a multiple of BLOCK_S, and a divisor of the forward kernel's
    EDGE: tl.constexpr,  # keys in a tile of the column kernel: a multiple of BLOCK_S
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = first_head + tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    i = first_row + tile * BLOCK_T + (S - T) + t
    row = i - (S - T)
    valid = row < T
    if lengths is not None:
        valid = valid & (i < tl.load(lengths + b))
    CONTEXTUAL: tl.constexpr = (e is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_k is not None
    DISTANCES: tl.constexpr = (relative is not None) or (distance_bias is not None)

    rows = head.to(tl.int64) * T + row
    scratch_row = tl.program_id(1).to(tl.int64) * launch_rows + tile * BLOCK_T
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    q_tile = tiles.load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
    base_q_tile = q_tile
    if base_q is not None:
        base_q_tile = tiles.load(base_q + b * bq_b + h * bq_h, row, bq_t, valid, HEAD_DIM, BLOCK_K)
    do_tile = tiles.load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
    o_tile = tiles.load(o, rows, HEAD_DIM, valid, HEAD_DIM, BLOCK_K)
    delta_r = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + rows, delta_r, mask=row < T)
    lse_r = tl.load(lse + rows, mask=valid, other=float("inf"))  # rows without a token have weights 0
    dq_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    dbase_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32) if OWN_GATES else None
    m_h = tl.load(m + h) if m is not None else None
    slope_h = tl.load(distance_slope + h) if distance_slope is not None else None
    bias_h = distance_bias + h * D if distance_bias is not None else None
    row_keys = tiles.keys_of_rows(seed, head, i) if DROPOUT else None

    # Tables, as far as positions reach.
    seen_to = tl.where(valid, i, -1)
    last_i = tl.max(seen_to, 0)
    begin = tl.load(plain_end + head.to(tl.int64) * T + tl.min(row, 0))
    begin = tl.where(begin < FAR, begin, 0)
    if CONTEXTUAL:
        pos_int = tl.load(end_pos_int + rows, mask=valid, other=0)
        pos_frac = tl.load(end_pos_frac + rows, mask=valid, other=0)
    z_rows = None
    if e is not None:
        z_rows = z_table + scratch_row * P
        e += h * e_h
        top = tl.minimum(tl.max(tl.where(valid, pos_int, 0), 0) + 1, P - 1)
        for start in tl.range(0, top + 1, BLOCK_P, num_stages=1):
            tiles.fill_table(
                z_rows, start, base_q_tile, e, e_scale, P, PAIRS, PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_P
            )
    relative_rows = None
    if relative is not None:
        relative_rows = relative_table + scratch_row * R
        relative += h * r_h
        for start in tl.range(0, tl.minimum(R, last_i + 1), BLOCK_R, num_stages=1):
            tiles.fill_table(
                relative_rows, start, base_q_tile, relative, relative_scale, R,
                "", PRECISION, HEAD_DIM, BLOCK_T, BLOCK_K, BLOCK_R,
            )  # fmt: skip
    if (relative is not None) or (e is not None):
        tl.debug_barrier()

    # Plain tiles.
    far = tiles.far_score(
        z_rows, t * P, P, relative_rows, t * R, R, bias_h, D, valid & (begin + tl.zeros_like(row) > 0), FAR_LAST, PAIRS, BLOCK_T
    )
    far -= lse_r
    tl.store(far_score + rows, far, mask=row < T)
    ds_plain = tl.zeros((BLOCK_T,), tl.float32)
    for plain in range(begin // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = tiles.load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        v_tile = tiles.load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        s = tiles.dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E) + far[:, None]
        if slope_h is not None:
            s += (slope_h * LOG2E) * (i[:, None] - j[None, :]).to(tl.float32)
        a = tiles.exp2(s)
        da = tiles.dot(do_tile, tl.trans(v_tile), PRECISION)
        if DROPOUT:
            da = tl.where(tiles.kept(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        ds_plain += tl.sum(ds, 1)
        dq_tile += tiles.dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    # General tiles, in the same direction.
    if CONTEXTUAL:
        c = tl.arange(0, BLOCK_S)
        from_here = (c[:, None] >= c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] <= c[None, :]).to(tl.float32).to(tl.bfloat16)
        dp_before = tl.zeros((BLOCK_T,), tl.float32)
        edges = tl.program_id(1).to(tl.int64) * tl.cdiv(S, EDGE) * launch_rows + tile * BLOCK_T
        local = tl.where(row < T, t, -1)
        dm_r = tl.zeros((BLOCK_T,), tl.float32)
    if e is not None:
        prefix_sums += scratch_row * P * 2
        below_sum = ds_plain
        above_sum = tl.zeros((BLOCK_T,), tl.float32)
    if DISTANCES:
        by_distance += scratch_row * N
        relative_far = ds_plain
        bias_far = ds_plain
    for n in tl.range(begin // BLOCK_S, tl.cdiv(last_i + 1, BLOCK_S), num_stages=1):
        j = n * BLOCK_S + tl.arange(0, BLOCK_S)
        visible = j[None, :] <= seen_to[:, None]
        k_tile = tiles.load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        v_tile = tiles.load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        s = tl.where(visible, tiles.dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E), float("-inf"))
        distance = i[:, None] - j[None, :]
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_k_tile = tiles.load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
                gate_logits = tiles.dot(base_q_tile, tl.trans(gate_k_tile), PRECISION) * (scale * LOG2E)
                gate_logits = tl.where(visible, gate_logits, float("-inf"))
            gate = tiles.gate_of(gate_logits)
            units = tiles.units_of(gate)
            pos_int, pos_frac = tiles.advance(pos_int, pos_frac, -tl.sum(units, 1))
            edge = edges + n // (EDGE // BLOCK_S) * launch_rows
            if n % (EDGE // BLOCK_S) == EDGE // BLOCK_S - 1:
                tiles.scatter(edge_pos_int + edge, local, pos_int)
                tiles.scatter(edge_pos_frac + edge, local, pos_frac)
            if n % (EDGE // BLOCK_S) == 0:
                tiles.scatter(edge_dp + edge, local, dp_before)
            ahead = tiles.units_from(units, from_here, False)
            positions = pos_frac[:, None] + ahead  # units from pos_int on
            # Computed before the products below, so that fewer registers are live during them.
            gate_slope = gate - gate * gate
            if e is not None:
                row_index, limit = tiles.table_row(t * P, pos_int, P - 1)
                entry, frac = tiles.entry_of(row_index[:, None], limit[:, None], positions)
                next_entry, _next_frac = tiles.entry_of(row_index[:, None], limit[:, None], positions - units)
                at = tl.where(next_entry < entry, next_entry, -1)
                value, slope = tiles.look_up_with_slope(z_rows, entry, frac, (t * P + P - 1)[:, None], PAIRS)
                s += LOG2E * value
            if m is not None:
                p = tiles.to_float(pos_int[:, None], positions)
                s += LOG2E * m_h * p
        s += LOG2E * tiles.distance_scores(distance, relative_rows, (t * R)[:, None], R, bias_h, D, slope_h, FAR_LAST)
        a = tiles.exp2(s - lse_r[:, None])
        da = tiles.dot(do_tile, tl.trans(v_tile), PRECISION)
        if DROPOUT:
            da = tl.where(tiles.kept(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        if DISTANCES:
            inside = visible & (distance < N)
            tiles.scatter(by_distance, tl.where(inside, (t * N)[:, None] + distance, -1), ds)
            if relative is not None:
                relative_far += tl.sum(tl.where(distance >= R - 1, ds, 0.0), 1)
            if distance_bias is not None:
                bias_far += tl.sum(tl.where(distance >= D - 1, ds, 0.0), 1)
        if CONTEXTUAL:
            dp = tl.zeros_like(ds)
            if e is not None:
                dp += ds * slope
            if m is not None:
                dp += ds * m_h
                dm_r += tl.sum(ds * p, 1)
            dgate = dp_before[:, None] + tiles.cumulative(dp, up_to_here, False, PARTS)
            dp_before += tl.sum(dp, 1)
            dlogits = dgate * gate_slope
            if e is not None:
                above = tiles.rounded(ds * frac, PARTS)
                below = tiles.rounded(ds - above, PARTS)
                below_sums = below_sum[:, None] + tiles.cumulative(below, up_to_here, False, PARTS)
                above_sums = above_sum[:, None] + tiles.cumulative(above, up_to_here, False, PARTS)
                tiles.scatter_pairs(prefix_sums, at, below_sums, above_sums)
                below_sum += tl.sum(below, 1)
                above_sum += tl.sum(above, 1)
            if OWN_GATES:
                dbase_tile += tiles.dot(dlogits.to(gate_k_tile.dtype), gate_k_tile, PRECISION)
            else:
                ds += dlogits
        dq_tile += tiles.dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    # Tables.
    if m is not None:
        tl.store(dm_rows + rows, tl.where(valid, dm_r, 0.0), mask=row < T)
    if base_q is not None:
        tiles.store(dq, rows, dq_tile * scale, row < T, HEAD_DIM, BLOCK_K)
        dq = dbase_q
        dq_tile = dbase_tile if OWN_GATES else tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    elif OWN_GATES:
        dq_tile += dbase_tile
    dq_tile *= scale
    if (e is not None) or DISTANCES:
        tl.debug_barrier()  # the stores above are read below by other threads of this program
    # Loaded again, so that they occupy no registers before.
    if base_q is not None:
        base_q_tile = tiles.load(base_q + b * bq_b + h * bq_h, row, bq_t, valid, HEAD_DIM, BLOCK_K)
    else:
        base_q_tile = tiles.load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
    if e is not None:
        first_entry = tl.minimum(tl.load(end_pos_int + rows, mask=valid, other=0), P - 1)
        e_parts += part * P * HEAD_DIM
        store_zeros(e_parts, tl.cdiv(top + 1, BLOCK_P) * BLOCK_P, P, HEAD_DIM, BLOCK_K, BLOCK_P)
        for start in tl.range(0, top + 1, BLOCK_P, num_stages=1):
            entries = start + tl.arange(0, BLOCK_P)
            dz = from_prefix_sums(
                prefix_sums, (t * P * 2)[:, None], entries, below_sum, above_sum, first_entry[:, None], valid, P
            )
            dq_tile = table_gradients(
                dz, entries, base_q_tile, dq_tile, e, e_parts, e_scale, P, PRECISION, HEAD_DIM, BLOCK_K
            )
    if DISTANCES:
        starts = (t * N)[:, None]
        if relative is not None:
            relative_parts += part * R * HEAD_DIM
            last = tl.minimum(R, last_i + 1)
            store_zeros(relative_parts, tl.cdiv(last, BLOCK_R) * BLOCK_R, R, HEAD_DIM, BLOCK_K, BLOCK_R)
            for start in tl.range(0, last, BLOCK_R, num_stages=1):
                entries = start + tl.arange(0, BLOCK_R)
                dz = of_distances(by_distance, starts, entries, i, relative_far, valid, R, FAR_LAST)
                dq_tile = table_gradients(
                    dz, entries, base_q_tile, dq_tile, relative, relative_parts, relative_scale, R,
                    PRECISION, HEAD_DIM, BLOCK_K,
                )  # fmt: skip
        if distance_bias is not None:
            for start in tl.range(0, D, BLOCK_R, num_stages=1):
                entries = start + tl.arange(0, BLOCK_R)
                db = tl.sum(of_distances(by_distance, starts, entries, i, bias_far, valid, D, True), 0)
                tl.store(bias_parts + part * D + entries, db, mask=entries < D)
    tiles.store(dq, rows, dq_tile, row < T, HEAD_DIM, BLOCK_K)
