"""The Triton kernels of `triton_attention.py`: forward, two backward kernels, and the functions that they share.

A program of a row kernel computes a tile of queries and loops over tiles of keys. A program of the column kernel
computes a tile of keys and loops over the tiles of queries that see it. A tile of scores is *general* or *plain*. In a
plain tile, every query has reached the last position and the last distance of its tables: the bias is one number per
query, gates have no gradient, and the computation is flash attention (Dao et al. 2022).

    forward        visits keys from the query to earlier tokens: a position is the sum of the gates from the key to the
                   query. Stores where the plain tiles of a row end, and the row's position there.
    backward_rows  visits keys in the opposite direction and subtracts gates from the position: the gradient of a gate
                   is the sum over all positions from the row's first key to its own, dg_ik = Σ_{j ≤ k} dp_ij. Computes
                   dq and the gradients of all tables; stores position and Σ dp at the edges of general tiles.
    backward_keys  reads these, and computes dk and dv. No two programs write to the same memory, so gradients have the
                   same bits in every run.

**Positions are fixed-point numbers**, integers (`pos_int`) and fractions (`pos_frac`) in units of 2⁻²²: their sums are
exact in any order. Within a tile they are summed by a product with a triangular matrix of ones, in two halves of 11
bits that float16 holds exactly. This needs no scan, hence no shuffles. A gate is at most 1, so neighbours differ by at
most one table entry.

**The gradient of a table needs no atomics.** Let f_j = ⌊p_ij⌋, which does not increase along a row. The prefix sum C of
ds over the keys so far, stored where f goes from n + 1 to n, is C[n] = Σ_{f_j > n} ds; entry n gets C[n − 1] − C[n].
Each is stored once, in `prefix_sums`. There are two: of ds·(1 − w) for entry f, and of ds·w for entry f + 1, where w is
the fraction.

Shapes: T queries (the last of S tokens), S keys, K head dim; in names, r rows (queries) and c columns (keys) of a tile.
Tensors are (B, H, T or S, ·), contiguous where no strides are given.
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


# Shared functions -----------------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, accumulated in float32."""
    if INTERPRETED:  # NumPy has no bfloat16: the interpreter would multiply its bits as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load(base, at, stride, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load the vectors with indices `at` as rows; 0 where not `inside` and beyond the head dim."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None]
    if HEAD_DIM != BLOCK_K:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(base + at.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, at, value, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Store rows as contiguous vectors with indices `at`."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(base + at.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _gate(logits, visible):
    """σ(logits), and its value in units of 1/UNITS, rounded; 0 units where not visible."""
    gate = 1.0 / (1.0 + tl.exp2(logits * -LOG2E))
    units = tl.where(visible, (gate * UNITS + 0.5).to(tl.int32), 0)
    return gate, units


@triton.jit
def _units_from(units, triangle, KEYS_FIRST: tl.constexpr):
    """Sums of the tile's units from each key on; exact, because float16 and float32 hold both halves exactly."""
    high = (units >> HALF_BITS).to(tl.float16)
    low = (units & (HALF - 1)).to(tl.float16)
    if KEYS_FIRST:
        high_sum = _dot(triangle, high, "ieee")
        low_sum = _dot(triangle, low, "ieee")
    else:
        high_sum = _dot(high, triangle, "ieee")
        low_sum = _dot(low, triangle, "ieee")
    return (high_sum.to(tl.int32) << HALF_BITS) + low_sum.to(tl.int32)


@triton.jit
def _advance(pos_int, pos_frac, units):
    """A position plus some units, which may be negative."""
    pos_frac = pos_frac + units
    return pos_int + (pos_frac >> UNIT_BITS), pos_frac & (UNITS - 1)


@triton.jit
def _entry(pos_int, pos_frac, last):
    """The table entry at or below a position, and the fraction to the next entry: 0 from the last entry on."""
    inside = (pos_int >= 0) & (pos_int < last)
    frac = tl.where(inside, pos_frac.to(tl.float32) * (1.0 / UNITS), 0.0)
    return tl.minimum(tl.maximum(pos_int, 0), last), frac


@triton.jit
def _look_up(z_rows, entry, frac, last, inside, PAIRS: tl.constexpr):
    """The interpolated table entry at a position, and its slope: 0 where ⌈p⌉ = ⌊p⌋, as in the paper's listing.

    PAIRS: type of z if each entry is packed with the next one, "bf16" or "fp16"; "" if z is float32 and not packed.
    """
    if PAIRS == "":
        below = tl.load(z_rows + entry, mask=inside, other=0.0)
        above = tl.load(z_rows + tl.minimum(entry + 1, last), mask=inside, other=0.0)
    else:
        pair = tl.load(z_rows + entry, mask=inside, other=0)
        if PAIRS == "bf16":
            below = (pair << 16).to(tl.float32, bitcast=True)
            above = (pair & -65536).to(tl.float32, bitcast=True)
        else:
            below = (pair & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            above = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    slope = tl.where(frac > 0, above - below, 0.0)
    return below + frac * slope, slope


@triton.jit
def _last_entry(z_row, last, inside, PAIRS: tl.constexpr):
    """Each row's last entry of z."""
    if PAIRS == "":
        value = tl.load(z_row + last, mask=inside, other=0.0)
    elif PAIRS == "bf16":
        value = (tl.load(z_row + last, mask=inside, other=0) << 16).to(tl.float32, bitcast=True)
    else:
        pair = tl.load(z_row + last, mask=inside, other=0)
        value = (pair & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _cumulative(values, triangle, KEYS_FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Sums of the tile's values up to each key, by a product with a triangle of ones (bfloat16).

    PARTS: number of bfloat16 numbers that represent each value: 2 hold 16 bits of it, 3 all 24 of a float32.
    """
    part = values.to(tl.bfloat16)
    rest = values - part.to(tl.float32)
    total = _dot(triangle, part, "ieee") if KEYS_FIRST else _dot(part, triangle, "ieee")
    for _ in tl.static_range(PARTS - 1):
        part = rest.to(tl.bfloat16)
        rest = rest - part.to(tl.float32)
        if KEYS_FIRST:
            total += _dot(triangle, part, "ieee")
        else:
            total += _dot(part, triangle, "ieee")
    return total


@triton.jit
def _row_keys(seed, head, i):
    """The key of each query's row in `dropout.dropout_mask`."""
    x = (head.to(tl.uint64) << 32) | i.to(tl.uint64)
    x = x * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32)


@triton.jit
def _dropout_mask(row_keys, j, threshold):
    """`dropout.dropout_mask` of a tile; `row_keys` and key indices `j` are broadcast."""
    x = row_keys + j.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit
def forward(
    q,
    k,
    v,
    gate_q,  # None: gates see the logits
    gate_k,
    z,  # LookUp, packed or float32; or None
    m,  # Slope, float32; or None
    relative,  # RelativeLookUp; or None
    far_slope,  # DistanceSlope, float32; or None
    lengths,  # or None
    o,
    lse,  # of the rows' scores, in base 2
    plain_end,  # int32: the first key that is not in a plain tile
    end_pos_int,  # int32: integer part of the position of that key
    end_pos_frac,  # int32: its fraction, in units
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    gq_b,
    gq_h,
    gq_t,
    gk_b,
    gk_h,
    gk_t,
    H,
    T,
    S,
    P,
    R,
    scale,
    seed,
    threshold,  # `dropout.threshold` − 2³¹
    survival,  # 1 − the dropout
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    BUCKET: tl.constexpr,  # of T, for the tuner
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of general tiles
    PLAIN_S: tl.constexpr,  # of plain tiles, which need fewer registers: a multiple of BLOCK_S
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    i = row + (S - T)
    valid = row < T
    if lengths is not None:
        valid = valid & (i < tl.load(lengths + b))
    CONTEXTUAL: tl.constexpr = (z is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_q is not None

    rows = head.to(tl.int64) * T + row
    q_tile = _load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
    if OWN_GATES:
        gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, valid, HEAD_DIM, BLOCK_K)
    triangle = (tl.arange(0, BLOCK_S)[:, None] >= tl.arange(0, BLOCK_S)[None, :]).to(tl.float16)
    if m is not None:
        m_h = tl.load(m + h)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)
    if DROPOUT:
        row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)

    row_max = tl.full((BLOCK_T,), NONE_YET, tl.float32)
    weight = tl.zeros((BLOCK_T,), tl.float32)
    sums = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    # Rows without a token are past the last position, so that other rows do not wait for them.
    pos_int = tl.where(valid, 0, FAR)
    pos_frac = tl.zeros((BLOCK_T,), tl.int32)

    n = tl.cdiv(tl.max(tl.where(valid, i + 1, 0), 0), BLOCK_S) - 1
    any_key = n >= 0
    first_i = tile * BLOCK_T + (S - T)
    is_general = any_key
    while is_general:
        j = n * BLOCK_S + tl.arange(0, BLOCK_S)
        visible = j[None, :] <= i[:, None]
        k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION) * scale
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_k_tile = _load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
                gate_logits = _dot(gate_q_tile, tl.trans(gate_k_tile), PRECISION) * scale
            _gates, units = _gate(gate_logits, visible)
            pos_ints, pos_fracs = _advance(pos_int[:, None], pos_frac[:, None], _units_from(units, triangle, False))
            if z is not None:
                entry, frac = _entry(pos_ints, pos_fracs, P - 1)
                value, _slope = _look_up((z + rows * P)[:, None], entry, frac, P - 1, valid[:, None], PAIRS)
                s += value
            if m is not None:
                s += m_h * (pos_ints.to(tl.float32) + pos_fracs.to(tl.float32) * (1.0 / UNITS))
            pos_int, pos_frac = _advance(pos_int, pos_frac, tl.sum(units, 1))
        distance = i[:, None] - j[None, :]
        if relative is not None:
            near = visible & valid[:, None]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[:, None] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        s = tl.where(visible, s * LOG2E, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        rescale = tl.exp2(row_max - new_max)
        a = tl.exp2(s - new_max[:, None])
        weight = weight * rescale + tl.sum(a, 1)
        if DROPOUT:
            a = tl.where(_dropout_mask(row_keys[:, None], j[None, :], threshold), a, 0.0)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        sums = sums * rescale[:, None] + _dot(a.to(v_tile.dtype), v_tile, PRECISION)
        row_max = new_max
        n -= 1
        # The next tile is plain if all its keys are visible, saturated, and farther than the table of distances.
        last_j = n * BLOCK_S + BLOCK_S - 1
        general = last_j > first_i
        if m is not None:
            general = True
        elif z is not None:
            general = general | (tl.min(pos_int, 0) < P - 1)
        if relative is not None:
            general = general | (first_i - last_j < R)
        is_general = (n >= 0) & (general | ((n + 1) % (PLAIN_S // BLOCK_S) != 0))

    begin = (n + 1) * BLOCK_S
    tl.store(plain_end + rows, tl.where(any_key, begin, FAR) + tl.zeros_like(row), mask=row < T)
    if CONTEXTUAL:
        tl.store(end_pos_int + rows, pos_int, mask=row < T)
        tl.store(end_pos_frac + rows, pos_frac, mask=row < T)

    constant = tl.zeros((BLOCK_T,), tl.float32)
    if z is not None:
        constant += _last_entry(z + rows * P, P - 1, valid, PAIRS)
    if (relative is not None) and FAR_LAST:
        constant += tl.load(relative + rows * R + (R - 1), mask=valid, other=0.0).to(tl.float32)
    for plain in range(begin // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E) + (constant * LOG2E)[:, None]
        if far_slope is not None:
            s += (far_slope_h * LOG2E) * (i[:, None] - j[None, :]).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        rescale = tl.exp2(row_max - new_max)
        a = tl.exp2(s - new_max[:, None])
        weight = weight * rescale + tl.sum(a, 1)
        if DROPOUT:
            a = tl.where(_dropout_mask(row_keys[:, None], j[None, :], threshold), a, 0.0)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        sums = sums * rescale[:, None] + _dot(a.to(v_tile.dtype), v_tile, PRECISION)
        row_max = new_max

    weight = tl.where(valid, weight, 1.0)
    out = tl.where(valid[:, None], sums / (weight * survival)[:, None], 0.0)
    _store(o, rows, out, row < T, HEAD_DIM, BLOCK_K)
    tl.store(lse + rows, tl.where(valid, row_max + tl.log2(weight), 0.0), mask=row < T)


# Backward, along rows -------------------------------------------------------------------------------------------------


@triton.jit
def backward_rows(
    q,
    k,
    v,
    gate_q,
    gate_k,
    z,
    m,
    relative,
    far_slope,
    lengths,
    o,
    do,
    lse,
    plain_end,
    end_pos_int,
    end_pos_frac,
    delta,  # out: Σ_k do·o, for the column kernel
    dq,
    dgate_q,
    dz,
    dm_rows,  # each row's part of the gradient of m
    drelative,
    prefix_sums,  # workspace (B, H, row of this launch, P, 2): the two prefix sums where an entry's keys end
    edge_pos_int,  # out (B, H, tile of keys, row of this launch): the position at a general tile's right edge
    edge_pos_frac,
    edge_dp,  # Σ dp of all keys before the tile
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    gq_b,
    gq_h,
    gq_t,
    gk_b,
    gk_h,
    gk_t,
    do_b,
    do_h,
    do_t,
    H,
    T,
    S,
    P,
    R,
    scale,
    seed,
    threshold,
    survival,
    first_row,  # of this launch
    launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of general tiles
    PLAIN_S: tl.constexpr,  # of plain tiles: a multiple of BLOCK_S, and a divisor of the forward kernel's
    BLOCK_T: tl.constexpr,
):
    local = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = first_row + local
    i = row + (S - T)
    valid = row < T
    if lengths is not None:
        valid = valid & (i < tl.load(lengths + b))
    CONTEXTUAL: tl.constexpr = (z is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_q is not None

    rows = head.to(tl.int64) * T + row
    q_tile = _load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
    do_tile = _load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
    o_tile = _load(o, rows, HEAD_DIM, valid, HEAD_DIM, BLOCK_K)
    delta_r = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + rows, delta_r, mask=row < T)
    lse_r = tl.load(lse + rows, mask=valid, other=float("inf"))  # rows without a token have weights 0
    dq_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if OWN_GATES:
        gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, valid, HEAD_DIM, BLOCK_K)
        dgate_q_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if m is not None:
        m_h = tl.load(m + h)
        dm_r = tl.zeros((BLOCK_T,), tl.float32)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)
    if DROPOUT:
        row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)

    # Plain tiles.
    tiles = tl.cdiv(tl.max(tl.where(valid, i + 1, 0), 0), BLOCK_S)
    begin = tl.load(plain_end + head.to(tl.int64) * T + tl.min(row, 0))
    begin = tl.where(begin < FAR, begin, 0)
    constant = tl.zeros((BLOCK_T,), tl.float32)
    if z is not None:
        constant += _last_entry(z + rows * P, P - 1, valid, PAIRS)
    if (relative is not None) and FAR_LAST:
        constant += tl.load(relative + rows * R + (R - 1), mask=valid, other=0.0).to(tl.float32)
    ds_plain = tl.zeros((BLOCK_T,), tl.float32)
    for plain in range(begin // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E) + (constant * LOG2E - lse_r)[:, None]
        if far_slope is not None:
            s += (far_slope_h * LOG2E) * (i[:, None] - j[None, :]).to(tl.float32)
        a = tl.exp2(s)
        da = _dot(do_tile, tl.trans(v_tile), PRECISION)
        if DROPOUT:
            da = tl.where(_dropout_mask(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        ds_plain += tl.sum(ds, 1)
        dq_tile += _dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    # General tiles, in the same direction.
    if CONTEXTUAL:
        c = tl.arange(0, BLOCK_S)
        from_here = (c[:, None] >= c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] <= c[None, :]).to(tl.float32).to(tl.bfloat16)
        pos_int = tl.load(end_pos_int + rows, mask=valid, other=FAR)
        pos_frac = tl.load(end_pos_frac + rows, mask=valid, other=0)
        dp_before = tl.zeros((BLOCK_T,), tl.float32)
        edges = head.to(tl.int64) * tl.cdiv(S, BLOCK_S) * launch_rows + local
    if z is not None:
        first_entry, _first_frac = _entry(pos_int, pos_frac, P - 1)
        prefix_sum_rows = prefix_sums + (head.to(tl.int64) * launch_rows + local) * P * 2
        below_sum = ds_plain
        above_sum = tl.zeros((BLOCK_T,), tl.float32)
    ds_far = ds_plain
    for n in tl.range(begin // BLOCK_S, tiles, num_stages=1):
        j = n * BLOCK_S + tl.arange(0, BLOCK_S)
        visible = j[None, :] <= i[:, None]
        k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION) * scale
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_k_tile = _load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
                gate_logits = _dot(gate_q_tile, tl.trans(gate_k_tile), PRECISION) * scale
            gate, units = _gate(gate_logits, visible)
            pos_int, pos_frac = _advance(pos_int, pos_frac, -tl.sum(units, 1))
            edge = edges + n * launch_rows
            tl.store(edge_pos_int + edge, pos_int, mask=row < T)
            tl.store(edge_pos_frac + edge, pos_frac, mask=row < T)
            tl.store(edge_dp + edge, dp_before, mask=row < T)
            ahead = _units_from(units, from_here, False)
            pos_ints, pos_fracs = _advance(pos_int[:, None], pos_frac[:, None], ahead)
            # Computed before the products below, so that fewer registers are live during them.
            gate_slope = tl.where(visible, gate * (1.0 - gate), 0.0)
            if z is not None:
                entry, frac = _entry(pos_ints, pos_fracs, P - 1)
                next_pos_ints, next_pos_fracs = _advance(pos_int[:, None], pos_frac[:, None], ahead - units)
                next_entry, _next_frac = _entry(next_pos_ints, next_pos_fracs, P - 1)
                next_lower_entry = tl.where((next_entry < entry) & valid[:, None], next_entry, -1)
                value, slope = _look_up((z + rows * P)[:, None], entry, frac, P - 1, valid[:, None], PAIRS)
                s += value
            if m is not None:
                p = pos_ints.to(tl.float32) + pos_fracs.to(tl.float32) * (1.0 / UNITS)
                s += m_h * p
        distance = i[:, None] - j[None, :]
        if relative is not None:
            near = visible & valid[:, None]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[:, None] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        a = tl.where(visible, tl.exp2(s * LOG2E - lse_r[:, None]), 0.0)
        da = _dot(do_tile, tl.trans(v_tile), PRECISION)
        if DROPOUT:
            da = tl.where(_dropout_mask(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        if relative is not None:
            last = R - 1 if FAR_LAST else R
            at = (drelative + rows * R)[:, None] + distance
            inside = visible & valid[:, None] & (distance < last)
            tl.store(at, ds.to(drelative.dtype.element_ty), mask=inside)
            ds_far += tl.sum(tl.where(distance >= R - 1, ds, 0.0), 1)
        if CONTEXTUAL:
            dp = tl.zeros_like(ds)
            if z is not None:
                dp += ds * slope
                above = ds * frac
                below = ds - above
                at = prefix_sum_rows[:, None] + next_lower_entry * 2
                enters_lower = next_lower_entry >= 0
                tl.store(at, below_sum[:, None] + _cumulative(below, up_to_here, False, PARTS), mask=enters_lower)
                tl.store(at + 1, above_sum[:, None] + _cumulative(above, up_to_here, False, PARTS), mask=enters_lower)
                below_sum += tl.sum(below, 1)
                above_sum += tl.sum(above, 1)
            if m is not None:
                dp += ds * m_h
                dm_r += tl.sum(ds * p, 1)
            dgate = dp_before[:, None] + _cumulative(dp, up_to_here, False, PARTS)
            dp_before += tl.sum(dp, 1)
            dlogits = dgate * gate_slope
            if OWN_GATES:
                dgate_q_tile += _dot(dlogits.to(gate_k_tile.dtype), gate_k_tile, PRECISION)
            else:
                ds += dlogits
        dq_tile += _dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    _store(dq, rows, dq_tile * scale, row < T, HEAD_DIM, BLOCK_K)
    if OWN_GATES:
        _store(dgate_q, rows, dgate_q_tile * scale, row < T, HEAD_DIM, BLOCK_K)
    if m is not None:
        tl.store(dm_rows + rows, tl.where(valid, dm_r, 0.0), mask=row < T)
    if (relative is not None) and FAR_LAST:
        at = drelative + rows * R + (R - 1)
        tl.store(at, ds_far.to(drelative.dtype.element_ty), mask=valid)
    if z is not None:
        tl.debug_barrier()  # the stores above are read below by other threads of this program
        for start in range(0, P, BLOCK_P):
            entry_n = (start + tl.arange(0, BLOCK_P))[None, :]
            # Prefix sums at the first key's entry and above are 0; the one at −1 is that of the whole row.
            first_key_entry = first_entry[:, None]
            at = prefix_sum_rows[:, None] + entry_n * 2
            below_n = tl.load(at, mask=valid[:, None] & (entry_n < first_key_entry), other=0.0)
            inside = valid[:, None] & (entry_n >= 1) & (entry_n - 1 < first_key_entry)
            below_1 = tl.where(entry_n < 1, below_sum[:, None], tl.load(at - 2, mask=inside, other=0.0))
            above_1 = tl.load(at - 1, mask=inside, other=0.0)
            inside = valid[:, None] & (entry_n >= 2) & (entry_n - 2 < first_key_entry)
            above_2 = tl.where(entry_n == 1, above_sum[:, None], tl.load(at - 3, mask=inside, other=0.0))
            value = below_1 - below_n + above_2 - above_1
            inside = (row < T)[:, None] & (entry_n < P)
            tl.store((dz + rows * P)[:, None] + entry_n, value.to(dz.dtype.element_ty), mask=inside)


# Backward, along columns ----------------------------------------------------------------------------------------------


@triton.jit
def backward_keys(
    q,
    k,
    v,
    gate_q,
    gate_k,
    z,
    m,
    relative,
    far_slope,
    lengths,
    do,
    lse,
    plain_end,
    delta,
    edge_pos_int,
    edge_pos_frac,
    edge_dp,
    dk,
    dv,
    dgate_k,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    gq_b,
    gq_h,
    gq_t,
    gk_b,
    gk_h,
    gk_t,
    do_b,
    do_h,
    do_t,
    H,
    T,
    S,
    P,
    R,
    scale,
    seed,
    threshold,
    survival,
    first_row,
    launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FAR_LAST: tl.constexpr,
    DROPOUT: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BUCKET: tl.constexpr,
    EDGE: tl.constexpr,  # the row kernel's BLOCK_S
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,  # of general tiles
    PLAIN_T: tl.constexpr,  # of plain tiles: a multiple of BLOCK_T
    TILES: tl.constexpr,  # a power of 2; TILES·BLOCK_T rows at least are the launch's
):
    """Keys are the first axis of a tile here, so that the factors of q and do need no transposition."""
    n = tl.program_id(0)
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    j = n * BLOCK_S + tl.arange(0, BLOCK_S)
    CONTEXTUAL: tl.constexpr = (z is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_q is not None

    k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
    v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
    dk_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    dv_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if OWN_GATES:
        gate_k_tile = _load(gate_k + b * gk_b + h * gk_h, j, gk_t, j < S, HEAD_DIM, BLOCK_K)
        dgate_k_tile = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if CONTEXTUAL:
        c = tl.arange(0, BLOCK_S)
        from_here = (c[:, None] <= c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] >= c[None, :]).to(tl.float32).to(tl.bfloat16)
        # The first and the last of the row kernel's tiles in this one.
        left = n * (BLOCK_S // EDGE)
        right = left + BLOCK_S // EDGE - 1
        edges = head.to(tl.int64) * tl.cdiv(S, EDGE) * launch_rows
    if m is not None:
        m_h = tl.load(m + h)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)

    # Tiles of queries, counted from the first of the launch: before `start` none sees a key, from `end` on there are no
    # tokens, and from `general_end` on this tile is plain for all queries.
    rows_end = T
    if lengths is not None:
        rows_end = tl.minimum(T, (tl.load(lengths + b) - (S - T)).to(tl.int32))
    end = tl.cdiv(tl.maximum(tl.minimum(rows_end - first_row, launch_rows), 0), BLOCK_T)
    start = tl.maximum(n * BLOCK_S - (S - T) - first_row, 0) // BLOCK_T
    each = tl.arange(0, TILES)
    tile_row = first_row + each * BLOCK_T
    begins = tl.load(plain_end + head.to(tl.int64) * T + tile_row, mask=(tile_row < T) & (each < end), other=FAR)
    general_end = tl.max(tl.where(begins < (n + 1) * BLOCK_S, each + 1, 0), 0)
    general_end = tl.maximum(start, tl.minimum(general_end, end))
    general_end = tl.cdiv(general_end, PLAIN_T // BLOCK_T) * (PLAIN_T // BLOCK_T)

    for tile in tl.range(start, general_end, num_stages=1):
        local = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        row = first_row + local
        i = row + (S - T)
        valid = row < rows_end
        rows = head.to(tl.int64) * T + row
        visible = j[:, None] <= i[None, :]
        q_tile = _load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = _load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
        lse_r = tl.load(lse + rows, mask=valid, other=float("inf"))  # rows without a token have weights 0
        delta_r = tl.load(delta + rows, mask=valid, other=0.0)
        s = _dot(k_tile, tl.trans(q_tile), PRECISION) * scale
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, valid, HEAD_DIM, BLOCK_K)
                gate_logits = _dot(gate_k_tile, tl.trans(gate_q_tile), PRECISION) * scale
            gate, units = _gate(gate_logits, visible)
            gate_slope = tl.where(visible, gate * (1.0 - gate), 0.0)
            # A tile that is plain for these rows, but not for later ones, has no stored edge: its keys are saturated.
            begin = tl.load(plain_end + rows, mask=valid, other=FAR)
            seen = valid & (right * EDGE <= i)
            edge = seen & (begin <= right * EDGE)
            at = edges + right * launch_rows + local
            pos_int = tl.where(seen, tl.load(edge_pos_int + at, mask=edge, other=FAR), 0)
            pos_frac = tl.load(edge_pos_frac + at, mask=edge, other=0)
            at = edges + left * launch_rows + local
            dp_before = tl.load(edge_dp + at, mask=valid & (begin <= left * EDGE) & (left * EDGE <= i), other=0.0)
            pos_ints, pos_fracs = _advance(pos_int[None, :], pos_frac[None, :], _units_from(units, from_here, True))
            if z is not None:
                entry, frac = _entry(pos_ints, pos_fracs, P - 1)
                value, slope = _look_up((z + rows * P)[None, :], entry, frac, P - 1, valid[None, :], PAIRS)
                s += value
            if m is not None:
                s += m_h * (pos_ints.to(tl.float32) + pos_fracs.to(tl.float32) * (1.0 / UNITS))
        distance = i[None, :] - j[:, None]
        if relative is not None:
            near = visible & valid[None, :]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[None, :] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        a = tl.where(visible & valid[None, :], tl.exp2(s * LOG2E - lse_r[None, :]), 0.0)
        da = _dot(v_tile, tl.trans(do_tile), PRECISION)
        kept_a = a
        if DROPOUT:
            row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)
            kept = _dropout_mask(row_keys[None, :], j[:, None], threshold)
            kept_a = tl.where(kept, a / survival, 0.0)
            da = tl.where(kept, da / survival, 0.0)
        dv_tile += _dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        ds = a * (da - delta_r[None, :])
        if CONTEXTUAL:
            dp = tl.zeros_like(ds)
            if z is not None:
                dp += ds * slope
            if m is not None:
                dp += ds * m_h
            dgate = dp_before[None, :] + _cumulative(dp, up_to_here, True, PARTS)
            dlogits = dgate * gate_slope
            if OWN_GATES:
                dgate_k_tile += _dot(dlogits.to(gate_q_tile.dtype), gate_q_tile, PRECISION)
            else:
                ds += dlogits
        dk_tile += _dot(ds.to(q_tile.dtype), q_tile, PRECISION)

    for plain in range(general_end * BLOCK_T // PLAIN_T, tl.cdiv(end * BLOCK_T, PLAIN_T)):
        local = plain * PLAIN_T + tl.arange(0, PLAIN_T)
        row = first_row + local
        i = row + (S - T)
        valid = row < rows_end
        rows = head.to(tl.int64) * T + row
        q_tile = _load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K)
        do_tile = _load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
        delta_r = tl.load(delta + rows, mask=valid, other=0.0)
        constant = -tl.load(lse + rows, mask=valid, other=float("inf"))
        if z is not None:
            constant += _last_entry(z + rows * P, P - 1, valid, PAIRS) * LOG2E
        if (relative is not None) and FAR_LAST:
            constant += tl.load(relative + rows * R + (R - 1), mask=valid, other=0.0).to(tl.float32) * LOG2E
        s = _dot(k_tile, tl.trans(q_tile), PRECISION) * (scale * LOG2E) + constant[None, :]
        if far_slope is not None:
            s += (far_slope_h * LOG2E) * (i[None, :] - j[:, None]).to(tl.float32)
        a = tl.exp2(s)
        da = _dot(v_tile, tl.trans(do_tile), PRECISION)
        kept_a = a
        if DROPOUT:
            row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)
            kept = _dropout_mask(row_keys[None, :], j[:, None], threshold)
            kept_a = tl.where(kept, a / survival, 0.0)
            da = tl.where(kept, da / survival, 0.0)
        dv_tile += _dot(kept_a.to(do_tile.dtype), do_tile, PRECISION)
        ds = a * (da - delta_r[None, :])
        dk_tile += _dot(ds.to(q_tile.dtype), q_tile, PRECISION)

    keys = head.to(tl.int64) * S + j
    _store(dk, keys, dk_tile * scale, j < S, HEAD_DIM, BLOCK_K)
    _store(dv, keys, dv_tile, j < S, HEAD_DIM, BLOCK_K)
    if OWN_GATES:
        _store(dgate_k, keys, dgate_k_tile * scale, j < S, HEAD_DIM, BLOCK_K)
