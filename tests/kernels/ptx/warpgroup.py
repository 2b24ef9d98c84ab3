"""`wgmma.mma_async`, the products of matrices of sm_90: four warps multiply 64 rows, and each of them 16.

A factor in shared memory is named by a *descriptor* of 64 bits: its address, the distances of its blocks, and the swizzle
of its chunks of 16 bytes. The layouts are those of the PTX ISA, "Matrices in shared memory for wgmma".

Products are computed at once, and their factors are read again when the program waits: until then they must not change.
That the results are not used before is not checked, nor are fences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.arithmetic import Array, f4, u2, u4, widen_bfloat16, widen_float16
from tests.kernels.ptx.memory import Fault, Memory

SWIZZLED = {1: 128, 2: 64, 3: 32}
"""Bytes in which chunks are exchanged, by the descriptor's bits from 62 on."""

WIDEN: dict[str, Callable[[Array], Array]] = {"bf16": widen_bfloat16, "f16": widen_float16}
"""By type, the numbers of bits."""


def chunk_addresses(descriptor: int, rows: int, transposed: bool) -> Array:
    """Addresses of a factor's chunks of 8 numbers: (rows, 2), along the 16 terms of the sum; transposed: (rows ÷ 8, 16)."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
    if descriptor >> 49 & 7 or descriptor >> 62 not in SWIZZLED:
        raise Fault(f"a descriptor without swizzle, or with a base offset: {descriptor:#x}")
    width = SWIZZLED[descriptor >> 62]
    if transposed:
        chunk, k = np.arange(rows // 8)[:, None], np.arange(16)[None, :]
        in_width = width // 16
        address = start + chunk % in_width * 16 + chunk // in_width * leading + k % 8 * width + k // 8 * stride
    else:
        row, chunk = np.arange(rows)[:, None], np.arange(2)[None, :]
        address = start + row % 8 * width + row // 8 * stride + chunk * 16
    return address ^ ((address >> 7 & (width // 16 - 1)) << 4)


class Products:
    """The products that a warp has started."""

    def __init__(self, memory: Memory, warp: int) -> None:
        self.memory, self.warp = memory, warp
        self._open: list[tuple[Array, Array]] = []
        self._groups: list[list[tuple[Array, Array]]] = []

    def start(
        self,
        kind: str,
        columns: int,
        results: tuple[Array, ...],
        a: tuple[Array, ...],
        b: Array,
        add: bool,
        transposed: tuple[bool, bool],
    ) -> list[Array]:
        """A product, added to `results` or not: its registers. `a`: four registers, or a descriptor."""
        widen = WIDEN[kind]
        if len(a) > 1:
            bits = np.concatenate([x.view(u4) for x in a]).view(u2)
            left = widen(bits).reshape(2, 2, 8, 8).transpose(1, 2, 0, 3).reshape(16, 16)
        else:
            # Each warp of the four has 16 of the 64 rows.
            left = widen(self._load(a[0], 64, transposed[0])[16 * (self.warp % 4) :][:16])
        product = left @ widen(self._load(b, columns, transposed[1])).T
        mine = product.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(columns // 2, 32)
        if add:
            mine = mine + np.stack([x.view(f4) for x in results])
        return list(mine.astype(f4))

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """Complete all groups but the last `pending`. Raises Fault if their factors have changed."""
        done = max(len(self._groups) - pending, 0)
        for group in self._groups[:done]:
            for addresses, words in group:
                if not np.array_equal(self.memory.shared.load(addresses, 4, 4), words):
                    raise Fault("a factor of wgmma has changed before the program waited for the product")
        self._groups = self._groups[done:]

    def _load(self, descriptor: Array, rows: int, transposed: bool) -> Array:
        """The bits of a factor, (rows, 16)."""
        addresses = chunk_addresses(int(descriptor[0]), rows, transposed)
        flat = addresses.ravel().astype(np.int64)
        words = self.memory.shared.load(flat, 4, 4)
        self._open.append((flat, words))
        bits = np.ascontiguousarray(words).view(u2)
        if transposed:
            bits = bits.reshape(rows // 8, 16, 8).transpose(0, 2, 1)
        return np.ascontiguousarray(bits).reshape(rows, 16)
