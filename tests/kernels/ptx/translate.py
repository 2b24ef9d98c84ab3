"""Instructions → a Python generator that runs a warp, and yields at each barrier.

A register is a local variable: an array of 32 lanes, of the register's size and of any type, because instructions view
their operands as the type that they name. Arrays are never changed in place. A kernel becomes one function of Python, a
branch of `if` for each basic block, so an instruction costs little more than its operation in NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx.expressions import Expressions, dtype_of, size_of
from tests.kernels.ptx.memory import Copies, Fault, Memory
from tests.kernels.ptx.parse import Instruction, Kernel
from tests.kernels.ptx.warpgroup import WIDEN, Products


@dataclass
class Warp:
    """What a warp has: special registers and parameters, arrays of 32 lanes by name; memory; and what it waits for."""

    special: dict[str, Any]
    parameters: dict[str, Any]
    memory: Memory
    copies: Copies
    products: Products


@dataclass(frozen=True)
class Program:
    """A kernel that can be run."""

    kernel: Kernel
    start: Callable[[Warp, Any], Iterator[None]]
    """Runs a warp up to its next barrier, each time it is advanced. The second argument counts the runs of basic blocks."""
    blocks: list[list[Instruction]]
    lines: dict[int, Instruction]
    """The instruction of a line of the generated function."""
    code: str = field(repr=False)


def translate(kernel: Kernel, truncating: bool = False) -> Program:
    """`truncating`: products of 16-bit matrices are rounded by `mma_16_truncating`.

    Raises ValueError, with the line, for an instruction that the emulator does not know.
    """
    return _Translation(kernel, truncating).program()


def uniform(predicate: Any) -> bool:
    """Whether a branch is taken, by all lanes or by none."""
    taken = int(np.count_nonzero(predicate))
    if 0 < taken < 32:
        raise Fault("a branch is taken by some lanes of the warp: the emulator has no divergence")
    return taken == 32


class _Translation:
    def __init__(self, kernel: Kernel, truncating: bool) -> None:
        self.kernel = kernel
        self.mma_16 = "mma_16_truncating" if truncating else "mma_16"
        self.of = Expressions(kernel)
        self.names = self.of.names
        self.lines: list[str] = []
        self.instruction_of: dict[int, Instruction] = {}
        self.blocks: list[list[Instruction]] = []

    def program(self) -> Program:
        self.blocks, labels = _basic_blocks(self.kernel.code)
        self._emit("def start(warp, runs):")
        self._emit(" memory, copies, products = warp.memory, warp.copies, warp.products")
        for size in (1, 2, 4, 8):
            names = [self.names[r] for r, kind in self.kernel.registers.items() if size_of(kind) == size]
            if names:
                kind = f"u{8 * size}" if size > 1 else "pred"
                self._emit(f" {' = '.join(names)} = {self.of.constant('-1' if size > 1 else '1', kind)}")
        self._emit(" at = 0")
        self._emit(" while True:")
        for index, block in enumerate(self.blocks):
            self._emit(f"  if at == {index}:")
            self._emit(f"   runs[{index}] += 1")
            for instruction in block:
                self._instruction(instruction, labels)
            self._emit(f"   at = {index + 1}")
        self._emit("  raise AssertionError('the end of the code without ret')")
        self._emit(" yield")  # a kernel without a barrier is a generator, too
        code = "\n".join(self.lines)
        environment = {**self.of.environment, "uniform": uniform}
        exec(compile(code, f"<{self.kernel.name}>", "exec"), environment)
        return Program(self.kernel, environment["start"], self.blocks, self.instruction_of, code)

    def _emit(self, line: str) -> None:
        self.lines.append(line)

    def _instruction(self, instruction: Instruction, labels: dict[str, int]) -> None:
        begin = len(self.lines)
        try:
            self._translate(instruction, labels)
        except (KeyError, ValueError, IndexError) as error:
            problem = f"{self.kernel.name}, line {instruction.line}: {instruction.text}"
            raise ValueError(f"{problem}: an instruction that the emulator does not know ({error!r})") from error
        for line in range(begin, len(self.lines)):
            self.instruction_of[line + 1] = instruction

    # Results ----------------------------------------------------------------------------------------------------------

    def assign(self, target: str, kind: str, expression: str, guard: str | None) -> None:
        if target == "_":
            return
        name = self.names[target]
        if guard is not None:
            same = "" if kind == "pred" else f".view({dtype_of(kind)})"
            expression = f"np.where({guard}, {expression}, {name}{same})"
        self._emit(f"   {name} = {expression}")

    def guard(self, instruction: Instruction) -> str | None:
        if instruction.guard is None:
            return None
        name = self.names[instruction.guard.lstrip("!")]
        return f"~{name}" if instruction.guard.startswith("!") else name

    # Instructions -----------------------------------------------------------------------------------------------------

    def _translate(self, instruction: Instruction, labels: dict[str, int]) -> None:
        opcode, operands, guard = instruction.opcode, list(instruction.operands), self.guard(instruction)
        words = opcode.split(".")
        if words[0] == "bra":
            condition = f"if uniform({guard}): " if guard else ""
            self._emit(f"   {condition}at = {labels[operands[0]]}; continue")
        elif words[0] == "ret":
            self._emit(f"   if uniform({guard}): return" if guard else "   return")
        elif opcode in ("wgmma.fence.sync.aligned", "fence.proxy.async.shared::cta"):
            pass  # memory is the same for all
        elif opcode == "bar.warp.sync":
            if operands != ["-1"]:
                raise ValueError("a barrier of some lanes")  # the lanes of a warp run together
        elif words[0] in ("bar", "barrier"):
            if guard or operands != ["0"]:
                raise ValueError("a barrier of some threads")
            self._emit("   yield")
        elif words[0] in ("ld", "st"):
            self._access(words, operands, guard)
        elif words[0] == "cp":
            self._copy(opcode, operands, guard)
        elif words[0] in ("ldmatrix", "mma"):
            if guard:
                raise ValueError("a guard")
            self._matrices(opcode, words, operands)
        elif words[0] == "wgmma":
            self._products(words, operands)
        elif words[0] == "stmatrix":
            if not re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", opcode):
                raise ValueError(opcode)
            stored = self.of.values(self.of.vector(operands[1]), "u32")
            self._emit(f"   memory.store_matrices({self.of.address(operands[0])}, ({stored}), {'trans' in words})")
        elif words[0] == "setp":
            self._compare(words, operands, guard)
        elif words[0] == "shfl":
            self._shuffle(words, operands, guard)
        elif words[0] == "mov" and operands[0].startswith("{"):
            self._unpack(words[-1], operands, guard)
        else:
            expression, kind = self.of.result(words, operands[1:])
            self.assign(operands[0], kind, expression, guard)

    def _access(self, words: list[str], operands: list[str], guard: str | None) -> None:
        space, kind = words[1], words[-1]
        if space == "param":
            name = operands[1].strip("[] ")
            value = f"warp.parameters[{name!r}].view({dtype_of(kind)})"
            register = self.kernel.registers[operands[0]]
            self.assign(operands[0], register, f"{value}.astype({dtype_of(kind[0] + register[1:])})", guard)
            return
        if space not in ("global", "shared") or set(words[2:-1]) - {"v2", "v4"}:
            raise ValueError("the state space or a modifier")
        size = int(kind[1:]) // 8
        data, at = (operands[0], operands[1]) if words[0] == "ld" else (operands[1], operands[0])
        registers = self.of.vector(data)
        if any(size_of(self.kernel.registers.get(r, kind)) != size for r in registers):
            raise ValueError("a register of another size")
        if words[0] == "st":
            stored = self.of.values(registers, f"u{size * 8}")
            self._emit(f"   memory.store('{space}', {self.of.address(at)}, [{stored}], {guard})")
            return
        targets = ", ".join(f"loaded_{index}" for index in range(len(registers)))
        self._emit(f"   {targets}, = memory.load('{space}', {self.of.address(at)}, {size}, {len(registers)}, {guard})")
        for index, register in enumerate(registers):
            self.assign(register, f"u{size * 8}", f"loaded_{index}", guard)

    def _copy(self, opcode: str, operands: list[str], guard: str | None) -> None:
        if guard and "shared" not in opcode:
            raise ValueError("a guard")
        if opcode == "cp.async.commit_group":
            self._emit("   copies.commit()")
        elif opcode in ("cp.async.wait_group", "cp.async.wait_all"):
            if opcode == "cp.async.wait_all":
                self._emit("   copies.commit()")
            self._emit(f"   copies.wait({int(operands[0], 0) if operands else 0})")
        elif opcode.startswith(("cp.async.cg.shared.global", "cp.async.ca.shared.global")):
            size = int(operands[2], 0)
            given = self.of.value(operands[3] if len(operands) > 3 else operands[2], "u32")
            addresses = f"{self.of.address(operands[0])}, {self.of.address(operands[1])}"
            self._emit(f"   copies.start({addresses}, {size}, {given}, {guard})")
        else:
            raise ValueError(opcode)

    def _matrices(self, opcode: str, words: list[str], operands: list[str]) -> None:
        targets = [self.names[r] for r in self.of.vector(operands[0])]
        if words[0] == "ldmatrix":
            if not re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", opcode):
                raise ValueError(opcode)
            count = len(targets)
            call = f"memory.load_matrices({self.of.address(operands[1])}, {count}, {'trans' in words})"
        else:
            function = {
                "m16n8k16.row.col.f32.bf16.bf16.f32": f"{self.mma_16}(widen_bfloat16, ",
                "m16n8k16.row.col.f32.f16.f16.f32": f"{self.mma_16}(widen_float16, ",
                "m16n8k8.row.col.f32.tf32.tf32.f32": "mma_8(",
            }[opcode.removeprefix("mma.sync.aligned.")]
            given = ", ".join(f"({self.of.values(self.of.vector(operand), 'u32')})" for operand in operands[1:])
            call = f"{function}{given})"
        self._emit(f"   {', '.join(targets)}, = {call}")

    def _products(self, words: list[str], operands: list[str]) -> None:
        if words[1] == "commit_group":
            self._emit("   products.commit()")
        elif words[1] == "wait_group":
            self._emit(f"   products.wait({int(operands[0], 0)})")
        else:
            match = re.fullmatch(r"m64n(\d+)k16", words[4])
            in_registers = operands[1].startswith("{")
            signs, transposed = operands[4:6], operands[6:]
            if (
                match is None
                or words[5] != "f32"
                or signs != ["1", "1"]
                or words[6] != words[7]
                or words[6] not in WIDEN
            ):
                raise ValueError("a type or a sign")
            targets = self.of.vector(operands[0])
            # Of a in registers there is no flag.
            flags = (len(transposed) == 2 and transposed[0] == "1", transposed[-1:] == ["1"])
            a = self.of.values(self.of.vector(operands[1]), "u32" if in_registers else "u64")
            add = operands[3] == "1" if operands[3] in ("0", "1") else f"uniform({self.names[operands[3]]})"
            given = f"({self.of.values(targets, 'f32')}), ({a}), {self.of.value(operands[2], 'u64')}, {add}, {flags}"
            names = ", ".join(self.names[target] for target in targets)
            self._emit(f"   {names} = products.start('{words[6]}', {match[1]}, {given})")

    def _compare(self, words: list[str], operands: list[str], guard: str | None) -> None:
        self._emit(f"   result = {self.of.comparison(words, operands)}")
        results = ["result", "~result"]
        if words[2:-1] not in ([], ["ftz"]):
            sign = {"and": "&", "or": "|", "xor": "^"}[words[2]]
            other = operands[3]
            with_other = f"~{self.names[other[1:]]}" if other.startswith("!") else self.names[other]
            results = [f"({x} {sign} {with_other})" for x in results]
        for target, expression in zip(operands[0].split("|"), results, strict=False):
            self.assign(target.strip(), "pred", expression, guard)

    def _shuffle(self, words: list[str], operands: list[str], guard: str | None) -> None:
        targets = operands[0].split("|")
        x, by, control = (self.of.value(operand, "u32") for operand in operands[1:4])
        if guard or words[2] not in ("bfly", "idx") or int(operands[4], 0) & 0xFFFFFFFF != 0xFFFFFFFF:
            raise ValueError("the kind of a shuffle, or its lanes")
        self._emit(f"   shuffle, inside = shuffled('{words[2]}', {x}, {by}, {control})")
        for target, expression in zip(targets, ("shuffle", "inside"), strict=False):
            self.assign(target.strip(), "u32" if expression == "shuffle" else "pred", expression, None)

    def _unpack(self, kind: str, operands: list[str], guard: str | None) -> None:
        half = int(kind[1:]) // 2
        self._emit(f"   halves = np.ascontiguousarray({self.of.value(operands[1], kind)}).view(u{half // 8})")
        for index, target in enumerate(self.of.vector(operands[0])):
            self.assign(target, f"u{half}", f"halves[{index}::2]", guard)


def _basic_blocks(code: tuple[Instruction | str, ...]) -> tuple[list[list[Instruction]], dict[str, int]]:
    """Blocks that begin at a label or after a branch, and the number of the block at each label."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for item in code:
        if isinstance(item, str):
            if blocks[-1]:
                blocks.append([])
            labels[item] = len(blocks) - 1
            continue
        blocks[-1].append(item)
        if item.opcode.split(".")[0] == "bra":
            blocks.append([])
    return blocks, labels
