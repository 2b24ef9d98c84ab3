"""Fused attention in pure PyTorch: blocks of queries, and a backward pass that computes each block again.

Used where the native kernels cannot run. Computes in float32, or in float64 for float64 inputs. Memory beyond inputs
and outputs is that of a few blocks, O(rows × S).

The keys of a block are in reverse order: a row's columns go from the query to earlier tokens, so positions are a
cumulative sum along a row. Once every row of a block has reached the last position, the bias is constant and gates have
no gradient: the columns from there on are attention without positions.

Shapes: N heads of some sequences, R rows (queries of a block), C columns (keys up to the block's last query, reversed),
U columns before positions are saturated, P positions, M segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, Arguments
from cope_sweep.kernels.dropout import dropout_mask
from cope_sweep.kernels.problem import AttentionProblem

MAX_ROWS = 64
"""Queries in a block. With more, the columns before all of them have reached the last position are more, too."""
BLOCK_ELEMENTS = 3 << 16
"""Approximate number of scores in a block: enough to make Python's overhead small, few enough for a cache.
Long sequences have up to four times as many scores rather than fewer rows."""


def blocked(problem: AttentionProblem) -> Tensor:
    """Return attention for the problem, (B, H, T, K), in the type of the values."""
    given = Arguments.of(problem, torch.float64 if problem.q_BHTK.dtype == torch.float64 else torch.float32)
    with torch.autocast(given.q.device.type, enabled=False):
        return cast(Tensor, _Blocked.apply(*given)).to(problem.v_BHSK.dtype)


@dataclass(frozen=True)
class _Block:
    """Heads n0 … n1 − 1 and the queries that are tokens a … b − 1."""

    n0: int
    n1: int
    a: int
    b: int
    start: int
    """Index of the token of the first query."""

    @property
    def heads(self) -> slice:
        return slice(self.n0, self.n1)

    @property
    def rows(self) -> slice:
        """The block's queries, counted from the first query."""
        return slice(self.a - self.start, self.b - self.start)

    def add_columns(self, to_NSK: Tensor, columns: Tensor) -> None:
        """Add a gradient of the block's first columns, (heads, columns, K), to that of keys or values."""
        to_NSK[self.heads, self.b - columns.shape[1] : self.b] += columns.flip(1)

    def distances(self, device: torch.device) -> Tensor:
        """Distances i − j of queries and keys, (R, C); negative where the key is after the query."""
        row = torch.arange(self.b - self.a, device=device)
        return torch.arange(self.b, device=device) - (self.b - self.a - 1 - row)[:, None]

    def hidden(self, device: torch.device) -> Tensor:
        """Which of the first R columns are after the query, (R, R); later columns never are."""
        return torch.ones(self.b - self.a, self.b - self.a, dtype=torch.bool, device=device).tril(-1).flip(0)


def _blocks(heads: int, queries: int, keys: int) -> Iterator[_Block]:
    rows = max(16, min(MAX_ROWS, 4 * BLOCK_ELEMENTS // keys))
    heads_per_block = max(1, BLOCK_ELEMENTS // (min(rows, queries) * keys))
    start = keys - queries
    for n0 in range(0, heads, heads_per_block):
        for a in range(start, keys, rows):
            yield _Block(n0, min(heads, n0 + heads_per_block), a, min(keys, a + rows), start)


class _Tensors:
    """The arguments, with batch and heads flattened into one dimension N."""

    def __init__(self, given: Arguments) -> None:
        self.given = given
        self.B, self.H, self.T, _ = given.q.shape
        self.S = given.k.shape[2]
        self.device = given.q.device
        self.q, self.k, self.v = given.q.flatten(0, 1), given.k.flatten(0, 1), given.v.flatten(0, 1)
        self.base_q = self.q if given.base_q is None else given.base_q.flatten(0, 1)
        self.gate_k = flatten_heads(given.gate_k)
        self.segment_slope, self.segment_intercept = (
            flatten_heads(given.segment_slope),
            flatten_heads(given.segment_intercept),
        )
        self.contextual = given.e is not None or given.segment_slope is not None or given.m is not None
        self._reversed: dict[int, Tensor] = {}
        self._first_head = -1

    def columns(self, block: _Block, x_NSK: Tensor) -> Tensor:
        """The block's keys or values in reverse order, (heads, C, K)."""
        if block.n0 != self._first_head:
            self._first_head = block.n0
            self._reversed.clear()
        if id(x_NSK) not in self._reversed:
            self._reversed[id(x_NSK)] = x_NSK[block.heads].flip(1)
        return self._reversed[id(x_NSK)][:, self.S - block.b :]

    def table(self, block: _Block, e_PK: Tensor) -> Tensor:
        """The table of the block's heads: (P, K), or (heads, P, K) where each head has one."""
        return e_PK if e_PK.dim() == 2 else e_PK[self.head_index(block)]

    def products(self, block: _Block, e_PK: Tensor, scale: float) -> Tensor:
        """Z = scale·q·e for the block's queries, (heads, R, P)."""
        return (self.base_q[block.heads, block.rows] * scale) @ self.table(block, e_PK).transpose(-1, -2)

    def head_index(self, block: _Block) -> Tensor:
        """The head, 0 … H − 1, of each of the block's rows of N."""
        return torch.arange(block.n0, block.n1, device=self.device) % self.H

    def blocks(self) -> Iterator[_Block]:
        return _blocks(self.B * self.H, self.T, self.S)

    def is_token(self) -> Tensor | None:
        """Which queries are tokens, not padding, (N, T, 1); None: all."""
        if self.given.lengths is None:
            return None
        tokens = torch.arange(self.S - self.T, self.S, device=self.device)
        return (tokens < self.given.lengths[:, None]).repeat_interleave(self.H, dim=0)[..., None]

    def saturation(self) -> float:
        """From this position on, neither bias nor gradient changes."""
        if self.given.m is not None:
            return float("inf")
        table = 0.0 if self.given.e is None else float(self.given.e.shape[-2] - 1)
        return max(table, self.given.limit) if self.segment_slope is not None else table


@dataclass
class _Scores:
    """The scores of a block, and what its backward pass needs."""

    s_NRC: Tensor
    """Logits plus all terms; −∞ after the query."""
    k_NCK: Tensor
    """Keys in reverse order."""
    gate_k_NCK: Tensor | None = None
    gate_NRU: Tensor | None = None
    p_NRU: Tensor | None = None
    """Positions, without a limit."""
    z_NRP: Tensor | None = None


def _scores(x: _Tensors, block: _Block, width: int) -> tuple[_Scores, int]:
    """Compute the block's scores and U. `width` is the first guess of U."""
    given = x.given
    hidden = block.hidden(x.device)
    R = len(hidden)
    scores = _Scores(torch.empty(0), x.columns(block, x.k))
    s_NRC = scores.s_NRC = (x.q[block.heads, block.rows] * given.scale) @ scores.k_NCK.transpose(-1, -2)
    if x.contextual:
        logits_NRC = s_NRC
        if x.gate_k is not None:
            scores.gate_k_NCK = x.columns(block, x.gate_k)
            logits_NRC = (x.base_q[block.heads, block.rows] * given.scale) @ scores.gate_k_NCK.transpose(-1, -2)
        width = _gates_and_positions(scores, logits_NRC, hidden, max(width, R), x.saturation())
        _add_contextual(x, block, scores, width)
    if given.relative is not None or given.distance_bias is not None or given.distance_slope is not None:
        _add_distance(x, block, s_NRC)
    s_NRC[..., :R].masked_fill_(hidden, -torch.inf)
    return scores, width


def _gates_and_positions(scores: _Scores, logits_NRC: Tensor, hidden: Tensor, width: int, saturation: float) -> int:
    """Fill in gates and positions until all rows are saturated; returns U, the number of columns computed."""
    C, R = logits_NRC.shape[-1], len(hidden)
    while True:
        width = min(width, C)
        gate_NRU = logits_NRC[..., :width].sigmoid()
        gate_NRU[..., :R].masked_fill_(hidden[:, :width], 0)
        p_NRU = gate_NRU.cumsum(-1)
        if width == C or bool((p_NRU[..., -1] >= saturation).all()):
            scores.gate_NRU, scores.p_NRU = gate_NRU, p_NRU
            return width
        width = width * 5 // 4 + 16


def _add_contextual(x: _Tensors, block: _Block, scores: _Scores, width: int) -> None:
    given, near_NRU, far_NRC = x.given, scores.s_NRC[..., :width], scores.s_NRC[..., width:]
    p_NRU = cast(Tensor, scores.p_NRU)
    heads, rows = block.heads, block.rows
    if given.e is not None:
        z_NRP = scores.z_NRP = x.products(block, given.e, given.e_scale)
        index, w = _index_and_fraction(p_NRU, z_NRP.shape[-1] - 1)
        near_NRU += z_NRP.gather(-1, index)
        near_NRU.addcmul_(w, _differences(z_NRP).gather(-1, index))
        far_NRC += z_NRP[..., -1:]
    if x.segment_slope is not None and x.segment_intercept is not None:
        slope, intercept = x.segment_slope[heads, rows], x.segment_intercept[heads, rows]
        p, index = _segments(x, p_NRU)
        near_NRU += intercept.gather(-1, index).addcmul_(p, slope.gather(-1, index))
        if width < scores.s_NRC.shape[-1]:
            last = _segment_of(x, torch.full((1,), given.limit, dtype=p.dtype, device=x.device))
            far_NRC += intercept[..., last] + given.limit * slope[..., last]
    if given.m is not None:
        near_NRU += given.m[x.head_index(block)][:, None, None] * p_NRU


def _index_and_fraction(p: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Integer part (int32) and fraction of positions that stop at `last`."""
    p = p.clamp(max=last)
    index = p.to(torch.int32)
    return index, p - index


def _differences(z: Tensor) -> Tensor:
    """z[p + 1] − z[p], and 0 at the last."""
    return torch.nn.functional.pad(z.diff(dim=-1), (0, 1))


def _segments(x: _Tensors, p: Tensor) -> tuple[Tensor, Tensor]:
    p = p.clamp(max=x.given.limit)
    return p, _segment_of(x, p)


def _segment_of(x: _Tensors, p: Tensor) -> Tensor:
    return torch.searchsorted(cast(Tensor, x.given.knots).to(p.dtype), p, right=True, out_int32=True)


def _add_distance(x: _Tensors, block: _Block, s_NRC: Tensor) -> None:
    distance_RC = block.distances(x.device)
    if x.given.relative is not None:
        z_NRD = x.products(block, x.given.relative, x.given.relative_scale)
        index = distance_RC.clamp(0, z_NRD.shape[-1] - 1)
        bias = z_NRD.gather(-1, index.expand(len(z_NRD), -1, -1))
        s_NRC += bias if x.given.far_last else bias.masked_fill_(distance_RC >= z_NRD.shape[-1], 0)
    if x.given.distance_bias is not None:
        b_ND = x.given.distance_bias[x.head_index(block)]
        s_NRC += b_ND[:, distance_RC.clamp(0, b_ND.shape[-1] - 1)]
    if x.given.distance_slope is not None:
        s_NRC += x.given.distance_slope[x.head_index(block)][:, None, None] * distance_RC


def _dropout_mask(x: _Tensors, block: _Block) -> Tensor:
    heads = torch.arange(block.n0, block.n1, device=x.device)
    queries = torch.arange(block.a, block.b, device=x.device)
    keys = torch.arange(block.b - 1, -1, -1, device=x.device)
    return dropout_mask(cast(Tensor, x.given.seed), x.given.dropout, heads, queries, keys)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        given = Arguments(*arguments)
        x = _Tensors(given)
        out_NTK = x.q.new_empty(x.B * x.H, x.T, given.v.shape[-1])
        lse_NT = x.q.new_empty(x.B * x.H, x.T)
        widths: list[int] = []
        width = 1
        for block in x.blocks():
            scores, width = _scores(x, block, width)
            widths.append(width)
            max_NR1 = scores.s_NRC.amax(-1, keepdim=True)
            a_NRC = scores.s_NRC.sub_(max_NR1).exp_()
            total_NR1 = a_NRC.sum(-1, keepdim=True)
            if given.dropout:
                a_NRC *= _dropout_mask(x, block)
            out_NTK[block.heads, block.rows] = (a_NRC @ x.columns(block, x.v)) / (total_NR1 * (1 - given.dropout))
            lse_NT[block.heads, block.rows] = (max_NR1 + total_NR1.log())[..., 0]
        is_token = x.is_token()
        if is_token is not None:
            out_NTK.masked_fill_(~is_token, 0)
        tensors = [value for value in given if isinstance(value, Tensor)]
        ctx.plan = [None if isinstance(value, Tensor) else (value,) for value in given]
        ctx.widths = widths
        ctx.save_for_backward(out_NTK, lse_NT, *tensors)
        return out_NTK.view(x.B, x.H, x.T, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out_NTK, lse_NT, *tensors = ctx.saved_tensors
        values = iter(tensors)
        given = Arguments(*(next(values) if kept is None else kept[0] for kept in ctx.plan))
        with torch.no_grad():
            return _backward(given, ctx.widths, out_NTK, lse_NT, gradients[0].flatten(0, 1))


def _backward(
    given: Arguments, widths: list[int], out_NTK: Tensor, lse_NT: Tensor, dout_NTK: Tensor
) -> tuple[Tensor | None, ...]:
    x = _Tensors(given)
    is_token = x.is_token()
    if is_token is not None:
        dout_NTK = dout_NTK.masked_fill(~is_token, 0)
    grads = _Gradients(x)
    for block, width in zip(x.blocks(), widths, strict=True):
        heads, rows = block.heads, block.rows
        scores, _ = _scores(x, block, width)
        a_NRC = scores.s_NRC.sub_(lse_NT[heads, rows, None]).exp_()
        dout_NRK = dout_NTK[heads, rows]
        da_NRC = dout_NRK @ x.columns(block, x.v).transpose(-1, -2)
        delta_NR1 = (dout_NRK * out_NTK[heads, rows]).sum(-1, keepdim=True)
        dropped_NRC = a_NRC
        if given.dropout:
            factor = _dropout_mask(x, block).to(a_NRC.dtype) / (1 - given.dropout)
            da_NRC *= factor
            dropped_NRC = a_NRC * factor
        block.add_columns(grads.v, dropped_NRC.transpose(-1, -2) @ dout_NRK)
        ds_NRC = da_NRC.sub_(delta_NR1).mul_(a_NRC)
        grads.q[heads, rows] = 0
        if x.base_q is not x.q:
            grads.base_q[heads, rows] = 0
        grads.add_distances(block, ds_NRC)
        if x.contextual:
            dlogits_NRU = grads.add_contextual(block, scores, ds_NRC)
            U = dlogits_NRU.shape[-1]
            if scores.gate_k_NCK is None:
                ds_NRC[..., :U] += dlogits_NRU
            else:
                dlogits_NRU *= given.scale
                grads.base_q[heads, rows] += dlogits_NRU @ scores.gate_k_NCK[:, :U]
                block.add_columns(grads.gate_k, dlogits_NRU.transpose(-1, -2) @ x.base_q[heads, rows])
        grads.q[heads, rows] += (ds_NRC @ scores.k_NCK).mul_(given.scale)
        block.add_columns(grads.k, (ds_NRC.transpose(-1, -2) @ x.q[heads, rows]).mul_(given.scale))
    return grads.result()


class _Gradients:
    """The gradients, summed block by block."""

    def __init__(self, x: _Tensors) -> None:
        self.x = x
        given = x.given
        self.q, self.k, self.v = torch.empty_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)
        self.base_q = self.q if x.base_q is x.q else torch.empty_like(x.base_q)
        if x.gate_k is not None:
            self.gate_k = torch.zeros_like(x.gate_k)
        self.e, self.relative = _zeros_or_none(given.e), _zeros_or_none(given.relative)
        self.segment_slope, self.segment_intercept = (
            None if x.segment_slope is None else torch.empty_like(x.segment_slope),
            None if x.segment_intercept is None else torch.empty_like(x.segment_intercept),
        )
        self.m, self.distance_bias = _zeros_or_none(given.m), _zeros_or_none(given.distance_bias)

    def add_products(self, block: _Block, dz_NRP: Tensor, e_PK: Tensor, de_PK: Tensor, scale: float) -> None:
        """Add to the gradients of q and e, given that of z = scale·q·e."""
        dz_NRP *= scale
        self.base_q[block.heads, block.rows] += dz_NRP @ self.x.table(block, e_PK)
        q_NRK = self.x.base_q[block.heads, block.rows]
        if de_PK.dim() == 2:
            de_PK += dz_NRP.flatten(0, 1).T @ q_NRK.flatten(0, 1)
        else:
            de_PK.index_add_(0, self.x.head_index(block), dz_NRP.transpose(-1, -2) @ q_NRK)

    def add_distances(self, block: _Block, ds_NRC: Tensor) -> None:
        x, given = self.x, self.x.given
        if self.relative is None and self.distance_bias is None:
            return
        distance_RC = block.distances(x.device)
        if self.relative is not None:
            size = self.relative.shape[-2]
            added = ds_NRC if given.far_last else ds_NRC.masked_fill(distance_RC >= size, 0)
            index = distance_RC.clamp(0, size - 1).expand_as(ds_NRC)
            dz_NRP = ds_NRC.new_zeros(*ds_NRC.shape[:2], size).scatter_add_(-1, index, added)
            self.add_products(block, dz_NRP, cast(Tensor, given.relative), self.relative, given.relative_scale)
        if self.distance_bias is not None:
            size = self.distance_bias.shape[-1]
            index = distance_RC.clamp(0, size - 1).flatten().expand(len(ds_NRC), -1)
            b_ND = ds_NRC.new_zeros(len(ds_NRC), size).scatter_add_(-1, index, ds_NRC.flatten(1))
            self.distance_bias.index_add_(0, x.head_index(block), b_ND)

    def add_contextual(self, block: _Block, scores: _Scores, ds_NRC: Tensor) -> Tensor:
        """Return the gradient of the gates' logits, (heads, R, U), and add to the gradients of the tables."""
        x, heads, rows = self.x, block.heads, block.rows
        p_NRU, gate_NRU = cast(Tensor, scores.p_NRU), cast(Tensor, scores.gate_NRU)
        U = p_NRU.shape[-1]
        near_NRU, far_NR = ds_NRC[..., :U], ds_NRC[..., U:].sum(-1)
        dp_NRU = torch.zeros_like(p_NRU)
        if scores.z_NRP is not None and x.given.e is not None and self.e is not None:
            P = scores.z_NRP.shape[-1]
            index, w = _index_and_fraction(p_NRU, P - 1)
            # At the last position the difference is 0, which is also the gradient of clamped positions.
            dp_NRU.addcmul_(near_NRU, _differences(scores.z_NRP).gather(-1, index))
            dz_next_NRU = w.mul_(near_NRU)
            bounds = _run_boundaries(index, P)
            dz_next_NRP = _run_sums(dz_next_NRU, bounds)
            dz_NRP = _run_sums(near_NRU, bounds).sub_(dz_next_NRP)
            dz_NRP[..., 1:] += dz_next_NRP[..., :-1]
            dz_NRP[..., -1] += far_NR
            self.add_products(block, dz_NRP, x.given.e, self.e, x.given.e_scale)
        if x.segment_slope is not None and self.segment_slope is not None and self.segment_intercept is not None:
            p, index = _segments(x, p_NRU)
            slope = x.segment_slope[heads, rows].gather(-1, index)
            dp_NRU += (near_NRU * slope).masked_fill_(p_NRU > x.given.limit, 0)
            bounds = _run_boundaries(index, self.segment_slope.shape[-1])
            dslope, dintercept = self.segment_slope[heads, rows], self.segment_intercept[heads, rows]
            dslope.copy_(_run_sums(near_NRU * p, bounds))
            dintercept.copy_(_run_sums(near_NRU, bounds))
            if ds_NRC.shape[-1] > U:
                last = _segment_of(x, torch.full((1,), x.given.limit, dtype=p.dtype, device=x.device))
                dslope[..., last] += x.given.limit * far_NR[..., None]
                dintercept[..., last] += far_NR[..., None]
        if x.given.m is not None and self.m is not None:
            head = x.head_index(block)
            self.m.index_add_(0, head, (near_NRU * p_NRU).sum((-1, -2)))
            dp_NRU.addcmul_(near_NRU, x.given.m[head][:, None, None])
        # A gate adds to the positions of its own key and of all earlier ones: of its own column and those to the right.
        sums_NRU = dp_NRU.cumsum(-1)
        dgate_NRU = dp_NRU.sub_(sums_NRU).add_(sums_NRU[..., -1:])
        return dgate_NRU.mul_(gate_NRU).mul_(1 - gate_NRU)

    def result(self) -> tuple[Tensor | None, ...]:
        return (
            self._unflatten_heads(self.q),
            self._unflatten_heads(self.k),
            self._unflatten_heads(self.v),
            None if self.base_q is self.q else self._unflatten_heads(self.base_q),
            None if self.x.gate_k is None else self._unflatten_heads(self.gate_k),
            self.e,
            self._unflatten_heads(self.segment_slope),
            self._unflatten_heads(self.segment_intercept),
            self.m,
            self.relative,
            self.distance_bias,
            *[None] * (len(Arguments._fields) - DIFFERENTIABLE),
        )

    def _unflatten_heads(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else gradient.view(self.x.B, self.x.H, *gradient.shape[1:])


def _run_boundaries(index_NRU: Tensor, size: int) -> Tensor:
    """Where each of `size` values begins among the ascending indices, and where the last ends: (N, R, size + 1)."""
    entries = torch.arange(size + 1, dtype=index_NRU.dtype, device=index_NRU.device)
    return torch.searchsorted(index_NRU, entries.expand(*index_NRU.shape[:2], size + 1).contiguous())


def _run_sums(values_NRU: Tensor, bounds: Tensor) -> Tensor:
    """Sums of the columns of each index value: a scatter-add, five times as fast."""
    cumulative = torch.nn.functional.pad(values_NRU.cumsum(-1), (1, 0))
    return cumulative.gather(-1, bounds).diff(dim=-1)


def flatten_heads(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(0, 1)


def _zeros_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x)
