"""`inherit: NAME`: an ablation file takes base, axes, seeds, metrics and scales from another file of its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cope_sweep.config.explain import suggest
from cope_sweep.config.source import Json, KeyPath, Source, SpecError, read_source

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names without separators, so that no file of another folder can be named."""
SUFFIXES = (".yaml", ".yml")
OWN_KEYS = ("title", "hypothesis", "reproduces", "figures", "inherit")
"""Keys that describe one file and are not inherited."""


def with_inherited(source: Source, folder: Path | None) -> Source:
    """The file with the inherited keys, and the `parents` that they were read from.

    A key of the file replaces the inherited one. Mappings merge by key, with three exceptions. An axis is replaced as a
    whole. A mapping with another `kind` is replaced as a whole. `null` removes an inherited axis or scale.

    Args:
        source: The parsed file.
        folder: The only folder that files are read from; None: no file is read.

    Raises:
        SpecError: `folder` has no file of this name, or files inherit from one another in a circle.
    """
    chain = [source]
    while chain[-1].data.get("inherit") is not None:
        chain.append(_parent(chain, folder))
    merged: dict[str, Json] = {}
    lines: dict[KeyPath, int | str] = {}
    for each in reversed(chain):
        own = {key: value for key, value in each.data.items() if each is source or key not in OWN_KEYS}
        merged, lines = _merged(merged, own, lines, _lines_in(each, source), ())
    return replace(source, data=merged, lines=lines, parents=tuple(Path(parent.name) for parent in chain[1:]))


def _parent(chain: list[Source], folder: Path | None) -> Source:
    """The file that the last file of the chain inherits from. Raises SpecError."""
    child, path = chain[-1], ("inherit",)
    name = child.data["inherit"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise child.error(
            path,
            f"{name!r} is not the name of an ablation; write the name of a file of the same folder, as in "
            "inherit: wikitext",
        )
    if folder is None:
        raise child.error(path, f"{name!r} cannot be read, because this text belongs to no folder; remove the key")
    files = {file.stem: file for suffix in reversed(SUFFIXES) for file in sorted(folder.glob(f"*{suffix}"))}
    if name not in files:
        raise child.error(path, f"no file {folder / name}.yaml" + suggest(name, sorted(files)))
    file = files[name]
    if any(Path(each.name) == file for each in chain):
        names = [Path(each.name).stem for each in chain]
        raise child.error(path, f"files inherit from one another: {' → '.join((*names, name))}; remove one `inherit`")
    try:
        return read_source(file)
    except SpecError as error:
        raise SpecError(f"{error} (inherited by {child.location(path)})") from error


def _lines_in(each: Source, source: Source) -> dict[KeyPath, int | str]:
    """The lines of a file of the chain, as error messages about `source` show them."""
    if each is source:
        return dict(each.lines)
    child = source.location(("inherit",))
    return {path: f"{each.name}:{line} (inherited by {child})" for path, line in each.lines.items()}


def _merged(
    inherited: dict[str, Json],
    own: dict[str, Json],
    inherited_lines: Mapping[KeyPath, int | str],
    own_lines: Mapping[KeyPath, int | str],
    path: KeyPath,
) -> tuple[dict[str, Json], dict[KeyPath, int | str]]:
    """Two mappings at the same key path, merged, with the lines of what is kept of each."""
    data, lines = dict(inherited), dict(inherited_lines)
    for key, value in own.items():
        here = (*path, key)
        if value is None and _is_removable(here):
            data.pop(key, None)
        elif _merges(data.get(key), value, here):
            data[key], lines = _merged(data[key], value, lines, own_lines, here)
            lines |= {here: own_lines[here]} if here in own_lines else {}
            continue
        else:
            data[key] = value
        lines = {known: line for known, line in lines.items() if known[: len(here)] != here}
        lines |= {known: line for known, line in own_lines.items() if known[: len(here)] == here}
    return data, lines


def _is_axis(path: KeyPath) -> bool:
    """Whether this is the path of an axis: `grid.KEY`, also of a scale."""
    return len(path) >= 2 and path[-2] == "grid" and len(path) in (2, 4)


def _is_removable(path: KeyPath) -> bool:
    return _is_axis(path) or (len(path) == 2 and path[0] == "scales")


def _merges(inherited: Json, own: Json, path: KeyPath) -> bool:
    if not isinstance(inherited, dict) or not isinstance(own, dict) or _is_axis(path):
        return False
    return inherited.get("kind") == own.get("kind", inherited.get("kind"))
