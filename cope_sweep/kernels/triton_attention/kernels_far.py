"""Flash attention with one bias for each query: the tiles of keys beyond all tables, where others visit those before.

What the kernels with tables have in registers is not in the way here, and tiles have other sizes. `far_forward` runs
after the forward kernel and goes on from its sums; `far_rows` before the backward kernel along rows, and stores what
that goes on from; `far_keys` after the one along columns, and adds to its sums.

Shapes: as in `kernel_forward.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from cope_sweep.kernels.triton_attention import (
    kernel_backward_keys,
    kernel_backward_rows,
    kernel_forward,
    scores,
    tiles,
)
from cope_sweep.kernels.triton_attention.tiles import FAR


@triton.jit
def first_key_not_plain(plain_end, head, first_row, T):
    """`plain_end` of the tile of queries from `first_row` on; 0 if it has no tokens."""
    end = tl.load(plain_end + head.to(tl.int64) * T + first_row, mask=first_row < T, other=FAR)
    return tl.where(end < FAR, end, 0)


@triton.jit(do_not_specialize=tiles.SIZES)
def far_forward(
    q, k, v, distance_slope, key_bias, lengths, seeds, o,
    lse,  # in: the maximum of the scores so far
    plain_end, far_bias, near_weight, near_sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    H, T, S, scale, threshold, survival, first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,  # a divisor of the forward kernel's
    PLAIN_S: tl.constexpr,  # a divisor of the forward kernel's
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head, b, h = tiles.head_of_program(first_head, H)
    tile_row = first_row + tile * BLOCK_T
    end = first_key_not_plain(plain_end, head, tile_row, T)
    if end > 0:
        i, row, valid = tiles.queries_from(tile_row + (S - T), lengths, b, T, S, BLOCK_T)
        rows = head.to(tl.int64) * T + row
        of_launch = tl.program_id(1).to(tl.int64) * launch_rows + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        row_max, weight, sums = kernel_forward.plain_tiles(
            tl.load(lse + rows, mask=valid, other=0.0),
            tl.load(near_weight + of_launch, mask=valid, other=1.0),
            tiles.load(near_sums, of_launch, HEAD_DIM, valid, HEAD_DIM, BLOCK_K),
            end,
            tiles.load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K),
            k + b * k_b + h * k_h, k_t, v + b * v_b + h * v_h, v_t,
            key_bias + head.to(tl.int64) * S if key_bias is not None else None,
            tl.load(far_bias + rows, mask=valid, other=0.0),
            tl.load(distance_slope + h) if distance_slope is not None else None,
            tiles.keys_of_rows(seeds, b, h, i) if DROPOUT else None,
            i, S, scale, threshold, DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_S,
        )  # fmt: skip
        kernel_forward.finish(o, lse, rows, row < T, valid, row_max, weight, sums, survival, HEAD_DIM, BLOCK_K)


@triton.jit(do_not_specialize=tiles.SIZES)
def far_rows(
    q, k, v, distance_slope, key_bias, lengths, seeds, o, do, lse, plain_end, far_bias,
    far_dq,  # out (heads of this launch, launch_rows, K), where there are plain tiles
    row_records,  # out
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    H, T, S, scale, threshold, survival, first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,  # a divisor of the forward kernel's
    PLAIN_S: tl.constexpr,  # a divisor of the forward kernel's
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, b, h = tiles.head_of_program(first_head, H)
    tile_row = first_row + tile * BLOCK_T
    end = first_key_not_plain(plain_end, head, tile_row, T)
    i, row, valid = tiles.queries_from(tile_row + (S - T), lengths, b, T, S, BLOCK_T)
    rows = head.to(tl.int64) * T + row
    of_launch = tl.program_id(1).to(tl.int64) * launch_rows + tile * BLOCK_T + tl.arange(0, BLOCK_T)
    do_tile = tiles.load(do + b * do_b + h * do_h, row, do_t, valid, HEAD_DIM, BLOCK_K)
    delta_r = kernel_backward_rows.delta_of(o, rows, do_tile, valid, HEAD_DIM, BLOCK_K)
    lse_r = tl.load(lse + rows, mask=valid, other=float("inf"))  # rows without a token have weights 0
    far = tl.load(far_bias + rows, mask=valid, other=0.0) - lse_r
    dq_tile, ds_plain = kernel_backward_rows.plain_tiles(
        tl.zeros((BLOCK_T, BLOCK_K), tl.float32),
        end,
        tiles.load(q + b * q_b + h * q_h, row, q_t, valid, HEAD_DIM, BLOCK_K),
        do_tile, k + b * k_b + h * k_h, k_t, v + b * v_b + h * v_h, v_t,
        key_bias + head.to(tl.int64) * S if key_bias is not None else None,
        far,
        tl.load(distance_slope + h) if distance_slope is not None else None,
        delta_r,
        tiles.keys_of_rows(seeds, b, h, i) if DROPOUT else None,
        i, S, scale, threshold, survival, DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_S,
    )  # fmt: skip
    if end > 0:
        tiles.store(far_dq, of_launch, dq_tile, valid, HEAD_DIM, BLOCK_K)
    record = row_records + of_launch * 4
    tl.store(record, delta_r)
    tl.store(record + 1, lse_r)
    tl.store(record + 2, far)
    tl.store(record + 3, ds_plain)


@triton.jit(do_not_specialize=tiles.SIZES)
def far_keys(
    q, k, v, distance_slope, key_bias, lengths, seeds, do, plain_end, row_records,
    near_dk, near_dv, near_dkey_bias,  # of `backward_keys`, for the heads of this launch
    dk, dv, dkey_bias,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    H, T, S, scale, threshold, survival, first_head, first_row, launch_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,  # dk, dv and dkey_bias are the sums of `backward_keys`
    BLOCK_S: tl.constexpr,  # those of `backward_keys`
    BLOCK_T: tl.constexpr,
    PLAIN_T: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    head, b, h = tiles.head_of_program(first_head, H)
    j = n * BLOCK_S + tl.arange(0, BLOCK_S)
    rows_end, _start, general_end, end = kernel_backward_keys.tiles_of_queries(
        n, head, plain_end, lengths, b, T, S, first_row, launch_rows, BLOCK_S, BLOCK_T, PLAIN_T
    )
    of_heads = tl.program_id(1).to(tl.int64)
    bias_c = scores.load_key_bias(key_bias + head.to(tl.int64) * S, j, S) if key_bias is not None else None
    dk_tile, dv_tile, dbias_c = kernel_backward_keys.plain_tiles(
        tl.zeros((BLOCK_S, BLOCK_K), tl.float32),
        tl.zeros((BLOCK_S, BLOCK_K), tl.float32),
        tl.zeros((BLOCK_S,), tl.float32),
        general_end * BLOCK_T // PLAIN_T,
        tl.cdiv(end * BLOCK_T, PLAIN_T),
        tiles.load(k + b * k_b + h * k_h, j, k_t, j < S, HEAD_DIM, BLOCK_K),
        tiles.load(v + b * v_b + h * v_h, j, v_t, j < S, HEAD_DIM, BLOCK_K),
        q + b * q_b + h * q_h, q_t, do + b * do_b + h * do_h, do_t, row_records + of_heads * launch_rows * 4, bias_c,
        tl.load(distance_slope + h) if distance_slope is not None else None,
        seeds, b, h, j, T, S, first_row, rows_end, scale, threshold, survival,
        DROPOUT, PRECISION, HEAD_DIM, BLOCK_K, PLAIN_T,
    )  # fmt: skip
    of_launch = of_heads * S + j
    keys = of_launch if ADD else head.to(tl.int64) * S + j
    dk_tile = dk_tile * scale + tiles.load(near_dk, of_launch, HEAD_DIM, j < S, HEAD_DIM, BLOCK_K)
    dv_tile += tiles.load(near_dv, of_launch, HEAD_DIM, j < S, HEAD_DIM, BLOCK_K)
    tiles.store(dk, keys, dk_tile, j < S, HEAD_DIM, BLOCK_K)
    tiles.store(dv, keys, dv_tile, j < S, HEAD_DIM, BLOCK_K)
    if key_bias is not None:
        dbias_c += tl.load(near_dkey_bias + of_launch, mask=j < S, other=0.0)
        tl.store(dkey_bias + keys, dbias_c.to(dkey_bias.dtype.element_ty), mask=j < S)
