"""Tile sizes, numbers of warps and of pipeline stages of the Triton kernels, from a table.

The table is `tuning.json`, which `make gpu STAGE=tune` measures and writes. Nothing is measured in training: the same
inputs use the same configurations, and so give the same bits, in every process. `COPE_SWEEP_TUNING` in the environment
names another table.

An *entry* holds the configurations of all kernels for one kind of problem, because the kernels share tile boundaries. A
problem uses the nearest entry (`Table.nearest`):

1. `architecture`: the same, or else the newest older one with entries, or else the oldest; the interpreter has its own.
2. `bits` of an input's numbers (16 or 32) and `contextual` are the same.
3. `head_dim`: the smallest that is not below the problem's, or else the largest.
4. Of these, the nearest in `p_max` and `tokens`: the least sum of distances, |log₂ a − log₂ b| each. A `p_max` of null
   is that of problems without a table of positions, and counts as 1. In a tie, the first in the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).with_name("tuning.json")
VARIABLE = "COPE_SWEEP_TUNING"
INTERPRETER = "interpreter"
KERNELS = ("forward", "backward_rows", "backward_keys")
VERSION = 1

Configuration = dict[str, int]
"""By name: the tile sizes of a kernel (its parameters), `num_warps` and `num_stages`."""
Configurations = Mapping[str, Configuration]
"""By kernel."""


@dataclass(frozen=True)
class Entry:
    """The configurations of all kernels for one kind of problem."""

    architecture: str
    """Such as "sm_90", or "interpreter"."""
    bits: int
    contextual: bool
    head_dim: int
    p_max: int | None
    tokens: int
    kernels: Configurations
    source: str
    """The origin of the configurations: "default", or the device and versions that measured them."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.architecture, self.bits, self.contextual, self.head_dim, self.p_max, self.tokens


@dataclass(frozen=True)
class Table:
    entries: tuple[Entry, ...]
    path: Path

    def nearest(
        self, architecture: str, bits: int, contextual: bool, head_dim: int, p_max: int | None, tokens: int
    ) -> Entry:
        """The entry for a problem, by the rules of the module's docstring. Raises ValueError if there is none."""
        kind = [entry for entry in self.entries if (entry.bits, entry.contextual) == (bits, contextual)]
        chosen = _architecture(architecture, {entry.architecture for entry in kind})
        of_kind = [entry for entry in kind if entry.architecture == chosen]
        if not of_kind:
            raise ValueError(
                f"{self.path}: no entry for {architecture}, bits {bits}, contextual {str(contextual).lower()}: "
                "add one, or measure it with make gpu STAGE=tune"
            )
        head_dims = {entry.head_dim for entry in of_kind}
        nearest_head_dim = min((d for d in head_dims if d >= head_dim), default=max(head_dims))
        candidates = [entry for entry in of_kind if entry.head_dim == nearest_head_dim]
        return min(candidates, key=lambda entry: _distance(entry.p_max, p_max) + _distance(entry.tokens, tokens))

    def to_json(self) -> str:
        """The file's text: one line for each entry."""
        lines = ",\n".join("    " + json.dumps(asdict(entry)) for entry in self.entries)
        return f'{{\n  "version": {VERSION},\n  "entries": [\n{lines}\n  ]\n}}\n'

    def updated(self, entries: Sequence[Entry]) -> Table:
        """The table with these entries added, in the place of those with the same key."""
        of_key = {entry.key: entry for entry in (*self.entries, *entries)}
        return Table(tuple(of_key.values()), self.path)


def configuration(
    kernel: str,
    *,
    architecture: str,
    dtype: torch.dtype,
    head_dim: int,
    p_max: int | None,
    contextual: bool,
    tokens: int,
) -> Configuration:
    """The configuration of a kernel: its tile sizes by parameter, `num_warps` and `num_stages`.

    `architecture`: what `architecture_of` returns. `p_max`: number of entries of the table of positions, or None.
    `contextual`: whether any term depends on gates. `tokens`: the number of keys. Raises ValueError for a bad table.
    """
    if _overrides:
        return dict(_overrides[-1][kernel])
    table = read_table(Path(os.environ.get(VARIABLE) or PATH))
    entry = table.nearest(architecture, dtype.itemsize * 8, contextual, head_dim, p_max, tokens)
    return dict(entry.kernels[kernel])


_overrides: list[Configurations] = []


@contextmanager
def using_configurations(configurations: Configurations) -> Iterator[None]:
    """Use these configurations for all problems within a `with` block, in all threads: a backward pass has its own."""
    _overrides.append(configurations)
    try:
        yield
    finally:
        _overrides.pop()


def architecture_of(device: torch.device) -> str:
    """Return "sm_90", for example; "interpreter" for a device that is no GPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def read_table(path: Path) -> Table:
    """Read and check a table. Raises ValueError with the file, the entry and the key that is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: the table of configurations cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path}: not a table of configurations of version {VERSION}")
    given = content.get("entries")
    if not isinstance(given, list) or not given:
        raise ValueError(f"{path}: entries: a list with at least one entry is needed")
    entries = tuple(_entry(value, f"{path}: entries[{index}]") for index, value in enumerate(given))
    seen: set[tuple[Any, ...]] = set()
    for index, entry in enumerate(entries):
        if entry.key in seen:
            raise ValueError(f"{path}: entries[{index}]: another entry is for the same problems; remove one")
        seen.add(entry.key)
    return Table(entries, path)


def _architecture(wanted: str, known: set[str]) -> str | None:
    if wanted in known or wanted == INTERPRETER:
        return wanted if wanted in known else None
    gpus = sorted(known - {INTERPRETER}, key=_capability)
    older = [name for name in gpus if _capability(name) <= _capability(wanted)]
    return older[-1] if older else next(iter(gpus), None)


def _capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


def _distance(one: int | None, other: int | None) -> float:
    return abs(math.log2(one or 1) - math.log2(other or 1))


def _entry(value: Any, where: str) -> Entry:
    fields = tuple(Entry.__dataclass_fields__)
    if not isinstance(value, dict) or sorted(value) != sorted(fields):
        given = ", ".join(value) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{where}: needs exactly the keys {', '.join(fields)}, and has {given}")
    entry = Entry(**value)
    name = entry.architecture
    _check(
        name == INTERPRETER or (isinstance(name, str) and name.startswith("sm_") and name[3:].isdigit()),
        where, "architecture", name, 'sm_ and a number, as "sm_90", or "interpreter"',
    )  # fmt: skip
    _check(entry.bits in (16, 32), where, "bits", entry.bits, "16 or 32")
    _check(isinstance(entry.contextual, bool), where, "contextual", entry.contextual, "true or false")
    _check(entry.p_max is None or _positive(entry.p_max), where, "p_max", entry.p_max, "a positive integer or null")
    for key in ("head_dim", "tokens"):
        _check(_positive(value[key]), where, key, value[key], "a positive integer")
    _check(isinstance(entry.source, str), where, "source", entry.source, "a text")
    kernels = entry.kernels
    ok = isinstance(kernels, dict) and sorted(kernels) == sorted(KERNELS)
    _check(ok, where, "kernels", kernels, f"an object with {', '.join(KERNELS)}")
    for kernel, sizes in kernels.items():
        _check_configuration(sizes, f"{where}.kernels.{kernel}")
    problem = incompatible(kernels)
    if problem:
        raise ValueError(f"{where}.kernels: {problem}")
    return entry


_MULTIPLES = (
    (("forward", "PLAIN_S"), ("forward", "BLOCK_S")),
    (("forward", "BLOCK_S"), ("backward_rows", "BLOCK_S")),
    (("forward", "BLOCK_T"), ("backward_rows", "BLOCK_T")),
    (("forward", "BLOCK_T"), ("backward_keys", "BLOCK_T")),
    (("forward", "PLAIN_S"), ("backward_rows", "PLAIN_S")),
    (("backward_rows", "BLOCK_T"), ("backward_keys", "BLOCK_T")),
    (("backward_rows", "PLAIN_S"), ("backward_rows", "BLOCK_S")),
    (("backward_keys", "BLOCK_S"), ("backward_rows", "BLOCK_S")),
    (("backward_keys", "PLAIN_T"), ("backward_keys", "BLOCK_T")),
)
"""Tile sizes of which the first is a multiple of the second: the forward kernel determines where plain tiles end, and
`backward_rows` stores positions at the edges of its tiles of BLOCK_S keys, for its tiles of BLOCK_T queries."""

MAX_KEYS = 64
"""The largest BLOCK_S: sums of so many gates are exact (see `triton_attention/tiles.py`)."""


def incompatible(configurations: Configurations) -> str | None:
    """Why these tile sizes of the kernels do not fit together, for an error message; None: they do."""
    for (kernel, size), (other_kernel, other_size) in _MULTIPLES:
        one, other = configurations[kernel].get(size), configurations[other_kernel].get(other_size)
        if one is None or other is None or one % other:
            return f"{kernel}.{size} ({one}) has to be a multiple of {other_kernel}.{other_size} ({other})"
    for kernel, sizes in configurations.items():
        if sizes["BLOCK_S"] > MAX_KEYS:
            return f"{kernel}.BLOCK_S ({sizes['BLOCK_S']}) has to be at most {MAX_KEYS}"
    return None


def _check_configuration(sizes: Any, where: str) -> None:
    _check(isinstance(sizes, dict) and len(sizes) > 2, where, "", sizes, "an object of tile sizes, warps and stages")
    for key, size in sizes.items():
        wanted = "a positive integer" if key == "num_stages" else "a power of 2"
        power = _positive(size) and (key == "num_stages" or size & (size - 1) == 0)
        _check(power, where, key, size, wanted)
    for key in ("num_warps", "num_stages"):
        _check(key in sizes, where, key, None, "given")


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check(ok: bool, where: str, key: str, value: Any, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{where}{'.' if key else ''}{key}: {value!r} is not {wanted}")
