"""YAML files that remember where each value stood, so that an error can name its line.

YAML 1.2's core rules hold (`1e-3` is a number, `on` is a word), duplicate keys are errors, and only JSON's types pass.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from cope_sweep.errors import UserError

KeyPath = tuple[str | int, ...]

DEEPEST, LARGEST = 30, 50_000
"""Levels and values that a file may have: far beyond any ablation, and short of what aliases can blow up to."""


class SpecError(UserError):
    """A declaration cannot be used; the message names file, line, key, value, and what would be accepted."""


@dataclass(frozen=True)
class Source:
    """A parsed file: its data as JSON's types, and the line of every key and item."""

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int | str] = field(default_factory=dict)
    """Key path → its line; or, for what an option set, that option."""

    def place(self, path: KeyPath) -> str:
        """Where the deepest part of `path` that is known was written: `file:line`, or an option."""
        for length in range(len(path), 0, -1):
            place = self.lines.get(path[:length])
            if place is not None:
                return place if isinstance(place, str) else f"{self.name}:{place}"
        return self.name

    def error(self, path: KeyPath, message: str) -> SpecError:
        return SpecError(f"{self.place(path)}: {dotted(path)}: {message}" if path else f"{self.name}: {message}")


def dotted(path: KeyPath) -> str:
    """`model.position[0].p_max`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def read_source(path: Path) -> Source:
    """Parse a YAML file. Raises SpecError where it cannot be read, is not YAML, or does not hold a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    return parse_source(text, str(path))


def parse_source(text: str, name: str) -> Source:
    """Parse YAML text; `name` is what errors call it. Raises SpecError."""
    try:
        loaded = YAML(typ="rt").load(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise SpecError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise SpecError(f"{name}: not valid YAML: {error}") from error
    if not isinstance(loaded, CommentedMap):
        raise SpecError(f"{name}: expected a mapping of keys, as in ablations/quickstart.yaml")
    lines: dict[KeyPath, int | str] = {}
    data = _plain(loaded, (), lines, name)
    return Source(name, data, lines)


def parse_value(text: str, name: str) -> Any:
    """One YAML value, as after the = of `--set key=value`. Raises SpecError."""
    source = parse_source(f"value: {text}", name)
    return source.data.get("value")


def _plain(node: Any, path: KeyPath, lines: dict[KeyPath, int | str], name: str) -> Any:
    here = Source(name, {}, lines)
    if len(path) > DEEPEST or len(lines) > LARGEST:
        raise here.error(path[:3], "too deep or too large for an ablation; does it contain itself?")
    if isinstance(node, (CommentedMap, CommentedSeq)) and node.tag.value:
        raise here.error(path, f"the YAML tag {node.tag.value} has no meaning here; remove it")
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise SpecError(f"{name}:{node.lc.line + 1}: {dotted(path)}: key {key!r} is not text; quote it")
            if node.lc.data and key in node.lc.data:
                lines[*path, key] = node.lc.key(key)[0] + 1
            result[key] = _plain(value, (*path, key), lines, name)
        return result
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            if node.lc.data and index in node.lc.data:
                lines[*path, index] = node.lc.item(index)[0] + 1
        return [_plain(value, (*path, index), lines, name) for index, value in enumerate(node)]
    try:
        return json.loads(json.dumps(node, allow_nan=False))
    except (TypeError, ValueError):
        raise here.error(path, f"{node} is not text, a number, true, false or null") from None
