"""The GPU's part of `triton_attention.py`: three Triton kernels, and the pieces of a tile that they share.

One program of a row kernel owns a tile of queries and walks the tiles of keys; one program of the column kernel owns
a tile of keys and walks the queries that see it. A tile of scores is *general*, or *plain*: in a plain one every query
has passed the last position and the last distance that differs: its bias is one number per query, its gates have no
gradient, and what is left is flash attention (Dao et al. 2022).

    forward        from the query's own tile leftwards: a position is the sum of the gates from the key to the query.
                   Leaves where its plain tiles end, and each row's position there.
    backward_rows  rightwards, taking gates off the position again, for a gate's gradient is the sum of those of all
                   positions from the row's first key up to its own: dg_ik = Σ_{j ≤ k} dp_ij. Gives dq and every table's
                   gradient, and leaves both running sums at the edges of general tiles.
    backward_keys  reads these and gives dk, dv: no kernel adds to memory that another program writes, so that gradients
                   are the same at every run.

**Positions are whole numbers of 2⁻²²**, so that their sums have no rounding and no order. Inside a tile they are
summed by a product with a triangle of ones, in two halves of 11 bits that float16 holds exactly: no scan, and so no
shuffles. Since a gate is at most 1, neighbours differ by at most one table entry, exactly.

**The gradient of a table without atomics.** Let f_j = ⌊p_ij⌋, which only falls along a row. The sum C of ds over the
keys so far, stored where f falls from n + 1 to n, is C[n] = Σ_{f_j > n} ds, and entry n gets C[n − 1] − C[n]. Each is
stored once. Two such sums are kept: of ds·(1 − w), for entry f, and of ds·w, for entry f + 1, w being the fraction.

Shapes: T queries (the last of S tokens), S keys, K head dim; in names, r rows (queries) and c columns (keys) of a tile.
Tensors are (B, H, T or S, ·), contiguous where no strides are given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run as NumPy, on the CPU (TRITON_INTERPRET=1, read when this module is imported)."""
LOG2E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(4194304)
"""2²²: positions are counted in 1/UNITS."""
UNIT_BITS = tl.constexpr(22)
HALF = tl.constexpr(2048)
HALF_BITS = tl.constexpr(11)
FAR = tl.constexpr(1 << 30)
"""More than any position or token."""
NONE_YET = tl.constexpr(-1e30)
"""A maximum of nothing; finite, so that a row of a tile in which all is hidden makes no NaN."""


# Pieces ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, added up in float32."""
    if INTERPRETED:  # NumPy has no bfloat16, and the interpreter multiplies its bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load(base, at, stride, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Vectors number `at`, as rows; 0 where not `inside`, and beyond the head dim."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None]
    if HEAD_DIM != BLOCK_K:
        mask = mask & (d < HEAD_DIM)[None, :]
    return tl.load(base + at.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, at, value, inside, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """The inverse of `_load`, where vectors lie one behind the other."""
    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(base + at.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _gate(logits, visible):
    """σ(logits), and the same in whole units; 0 units where not visible."""
    gate = 1.0 / (1.0 + tl.exp2(logits * -LOG2E))
    units = tl.where(visible, (gate * UNITS + 0.5).to(tl.int32), 0)
    return gate, units


@triton.jit
def _units_from(units, triangle, KEYS_FIRST: tl.constexpr):
    """Σ of the tile's units from each key on: exact, both halves being integers that float16 and float32 hold."""
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
def _moved(whole, part, units):
    """A position, moved on by some units (back, where they are negative)."""
    part = part + units
    return whole + (part >> UNIT_BITS), part & (UNITS - 1)


@triton.jit
def _entry(whole, part, last):
    """Which table entry a position is above, and how far it is on the way to the next: 0 from the last entry on."""
    inside = (whole >= 0) & (whole < last)
    way = tl.where(inside, part.to(tl.float32) * (1.0 / UNITS), 0.0)
    return tl.minimum(tl.maximum(whole, 0), last), way


@triton.jit
def _look_up(z_rows, entry, way, last, inside, PAIRS: tl.constexpr):
    """What a position adds to the score, and the slope there. As in the listing, where ⌈p⌉ = ⌊p⌋ the slope is 0.

    PAIRS: what z is packed of, each entry beside the next: "bf16", "fp16", or "" where z is float32 and not packed.
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
    slope = tl.where(way > 0, above - below, 0.0)
    return below + way * slope, slope


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
def _running(values, triangle, KEYS_FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Σ of the tile's values up to each key, by a product with a triangle of ones (bfloat16).

    PARTS: how many bfloat16 numbers stand for each value: 2 hold 16 bits of it, 3 all 24 of a float32.
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
    """`dropout.keep`'s key of each query's row."""
    x = (head.to(tl.uint64) << 32) | i.to(tl.uint64)
    x = x * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32)


@triton.jit
def _kept(row_keys, j, threshold):
    """`dropout.keep` of a tile: row keys and keys' numbers, shaped to be broadcast."""
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
    whole_there,  # int32: the position of that key, whole
    part_there,  # and its fraction, in units
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
    PLAIN_S: tl.constexpr,  # of plain ones, which need fewer registers: a multiple of BLOCK_S
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    i = row + (S - T)
    real = row < T
    if lengths is not None:
        real = real & (i < tl.load(lengths + b))
    CONTEXTUAL: tl.constexpr = (z is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_q is not None

    rows = head.to(tl.int64) * T + row
    q_tile = _load(q + b * q_b + h * q_h, row, q_t, real, HEAD_DIM, BLOCK_K)
    if OWN_GATES:
        gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, real, HEAD_DIM, BLOCK_K)
    triangle = (tl.arange(0, BLOCK_S)[:, None] >= tl.arange(0, BLOCK_S)[None, :]).to(tl.float16)
    if m is not None:
        m_h = tl.load(m + h)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)
    if DROPOUT:
        row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)

    top = tl.full((BLOCK_T,), NONE_YET, tl.float32)
    weight = tl.zeros((BLOCK_T,), tl.float32)
    sums = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    # Rows that are none have passed the last position: they hold no other back.
    whole = tl.where(real, 0, FAR)
    part = tl.zeros((BLOCK_T,), tl.int32)

    n = tl.cdiv(tl.max(tl.where(real, i + 1, 0), 0), BLOCK_S) - 1
    any_key = n >= 0
    first_i = tile * BLOCK_T + (S - T)
    going = any_key
    while going:
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
            wholes, parts = _moved(whole[:, None], part[:, None], _units_from(units, triangle, False))
            if z is not None:
                entry, way = _entry(wholes, parts, P - 1)
                value, _slope = _look_up((z + rows * P)[:, None], entry, way, P - 1, real[:, None], PAIRS)
                s += value
            if m is not None:
                s += m_h * (wholes.to(tl.float32) + parts.to(tl.float32) * (1.0 / UNITS))
            whole, part = _moved(whole, part, tl.sum(units, 1))
        distance = i[:, None] - j[None, :]
        if relative is not None:
            near = visible & real[:, None]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[:, None] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        s = tl.where(visible, s * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        fading = tl.exp2(top - new_top)
        a = tl.exp2(s - new_top[:, None])
        weight = weight * fading + tl.sum(a, 1)
        if DROPOUT:
            a = tl.where(_kept(row_keys[:, None], j[None, :], threshold), a, 0.0)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        sums = sums * fading[:, None] + _dot(a.to(v_tile.dtype), v_tile, PRECISION)
        top = new_top
        n -= 1
        # The next tile is plain if it hides nothing, and neither positions nor distances matter any longer.
        last_j = n * BLOCK_S + BLOCK_S - 1
        general = last_j > first_i
        if m is not None:
            general = True
        elif z is not None:
            general = general | (tl.min(whole, 0) < P - 1)
        if relative is not None:
            general = general | (first_i - last_j < R)
        going = (n >= 0) & (general | ((n + 1) % (PLAIN_S // BLOCK_S) != 0))

    begin = (n + 1) * BLOCK_S
    tl.store(plain_end + rows, tl.where(any_key, begin, FAR) + tl.zeros_like(row), mask=row < T)
    if CONTEXTUAL:
        tl.store(whole_there + rows, whole, mask=row < T)
        tl.store(part_there + rows, part, mask=row < T)

    constant = tl.zeros((BLOCK_T,), tl.float32)
    if z is not None:
        constant += _last_entry(z + rows * P, P - 1, real, PAIRS)
    if (relative is not None) and FAR_LAST:
        constant += tl.load(relative + rows * R + (R - 1), mask=real, other=0.0).to(tl.float32)
    for plain in range(begin // PLAIN_S):
        j = plain * PLAIN_S + tl.arange(0, PLAIN_S)
        k_tile = _load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K)
        s = _dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E) + (constant * LOG2E)[:, None]
        if far_slope is not None:
            s += (far_slope_h * LOG2E) * (i[:, None] - j[None, :]).to(tl.float32)
        new_top = tl.maximum(top, tl.max(s, 1))
        fading = tl.exp2(top - new_top)
        a = tl.exp2(s - new_top[:, None])
        weight = weight * fading + tl.sum(a, 1)
        if DROPOUT:
            a = tl.where(_kept(row_keys[:, None], j[None, :], threshold), a, 0.0)
        v_tile = _load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K)
        sums = sums * fading[:, None] + _dot(a.to(v_tile.dtype), v_tile, PRECISION)
        top = new_top

    weight = tl.where(real, weight, 1.0)
    out = tl.where(real[:, None], sums / (weight * survival)[:, None], 0.0)
    _store(o, rows, out, row < T, HEAD_DIM, BLOCK_K)
    tl.store(lse + rows, tl.where(real, top + tl.log2(weight), 0.0), mask=row < T)


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
    whole_there,
    part_there,
    delta,  # out: Σ_k do·o, for the column kernel
    dq,
    dgate_q,
    dz,
    dm_rows,  # each row's part
    drelative,
    fallen,  # workspace (B, H, row of this launch, P, 2): the two running sums where an entry's run of keys ends
    edge_whole,  # out (B, H, tile of keys, row of this launch): the position at a general tile's right edge
    edge_part,
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
    PLAIN_S: tl.constexpr,  # of plain ones: a multiple of BLOCK_S, and a divisor of the forward kernel's
    BLOCK_T: tl.constexpr,
):
    local = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = first_row + local
    i = row + (S - T)
    real = row < T
    if lengths is not None:
        real = real & (i < tl.load(lengths + b))
    CONTEXTUAL: tl.constexpr = (z is not None) or (m is not None)
    OWN_GATES: tl.constexpr = gate_q is not None

    rows = head.to(tl.int64) * T + row
    q_tile = _load(q + b * q_b + h * q_h, row, q_t, real, HEAD_DIM, BLOCK_K)
    do_tile = _load(do + b * do_b + h * do_h, row, do_t, real, HEAD_DIM, BLOCK_K)
    o_tile = _load(o, rows, HEAD_DIM, real, HEAD_DIM, BLOCK_K)
    delta_r = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + rows, delta_r, mask=row < T)
    lse_r = tl.load(lse + rows, mask=real, other=float("inf"))  # of rows that are none, all weights are 0
    dq_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if OWN_GATES:
        gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, real, HEAD_DIM, BLOCK_K)
        dgate_q_tile = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    if m is not None:
        m_h = tl.load(m + h)
        dm_r = tl.zeros((BLOCK_T,), tl.float32)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)
    if DROPOUT:
        row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)

    # Plain tiles.
    tiles = tl.cdiv(tl.max(tl.where(real, i + 1, 0), 0), BLOCK_S)
    begin = tl.load(plain_end + head.to(tl.int64) * T + tl.min(row, 0))
    begin = tl.where(begin < FAR, begin, 0)
    constant = tl.zeros((BLOCK_T,), tl.float32)
    if z is not None:
        constant += _last_entry(z + rows * P, P - 1, real, PAIRS)
    if (relative is not None) and FAR_LAST:
        constant += tl.load(relative + rows * R + (R - 1), mask=real, other=0.0).to(tl.float32)
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
            da = tl.where(_kept(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        ds_plain += tl.sum(ds, 1)
        dq_tile += _dot(ds.to(k_tile.dtype), k_tile, PRECISION)

    # General tiles, in the same direction.
    if CONTEXTUAL:
        c = tl.arange(0, BLOCK_S)
        from_here = (c[:, None] >= c[None, :]).to(tl.float16)
        up_to_here = (c[:, None] <= c[None, :]).to(tl.float32).to(tl.bfloat16)
        whole = tl.load(whole_there + rows, mask=real, other=FAR)
        part = tl.load(part_there + rows, mask=real, other=0)
        dp_before = tl.zeros((BLOCK_T,), tl.float32)
        edges = head.to(tl.int64) * tl.cdiv(S, BLOCK_S) * launch_rows + local
    if z is not None:
        first_entry, _first_way = _entry(whole, part, P - 1)
        fallen_rows = fallen + (head.to(tl.int64) * launch_rows + local) * P * 2
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
            whole, part = _moved(whole, part, -tl.sum(units, 1))
            edge = edges + n * launch_rows
            tl.store(edge_whole + edge, whole, mask=row < T)
            tl.store(edge_part + edge, part, mask=row < T)
            tl.store(edge_dp + edge, dp_before, mask=row < T)
            ahead = _units_from(units, from_here, False)
            wholes, parts = _moved(whole[:, None], part[:, None], ahead)
            # What is needed after the products below is made small here: registers are few.
            gate_slope = tl.where(visible, gate * (1.0 - gate), 0.0)
            if z is not None:
                entry, way = _entry(wholes, parts, P - 1)
                next_wholes, next_parts = _moved(whole[:, None], part[:, None], ahead - units)
                next_entry, _next_way = _entry(next_wholes, next_parts, P - 1)
                falls_to = tl.where((next_entry < entry) & real[:, None], next_entry, -1)
                value, slope = _look_up((z + rows * P)[:, None], entry, way, P - 1, real[:, None], PAIRS)
                s += value
            if m is not None:
                p = wholes.to(tl.float32) + parts.to(tl.float32) * (1.0 / UNITS)
                s += m_h * p
        distance = i[:, None] - j[None, :]
        if relative is not None:
            near = visible & real[:, None]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[:, None] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        a = tl.where(visible, tl.exp2(s * LOG2E - lse_r[:, None]), 0.0)
        da = _dot(do_tile, tl.trans(v_tile), PRECISION)
        if DROPOUT:
            da = tl.where(_kept(row_keys[:, None], j[None, :], threshold), da / survival, 0.0)
        ds = a * (da - delta_r[:, None])
        if relative is not None:
            last = R - 1 if FAR_LAST else R
            at = (drelative + rows * R)[:, None] + distance
            inside = visible & real[:, None] & (distance < last)
            tl.store(at, ds.to(drelative.dtype.element_ty), mask=inside)
            ds_far += tl.sum(tl.where(distance >= R - 1, ds, 0.0), 1)
        if CONTEXTUAL:
            dp = tl.zeros_like(ds)
            if z is not None:
                dp += ds * slope
                above = ds * way
                below = ds - above
                at = fallen_rows[:, None] + falls_to * 2
                falls = falls_to >= 0
                tl.store(at, below_sum[:, None] + _running(below, up_to_here, False, PARTS), mask=falls)
                tl.store(at + 1, above_sum[:, None] + _running(above, up_to_here, False, PARTS), mask=falls)
                below_sum += tl.sum(below, 1)
                above_sum += tl.sum(above, 1)
            if m is not None:
                dp += ds * m_h
                dm_r += tl.sum(ds * p, 1)
            dgate = dp_before[:, None] + _running(dp, up_to_here, False, PARTS)
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
        tl.store(dm_rows + rows, tl.where(real, dm_r, 0.0), mask=row < T)
    if (relative is not None) and FAR_LAST:
        at = drelative + rows * R + (R - 1)
        tl.store(at, ds_far.to(drelative.dtype.element_ty), mask=real)
    if z is not None:
        tl.debug_barrier()  # what other threads of this program stored is read below
        for start in range(0, P, BLOCK_P):
            entry_n = (start + tl.arange(0, BLOCK_P))[None, :]
            # Sums at entries from the first key's on are 0; the one at −1 is the whole row's.
            reached = first_entry[:, None]
            at = fallen_rows[:, None] + entry_n * 2
            below_n = tl.load(at, mask=real[:, None] & (entry_n < reached), other=0.0)
            inside = real[:, None] & (entry_n >= 1) & (entry_n - 1 < reached)
            below_1 = tl.where(entry_n < 1, below_sum[:, None], tl.load(at - 2, mask=inside, other=0.0))
            above_1 = tl.load(at - 1, mask=inside, other=0.0)
            inside = real[:, None] & (entry_n >= 2) & (entry_n - 2 < reached)
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
    edge_whole,
    edge_part,
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
    PLAIN_T: tl.constexpr,  # of plain ones: a multiple of BLOCK_T
    TILES: tl.constexpr,  # a power of 2; TILES·BLOCK_T rows at least are the launch's
):
    """Tiles lie on their side here, keys along the first axis: what multiplies q and do is never transposed."""
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
        # Of the row kernel's tiles, this one's first and last, whose edges are this one's.
        left = n * (BLOCK_S // EDGE)
        right = left + BLOCK_S // EDGE - 1
        edges = head.to(tl.int64) * tl.cdiv(S, EDGE) * launch_rows
    if m is not None:
        m_h = tl.load(m + h)
    if far_slope is not None:
        far_slope_h = tl.load(far_slope + h)

    # Tiles of queries, counted from the launch's first: none before `start` sees a key, none from `end` on is of
    # tokens, and from `general_end` on this tile is plain for all.
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
        real = row < rows_end
        rows = head.to(tl.int64) * T + row
        visible = j[:, None] <= i[None, :]
        q_tile = _load(q + b * q_b + h * q_h, row, q_t, real, HEAD_DIM, BLOCK_K)
        do_tile = _load(do + b * do_b + h * do_h, row, do_t, real, HEAD_DIM, BLOCK_K)
        lse_r = tl.load(lse + rows, mask=real, other=float("inf"))  # of rows that are none, all weights are 0
        delta_r = tl.load(delta + rows, mask=real, other=0.0)
        s = _dot(k_tile, tl.trans(q_tile), PRECISION) * scale
        if CONTEXTUAL:
            gate_logits = s
            if OWN_GATES:
                gate_q_tile = _load(gate_q + b * gq_b + h * gq_h, row, gq_t, real, HEAD_DIM, BLOCK_K)
                gate_logits = _dot(gate_k_tile, tl.trans(gate_q_tile), PRECISION) * scale
            gate, units = _gate(gate_logits, visible)
            gate_slope = tl.where(visible, gate * (1.0 - gate), 0.0)
            # What is plain for these rows, though not for some later ones, has no edge: it is beyond all positions.
            begin = tl.load(plain_end + rows, mask=real, other=FAR)
            seen = real & (right * EDGE <= i)
            edge = seen & (begin <= right * EDGE)
            at = edges + right * launch_rows + local
            whole = tl.where(seen, tl.load(edge_whole + at, mask=edge, other=FAR), 0)
            part = tl.load(edge_part + at, mask=edge, other=0)
            at = edges + left * launch_rows + local
            dp_before = tl.load(edge_dp + at, mask=real & (begin <= left * EDGE) & (left * EDGE <= i), other=0.0)
            wholes, parts = _moved(whole[None, :], part[None, :], _units_from(units, from_here, True))
            if z is not None:
                entry, way = _entry(wholes, parts, P - 1)
                value, slope = _look_up((z + rows * P)[None, :], entry, way, P - 1, real[None, :], PAIRS)
                s += value
            if m is not None:
                s += m_h * (wholes.to(tl.float32) + parts.to(tl.float32) * (1.0 / UNITS))
        distance = i[None, :] - j[:, None]
        if relative is not None:
            near = visible & real[None, :]
            if not FAR_LAST:
                near = near & (distance < R)
            at = (relative + rows * R)[None, :] + tl.minimum(distance, R - 1)
            s += tl.load(at, mask=near, other=0.0).to(tl.float32)
        if far_slope is not None:
            s += far_slope_h * distance.to(tl.float32)
        a = tl.where(visible & real[None, :], tl.exp2(s * LOG2E - lse_r[None, :]), 0.0)
        da = _dot(v_tile, tl.trans(do_tile), PRECISION)
        kept_a = a
        if DROPOUT:
            row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)
            kept = _kept(row_keys[None, :], j[:, None], threshold)
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
            dgate = dp_before[None, :] + _running(dp, up_to_here, True, PARTS)
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
        real = row < rows_end
        rows = head.to(tl.int64) * T + row
        q_tile = _load(q + b * q_b + h * q_h, row, q_t, real, HEAD_DIM, BLOCK_K)
        do_tile = _load(do + b * do_b + h * do_h, row, do_t, real, HEAD_DIM, BLOCK_K)
        delta_r = tl.load(delta + rows, mask=real, other=0.0)
        constant = -tl.load(lse + rows, mask=real, other=float("inf"))
        if z is not None:
            constant += _last_entry(z + rows * P, P - 1, real, PAIRS) * LOG2E
        if (relative is not None) and FAR_LAST:
            constant += tl.load(relative + rows * R + (R - 1), mask=real, other=0.0).to(tl.float32) * LOG2E
        s = _dot(k_tile, tl.trans(q_tile), PRECISION) * (scale * LOG2E) + constant[None, :]
        if far_slope is not None:
            s += (far_slope_h * LOG2E) * (i[None, :] - j[:, None]).to(tl.float32)
        a = tl.exp2(s)
        da = _dot(v_tile, tl.trans(do_tile), PRECISION)
        kept_a = a
        if DROPOUT:
            row_keys = _row_keys(tl.full((1,), 0, tl.int64) + seed, tl.zeros_like(i) + head, i)
            kept = _kept(row_keys[None, :], j[:, None], threshold)
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
