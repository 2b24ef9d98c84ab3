"""The corpus `python-packages`: the Python files of packages that the project's own environment installs, at pinned
versions, without tests.

`python_packages.json` beside this file has, for each package, its version, its licence, its split, and a digest of its
files. A package is in one split as a whole, so that no model is tested on the neighbours of what it was trained on.
Files that are copies of another, as vendored packages are, are left out; what a held-out file has is never trained on.

The texts are those of their authors, under their licences: they are read where they are installed, and not passed on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TypedDict

from cope_sweep.text.reading import Files, TextError, open_file

PINNED = Path(__file__).with_name("python_packages.json")
SPLITS = ("test", "validation", "train")
"""In this order copies are looked for: the first is kept, so nothing of a test file is in the others."""
LEFT_OUT = frozenset(("test", "tests", "idle_test", ".."))
"""Folders whose files are not read; `..` leads out of the installed packages."""
GENERATED = ("version.py", "_version.py")
"""Files that a build writes: the same version of a package has others on another platform."""


class Package(TypedDict):
    """A package of the corpus, as `python_packages.json` has it."""

    version: str
    licence: str
    split: str
    sha256: str


def pinned_packages() -> dict[str, Package]:
    """Name of a package → what is pinned of it."""
    pinned: dict[str, Package] = json.loads(PINNED.read_text("utf-8"))
    return pinned


def package_files(pinned: Mapping[str, Package] | None = None) -> dict[str, Files]:
    """The files of each split, without copies; `pinned` are the packages, None: those of `python_packages.json`.

    Raises TextError if a package is missing, has another version, or has other files than it was pinned with.
    """
    pinned = pinned_packages() if pinned is None else pinned
    installed = {name: installed_version(name) for name in pinned}
    if other := {name: version for name, version in installed.items() if version != pinned[name]["version"]}:
        wanted = " ".join(f"{name}=={pinned[name]['version']}" for name in sorted(other))
        raise TextError(
            f"the corpus python-packages needs other versions of {len(other)} of its {len(pinned)} packages; install "
            f"them into this environment: pip install --no-deps {wanted}",
            code="other_packages",
            installed=dict(sorted(other.items())),
        )
    found = {name: sources(name) for name in pinned}
    if changed := sorted(name for name, paths in found.items() if digest(paths) != pinned[name]["sha256"]):
        raise TextError(
            f"the corpus python-packages: the files of {', '.join(changed)} are not those of the pinned versions; "
            f"install them again: pip install --no-deps --force-reinstall {' '.join(changed)}",
            code="changed_packages",
            packages=list(changed),
        )
    seen: set[bytes] = set()
    splits: dict[str, Files] = {}
    for split in SPLITS:
        of_split = (path for name, paths in found.items() if pinned[name]["split"] == split for path in paths)
        splits[split] = Files(tuple(path for path in of_split if not _is_seen(path, seen)), one_document=False)
    return {split: splits[split] for split in reversed(SPLITS)}


def sources(name: str) -> list[Path]:
    """The Python files of an installed package, without tests and empty ones, by name.

    Raises TextError if it has no list of its files.
    """
    package = distribution(name)
    if package.files is None:
        raise TextError(
            f"the package {name} does not say which files it has (no RECORD); install it with pip or uv",
            code="no_record",
            package=name,
        )
    paths = {
        file.as_posix(): Path(str(package.locate_file(file)))
        for file in package.files
        if file.suffix == ".py" and file.name not in GENERATED and not LEFT_OUT.intersection(file.parts)
    }
    return [path for _, path in sorted(paths.items()) if path.is_file() and path.stat().st_size]


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the contents of files in order."""
    return Files(tuple(paths), one_document=False).digest()


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


_IGNORED_LINES = re.compile(rb"^[ \t]*(?:#.*|import\s.*|from\s.*)?\r?$\n?", re.MULTILINE)
"""Blank lines, comments and imports, in which a vendored copy differs from its original."""


def _is_seen(path: Path, seen: set[bytes]) -> bool:
    """Whether a file is a copy of one before, but for blank lines, comments and imports; it is noted as seen."""
    with open_file(path) as file:
        content = hashlib.sha256(_IGNORED_LINES.sub(b"", file.read())).digest()
    is_copy = content in seen
    seen.add(content)
    return is_copy
