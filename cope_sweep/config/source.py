"""YAML files, parsed to plain data together with the line of every key, so that errors can name it.

Scalars follow the core schema of YAML 1.2: `1e-3` is a number and `on` is text. Duplicate keys are errors. Only values
that JSON can express are accepted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.parser import RoundTripParser
from ruamel.yaml.scalarbool import ScalarBoolean

from cope_sweep.errors import UserError

Json = Any
"""A value that JSON can express: a mapping with text keys, a list, text, a number, true, false or null."""

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file to a value."""

MAX_DEPTH = 30
"""Largest number of nested levels in a file. It stops aliases that contain themselves."""
MAX_CHARACTERS = 200_000
"""Largest length of a file: parsing takes 10 µs per character."""
MAX_VALUES = 20_000
"""Largest number of values in a file. It stops aliases that expand exponentially."""
TOO_LARGE = f"more than {MAX_DEPTH} levels or {MAX_VALUES:,} values"
MAX_NUMBER = 10**18
"""Larger whole numbers are refused."""
TOO_MANY_DIGITS = "the number has too many digits; whole numbers have at most 18"


class SpecError(UserError):
    """A declaration is not valid. The message names the file, line, key and value, and what would be accepted."""


@dataclass(frozen=True)
class Source:
    """A parsed file: its data, and where each key and item was written."""

    name: str
    """The file's path, as error messages show it."""
    data: dict[str, Json]
    """Read-only by convention: specs that were validated from it share its values."""
    lines: dict[KeyPath, int | str] = field(default_factory=dict)
    """Key path → line number; or, as text, the command-line option or the place in another file that set the value."""
    parents: tuple[Path, ...] = ()
    """The files that it inherits from, nearest first."""

    def location(self, path: KeyPath) -> str:
        """Where the deepest known part of `path` was written: `file:line`, or a command-line option.

        Of an error about several keys, `--set` options of some of them are the place: without them the file is valid.
        """
        if path and not isinstance(self.lines.get(path), str):
            below = [line for known, line in self.lines.items() if known[: len(path)] == path and isinstance(line, str)]
            if options := [line for line in below if line.startswith("--set ")]:
                return ", ".join(options)
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return line if isinstance(line, str) else f"{self.name}:{line}"
        return self.name

    def error(self, path: KeyPath, message: str) -> SpecError:
        """An error about the value at `path`; an empty path means the whole file."""
        return SpecError(f"{self.location(path)}: {dotted(path)}: {message}" if path else f"{self.name}: {message}")


def dotted(path: KeyPath) -> str:
    """A key path as text: `model.position[0].p_max`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def set_key(data: dict[str, Json], key: str, value: Json) -> None:
    """Set the dotted `key` of a nested mapping in place: `data["model"]["dim"]` for `model.dim`."""
    set_path(data, key.split("."), value)


def set_path(data: dict[str, Json], path: Sequence[str], value: Json) -> None:
    """Set the value at a key path of a nested mapping in place.

    The inner mappings on the way are copied first, because other data may share them. Text on the way is a `kind`, as
    in `task: flip_flop`, and becomes `{kind: flip_flop}`. Any other value on the way stays, for validation to refuse.
    """
    *parents, last = path
    for parent in parents:
        inner = data.get(parent, {})
        if isinstance(inner, str):
            inner = {"kind": inner}
        if not isinstance(inner, dict):
            return
        data[parent] = inner = dict(inner)
        data = inner
    data[last] = value


def read_source(path: Path) -> Source:
    """Parse a YAML file. Raises SpecError if it cannot be read, is not YAML, or does not hold a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    return parse_source(text, str(path))


@lru_cache(maxsize=64)
def parse_source(text: str, name: str) -> Source:
    """Parse YAML text; error messages call it `name`. Raises SpecError.

    Texts are kept: most files of a folder are read once more for each file that inherits from them.
    """
    if len(text) > MAX_CHARACTERS:
        raise SpecError(f"{name}: {len(text):,} characters; a declaration has at most {MAX_CHARACTERS:,}")
    yaml = YAML(typ="rt")
    yaml.Parser = _LimitedParser
    try:
        loaded = yaml.load(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}" if mark else name
        raise SpecError(f"{location}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise SpecError(f"{name}: not valid YAML: {error}") from error
    if not isinstance(loaded, CommentedMap):
        raise SpecError(f"{name}: expected a mapping of keys, as in ablations/quickstart.yaml")
    lines: dict[KeyPath, int | str] = {}
    data = _plain(loaded, (), lines, name)
    return Source(name, data, lines)


class _LimitedParser(RoundTripParser):
    """Stops at a text that is too deep or too large, before anything is made of it."""

    depth = events = 0

    def get_event(self) -> Any:
        event = super().get_event()
        self.events += 1
        self.depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if self.depth > MAX_DEPTH + 1 or self.events > MAX_VALUES:
            raise MarkedYAMLError(problem=TOO_LARGE, problem_mark=event.start_mark)
        return event


def source_of(data: Json, name: str) -> Source:
    """A mapping from JSON as if it were a file; error messages call it `name`. Raises SpecError."""
    if not isinstance(data, dict):
        raise SpecError(f"{name}: expected a mapping of keys, as in ablations/quickstart.yaml")
    values = 0
    open_values: list[tuple[KeyPath, Any]] = [((), data)]
    while open_values:
        path, value = open_values.pop()
        values += 1
        if len(path) > MAX_DEPTH or values > MAX_VALUES:
            raise SpecError(f"{name}: {dotted(path[:3])}: {TOO_LARGE}")
        if isinstance(value, dict):
            open_values += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            open_values += [((*path, index), inner) for index, inner in enumerate(value)]
        elif isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise SpecError(f"{name}: {dotted(path)}: {TOO_MANY_DIGITS}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{name}: {dotted(path)}: {value} is not a finite number")
    return Source(name, data)


def parse_value(text: str, name: str) -> Json:
    """One YAML value, as it follows the equals sign of `--set key=value`. Raises SpecError."""
    source = parse_source(f"value: {text}", name)
    return source.data.get("value")


def _plain(node: Any, path: KeyPath, lines: dict[KeyPath, int | str], name: str) -> Json:
    """A YAML node as plain data. Adds the lines of its keys and items to `lines`."""
    source = Source(name, {}, lines)
    if len(path) > MAX_DEPTH or len(lines) > MAX_VALUES:
        raise source.error(
            path[:3],
            f"the file is too deep or too large: {TOO_LARGE}; does an alias contain itself?",
        )
    if isinstance(node, (CommentedMap, CommentedSeq)) and node.tag.value:
        raise source.error(path, f"the YAML tag {node.tag.value} is not supported; remove it")
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise SpecError(f"{name}:{node.lc.line + 1}: {dotted(path)}: key {key!r} is not text; quote it")
            if node.lc.data and key in node.lc.data:
                lines[*path, key] = node.lc.key(key)[0] + 1
            result[str(key)] = _plain(value, (*path, key), lines, name)
        return result
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            if node.lc.data and index in node.lc.data:
                lines[*path, index] = node.lc.item(index)[0] + 1
        return [_plain(value, (*path, index), lines, name) for index, value in enumerate(node)]
    # ruamel's scalars are subclasses that also remember how they were written.
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, ScalarBoolean):
        return bool(node)
    if isinstance(node, int) and abs(node) >= MAX_NUMBER:
        raise source.error(path, TOO_MANY_DIGITS)
    for plain in (str, int, float):
        if isinstance(node, plain) and not (isinstance(node, float) and not math.isfinite(node)):
            return plain(node)
    raise source.error(path, f"{node} is not text, a number, true, false or null")
