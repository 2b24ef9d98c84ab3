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

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.memory import SHARED_BASE, Copies, Fault, Memory
from tests.kernels.ptx.parse import SIZES, Instruction, Kernel

SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x", "%laneid")


@dataclass
class Warp:
    """What a warp reads: special registers and parameters, arrays of 32 lanes by name; memory; and its copies."""

    special: dict[str, Any]
    parameters: dict[str, Any]
    memory: Memory
    copies: Copies


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

    Raises ValueError, with the line, for an instruction that the emulator does not know."""
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
        self.names = {register: f"v{index}" for index, register in enumerate(kernel.registers)}
        self.environment: dict[str, Any] = {"np": np, "uniform": uniform, **vars(arithmetic)}
        self.lines: list[str] = []
        self.instruction_of: dict[int, Instruction] = {}
        self.blocks: list[list[Instruction]] = []

    def program(self) -> Program:
        self.blocks, labels = _basic_blocks(self.kernel.code)
        self._emit("def start(warp, runs):")
        self._emit(" memory, copies = warp.memory, warp.copies")
        for size in (1, 2, 4, 8):
            names = [self.names[r] for r, kind in self.kernel.registers.items() if _bytes(kind) == size]
            if names:
                kind = f"u{8 * size}" if size > 1 else "pred"
                self._emit(f" {' = '.join(names)} = {self._constant('-1' if size > 1 else '1', kind)}")
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
        exec(compile(code, f"<{self.kernel.name}>", "exec"), self.environment)
        return Program(self.kernel, self.environment["start"], self.blocks, self.instruction_of, code)

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

    # Operands ---------------------------------------------------------------------------------------------------------

    def value(self, operand: str, kind: str) -> str:
        """The expression of an operand as an array of a type, such as `f32`."""
        if operand in self.names:
            name = self.names[operand]
            return name if kind == "pred" else f"{name}.view({_dtype(kind)})"
        if operand in SPECIAL:
            return f"warp.special[{operand!r}].view({_dtype(kind)})"
        if operand.startswith("{"):  # mov.b32 r, {a, b}: the first has the lower bits
            low, high = self.vector(operand)
            half = int(kind[1:]) // 2
            parts = f"{self.value(high, f'u{half}')}.astype(u{half // 4})", self.value(low, f"u{half}")
            return f"(({parts[0]} << {self._constant(str(half), f'u{2 * half}')}) | {parts[1]})"
        return self._constant(operand, kind)

    def values(self, operands: Iterator[str] | list[str], kind: str) -> str:
        return "".join(f"{self.value(operand, kind)}, " for operand in operands)

    def vector(self, operand: str) -> list[str]:
        return [part.strip() for part in operand.strip("{} ").split(",")]

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if match is None:
            raise ValueError(operand)
        base = match[1]
        wide = self.kernel.registers.get(base) == "b64"
        expression = f"{self.value(base, 's64' if wide else 'u32')}"
        if not wide:
            expression += ".astype(i8)"
        offset = int(match[2] or "0", 0)
        return f"({expression} + {offset})" if offset else expression

    def _constant(self, text: str, kind: str) -> str:
        name = f"k_{kind}_{re.sub(r'[^0-9A-Za-z]', lambda c: f'_{ord(c[0])}_', text)}"
        if name not in self.environment:
            array = np.broadcast_to(_number(text, kind), 32).copy()
            array.flags.writeable = False
            self.environment[name] = array
        return name

    # Results ----------------------------------------------------------------------------------------------------------

    def assign(self, target: str, kind: str, expression: str, guard: str | None) -> None:
        if target == "_":
            return
        name = self.names[target]
        if guard is not None:
            same = "" if kind == "pred" else f".view({_dtype(kind)})"
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
        elif words[0] == "setp":
            self._compare(words, operands, guard)
        elif words[0] == "shfl":
            self._shuffle(words, operands, guard)
        elif words[0] == "mov" and operands[0].startswith("{"):
            self._unpack(words[-1], operands, guard)
        else:
            expression, kind = self._expression(words, operands[1:])
            self.assign(operands[0], kind, expression, guard)

    def _access(self, words: list[str], operands: list[str], guard: str | None) -> None:
        space, kind = words[1], words[-1]
        if space == "param":
            name = operands[1].strip("[] ")
            value = f"warp.parameters[{name!r}].view({_dtype(kind)})"
            register = self.kernel.registers[operands[0]]
            self.assign(operands[0], register, f"{value}.astype({_dtype(kind[0] + register[1:])})", guard)
            return
        if space not in ("global", "shared") or set(words[2:-1]) - {"v2", "v4"}:
            raise ValueError("the state space or a modifier")
        size = int(kind[1:]) // 8
        data, at = (operands[0], operands[1]) if words[0] == "ld" else (operands[1], operands[0])
        registers = self.vector(data)
        if any(_bytes(self.kernel.registers.get(r, kind)) != size for r in registers):
            raise ValueError("a register of another size")
        if words[0] == "st":
            stored = self.values(registers, f"u{size * 8}")
            self._emit(f"   memory.store('{space}', {self.address(at)}, [{stored}], {guard})")
            return
        targets = ", ".join(f"loaded_{index}" for index in range(len(registers)))
        self._emit(f"   {targets}, = memory.load('{space}', {self.address(at)}, {size}, {len(registers)}, {guard})")
        for index, register in enumerate(registers):
            self.assign(register, f"u{size * 8}", f"loaded_{index}", guard)

    def _copy(self, opcode: str, operands: list[str], guard: str | None) -> None:
        if opcode == "cp.async.commit_group":
            self._emit("   copies.commit()")
        elif opcode in ("cp.async.wait_group", "cp.async.wait_all"):
            if guard:
                raise ValueError("a guard")
            if opcode == "cp.async.wait_all":
                self._emit("   copies.commit()")
            self._emit(f"   copies.wait({int(operands[0]) if operands else 0})")
        elif opcode.startswith(("cp.async.cg.shared.global", "cp.async.ca.shared.global")):
            size = int(operands[2], 0)
            given = self.value(operands[3] if len(operands) > 3 else operands[2], "u32")
            addresses = f"{self.address(operands[0])}, {self.address(operands[1])}"
            self._emit(f"   copies.start({addresses}, {size}, {given}, {guard})")
        else:
            raise ValueError(opcode)

    def _matrices(self, opcode: str, words: list[str], operands: list[str]) -> None:
        targets = [self.names[r] for r in self.vector(operands[0])]
        if words[0] == "ldmatrix":
            if not re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16", opcode):
                raise ValueError(opcode)
            count = len(targets)
            call = f"memory.load_matrices({self.address(operands[1])}, {count}, {'trans' in words})"
        else:
            function = {
                "m16n8k16.row.col.f32.bf16.bf16.f32": f"{self.mma_16}(widen_bfloat16, ",
                "m16n8k16.row.col.f32.f16.f16.f32": f"{self.mma_16}(widen_float16, ",
                "m16n8k8.row.col.f32.tf32.tf32.f32": "mma_8(",
            }[opcode.removeprefix("mma.sync.aligned.")]
            given = ", ".join(f"({self.values(self.vector(operand), 'u32')})" for operand in operands[1:])
            call = f"{function}{given})"
        self._emit(f"   {', '.join(targets)}, = {call}")

    def _compare(self, words: list[str], operands: list[str], guard: str | None) -> None:
        kind, (a, b) = words[-1], (self.value(x, words[-1]) for x in operands[1:3])
        flag = words[1]
        signs = {
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
            "eq": "==",
            "ne": "!=",
            "lo": "<",
            "ls": "<=",
            "hi": ">",
            "hs": ">=",
        }
        if kind[0] == "f":
            numbers = f"({a} == {a}) & ({b} == {b})"
            if flag in ("num", "nan"):
                result = f"({numbers})" if flag == "num" else f"~({numbers})"
            elif flag == "ne":
                result = f"(({a} != {b}) & {numbers})"
            elif flag.endswith("u"):
                result = f"(({a} {signs[flag[:-1]]} {b}) | ~({numbers}))"
            else:
                result = f"({a} {signs[flag]} {b})"
        else:
            result = f"({a} {signs[flag]} {b})"
        joined = [word for word in words[2:-1] if word in ("and", "or", "xor")]
        targets = operands[0].split("|")
        self._emit(f"   result = {result}")
        results = ["result", "~result"]
        if joined:
            sign = {"and": "&", "or": "|", "xor": "^"}[joined[0]]
            other = operands[3]
            with_other = f"~{self.names[other[1:]]}" if other.startswith("!") else self.names[other]
            results = [f"({x} {sign} {with_other})" for x in results]
        for target, expression in zip(targets, results, strict=False):
            self.assign(target.strip(), "pred", expression, guard)

    def _shuffle(self, words: list[str], operands: list[str], guard: str | None) -> None:
        targets = operands[0].split("|")
        x, by, control = (self.value(operand, "u32") for operand in operands[1:4])
        if guard or words[2] not in ("bfly", "idx") or int(operands[4], 0) & 0xFFFFFFFF != 0xFFFFFFFF:
            raise ValueError("the kind of a shuffle, or its lanes")
        self._emit(f"   shuffle, inside = shuffled('{words[2]}', {x}, {by}, {control})")
        for target, expression in zip(targets, ("shuffle", "inside"), strict=False):
            self.assign(target.strip(), "u32" if expression == "shuffle" else "pred", expression, None)

    def _unpack(self, kind: str, operands: list[str], guard: str | None) -> None:
        half = int(kind[1:]) // 2
        self._emit(f"   halves = np.ascontiguousarray({self.value(operands[1], kind)}).view(u{half // 8})")
        for index, target in enumerate(self.vector(operands[0])):
            self.assign(target, f"u{half}", f"halves[{index}::2]", guard)

    def _expression(self, words: list[str], operands: list[str]) -> tuple[str, str]:
        """The expression of an instruction with one result, and the result's type."""
        name, kind = words[0], words[-1]
        ftz = "ftz" in words
        if name == "cvt":
            return self._converted(".".join(words[1:]), operands)
        if name in ("mul", "mad") and words[1] == "wide":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            a, b = (f"{self.value(x, kind)}.astype({_dtype(wide)})" for x in operands[:2])
            added = f" + {self.value(operands[2], wide)}" if name == "mad" else ""
            return f"{a} * {b}{added}", wide
        if name in ("selp", "slct"):
            a, b = (self.value(x, kind) for x in operands[:2])
            return f"np.where({self.names[operands[2]]}, {a}, {b})", {"selp": kind}[name]
        if name in ("shl", "shr", "bfe"):
            function = {"shl": "shift_left", "shr": "shift_right", "bfe": "bit_field"}[name]
            numbers = "".join(f", {self.value(x, 'u32')}" for x in operands[1:])
            return f"{function}({self.value(operands[0], kind.replace('b', 'u'))}{numbers})", kind
        if name == "redux":
            reduce = {"max": "np.max", "min": "np.min", "add": "np.sum"}[words[2]]
            return f"reduced({reduce}, {self.value(operands[0], kind)}, {self.value(operands[1], 'u32')})", kind
        given = [self.value(x, kind) for x in operands]
        if kind == "f32":
            return self._of_floats(".".join(words[:-1]).replace(".ftz", ""), given, ftz), kind
        return self._of_integers(".".join(words[:-1]), given), kind

    def _of_floats(self, name: str, given: list[str], ftz: bool) -> str:
        one_or_two = {
            "add": "{0} + {1}", "add.rn": "{0} + {1}", "sub": "{0} - {1}", "sub.rn": "{0} - {1}", "mul": "{0} * {1}",
            "mul.rn": "{0} * {1}", "neg": "-{0}", "abs": "np.abs({0})",
            "max": "np.fmax({0}, {1})", "min": "np.fmin({0}, {1})",
            "fma.rn": "fma({0}, {1}, {2})", "fma.rz": "fma_truncated({0}, {1}, {2})",
            "div.full": "divide({0}, {1})", "div.rn": "divide({0}, {1})", "mov": "{0}",
        }  # fmt: skip
        if name in one_or_two:
            given = [f"flushed({x})" for x in given] if ftz else given
            result = one_or_two[name].format(*given)
            return f"flushed({result})" if ftz else result
        if name == "add.rz":
            return f"fma_truncated({given[0]}, np.float64(1), {given[1]})"
        if (name, ftz) in (("ex2.approx", True), ("rcp.approx", True), ("lg2.approx", False)):
            function = {"ex2": "exp2", "rcp": "reciprocal", "lg2": "log2"}[name.split(".")[0]]
            return f"{function}({given[0]})"
        raise ValueError(name)

    def _of_integers(self, name: str, given: list[str]) -> str:
        return {
            "mov": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul.lo": "{0} * {1}", "mad.lo": "{0} * {1} + {2}",
            "neg": "-{0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}",
            "max": "np.maximum({0}, {1})", "min": "np.minimum({0}, {1})", "abs": "np.abs({0})",
            "div": "divide_integers({0}, {1})", "rem": "remainder({0}, {1})",
            "shf.l.wrap": "funnel_left({0}, {1}, {2})", "prmt": "permuted_bytes({0}, {1}, {2})",
        }[name].format(*given)  # fmt: skip

    def _converted(self, types: str, operands: list[str]) -> tuple[str, str]:
        """`cvt`; `types` as in `rn.bf16x2.f32`."""
        kind, of = types.split(".")[-2:]
        if types in ("rn.bf16x2.f32", "rn.f16x2.f32"):
            function = "bfloat16" if kind == "bf16x2" else "float16"
            upper, lower = (f"{function}({self.value(x, 'f32')})" for x in operands)
            return f"pair({upper}, {lower})", "u32"
        if types in _CONVERSIONS:
            function, of = _CONVERSIONS[types]
            return function.format(self.value(operands[0], of)), {"bf16": "u16", "f16": "u16", "tf32": "u32"}.get(
                kind, kind
            )
        if types.split(".")[-2:] != types.split(".") or kind[0] not in "su" or of[0] not in "su":
            raise ValueError(types)
        register = self.kernel.registers.get(operands[0], of)
        if _bytes(register) > _bytes(of):  # the lower bits count
            return f"{self.value(operands[0], register)}.astype({_dtype(of)}).astype({_dtype(kind)})", kind
        return f"{self.value(operands[0], of)}.astype({_dtype(kind)})", kind


_CONVERSIONS = {
    "rn.bf16.f32": ("bfloat16({0})", "f32"),
    "rn.f16.f32": ("float16({0})", "f32"),
    "f32.bf16": ("from_bfloat16({0})", "u16"),
    "f32.f16": ("{0}.astype(f4)", "f16"),
    "rna.tf32.f32": ("tf32({0})", "f32"),
    "rzi.s32.f32": ("to_integer({0})", "f32"),
    "rn.f32.s32": ("{0}.astype(f4)", "s32"),
    "rn.f32.u32": ("{0}.astype(f4)", "u32"),
}
"""Expressions of conversions, and the type as which they take the operand."""


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


def _bytes(kind: str) -> int:
    return SIZES[kind.lstrip("bfsu") if kind != "pred" else kind]


def _dtype(kind: str) -> str:
    """The name of NumPy's type for one of PTX, in the environment of the generated function."""
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return f"{letter}{int(kind[1:]) // 8}"


def _number(text: str, kind: str) -> Any:
    """An immediate operand as a number of NumPy."""
    if kind == "pred":
        return np.bool_(int(text))
    dtype = np.dtype(_dtype(kind) if kind[0] != "u" or int(kind[1:]) > 8 else kind)
    if text == "global_smem":
        return dtype.type(SHARED_BASE)
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(dtype)
    value = int(text.rstrip("U"), 0)
    if kind[0] == "f":
        raise ValueError(text)
    return np.uint64(value & (2**64 - 1)).astype(dtype)
