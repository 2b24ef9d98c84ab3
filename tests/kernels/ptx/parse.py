"""PTX text → instructions. Names of registers are unique afterwards: those of scopes `{ … }` get the scope's number."""

from __future__ import annotations

import re
from dataclasses import dataclass

SIZES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    """With its types and modifiers: `setp.lt.s32`."""
    operands: tuple[str, ...]
    """As written; a vector keeps its braces, an address its brackets. A name of a register is `%r1` or `x@3` (scope 3)."""
    guard: str | None
    """The register of the predicate; `!` before it negates."""
    line: int
    text: str
    source: str
    """Where it comes from, as the compiler's comment says: `tiles.py:70:4`."""


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: dict[str, str]
    """Types (`u64`) by name, in order."""
    registers: dict[str, str]
    """Types (`b32`, `pred`) by name."""
    code: tuple[Instruction | str, ...]
    """Instructions, and labels as texts."""
    warps: int


def parse(ptx: str) -> Kernel:
    """Parse a module with one kernel. Raises ValueError with the line for what is no PTX that the emulator knows."""
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    if entry is None or threads is None or "global_smem[" not in ptx:
        raise ValueError("the PTX has no .entry, no number of threads (.reqntid), or no memory global_smem")
    parameters = {
        words[-1]: words[1].removeprefix(".")
        for words in (declaration.split() for declaration in entry[2].split(",") if declaration.strip())
    }
    body = _Body()
    start = ptx.index("{", entry.end())
    first_line = ptx.count("\n", 0, start) + 1
    for number, line in enumerate(ptx[start + 1 :].split("\n"), first_line):
        body.read(line, number)
        if body.ended:
            break
    return Kernel(entry[1], parameters, body.registers, tuple(body.code), int(threads[1]) // 32)


class _Body:
    """Reads a kernel's lines one by one."""

    def __init__(self) -> None:
        self.registers: dict[str, str] = {}
        self.code: list[Instruction | str] = []
        self.ended = False
        self._source = ""
        self._pending = ""
        self._scopes: list[tuple[int, set[str]]] = []
        self._scopes_so_far = 0

    def read(self, line: str, number: int) -> None:
        code, _, comment = line.partition("//")
        code = code.strip()
        if code.startswith(".loc"):
            self._source = comment.split("@")[0].strip()
            return
        if code.startswith((".pragma", ".file")):
            return
        label = re.match(r"(\$[\w$]+):", code)
        if label:
            self.code.append(label[1])
            code = code[label.end() :].strip()
        self._pending += " " + code
        *statements, self._pending = self._pending.split(";")
        for statement in statements:
            self._statement(statement.strip(), number)
        rest = self._pending.strip()
        while rest.startswith("}") and not self.ended:
            self._close()
            rest = rest[1:].strip()
        self._pending = rest

    def _close(self) -> None:
        if self._scopes:
            self._scopes.pop()
        else:
            self.ended = True

    def _statement(self, text: str, number: int) -> None:
        while text[:1] in ("{", "}"):
            if text[0] == "{":
                self._scopes_so_far += 1
                self._scopes.append((self._scopes_so_far, set()))
            else:
                self._close()
            text = text[1:].strip()
        if text.startswith(".reg"):
            self._declare(text, number)
        elif text:
            self.code.append(self._instruction(text, number))

    def _declare(self, text: str, number: int) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if match is None:
            raise ValueError(f"line {number}: {text}: not a declaration of registers that the emulator knows")
        kind, names = match[1], match[2]
        counted = re.fullmatch(r"(%\w+?)<(\d+)>", names.strip())
        if counted:
            self.registers |= {f"{counted[1]}{index}": kind for index in range(int(counted[2]))}
            return
        for name in names.split(","):
            if self._scopes:
                scope, declared = self._scopes[-1]
                declared.add(name.strip())
                self.registers[f"{name.strip()}@{scope}"] = kind
            else:
                self.registers[name.strip()] = kind

    def _instruction(self, text: str, number: int) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)\s*(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
        if match is None:
            raise ValueError(f"line {number}: {text}: not an instruction that the emulator knows")
        guard = None if match[2] is None else match[1] + self._resolved(match[2])
        operands = tuple(self._resolved(operand.strip()) for operand in _split(match[4]))
        return Instruction(match[3], operands, guard, number, text, self._source)

    def _resolved(self, operand: str) -> str:
        """The operand with the names of this scope's registers, and those of the scopes around it, made unique."""
        if not self._scopes:
            return operand

        def unique(name: re.Match[str]) -> str:
            for scope, declared in reversed(self._scopes):
                if name[0] in declared:
                    return f"{name[0]}@{scope}"
            return name[0]

        return re.sub(r"%?[A-Za-z_]\w*", unique, operand)


def _split(operands: str) -> list[str]:
    """Split at the commas that are not within braces or brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", operands)
    return [part for part in parts if part.strip()]
