"""The expressions of Python for PTX's operands, and for its instructions that compute one result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.memory import SHARED_BASE
from tests.kernels.ptx.parse import SIZES, Kernel

SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x", "%laneid")


class Expressions:
    """The expressions of a kernel, and the environment of names in which they are evaluated."""

    def __init__(self, kernel: Kernel) -> None:
        self.registers = kernel.registers
        self.names = {register: f"v{index}" for index, register in enumerate(kernel.registers)}
        self.environment: dict[str, Any] = {"np": np, **vars(arithmetic)}

    def value(self, operand: str, kind: str) -> str:
        """The expression of an operand as an array of a type, such as `f32`."""
        if operand in self.names:
            name = self.names[operand]
            return name if kind == "pred" else f"{name}.view({dtype_of(kind)})"
        if operand in SPECIAL:
            return f"warp.special[{operand!r}].view({dtype_of(kind)})"
        if operand.startswith("{"):  # mov.b32 r, {a, b}: the first has the lower bits
            low, high = self.vector(operand)
            half = int(kind[1:]) // 2
            parts = f"{self.value(high, f'u{half}')}.astype(u{half // 4})", self.value(low, f"u{half}")
            return f"(({parts[0]} << {self.constant(str(half), f'u{2 * half}')}) | {parts[1]})"
        return self.constant(operand, kind)

    def values(self, operands: Sequence[str], kind: str) -> str:
        return "".join(f"{self.value(operand, kind)}, " for operand in operands)

    def vector(self, operand: str) -> list[str]:
        return [part.strip() for part in operand.strip("{} ").split(",")]

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if match is None:
            raise ValueError(operand)
        base = match[1]
        wide = self.registers.get(base) == "b64"
        expression = f"{self.value(base, 's64' if wide else 'u32')}"
        if not wide:
            expression += ".astype(i8)"
        offset = int(match[2] or "0", 0)
        return f"({expression} + {offset})" if offset else expression

    def constant(self, text: str, kind: str) -> str:
        name = f"k_{kind}_{re.sub(r'[^0-9A-Za-z]', lambda c: f'_{ord(c[0])}_', text)}"
        if name not in self.environment:
            array = np.broadcast_to(_number(text, kind), 32).copy()
            array.flags.writeable = False
            self.environment[name] = array
        return name

    def comparison(self, words: list[str], operands: list[str]) -> str:
        """The expression of `setp`, without what combines it with another predicate."""
        kind, flag = words[-1], words[1]
        a, b = (self.value(x, kind) for x in operands[1:3])
        if kind[0] != "f":
            return f"({a} {_SIGNS[flag]} {b})"
        numbers = f"({a} == {a}) & ({b} == {b})"
        if flag in ("num", "nan"):
            return f"({numbers})" if flag == "num" else f"~({numbers})"
        if flag == "ne":
            return f"(({a} != {b}) & {numbers})"
        if flag.endswith("u"):
            return f"(({a} {_SIGNS[flag[:-1]]} {b}) | ~({numbers}))"
        return f"({a} {_SIGNS[flag]} {b})"

    def result(self, words: list[str], operands: list[str]) -> tuple[str, str]:
        """The expression of an instruction with one result, and the result's type."""
        name, kind = words[0], words[-1]
        ftz = "ftz" in words
        if name == "cvt":
            return self._converted(".".join(words[1:]), operands)
        if name in ("mul", "mad") and words[1] == "wide":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            a, b = (f"{self.value(x, kind)}.astype({dtype_of(wide)})" for x in operands[:2])
            added = f" + {self.value(operands[2], wide)}" if name == "mad" else ""
            return f"{a} * {b}{added}", wide
        if name == "selp":
            a, b = (self.value(x, kind) for x in operands[:2])
            return f"np.where({self.names[operands[2]]}, {a}, {b})", kind
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
            "min.relu": "np.maximum(np.minimum({0}, {1}), 0)", "max": "np.maximum({0}, {1})", "min": "np.minimum({0}, {1})", "abs": "np.abs({0})",
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
            bits = {"bf16": "u16", "f16": "u16", "tf32": "u32"}
            return function.format(self.value(operands[0], of)), bits.get(kind, kind)
        if types.split(".")[-2:] != types.split(".") or kind[0] not in "su" or of[0] not in "su":
            raise ValueError(types)
        register = self.registers.get(operands[0], of)
        if size_of(register) > size_of(of):  # the lower bits count
            return f"{self.value(operands[0], register)}.astype({dtype_of(of)}).astype({dtype_of(kind)})", kind
        return f"{self.value(operands[0], of)}.astype({dtype_of(kind)})", kind


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

_SIGNS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


def size_of(kind: str) -> int:
    return SIZES[kind.lstrip("bfsu") if kind != "pred" else kind]


def dtype_of(kind: str) -> str:
    """The name of NumPy's type for one of PTX, in the environment of the generated function."""
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return f"{letter}{int(kind[1:]) // 8}"


def _number(text: str, kind: str) -> Any:
    """An immediate operand as a number of NumPy."""
    if kind == "pred":
        return np.bool_(int(text) != 0)
    dtype = np.dtype(dtype_of(kind) if kind[0] != "u" or int(kind[1:]) > 8 else kind)
    if text == "global_smem":
        return dtype.type(SHARED_BASE)
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16)).view(dtype)
    value = int(text.rstrip("U"), 0)
    if kind[0] == "f":
        raise ValueError(text)
    return np.uint64(value & (2**64 - 1)).astype(dtype)
