"""The ablation files that commands name, and the files that they write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from cope_sweep.cli.options import load_plan
from cope_sweep.config import Plan
from cope_sweep.errors import UserError
from cope_sweep.read.queries import AblationFiles
from cope_sweep.read.queries.ablations import Place
from cope_sweep.store.files import replacing

BINARY = ("parquet", "png", "pdf")


class NamedFiles(AblationFiles):
    """Ablations by name or path. A run is looked for in the store alone: the plans of all files take a second."""

    def __init__(self, folder: Path, sets: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._sets = sets

    def load(self, name: str, scale: str | None = None) -> Plan:
        """The plan of an ablation at a scale, with the values of `--set`. Raises UserError."""
        if not self._sets and self.folder.is_dir() and name in self.files():
            return super().load(name, scale)
        return load_plan(name, self.folder, scale, self._sets)

    def places(self, run_ids: Iterable[str]) -> dict[str, list[Place]]:
        """None."""
        return {}


def save(
    question: Any,
    output: Path | None,
    write: Callable[[Any, IO[bytes]], object],
    *,
    default: str,
    suffixes: Mapping[str, str],
    binary: Collection[str] = BINARY,
) -> str:
    """Write the file that answers a question to a path, or to standard output, and return its format.

    Args:
        question: The question.
        output: The path; None: standard output.
        write: Writes the answer to a file.
        default: The format where neither the question nor the path's suffix names one.
        suffixes: Suffix of a file → its format.
        binary: Formats that are no text.

    Raises UserError.
    """
    chosen = question.format or suffixes.get("" if output is None else output.suffix.lower(), default)
    question = replace(question, format=chosen)
    if output is None:
        if chosen in binary:
            raise UserError(f"{chosen} is binary; name a file for it with --output FILE")
        sys.stdout.flush()
        write(question, sys.stdout.buffer)
        return chosen
    try:
        if output.exists() and not output.is_file():  # such as /dev/stdout
            with output.open("wb") as file:
                write(question, file)
        else:
            with replacing(output) as temporary, temporary.open("wb") as file:
                write(question, file)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror or error}; name another file with --output") from error
    return chosen
