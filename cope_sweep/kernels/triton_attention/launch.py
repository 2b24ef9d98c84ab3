"""Launches of the Triton kernels: their arguments, scratch memory and gradients.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim, P positions, R relative positions,
D distances with a bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, Arguments, head_stride, unit_stride
from cope_sweep.kernels.dropout import threshold
from cope_sweep.kernels.triton_attention import kernel_backward_keys, kernel_backward_rows, kernel_forward, kernels_far
from cope_sweep.kernels.triton_attention.tile_sizes import TileSizes, tile_sizes
from cope_sweep.kernels.triton_attention.workspace import Part, Parts, divide

KERNELS = {
    "forward": kernel_forward.forward,
    "backward_rows": kernel_backward_rows.backward_rows,
    "backward_keys": kernel_backward_keys.backward_keys,
    "forward_near": kernel_forward.forward,
    "backward_rows_near": kernel_backward_rows.backward_rows,
    "backward_keys_near": kernel_backward_keys.backward_keys,
    "forward_far": kernels_far.far_forward,
    "backward_rows_far": kernels_far.far_rows,
    "backward_keys_far": kernels_far.far_keys,
}

NEAR_AND_FAR = False
"""Whether plain tiles have kernels of their own (`kernels_far.py`), where a problem has tables. Not timed on a GPU yet
(`make gpu STAGE=near_far`)."""

OPTIONS = {"enable_fp_fusion": True}
"""Products and sums become one instruction: Triton's default changes with its versions."""

_NEVER = 1 << 30
"""Larger than any position."""
_LARGEST_TILE = 128
"""Launches divide queries at multiples of it, so that the kernels' tiles have the same boundaries."""


def run(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: TileSizes) -> None:
    """Run a kernel by name."""
    KERNELS[kernel][grid](**arguments, **sizes, **OPTIONS)


def run_far(kernel: str, grid: tuple[int, int], arguments: dict[str, Any], sizes: TileSizes) -> None:
    """Run a kernel of plain tiles, which takes only some of the arguments of the kernel of general tiles."""
    run(kernel, grid, {name: arguments[name] for name in KERNELS[kernel].arg_names if name in arguments}, sizes)


class Call:
    """One attention: the kernels' arguments, converted to the types that they read."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.q, self.k, self.v = unit_stride(arguments.q), unit_stride(arguments.k), unit_stride(arguments.v)
        (self.B, self.H, self.T, self.K), self.S = self.q.shape, self.k.shape[2]
        self.base_q = self._like_q(arguments.base_q)
        self.gate_k = self._like_q(arguments.gate_k)
        self.e, self.relative = (self._table(x) for x in (arguments.e, arguments.relative))
        self.m, self.gate_bias = (_float(x) for x in (arguments.m, arguments.gate_bias))
        self.distance_bias = _float(arguments.distance_bias)
        self.P, self.R = (0 if x is None else x.shape[-2] for x in (self.e, self.relative))
        self.D = 0 if self.distance_bias is None else self.distance_bias.shape[-1]
        self.M = 0 if arguments.segment_slope is None else arguments.segment_slope.shape[-1]
        self.N = max(self.R, self.D)
        self.chunk_p, self.chunk_r = _chunk(max(self.P, self.M)), _chunk(max(self.N, 1))
        # A slope of positions has no plain tiles, and without tables all but those on the diagonal are plain.
        self.near_and_far = NEAR_AND_FAR and self.m is None and bool(self.P or self.M or self.N)

    def _like_q(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else unit_stride(x.to(self.q.dtype))

    def _table(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.q.dtype).contiguous()

    def device(self) -> Any:
        """A context in which kernels are launched on the device of the inputs."""
        return torch.cuda.device_of(self.q)  # type: ignore[no-untyped-call]

    def name(self, kernel: str) -> str:
        """Of a kernel that visits general tiles, and plain ones if they have no kernel of their own."""
        return f"{kernel}_near" if self.near_and_far else kernel

    def sizes(self, kernel: str) -> TileSizes:
        """Tile sizes, number of warps and of pipeline stages of a kernel."""
        return tile_sizes(kernel, self.q.dtype, self.K)

    def shared(self) -> dict[str, Any]:
        """The arguments that all kernels take."""
        arguments = self.arguments
        bias = self.distance_bias
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "base_q": self.base_q,
            "gate_k": self.gate_k,
            "e": self.e,
            "m": self.m,
            "gate_bias": self.gate_bias,
            **self._segments(),
            "relative": self.relative,
            "distance_bias": None if bias is None else bias.view(torch.int32),
            "distance_slope": _float(arguments.distance_slope),
            "key_bias": _float(arguments.key_bias),
            "lengths": None if arguments.lengths is None else arguments.lengths.to(torch.int64).contiguous(),
            "seeds": self._seeds(),
            **strides("q", self.q),
            **strides("k", self.k),
            **strides("v", self.v),
            **strides("bq", self.q if self.base_q is None else self.base_q),
            **strides("gk", self.k if self.gate_k is None else self.gate_k),
            **{size: getattr(self, size) for size in "HTSPRDM"},
            "scale": arguments.scale,
            # As a signed integer: `tiles.kept` flips the highest bit of what it compares.
            "threshold": threshold(arguments.dropout) - 2**31,
            "survival": 1.0 - arguments.dropout,
            "HEAD_DIM": self.K,
            "BLOCK_K": max(16, triton.next_power_of_2(self.K)),
            "FAR_LAST": arguments.far_last,
            "DROPOUT": arguments.dropout > 0,
            "PAIRS": PAIRS[self.q.dtype],
            "PRECISION": precision(self.q.dtype),
            "STEPS": self.M.bit_length(),
        }

    def of_tables(self) -> dict[str, Any]:
        """The arguments of the kernels that compute tables."""
        return {
            "saturation": self._saturation(),
            "e_h": head_stride(self.e),
            "r_h": head_stride(self.relative),
            "e_scale": self.arguments.e_scale,
            "relative_scale": self.arguments.relative_scale,
            "BLOCK_P": self.chunk_p,
            "BLOCK_R": self.chunk_r,
        }

    def _segments(self) -> dict[str, Any]:
        arguments = self.arguments
        if arguments.knots is None:
            return {"knots": None, "segment_slope": None, "segment_intercept": None, "limit": arguments.limit}
        # The binary search is among 2^STEPS − 1 knots. Infinite ones are above every position.
        padding = 2 ** self.M.bit_length() - 1 - len(arguments.knots)
        knots = torch.nn.functional.pad(arguments.knots.float(), (0, padding), value=float("inf"))
        slope, intercept = _float(arguments.segment_slope), _float(arguments.segment_intercept)
        return {
            "knots": knots.view(torch.int32),
            "segment_slope": None if slope is None else slope.view(torch.int32),
            "segment_intercept": None if intercept is None else intercept.view(torch.int32),
            "limit": arguments.limit,
        }

    def _saturation(self) -> int:
        """The position from which on keys have one score."""
        if self.arguments.knots is None:
            return self.P - 1
        return math.ceil(self.arguments.limit) if self.arguments.limit < _NEVER else _NEVER

    def _seeds(self) -> Tensor | None:
        seeds = self.arguments.seeds
        return None if seeds is None or not self.arguments.dropout else seeds.to(self.q.device).contiguous()

    def scratch(self, parts: Parts, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor | None:
        """Memory for the heads and queries of a launch, `shape` words each; None if a size is 0."""
        if 0 in shape:
            return None
        return self.q.new_empty((parts.heads_each, parts.rows_each, *shape), dtype=dtype)


OF_KEYS = ("k", "v", "gate_k", "key_bias")
"""The arguments whose gradients `backward_keys` computes, (B, H, S, …)."""

PAIRS = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The types of queries, and whether a table's words are pairs (see `tiles.fill_table`)."""

PARTS = {torch.float32: 3, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of bfloat16 numbers that represent a term of a prefix sum: as many bits as the type has."""


def precision(dtype: torch.dtype) -> str:
    """The input precision of tl.dot: for float32 as exact as torch, which uses TF32 only if that is allowed."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_b": x.stride(0), f"{name}_h": x.stride(1), f"{name}_t": x.stride(2)}


def forward(given: Arguments, out: Tensor, lse: Tensor, carry: Tensor) -> None:
    """Write the output and what `backward` needs: lse, where plain tiles end, the position and the bias there."""
    call = Call(given)
    kernel = call.name("forward")
    sizes = call.sizes(kernel)
    tile = max(sizes["BLOCK_T"], _LARGEST_TILE)
    between = 4 * (1 + call.K) if call.near_and_far else 0
    parts = divide(call.B * call.H, call.T, 4 * (call.P + call.R) + between, _bytes(call.q), tile)
    arguments = {
        **call.shared(),
        **call.of_tables(),
        "o": out,
        "lse": lse,
        **_of_carry(carry),
        "z_table": call.scratch(parts, call.P),
        "relative_table": call.scratch(parts, call.R),
        "ONE_CHUNK": call.chunk_p >= call.P,
        "NEAR": call.near_and_far,
        "near_weight": call.scratch(parts, dtype=torch.float32) if call.near_and_far else None,
        "near_sums": call.scratch(parts, call.K, dtype=torch.float32) if call.near_and_far else None,
    }
    with call.device():
        for part in parts:
            of_part = {**arguments, **_of_part(part, parts)}
            run(kernel, (triton.cdiv(part.rows, sizes["BLOCK_T"]), part.heads), of_part, sizes)
            if call.near_and_far:
                far_sizes = call.sizes("forward_far")
                run_far("forward_far", (triton.cdiv(part.rows, far_sizes["BLOCK_T"]), part.heads), of_part, far_sizes)


def _of_carry(carry: Tensor) -> dict[str, Tensor]:
    """What the forward pass saves of each query, (4, B, H, T), by the names of the kernels' arguments."""
    plain_end, end_pos_int, end_pos_frac, far_bias = carry
    return {
        "plain_end": plain_end,
        "end_pos_int": end_pos_int,
        "end_pos_frac": end_pos_frac,
        "far_bias": far_bias.view(torch.float32),
    }


def row_bytes(call: Call, block_t: int, edge: int) -> float:
    """Scratch memory of the backward kernels for a query of a launch (see `workspace.py`)."""
    tables = 12 * call.P + 8 * call.M + 4 * (call.R + call.N) + 4 * (call.K * (call.P + call.R) + call.D) / block_t
    between = 4 * call.K * (1 + 2 * call.S / call.T) if call.near_and_far else 0
    return tables + between + 16 + (16 * (triton.cdiv(call.S, edge) + 1) if call.arguments.contextual else 0)


def backward(
    arguments: Arguments, dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, gradients: list[Tensor | None]
) -> None:
    """Write the gradients."""
    launches = Backward(Call(arguments), unit_stride(dout), out, lse, carry, gradients)
    with launches.call.device():
        for part in launches.parts:
            launches.run(part)
    launches.finish()


class Backward:
    """The launches of a backward pass, and the gradients that they write."""

    def __init__(
        self, call: Call, do: Tensor, out: Tensor, lse: Tensor, carry: Tensor, gradients: list[Tensor | None]
    ) -> None:
        self.call = call
        self.of = dict(zip(Arguments._fields[:DIFFERENTIABLE], gradients, strict=True))
        self.row_kernel, self.key_kernel = call.name("backward_rows"), call.name("backward_keys")
        self.row_sizes, self.key_sizes = call.sizes(self.row_kernel), call.sizes(self.key_kernel)
        block_t, edge = self.row_sizes["BLOCK_T"], self.key_sizes["BLOCK_S"]
        tile = max(_LARGEST_TILE, block_t, self.key_sizes["PLAIN_T"])
        self.parts = divide(call.B * call.H, call.T, row_bytes(call, block_t, edge), _bytes(call.q), tile)
        carried = _of_carry(carry)
        shared = {
            **call.shared(),
            **strides("do", do),
            "plain_end": carried["plain_end"],
            "edge_records": self._edges(edge),
            "do": do,
            "row_records": call.scratch(self.parts, 4, dtype=torch.float32),
            # float32 counts the entries of a tile's rows from 2²³ up to 2²⁴ (`tables.MAGIC`).
            "WIDE": _LARGEST_TILE * call.P >= 2**23,
            "z_table": call.scratch(self.parts, call.P),
            "relative_table": call.scratch(self.parts, call.R),
            "PARTS": PARTS[call.q.dtype],
            "NEAR": call.near_and_far,
        }
        self.of_rows = {
            **shared,
            **call.of_tables(),
            **self._row_outputs(lse, self._row_tiles(min(self.parts.rows_each, call.T), block_t)),
            **carried,
            "o": out,
            "lse": lse,
            "far_dq": call.scratch(self.parts, call.K, dtype=torch.float32) if call.near_and_far else None,
            "prefix_sums": call.scratch(self.parts, max(call.P, call.M), 2, dtype=torch.float32),
            "by_distance": call.scratch(self.parts, call.N, dtype=torch.float32),
            "N": call.N,
            "EDGE": edge,
        }
        self.of_keys = {**shared, **self._key_outputs(), "ROWS_T": block_t}
        self.of_far_keys = self._far_key_outputs() if call.near_and_far else {}
        of_tables = {"e": call.e, "relative": call.relative, "distance_bias": call.distance_bias}
        self.sums = {name: lse.new_zeros(table.shape) for name, table in of_tables.items() if table is not None}

    def _edges(self, edge: int) -> Tensor | None:
        """Positions and Σ dp at the edges of the column kernel's tiles of keys, and those of a saturated one."""
        if not self.call.arguments.contextual:
            return None
        shape = (self.parts.heads_each, triton.cdiv(self.call.S, edge) + 1, self.parts.rows_each, 4)
        return self.call.q.new_empty(shape, dtype=torch.float32)

    def _row_tiles(self, rows: int, block_t: int) -> int:
        """Number of programs of a row kernel. The column kernels read records of whole tiles, also beyond row T."""
        plain_t = self.key_sizes["PLAIN_T"]
        tiles: int = triton.cdiv(triton.cdiv(rows, plain_t) * plain_t, block_t)
        return tiles

    def _row_outputs(self, lse: Tensor, tiles: int) -> dict[str, Tensor | None]:
        call, heads = self.call, self.parts.heads_each
        return {
            "dq": self.of["q"],
            "dbase_q": self.of["base_q"],
            "dm_rows": None if call.m is None else torch.empty_like(lse),
            "dgate_bias_rows": None if call.gate_bias is None else torch.empty_like(lse),
            "slope_gradient": self.of["segment_slope"],
            "intercept_gradient": self.of["segment_intercept"],
            "e_parts": None if call.e is None else lse.new_empty((heads, tiles, call.P, call.K)),
            "relative_parts": None if call.relative is None else lse.new_empty((heads, tiles, call.R, call.K)),
            "bias_parts": None if call.distance_bias is None else lse.new_empty((heads, tiles, call.D)),
        }

    def _key_outputs(self) -> dict[str, Any]:
        """The gradients of keys; float32 sums for the heads of a launch, if it has not all queries of its heads."""
        of_keys = {f"d{name}": self.of[name] for name in OF_KEYS}
        if self.parts.rows_are_split:
            heads = self.parts.heads_each
            of_keys = {
                name: None if x is None else x.new_empty((heads, *x.shape[2:]), dtype=torch.float32)
                for name, x in of_keys.items()
            }
        return {**of_keys, "ADD": self.parts.rows_are_split}

    def _far_key_outputs(self) -> dict[str, Any]:
        """The sums that the near kernel leaves, and the outputs of the far kernel, which adds to them."""
        names = [name for name in OF_KEYS if name != "gate_k"]
        outputs = {f"d{name}": self.of_keys[f"d{name}"] for name in names}
        if not self.parts.rows_are_split:  # then the outputs are the gradients themselves
            for name in names:
                x = self.of[name]
                of_heads = (self.parts.heads_each, *x.shape[2:]) if x is not None else None
                self.of_keys[f"d{name}"] = of_heads and self.call.q.new_empty(of_heads, dtype=torch.float32)
        return {**{f"near_d{name}": self.of_keys[f"d{name}"] for name in names}, **outputs}

    def run(self, part: Part) -> None:
        """Run both kernels for some heads and queries."""
        call, of_part = self.call, _of_part(part, self.parts)
        if call.near_and_far:
            sizes = call.sizes("backward_rows_far")
            grid = self._row_tiles(part.rows, sizes["BLOCK_T"]), part.heads
            run_far("backward_rows_far", grid, {**self.of_rows, **of_part}, sizes)
        tiles = self._row_tiles(part.rows, self.row_sizes["BLOCK_T"])
        run(self.row_kernel, (tiles, part.heads), {**self.of_rows, **of_part}, self.row_sizes)
        self._run_keys(part, of_part)
        names = {"e": "e_parts", "relative": "relative_parts", "distance_bias": "bias_parts"}
        for name, total in self.sums.items():
            of_tiles = self.of_rows[names[name]].flatten(0, 1)[: part.heads * tiles].unflatten(0, (part.heads, tiles))
            _add_tiles(total, of_tiles, part.first_head, call.H)

    def _run_keys(self, part: Part, of_part: dict[str, int]) -> None:
        call, rows_end = self.call, part.first_row + part.rows
        sums = {name: self.of_keys[f"d{name}"] for name in OF_KEYS if self.parts.rows_are_split}
        for total in sums.values():
            # The launches of a head follow each other, and add to the same sums.
            if part.first_row == 0 and total is not None:
                total.zero_()
        keys = call.S - call.T + rows_end if self.parts.rows_are_split else call.S
        grid = triton.cdiv(keys, self.key_sizes["BLOCK_S"]), part.heads
        run(self.key_kernel, grid, {**self.of_keys, **of_part}, self.key_sizes)
        if call.near_and_far:
            arguments = {**self.of_keys, **self.of_far_keys, **of_part}
            run_far("backward_keys_far", grid, arguments, call.sizes("backward_keys_far"))
        for name, total in sums.items():
            gradient = self.of[name]
            if rows_end == call.T and total is not None and gradient is not None:
                gradient.flatten(0, 1)[part.first_head : part.first_head + part.heads].copy_(total)

    def finish(self) -> None:
        """Write the gradients that are sums over several launches or programs."""
        of_heads = {"m": self.of_rows["dm_rows"], "gate_bias": self.of_rows["dgate_bias_rows"]}
        totals = {name: rows.sum((0, 2)) for name, rows in of_heads.items() if rows is not None}
        for name, total in {**self.sums, **totals}.items():
            gradient = self.of[name]
            if gradient is not None:
                gradient.copy_(total)


def _add_tiles(total: Tensor, of_tiles: Tensor, first_head: int, H: int) -> None:
    """Add the parts of tiles, (heads, tiles, …), to the gradient of a table, (…) or one for each of the H heads."""
    if total.dim() == of_tiles.dim() - 2:
        total += of_tiles.sum((0, 1))
        return
    for h in range(H):
        of_head = of_tiles[(h - first_head) % H :: H]
        if len(of_head):
            total[h] += of_head.sum((0, 1))


def _of_part(part: Part, parts: Parts) -> dict[str, int]:
    return {"first_head": part.first_head, "first_row": part.first_row, "launch_rows": parts.rows_each}


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _chunk(entries: int) -> int:
    chunk: int = triton.next_power_of_2(max(1, entries))
    return min(64, max(16, chunk))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
