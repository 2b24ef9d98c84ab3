"""The scores of a block of queries in PyTorch, for `blocked.py`, whose docstring describes the method.

Shapes: N heads of some sequences, R rows (queries of a block), C columns (keys up to the block's last query, reversed),
U columns before positions are saturated, P positions, M segments.
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
        """Which of the first R columns are after the query, (R, R); later columns never are."""
        return torch.ones(self.b - self.a, self.b - self.a, dtype=torch.bool, device=device).tril(-1).flip(0)


def blocks(heads: int, queries: int, keys: int) -> Iterator[Block]:
    rows = max(16, min(MAX_ROWS, 4 * BLOCK_ELEMENTS // keys))
    heads_per_block = max(1, BLOCK_ELEMENTS // (min(rows, queries) * keys))
    start = keys - queries
    for n0 in range(0, heads, heads_per_block):
        for a in range(start, keys, rows):
            yield Block(n0, min(heads, n0 + heads_per_block), a, min(keys, a + rows), start)


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
        return blocks(self.B * self.H, self.T, self.S)

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
