"""Fused attention in pure PyTorch: blocks of queries, and a backward pass that computes each block again.

Used where the native kernels cannot run, for most terms (`why_not`); `query_blocks.py` is for all else. Computes in
float32, or in float64 for float64 inputs. Memory beyond inputs and outputs is that of a few blocks, O(rows × S).

The keys of a block are in reverse order: a row's columns go from the query to earlier tokens, so positions are a
cumulative sum along a row. Once every row of a block has reached the last position, the bias is constant and gates have
no gradient: the columns from there on are attention without positions.

Shapes: N heads of some sequences, R rows (queries of a block), C columns (keys up to the block's last query, reversed),
U columns before positions are saturated, P positions, M segments.

On a GPU, the forward pass waits at each block for U, which is a size. It saves U in the host's memory, so that the
backward pass need not wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.dropout import dropout_mask, heads_of_batch

MAX_ROWS = 64
"""Queries in a block. With more, the columns before all of them have reached the last position are more, too."""
BLOCK_ELEMENTS = 3 << 16
"""Approximate number of scores in a block: enough to make Python's overhead small, few enough for a cache.
Long sequences have up to four times as many scores rather than fewer rows."""


@dataclass(frozen=True)
class Block:
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
        """Whether each of the first R columns is after the query, bool (R, R); later columns never are."""
        return torch.ones(self.b - self.a, self.b - self.a, dtype=torch.bool, device=device).tril(-1).flip(0)


class Tensors:
    """The arguments in float32 (float64 if they are), with batch and heads flattened into one dimension N."""

    def __init__(self, given: Arguments) -> None:
        self.dtype = torch.float64 if given.q.dtype == torch.float64 else torch.float32
        self.given = given = self._precise(given)
        self.B, self.H, self.T, _ = given.q.shape
        self.S = given.k.shape[2]
        self.device = given.q.device
        self.q, self.k, self.v = given.q.flatten(0, 1), given.k.flatten(0, 1), given.v.flatten(0, 1)
        self.base_q = self.q if given.base_q is None else given.base_q.flatten(0, 1)
        self.gate_k = flatten_heads(given.gate_k)
        self.segment_slope, self.segment_intercept = map(flatten_heads, (given.segment_slope, given.segment_intercept))
        self.key_bias = None if given.key_bias is None else given.key_bias.flatten(0, 1)[..., None]
        self._reversed: dict[int, Tensor] = {}
        self._first_head = -1

    def _precise(self, given: Arguments) -> Arguments:
        floats: dict[str, Any] = {
            name: x.to(self.dtype)
            for name, x in given._asdict().items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        return given._replace(**floats)

    def columns(self, block: Block, x_NSK: Tensor) -> Tensor:
        """The block's keys or values in reverse order, (heads, C, K)."""
        if block.n0 != self._first_head:
            self._first_head = block.n0
            self._reversed.clear()
        if id(x_NSK) not in self._reversed:
            self._reversed[id(x_NSK)] = x_NSK[block.heads].flip(1)
        return self._reversed[id(x_NSK)][:, self.S - block.b :]

    def table(self, block: Block, e_PK: Tensor) -> Tensor:
        """The table of the block's heads: (P, K), or (heads, P, K) where each head has one."""
        return e_PK if e_PK.dim() == 2 else e_PK[self.head_index(block)]

    def products(self, block: Block, e_PK: Tensor, scale: float) -> Tensor:
        """Z = scale·q·e for the block's queries, (heads, R, P)."""
        return (self.base_q[block.heads, block.rows] * scale) @ self.table(block, e_PK).transpose(-1, -2)

    def head_index(self, block: Block) -> Tensor:
        """The head, 0 … H − 1, of each of the block's rows of N."""
        return torch.arange(block.n0, block.n1, device=self.device) % self.H

    def blocks(self) -> Iterator[Block]:
        heads, keys = self.B * self.H, self.S
        rows = max(16, min(MAX_ROWS, 4 * BLOCK_ELEMENTS // keys))
        heads_per_block = max(1, BLOCK_ELEMENTS // (min(rows, self.T) * keys))
        start = keys - self.T
        for n0 in range(0, heads, heads_per_block):
            for a in range(start, keys, rows):
                yield Block(n0, min(heads, n0 + heads_per_block), a, min(keys, a + rows), start)

    def is_token(self) -> Tensor | None:
        """Whether each query is a token, not padding, bool (N, T, 1); None: all are."""
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
class Scores:
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


def scores_of(x: Tensors, block: Block, width: int, is_known: bool = False) -> tuple[Scores, int]:
    """Compute the block's scores and U. `width` is U if that `is_known`, else the first guess of it."""
    given = x.given
    hidden = block.hidden(x.device)
    R = len(hidden)
    scores = Scores(torch.empty(0), x.columns(block, x.k))
    s_NRC = scores.s_NRC = (x.q[block.heads, block.rows] * given.scale) @ scores.k_NCK.transpose(-1, -2)
    if given.contextual:
        logits_NRC = s_NRC
        if x.gate_k is not None:
            scores.gate_k_NCK = x.columns(block, x.gate_k)
            logits_NRC = (x.base_q[block.heads, block.rows] * given.scale) @ scores.gate_k_NCK.transpose(-1, -2)
        saturation = None if is_known else x.saturation()
        width = _gates_and_positions(scores, logits_NRC, hidden, max(width, R), saturation)
        _add_contextual(x, block, scores, width)
    if given.relative is not None or given.distance_bias is not None or given.distance_slope is not None:
        _add_distance(x, block, s_NRC)
    if x.key_bias is not None:
        s_NRC += x.columns(block, x.key_bias)[..., 0][:, None]
    s_NRC[..., :R].masked_fill_(hidden, -torch.inf)
    return scores, width


def _gates_and_positions(
    scores: Scores, logits_NRC: Tensor, hidden: Tensor, width: int, saturation: float | None
) -> int:
    """Fill in gates and positions until all rows are saturated; returns U, the number of columns computed.

    `saturation` is the position from which a row is saturated; None: `width` is U.
    """
    C, R = logits_NRC.shape[-1], len(hidden)
    while True:
        width = min(width, C)
        gate_NRU = logits_NRC[..., :width].sigmoid()
        gate_NRU[..., :R].masked_fill_(hidden[:, :width], 0)
        p_NRU = gate_NRU.cumsum(-1)
        if saturation is None or width == C or bool((p_NRU[..., -1] >= saturation).all()):
            scores.gate_NRU, scores.p_NRU = gate_NRU, p_NRU
            return width
        width = width * 5 // 4 + 16


def _add_contextual(x: Tensors, block: Block, scores: Scores, width: int) -> None:
    given, near_NRU, far_NRC = x.given, scores.s_NRC[..., :width], scores.s_NRC[..., width:]
    p_NRU = cast(Tensor, scores.p_NRU)
    heads, rows = block.heads, block.rows
    if given.e is not None:
        z_NRP = scores.z_NRP = x.products(block, given.e, given.e_scale)
        index, w = index_and_fraction(p_NRU, z_NRP.shape[-1] - 1)
        near_NRU += z_NRP.gather(-1, index)
        near_NRU.addcmul_(w, differences(z_NRP).gather(-1, index))
        far_NRC += z_NRP[..., -1:]
    if x.segment_slope is not None and x.segment_intercept is not None:
        slope, intercept = x.segment_slope[heads, rows], x.segment_intercept[heads, rows]
        p, index = segments(x, p_NRU)
        near_NRU += intercept.gather(-1, index).addcmul_(p, slope.gather(-1, index))
        if width < scores.s_NRC.shape[-1]:
            last = segment_of(x, torch.full((1,), given.limit, dtype=p.dtype, device=x.device))
            far_NRC += intercept[..., last] + given.limit * slope[..., last]
    if given.m is not None:
        near_NRU += given.m[x.head_index(block)][:, None, None] * p_NRU


def index_and_fraction(p: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Integer part (int32) and fraction of positions that stop at `last`; 0 and NaN of one that is not a number."""
    p = p.clamp(max=last)
    index = p.to(torch.int32).clamp_(min=0)
    return index, p - index


def differences(z: Tensor) -> Tensor:
    """z[p + 1] − z[p], and 0 at the last."""
    return torch.nn.functional.pad(z.diff(dim=-1), (0, 1))


def segments(x: Tensors, p: Tensor) -> tuple[Tensor, Tensor]:
    p = p.clamp(max=x.given.limit)
    return p, segment_of(x, p)


def segment_of(x: Tensors, p: Tensor) -> Tensor:
    return torch.searchsorted(cast(Tensor, x.given.knots).to(p.dtype), p, right=True, out_int32=True)


def _add_distance(x: Tensors, block: Block, s_NRC: Tensor) -> None:
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


def block_dropout_mask(x: Tensors, block: Block) -> Tensor:
    seeds_N, heads_N = heads_of_batch(cast(Tensor, x.given.seeds).to(x.device), x.H)
    queries = torch.arange(block.a, block.b, device=x.device)
    keys = torch.arange(block.b - 1, -1, -1, device=x.device)
    return dropout_mask(x.given.dropout, seeds_N[block.heads], heads_N[block.heads], queries, keys)


def flatten_heads(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(0, 1)


# Forward and backward -------------------------------------------------------------------------------------------------


def why_not(given: Arguments) -> str | None:
    """Why these functions cannot compute a problem, for which `query_blocks` is used; None: they can."""
    if given.log_gates or given.stick_breaking or given.share_slope is not None:
        return "it has no sums of log gates, no stick-breaking and no bias by the share of the distance"
    return None


def forward(given: Arguments, out: Tensor, lse: Tensor, carry: Tensor) -> None:
    """Write the output and the log-sum-exp; `carry`, on the CPU, gets U of the block of each query."""
    with torch.autocast(given.q.device.type, enabled=False):
        x = Tensors(given)
        out_NTK, lse_NT, width_NT = out.flatten(0, 1), lse.flatten(0, 1), carry[0].flatten(0, 1)
        width = 1
        for block in x.blocks():
            heads, rows = block.heads, block.rows
            scores, width = scores_of(x, block, width)
            max_NR1 = scores.s_NRC.amax(-1, keepdim=True)
            a_NRC = scores.s_NRC.sub_(max_NR1).exp_()
            total_NR1 = a_NRC.sum(-1, keepdim=True)
            if given.dropout:
                a_NRC *= block_dropout_mask(x, block)
            out_NTK[heads, rows] = (a_NRC @ x.columns(block, x.v)) / (total_NR1 * (1 - given.dropout))
            lse_NT[heads, rows] = (max_NR1 + total_NR1.log())[..., 0]
            width_NT[heads, rows] = width
        is_token = x.is_token()
        if is_token is not None:
            out_NTK.masked_fill_(~is_token, 0)


def backward(
    given: Arguments, dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, gradients: list[Tensor | None]
) -> None:
    """Write the gradients, computing the weights of each block again."""
    with torch.autocast(given.q.device.type, enabled=False):
        x = Tensors(given)
        dout_NTK = dout.to(x.dtype).flatten(0, 1)
        is_token = x.is_token()
        if is_token is not None:
            dout_NTK = dout_NTK.masked_fill(~is_token, 0)
        out_NTK, lse_NT, width_NT = out.to(x.dtype).flatten(0, 1), lse.flatten(0, 1), carry[0].flatten(0, 1)
        grads = Gradients(x, gradients)
        for block in x.blocks():
            width = int(width_NT[block.n0, block.rows.start])
            _block_backward(x, block, width, dout_NTK, out_NTK, lse_NT, grads)
        grads.write()


def _block_backward(
    x: Tensors, block: Block, width: int, dout_NTK: Tensor, out_NTK: Tensor, lse_NT: Tensor, grads: Gradients
) -> None:
    given, heads, rows = x.given, block.heads, block.rows
    scores, _ = scores_of(x, block, width, is_known=True)
    a_NRC = scores.s_NRC.sub_(lse_NT[heads, rows, None]).exp_()
    dout_NRK = dout_NTK[heads, rows]
    da_NRC = dout_NRK @ x.columns(block, x.v).transpose(-1, -2)
    delta_NR1 = (dout_NRK * out_NTK[heads, rows]).sum(-1, keepdim=True)
    dropped_NRC = a_NRC
    if given.dropout:
        factor = block_dropout_mask(x, block).to(a_NRC.dtype) / (1 - given.dropout)
        da_NRC *= factor
        dropped_NRC = a_NRC * factor
    block.add_columns(grads.v, dropped_NRC.transpose(-1, -2) @ dout_NRK)
    ds_NRC = da_NRC.sub_(delta_NR1).mul_(a_NRC)
    grads.q[heads, rows] = 0
    if x.base_q is not x.q:
        grads.base_q[heads, rows] = 0
    grads.add_distances(block, ds_NRC)
    if grads.key_bias is not None:
        block.add_columns(grads.key_bias, ds_NRC.sum(1)[..., None])
    if given.contextual:
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


class Gradients:
    """The gradients, summed block by block."""

    def __init__(self, x: Tensors, to: list[Tensor | None]) -> None:
        self.x, self._to = x, to
        self._sums = [None if t is None else t if t.dtype == x.dtype else t.to(x.dtype) for t in to]
        of = Arguments(*cast(list[Any], self._sums))
        self.q, self.k, self.v = of.q.flatten(0, 1), of.k.flatten(0, 1), of.v.flatten(0, 1)
        self.base_q = self.q if of.base_q is None else of.base_q.flatten(0, 1)
        if of.gate_k is not None:
            self.gate_k = of.gate_k.flatten(0, 1)
        self.segment_slope, self.segment_intercept = map(flatten_heads, (of.segment_slope, of.segment_intercept))
        self.e, self.m, self.relative, self.distance_bias = of.e, of.m, of.relative, of.distance_bias
        self.key_bias = None if of.key_bias is None else of.key_bias.flatten(0, 1)[..., None]
        for summed in (of.k, of.v, of.gate_k, of.e, of.m, of.relative, of.distance_bias, of.key_bias):
            if summed is not None:
                summed.zero_()

    def add_products(self, block: Block, dz_NRP: Tensor, e_PK: Tensor, de_PK: Tensor, scale: float) -> None:
        """Add to the gradients of q and e, given that of z = scale·q·e."""
        dz_NRP *= scale
        self.base_q[block.heads, block.rows] += dz_NRP @ self.x.table(block, e_PK)
        q_NRK = self.x.base_q[block.heads, block.rows]
        if de_PK.dim() == 2:
            de_PK += dz_NRP.flatten(0, 1).T @ q_NRK.flatten(0, 1)
        else:
            de_PK.index_add_(0, self.x.head_index(block), dz_NRP.transpose(-1, -2) @ q_NRK)

    def add_distances(self, block: Block, ds_NRC: Tensor) -> None:
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

    def add_contextual(self, block: Block, scores: Scores, ds_NRC: Tensor) -> Tensor:
        """Return the gradient of the gates' logits, (heads, R, U), and add to the gradients of the tables."""
        x, heads, rows = self.x, block.heads, block.rows
        p_NRU, gate_NRU = cast(Tensor, scores.p_NRU), cast(Tensor, scores.gate_NRU)
        U = p_NRU.shape[-1]
        near_NRU, far_NR = ds_NRC[..., :U], ds_NRC[..., U:].sum(-1)
        dp_NRU = torch.zeros_like(p_NRU)
        if scores.z_NRP is not None and x.given.e is not None and self.e is not None:
            P = scores.z_NRP.shape[-1]
            index, w = index_and_fraction(p_NRU, P - 1)
            # At the last position the difference is 0, which is also the gradient of clamped positions.
            dp_NRU.addcmul_(near_NRU, differences(scores.z_NRP).gather(-1, index))
            dz_next_NRU = w.mul_(near_NRU)
            bounds = _run_boundaries(index, P)
            dz_next_NRP = _run_sums(dz_next_NRU, bounds)
            dz_NRP = _run_sums(near_NRU, bounds).sub_(dz_next_NRP)
            dz_NRP[..., 1:] += dz_next_NRP[..., :-1]
            dz_NRP[..., -1] += far_NR
            self.add_products(block, dz_NRP, x.given.e, self.e, x.given.e_scale)
        if x.segment_slope is not None and self.segment_slope is not None and self.segment_intercept is not None:
            p, index = segments(x, p_NRU)
            slope = x.segment_slope[heads, rows].gather(-1, index)
            dp_NRU += (near_NRU * slope).masked_fill_(p_NRU > x.given.limit, 0)
            bounds = _run_boundaries(index, self.segment_slope.shape[-1])
            dslope, dintercept = self.segment_slope[heads, rows], self.segment_intercept[heads, rows]
            dslope.copy_(_run_sums(near_NRU * p, bounds))
            dintercept.copy_(_run_sums(near_NRU, bounds))
            if ds_NRC.shape[-1] > U:
                last = segment_of(x, torch.full((1,), x.given.limit, dtype=p.dtype, device=x.device))
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

    def write(self) -> None:
        """Write the sums, where they are of another type than the gradients."""
        for to, summed in zip(self._to, self._sums, strict=True):
            if to is not None and summed is not None and to is not summed:
                to.copy_(summed)


def _run_boundaries(index_NRU: Tensor, size: int) -> Tensor:
    """The start of each of `size` values among the ascending indices, and the end of the last: (N, R, size + 1)."""
    entries = torch.arange(size + 1, dtype=index_NRU.dtype, device=index_NRU.device)
    return torch.searchsorted(index_NRU, entries.expand(*index_NRU.shape[:2], size + 1).contiguous())


def _run_sums(values_NRU: Tensor, bounds: Tensor) -> Tensor:
    """Sums of the columns of each index value: a scatter-add, five times as fast."""
    cumulative = torch.nn.functional.pad(values_NRU.cumsum(-1), (1, 0))
    return cumulative.gather(-1, bounds).diff(dim=-1)
