"""Runs a grid of blocks: the warps of a block one after another, from barrier to barrier, in an order that is chosen."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.kernels.ptx.memory import Copies, Fault, Memory, Now
from tests.kernels.ptx.translate import Program, Warp
from tests.kernels.ptx.warpgroup import Products

Order = Callable[[int], Sequence[int]]
"""The order in which warps run between two barriers, from their number."""


def forwards(warps: int) -> Sequence[int]:
    return range(warps)


def backwards(warps: int) -> Sequence[int]:
    return range(warps)[::-1]


class Shuffled:
    """Another order after each barrier."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, warps: int) -> Sequence[int]:
        return [int(warp) for warp in self.rng.permutation(warps)]


@dataclass
class Executed:
    """How often instructions ran, of all warps together."""

    program: Program
    runs: list[int] = field(init=False)
    """Of each basic block."""

    def __post_init__(self) -> None:
        self.runs = [0] * len(self.program.blocks)

    def opcodes(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for block, runs in zip(self.program.blocks, self.runs, strict=True):
            for instruction in block:
                counts[instruction.opcode] += runs
        return counts

    def never(self) -> list[Any]:
        """The instructions of basic blocks that did not run."""
        pairs = zip(self.program.blocks, self.runs, strict=True)
        return [instruction for block, runs in pairs if not runs for instruction in block]


def run(
    program: Program,
    grid: tuple[int, int],
    arguments: Sequence[torch.Tensor | float],
    shared_bytes: int,
    order: Order = forwards,
    names: Sequence[str] | None = None,
    executed: Executed | None = None,
) -> None:
    """Run a kernel with arguments in the order of its parameters; further parameters are null pointers.

    Raises Fault, with the instruction, for an access that a GPU need not perform as the program means it.
    """
    kernel = program.kernel
    names = [f"argument {index}" for index in range(len(arguments))] if names is None else names
    tensors = {name: x for name, x in zip(names, arguments, strict=True) if isinstance(x, torch.Tensor)}
    values = [*arguments, *[0] * (len(kernel.parameters) - len(arguments))]
    parameters = {
        name: _parameter(value, kind) for (name, kind), value in zip(kernel.parameters.items(), values, strict=True)
    }
    runs = [0] * len(program.blocks) if executed is None else executed.runs
    memory = Memory(tensors, shared_bytes, Now())
    with np.errstate(all="ignore"):
        for y in range(grid[1]):
            for x in range(grid[0]):
                memory.next_block()
                _run_block(program, (x, y), grid, parameters, memory, order, runs)


def _parameter(value: Any, kind: str) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if kind == "f32":
        return np.full(32, value, np.float32)
    bits = int(kind[1:])
    return np.full(32, int(value) % 2**bits, f"u{bits // 8}")


def _run_block(
    program: Program,
    block: tuple[int, int],
    grid: tuple[int, int],
    parameters: Mapping[str, Any],
    memory: Memory,
    order: Order,
    runs: list[int],
) -> None:
    warps = []
    for index in range(program.kernel.warps):
        special = {
            "%tid.x": np.arange(32) + 32 * index, "%laneid": np.arange(32), "%ntid.x": 32 * program.kernel.warps,
            "%ctaid.x": block[0], "%ctaid.y": block[1], "%ctaid.z": 0,
            "%nctaid.x": grid[0], "%nctaid.y": grid[1], "%nctaid.z": 1,
        }  # fmt: skip
        special = {name: np.broadcast_to(np.uint32(value), 32) for name, value in special.items()}
        copies = Copies(memory)
        warps.append(
            (program.start(Warp(special, dict(parameters), memory, copies, Products(memory, index)), runs), copies)
        )
    while True:
        ended = 0
        for index in order(len(warps)):
            memory.now.warp = index
            ended += _advance(program, *warps[index], f"block {block}, warp {index}")
        if ended == len(warps):
            return
        if ended:
            raise Fault(f"{program.kernel.name}: block {block}: {ended} warps end while others wait at a barrier")
        memory.now.barrier()


def _advance(program: Program, warp: Iterator[None], copies: Copies, who: str) -> bool:
    """Run a warp up to its next barrier; whether it has ended."""
    try:
        next(warp)
    except StopIteration:
        copies.check_none_pending()
        return True
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == f"<{program.kernel.name}>"]
        instruction = program.lines.get(frames[-1].lineno or 0) if frames else None
        if instruction is None:
            raise
        where = f"line {instruction.line} ({instruction.source}): {instruction.text}"
        raise Fault(f"{program.kernel.name}, {who}, {where}: {error}") from error
    return False
