"""`wgmma` in the PTX emulator: products of factors that lie in shared memory, placed chunk by chunk."""

import numpy as np
import pytest

from tests.kernels.ptx.memory import SHARED_BASE, Fault, Memory, Now
from tests.kernels.ptx.warpgroup import Products

LANES = np.arange(32)
SHARED = 16384


def memory_of(numbers, place):
    """Shared memory in which number (row, column) of a matrix lies at byte `place(row, column)`, and its bits."""
    memory = Memory({}, SHARED, Now())
    for at in np.ndindex(numbers.shape):
        bits = np.float16(numbers[at]).view(np.uint16)
        memory.shared.store(np.array([SHARED_BASE + place(*at)]), np.array([[bits]]))
    memory.now.barrier()
    return memory


def rows_swizzled(width):
    """Rows of `width` bytes. Chunk c of 16 bytes lies at the place of c ⊕ (row's place in 128 bytes); groups of 8 rows."""

    def place(row, column):
        chunk = column // 8
        repeats = 128 // width  # rows with the same exchange
        exchanged = chunk ^ (row % 8 // repeats)
        return row // 8 * 8 * width + row % 8 * width + exchanged * 16 + column % 8 * 2

    return place


def descriptor(offset, leading, stride, width):
    layout = {128: 1, 64: 2, 32: 3}[width]
    value = (SHARED_BASE + offset) // 16 | leading // 16 << 16 | stride // 16 << 32 | layout << 62
    return np.full(32, value, np.uint64)


def results(products, columns, a, b, transposed):
    registers = products.start("f16", columns, (np.zeros(32, np.float32),) * (columns // 2), a, b, False, transposed)
    found = np.zeros((16, columns))
    for index, register in enumerate(registers):  # d₄ⱼ₊ᵢ: rows g and g + 8, columns 8j + 2t and 8j + 2t + 1
        column = index // 4 * 8 + LANES % 4 * 2 + index % 2
        found[LANES // 4 + 8 * (index // 2 % 2), column] = register
    return found


def registers_of(a):
    """Four registers of 16 × 16 numbers: upper left, lower left, upper right, lower right."""
    blocks = (a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:])
    return tuple(np.ascontiguousarray(x.astype(np.float16)).reshape(-1).view(np.uint32) for x in blocks)


@pytest.mark.parametrize("width", [128, 64, 32])
def test_a_factor_in_rows(width):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)) / 4, rng.integers(-8, 9, (24, width // 2)) / 4
    memory = memory_of(b, rows_swizzled(width))
    for step in range(width // 32):  # 16 columns at a time
        products = Products(memory, 0)
        given = descriptor(32 * step, 16, 8 * width, width)
        found = results(products, 24, registers_of(a), given, (False, False))
        assert np.array_equal(found, a @ b[:, 16 * step :][:, :16].T)


def test_a_factor_in_columns():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)) / 4, rng.integers(-8, 9, (16, 128)) / 4

    def place(k, n):  # blocks of 64 columns, in which a row of 128 bytes has one k
        return n // 64 * 2048 + rows_swizzled(128)(k, n % 64)

    memory = memory_of(b, place)
    given = descriptor(0, 2048, 1024, 128)
    assert np.array_equal(results(Products(memory, 0), 128, registers_of(a), given, (False, True)), a @ b)


@pytest.mark.parametrize("warp", [0, 3, 5])
def test_each_warp_has_16_of_the_rows(warp):
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 9, (64, 64)) / 4
    memory = memory_of(a, rows_swizzled(128))
    given = descriptor(0, 16, 1024, 128)
    found = results(Products(memory, warp), 8, (given,), given, (False, False))
    assert np.array_equal(found, a[16 * (warp % 4) :][:16, :16] @ a[:8, :16].T)


def test_a_factor_must_not_change_before_the_wait():
    memory = memory_of(np.zeros((8, 64)), rows_swizzled(128))
    given = descriptor(0, 16, 1024, 128)
    for store, pending in ((False, 0), (True, 1)):
        products = Products(memory, 0)
        results(products, 8, registers_of(np.zeros((16, 16))), given, (False, False))
        products.commit()
        if store:
            memory.shared.store(np.array([SHARED_BASE]), np.array([[7]], np.uint32))
        products.wait(pending)
    with pytest.raises(Fault, match="has changed before"):
        products.wait(0)
