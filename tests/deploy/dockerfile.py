"""A Dockerfile as instructions, and what .dockerignore lets into the build context."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    name: str
    """In capitals: `RUN`, `COPY`, …"""
    text: str
    """What follows the name, continued lines joined."""

    def words(self) -> tuple[dict[str, str], list[str]]:
        """The options (`--from=build`) and the other words."""
        if self.text.startswith("["):
            return {}, json.loads(self.text)
        words = shlex.split(self.text)
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        return options, [word for word in words if not word.startswith("--")]


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage with their defaults, and the stages."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in joined.splitlines():
        name, text = line.split(None, 1)
        if name == "FROM":
            base, _, alias = text.partition(" AS ")
            stages.append(Stage(base, alias))
        elif not stages:
            key, _, value = text.partition("=")
            arguments[key] = value
        else:
            stages[-1].instructions.append(Instruction(name, text))
    return arguments, stages


def in_context(path: str, ignore: list[str]) -> bool:
    """Whether .dockerignore's lines let a file (relative path) into the build context: the last match decides."""
    included = True
    parents = [str(each) for each in Path(path).parents][:-1]
    for line in ignore:
        pattern = line.removeprefix("!").rstrip("/")
        candidates = [path, *parents]
        if pattern.startswith("**/"):
            pattern = pattern[3:]
            candidates += Path(path).parts
        if any(_matches(candidate, pattern) for candidate in candidates):
            included = line.startswith("!")
    return included


def _matches(path: str, pattern: str) -> bool:
    """fnmatch, whose `*` does not cross a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def ignore_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]
