"""Fused attention in pure PyTorch: blocks of queries, and a backward pass that computes each block again.

Used where the native kernels cannot run. Computes in float32, or in float64 for float64 inputs. Memory beyond inputs
and outputs is that of a few blocks, O(rows × S).

The keys of a block are in reverse order: a row's columns go from the query to earlier tokens, so positions are a
cumulative sum along a row. Once every row of a block has reached the last position, the bias is constant and gates have
no gradient: the columns from there on are attention without positions.

Shapes: N heads of some sequences, R rows (queries of a block), C columns (keys up to the block's last query, reversed),
U columns before positions are saturated, P positions, M segments.

On a GPU, the forward pass waits at each block for U, which is a size. It saves U in the host's memory, so that the
backward pass need not wait.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.blocked_scores import (
    Block,
    Scores,
    Tensors,
    block_dropout_mask,
    differences,
    flatten_heads,
    index_and_fraction,
    scores_of,
    segment_of,
    segments,
)


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
    """Where each of `size` values begins among the ascending indices, and where the last ends: (N, R, size + 1)."""
    entries = torch.arange(size + 1, dtype=index_NRU.dtype, device=index_NRU.device)
    return torch.searchsorted(index_NRU, entries.expand(*index_NRU.shape[:2], size + 1).contiguous())


def _run_sums(values_NRU: Tensor, bounds: Tensor) -> Tensor:
    """Sums of the columns of each index value: a scatter-add, five times as fast."""
    cumulative = torch.nn.functional.pad(values_NRU.cumsum(-1), (1, 0))
    return cumulative.gather(-1, bounds).diff(dim=-1)
