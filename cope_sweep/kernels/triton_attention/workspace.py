"""The heads and queries that a launch of the kernels computes, and the scratch memory that it needs.

Kernels keep tables q·e, prefix sums and positions at the edges of tiles in scratch memory: w bytes for each query in a
launch, where P are positions, M segments, R relative positions, N the larger of R and the number D of distances with a
bias:

    forward     w = 4·(P + R)
    backward    w = 12·P + 8·M + 4·(R + N) + 4·K·(P + R)/BLOCK_T + 4·D/BLOCK_T + 16 + 16·(S/EDGE + 1)

(EDGE keys in a tile of `backward_keys`; its term only with gates.) Where plain tiles have kernels of their own, w is
larger by 4·(1 + K) forward, and by 4·K·(1 + 2·S/T) backward. A launch has at most

    max(MIN_ROWS, max(MIN_BYTES, bytes of q)/w)

queries of all heads together, so scratch memory does not grow with the batch, the heads and T beyond that: it is at
most MIN_ROWS·w, MIN_BYTES or the size of q, whichever is largest. Launches follow each other, and use the same
memory. If a launch has not all queries of a head, there are float32 sums of the gradients of this head's keys and
values too, 8·S·K bytes (12·S·K with gate keys, and 4·S with a bias of keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MIN_ROWS = 16384
"""So many queries occupy a large GPU: 256 programs of 64."""
MIN_BYTES = 64 * 2**20
MAX_HEADS = 65535
"""CUDA's limit for the second dimension of a grid."""


@dataclass(frozen=True)
class Part:
    """The heads (of B·H) and queries (of T) of one launch."""

    first_head: int
    heads: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Parts:
    """The division of heads and queries among launches."""

    heads: int
    """B·H."""
    rows: int
    """T."""
    heads_each: int
    rows_each: int
    """Queries for which a launch has scratch memory, of each head: a multiple of the tiles."""

    @property
    def rows_are_split(self) -> bool:
        return self.rows_each < self.rows

    def __iter__(self) -> Iterator[Part]:
        for first_head in range(0, self.heads, self.heads_each):
            heads = min(self.heads_each, self.heads - first_head)
            for first_row in range(0, self.rows, self.rows_each):
                yield Part(first_head, heads, first_row, min(self.rows_each, self.rows - first_row))


def divide(heads: int, rows: int, row_bytes: float, q_bytes: int, tile: int) -> Parts:
    """Divide heads (B·H) and queries (T) among launches.

    `row_bytes`: scratch memory for a query. `q_bytes`: size of q. `tile`: a multiple of all tiles' numbers of queries.
    """
    all_rows = -(-rows // tile) * tile
    if row_bytes == 0:
        return Parts(heads, rows, min(heads, MAX_HEADS), all_rows)
    at_once = max(MIN_ROWS, int(max(MIN_BYTES, q_bytes) / row_bytes))
    if at_once >= all_rows:
        return Parts(heads, rows, min(heads, MAX_HEADS, at_once // all_rows), all_rows)
    return Parts(heads, rows, 1, max(tile, at_once // tile * tile))
