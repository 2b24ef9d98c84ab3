"""`wgmma.mma_async`, the products of matrices of sm_90: four warps multiply 64 rows, and each of them 16.

A factor in shared memory is named by a *descriptor* of 64 bits: its address, the distances of its blocks, and the swizzle
of its chunks of 16 bytes. The layouts are those of the PTX ISA, "Matrices in shared memory for wgmma".

Products are computed at once, and their factors are read again when the program waits: until then they must not change.
That the results are not used before is not checked, nor are fences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.arithmetic import Array, f4, f8, from_bfloat16, u2, u4
from tests.kernels.ptx.memory import Fault, Memory

SWIZZLED = {1: 128, 2: 64, 3: 32}
"""Bytes in which chunks are exchanged, by the descriptor's bits from 62 on."""

NUMBERS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "bf16": (2, lambda bits: from_bfloat16(bits).astype(f8)),
    "f16": (2, lambda bits: bits.view(np.float16).astype(f8)),
    "tf32": (4, lambda bits: (bits & np.uint32(0xFFFFE000)).view(f4).astype(f8)),
}
"""By type: the bytes of a number, and the numbers of bits."""


def chunk_addresses(descriptor: int, rows: int, size: int, transposed: bool) -> Array:
    """Addresses of a factor's chunks of 16 bytes: (rows, 2) along the sum; transposed: (rows ÷ numbers of a chunk, k).

    `size`: bytes of a number; k = 32 ÷ size terms.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
    if descriptor >> 49 & 7 or descriptor >> 62 not in SWIZZLED:
        raise Fault(f"a descriptor without swizzle, or with a base offset: {descriptor:#x}")
    width = SWIZZLED[descriptor >> 62]
    if transposed:
        chunk, k = np.arange(rows * size // 16)[:, None], np.arange(32 // size)[None, :]
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
        size, numbers = NUMBERS[kind]
        if len(a) > 1:
            left = self._of_registers(a, size, numbers)
        else:
            # Each warp of the four has 16 of the 64 rows.
            left = self._load(a[0], 64, size, numbers, transposed[0])[16 * (self.warp % 4) :][:16]
        product = left @ self._load(b, columns, size, numbers, transposed[1]).T
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

    @staticmethod
    def _of_registers(a: tuple[Array, ...], size: int, numbers: Callable[[Array], Array]) -> Array:
        bits = np.concatenate([x.view(u4) for x in a])
        if size == 2:
            bits = bits.view(u2)
        return numbers(bits).reshape(2, 2, 8, 16 // size).transpose(1, 2, 0, 3).reshape(16, 32 // size)

    def _load(
        self, descriptor: Array, rows: int, size: int, numbers: Callable[[Array], Array], transposed: bool
    ) -> Array:
        """A factor, (rows, k)."""
        addresses = chunk_addresses(int(descriptor[0]), rows, size, transposed)
        flat = addresses.ravel().astype(np.int64)
        words = self.memory.shared.load(flat, 4, 4)
        self._open.append((flat, words))
        bits = np.ascontiguousarray(words).view(f"u{size}")
        if transposed:
            chunks, k = addresses.shape
            return numbers(bits).reshape(chunks, k, 16 // size).transpose(0, 2, 1).reshape(rows, k)
        return numbers(bits).reshape(rows, 32 // size)
