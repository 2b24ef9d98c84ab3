"""Global and shared memory of the emulated GPU.

Every access is checked: it is aligned, within a tensor or the shared memory, and free of *races*. Two accesses race if
they are of different warps of a block without a barrier between them, or of different blocks of a launch, and one of
them is a store of other bits than are there. A copy by `cp.async` writes at an unknown time until it has been waited
for: any access to its target in between is a race, too.

For this, each *granule* of 2 bytes has two stamps, of its last store and of its last load. A stamp is a number of the
*epoch*, which begins at a barrier, and of the warp; later epochs have larger stamps.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]

GRANULE = 2
WARPS = 64
"""Stamps of an epoch."""
SEVERAL = WARPS - 1
"""In the place of a warp: several have loaded the granule in this epoch."""
OTHER_BLOCKS = 1
"""The stamp of loads of several blocks."""
IN_FLIGHT = np.iinfo(np.int64).max
"""The stamp of a store that is not completed."""


class Fault(Exception):
    """An access that a GPU need not perform as the program means it."""


@dataclass
class Now:
    """Who accesses memory. Stamps from `epoch` on are of this epoch, those below `block` of other blocks."""

    block: int = WARPS
    epoch: int = WARPS
    warp: int = 0

    @property
    def stamp(self) -> int:
        return self.epoch + self.warp

    def barrier(self) -> None:
        self.epoch += WARPS

    def next_block(self) -> None:
        self.barrier()
        self.block = self.epoch


class Region:
    """Consecutive memory."""

    def __init__(self, name: str, base: int, data: NDArray[np.uint8], now: Now, new: bool) -> None:
        self.new = new
        """Whether all contents are undefined at first."""
        self.name, self.base, self.data, self.now = name, base, data, now
        granules = -(-len(data) // GRANULE)
        self.stores, self.loads = np.zeros((2, granules), np.int64)
        self.open = np.ones(granules, bool)
        """Whether a granule may be accessed."""
        self._views = {size: data[: len(data) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)}

    def contains(self, addresses: Array) -> bool:
        return bool(self.base <= addresses.min() and addresses.max() < self.base + len(self.data))

    def load(self, addresses: Array, size: int, count: int) -> Array:
        """The words at these addresses, (lanes, count) of `size` bytes each."""
        index, granules = self._at(addresses, size, count)
        if self.new and not self.stores[granules].all():
            raise Fault(f"{self.name}: a load at offsets {(addresses - self.base).tolist()}, where nothing has stored")
        self._check(self.stores[granules], f"load of {count * size} bytes", addresses)
        old, now = self.loads[granules], self.now
        new = np.where((old >= now.epoch) & (old != now.stamp), now.epoch + SEVERAL, now.stamp)
        self.loads[granules] = np.where((old > 0) & (old < now.block), OTHER_BLOCKS, new)
        loaded: Array = self._views[size][index]
        return loaded

    def store(self, addresses: Array, values: Array) -> None:
        """Store words, (lanes, count). Raises Fault if two lanes store different bits at one address."""
        size, count = values.itemsize, values.shape[1]
        index, granules = self._at(addresses, size, count)
        view, what = self._views[size], f"store of {count * size} bytes"
        stored = self.stores[granules]
        changes = not np.array_equal(view[index], values)
        if changes or (stored == IN_FLIGHT).any():
            self._check(stored, what, addresses)
            self._check(self.loads[granules], what, addresses)
        self.stores[granules] = self.now.stamp
        view[index] = values
        if changes and not np.array_equal(view[index], values):
            raise Fault(f"{self.name}: lanes store different bits at one address")

    def begin_copy(self, addresses: Array, size: int) -> None:
        """Mark the targets of a copy that is not completed."""
        _, granules = self._at(addresses, size, 1)
        self._check(self.stores[granules], "copy", addresses)
        self._check(self.loads[granules], "copy", addresses)
        self.stores[granules] = IN_FLIGHT
        self.data[(addresses - self.base)[:, None] + np.arange(size)] = 0xFF

    def end_copy(self, addresses: Array, values: Array) -> None:
        _, granules = self._at(addresses, values.shape[1], 1)
        self.stores[granules] = self.now.stamp
        self.data[(addresses - self.base)[:, None] + np.arange(values.shape[1])] = values

    def _at(self, addresses: Array, size: int, count: int) -> tuple[Array, Array]:
        """Indices of words, (lanes, count), and of granules, (lanes, …)."""
        offset, total = addresses - self.base, size * count
        if (addresses % total).any():
            raise Fault(f"{self.name}: {total} bytes at addresses that are not multiples of it: {addresses.tolist()}")
        if offset.min() < 0 or offset.max() + total > len(self.data):
            raise Fault(f"{self.name}: {total} bytes at offsets {offset.tolist()}, of {len(self.data)} bytes")
        granules = (offset // GRANULE)[:, None] + np.arange(-(-total // GRANULE))
        if not self.open[granules].all():
            raise Fault(f"{self.name}: {total} bytes at offsets {offset.tolist()}, between the elements of the tensor")
        return (offset // size)[:, None] + np.arange(count), granules

    def _check(self, stamps: Array, what: str, addresses: Array) -> None:
        now = self.now
        others = (stamps >= now.epoch) & (stamps != now.stamp)
        others |= (stamps > 0) & (stamps < now.block)
        if others.any():
            lane = int(np.argmax(others.any(1)))
            stamp = int(stamps[lane][others[lane]][0])
            who = (
                "a copy that was not waited for" if stamp == IN_FLIGHT
                else "another block" if stamp < now.block
                else f"warp {stamp - now.epoch} (63: several), without a barrier in between"
            )  # fmt: skip
            where = int(addresses[lane]) - self.base
            raise Fault(f"{self.name}: race of a {what} at offset {where}, lane {lane}, with {who}")


class Global:
    """The memory of tensors on the CPU, at their real addresses."""

    def __init__(self, tensors: dict[str, torch.Tensor], now: Now) -> None:
        regions: dict[int, Region] = {}
        for name, x in tensors.items():
            storage = x.untyped_storage()
            if storage.nbytes() == 0:
                continue
            address = storage.data_ptr()
            if address not in regions:
                data = np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(address), np.uint8)
                regions[address] = Region(name, address, data, now, new=False)
                regions[address].open[:] = False
            each = x.element_size() // GRANULE
            opened = torch.from_numpy(regions[address].open)
            for part in range(each):
                strides = [stride * each for stride in x.stride()]
                opened.as_strided(x.shape, strides, x.storage_offset() * each + part).fill_(True)
        self.regions = list(regions.values())

    def at(self, addresses: Array) -> Region:
        """The region of an access: all lanes access one tensor."""
        for region in self.regions:
            if region.base <= addresses[0] < region.base + len(region.data):
                return region
        names = ", ".join(f"{r.name} [{r.base:#x}, {r.base + len(r.data):#x})" for r in self.regions)
        raise Fault(f"address {int(addresses[0]):#x} is in no tensor: {names}")


SHARED_BASE = 1024
"""Address of the first byte of shared memory: swizzles need a multiple of 1024, as GPUs have it."""


class Memory:
    """What a block accesses: global memory, its shared memory, and its copies between them."""

    def __init__(self, tensors: dict[str, torch.Tensor], shared_bytes: int, now: Now) -> None:
        self.now = now
        self.of_tensors = Global(tensors, now)
        self.shared_bytes = shared_bytes
        self.next_block()

    def next_block(self) -> None:
        """New shared memory, which is NaN in all types."""
        data = np.full(self.shared_bytes, 0xFF, np.uint8)
        self.shared = Region("shared memory", SHARED_BASE, data, self.now, new=True)
        self.now.next_block()

    def region(self, space: str, addresses: Array) -> Region:
        return self.shared if space == "shared" else self.of_tensors.at(addresses)

    def load(self, space: str, addresses: Array, size: int, count: int, guard: Array | None) -> list[Array]:
        """Words of `size` bytes, an array of 32 lanes for each of `count`; 0 where the guard is false."""
        addresses = addresses.astype(np.int64)
        if guard is None or guard.all():
            return list(self.region(space, addresses).load(addresses, size, count).T)
        result = np.zeros((32, count), f"u{size}")
        if guard.any():
            chosen = addresses[guard]
            result[guard] = self.region(space, chosen).load(chosen, size, count)
        return list(result.T)

    def store(self, space: str, addresses: Array, values: list[Array], guard: Array | None) -> None:
        addresses, words = addresses.astype(np.int64), np.stack(values, 1)
        if guard is not None:
            addresses, words = addresses[guard], words[guard]
        if len(addresses):
            self.region(space, addresses).store(addresses, words)

    def load_matrices(self, addresses: Array, count: int, transposed: bool) -> list[Array]:
        """`ldmatrix`: `count` matrices of 8 × 8 numbers of 16 bits; lane l has the address of row l % 8 of matrix l // 8."""
        addresses = addresses.astype(np.int64)[: 8 * count]
        rows = self.shared.load(addresses, 4, 4).reshape(count, 8, 4)
        if transposed:
            rows = np.ascontiguousarray(rows.view(np.uint16).transpose(0, 2, 1)).view(np.uint32)
        return list(rows.reshape(count, 32))

    def store_matrices(self, addresses: Array, matrices: tuple[Array, ...], transposed: bool) -> None:
        """`stmatrix`, which stores what `load_matrices` loads."""
        rows = np.stack([x.view(np.uint32) for x in matrices]).reshape(-1, 8, 4)
        if transposed:
            rows = np.ascontiguousarray(np.ascontiguousarray(rows).view(np.uint16).transpose(0, 2, 1)).view(np.uint32)
        self.shared.store(addresses.astype(np.int64)[: 8 * len(matrices)], rows.reshape(-1, 4))


class Copies:
    """The copies that the threads of a warp have started with `cp.async`, in groups."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._open: list[tuple[Array, Array]] = []
        self._groups: list[list[tuple[Array, Array]]] = []

    def start(self, to: Array, source: Array, size: int, given: Array, guard: Array | None) -> None:
        """Copy `size` bytes for each lane, of which those after the first `given` are 0."""
        lanes = np.ones(32, bool) if guard is None else guard
        if not lanes.any():
            return
        to, source, given = (x.astype(np.int64)[lanes] for x in (to, source, given))
        values = np.zeros((len(to), size), np.uint8)
        if ((given != 0) & (given != size)).any():
            raise Fault(f"cp.async with {given} of {size} bytes: the emulator copies all or none")
        some = given > 0
        if some.any():
            words = self.memory.of_tensors.at(source[some]).load(source[some], 4, size // 4)
            values[some] = np.ascontiguousarray(words).view(np.uint8)
        self.memory.shared.begin_copy(to, size)
        self._open.append((to, values))

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, pending: int) -> None:
        """Complete all groups but the last `pending`."""
        done = len(self._groups) - pending
        for group in self._groups[: max(done, 0)]:
            for to, values in group:
                self.memory.shared.end_copy(to, values)
        self._groups = self._groups[max(done, 0) :]

    def check_none_pending(self) -> None:
        if self._open or any(self._groups):
            raise Fault("a warp ends while its copies are pending")
