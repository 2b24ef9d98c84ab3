"""Loads ablation files, with what they inherit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cope_sweep.config.ablation import Ablation, Axis, Plugins
from cope_sweep.config.explain import explain_all, suggest
from cope_sweep.config.keys import RIVAL_KEYS, is_below, is_field, leaves
from cope_sweep.config.source import (
    FileMapping,
    Json,
    KeyPath,
    Source,
    SpecError,
    copied,
    default_label,
    error_at,
    places_of,
    read_source,
    spelled_as,
)
from cope_sweep.errors import NotFoundError
from cope_sweep.registry import PluginError, load_plugins

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names without separators, so that no file of another folder can be named."""
SUFFIXES = (".yaml", ".yml")
PLUGINS: TypeAdapter[list[str]] = TypeAdapter(Plugins)


@dataclass(frozen=True, slots=True, eq=False)
class AxisValue:
    """A value that a point of an ablation assigns to a key, its label, and its key path in the file.

    Points share their values, so a value is equal only to itself, which is cheap to compare and to hash.
    """

    label: str
    value: Json
    origin: KeyPath

    @classmethod
    def of(cls, value: Json, *origin: str | int) -> AxisValue:
        """A value that the file gives no label."""
        return cls(default_label(value), value, origin)


Assignments = dict[str, AxisValue]
"""Key of a run → value: one point, or a part of it."""


@dataclass(frozen=True)
class LoadedAblation:
    """An ablation with its name, what a scale and `--set` change, and the source that error messages refer to."""

    name: str
    content: Ablation
    """The file, with the top-level keys that a scale or `--set` replaces. Its axes are as written: see `axes`."""
    source: Source
    """What `content` was validated from: error messages find their lines there."""
    layers: Assignments = field(default_factory=dict)
    """Key of a run → the value that a scale or `--set` gives it in every point, in the order of their assignment."""
    beside: tuple[Assignments, ...] = ()
    """Rows that `--set +KEY=VALUE` adds to a file without axes."""
    replaced: tuple[str, ...] = ()
    """Keys that a scale or `--set` has replaced and that decide what is trained: not what the paper trained."""
    scale: str | None = None
    """The scale that was chosen, if any."""
    assignments: tuple[str, ...] = ()
    """The values of `--set`."""
    typed: tuple[str, ...] = ()
    """How a command line named it: name or path, and its folder. Empty: just the name."""
    unchanged: Source | None = None
    """The file before scale and `--set`; None without these: `source` is the file then."""

    @property
    def data(self) -> dict[str, Json]:
        """The content of its file with what that inherits, before scale and `--set`."""
        source = self.unchanged or self.source
        return {key: value for key, value in source.data.items() if key != "inherit"}

    @cached_property
    def fixed(self) -> frozenset[str]:
        """The keys that have one value because of `layers`: those, and the keys that mean the same quantity."""
        return frozenset({*self.layers, *(RIVAL_KEYS[key] for key in self.layers if key in RIVAL_KEYS)})

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes of the grid that still vary."""
        return {key: axis for key, axis in self.content.grid.items() if key not in self.fixed}

    @property
    def assigning_places(self) -> list[KeyPath]:
        """The key paths that end with a key of a run: axes, the search space, and what conditions set."""
        content = self.content
        places: list[KeyPath] = [("grid", key) for key in content.grid]
        places += [("search", "space", key) for key in getattr(content.search, "space", {})]
        for index, condition in enumerate(content.when):
            places += [("when", index, "grid", key) for key in condition.grid]
            places += [("when", index, "set", key) for key in condition.set]
        return places

    def labelled(self, key: str, value: Json, origin: KeyPath) -> AxisValue:
        """A value with the label that it has on the axis of its key: by that, conditions name it."""
        axes = [grid.get(key) for grid in (self.content.grid, *(condition.grid for condition in self.content.when))]
        known = [item for axis in axes if isinstance(axis, dict) for item in axis.items()]
        label = default_label(value)  # the same for [cope] and [{kind: cope}]
        return AxisValue(next((name for name, item in known if default_label(item) == label), label), value, origin)

    @property
    def arguments(self) -> list[str]:
        """The arguments of a command that name it, with scale and `--set`."""
        return [*(self.typed or (self.name,)), *option_words(self.scale, self.assignments)]

    @property
    def cli_args(self) -> str:
        """Name, scale and `--set`, as commands take them: `counting --scale small`."""
        return shlex.join([self.name, *option_words(self.scale, self.assignments)])


def option_words(scale: str | None, sets: Iterable[str], rows: Iterable[str] = ()) -> list[str]:
    """The `--scale`, `--set` and `--rows` of a command line, in words."""
    given = [*(("--set", text) for text in sets), *(("--rows", text) for text in rows)]
    return [*(["--scale", scale] if scale else []), *(word for option in given for word in option)]


def validate(source: Source, name: str, *, folder: Path | None = None, allow_plugins: bool = True) -> LoadedAblation:
    """The ablation in a parsed file. Imports its plugins.

    Base and axes are validated later, when the ablation is expanded: only whole runs can be.

    Args:
        source: The parsed file.
        name: The ablation's name.
        folder: The only folder of files that it may inherit from; None: it may not inherit.
        allow_plugins: Whether it, or a file that it inherits from, may name plugins.

    Raises SpecError with one line per problem.
    """
    file_alone = source
    # A source with parents already has their keys.
    if source.data.get("inherit") is not None and not source.parents:
        source = with_inherited(source, folder)
    loaded = _validated(source, name, folder, allow_plugins=allow_plugins)
    _check_base(file_alone, loaded)
    return loaded


def _validated(source: Source, name: str, folder: Path | None, *, allow_plugins: bool = True) -> LoadedAblation:
    plugins: list[str] = []
    with suppress(ValidationError):  # which is reported with the other errors of the file
        plugins = PLUGINS.validate_python(source.data.get("plugins", []))
    if plugins and not allow_plugins:
        raise source.error(
            ("plugins",),
            f"plugins ({', '.join(plugins)}) are not allowed here, because importing them runs code; remove "
            "the key. The operator can install the plugins and declare them as entry points or in COPE_SWEEP_PLUGINS",
            "plugins_refused",
            plugins=plugins,
        )
    for index, module in enumerate(plugins):
        try:
            load_plugins([module], folder)
        except PluginError as error:
            raise source.error(("plugins", index), str(error), error.code, **error.data) from error
    content = validated_content(source, source.data)  # after the plugins, which may bring the kinds of its figures
    return LoadedAblation(name, content, source)


def validated_content(source: Source, values: Mapping[str, Json]) -> Ablation:
    """The ablation of these top-level keys. Raises SpecError, with the places that `source` knows."""
    try:
        return Ablation.model_validate(values)
    except ValidationError as error:
        problems = explain_all(error, Ablation)
        raise SpecError.of(
            [source.error(problem.path, problem.message, problem.code, **problem.data) for problem in problems]
        ) from error


def _check_base(file_alone: Source, loaded: LoadedAblation) -> None:
    """Raises SpecError for base values of a file below an axis, as `task.tokens` below `task`: each row replaces them.

    `file_alone` is the file before inheritance: inherited values may be replaced.
    """
    if not isinstance(base := file_alone.data.get("base"), dict):
        return
    for path in loaded.assigning_places:
        if path[0] == "when":  # in some rows
            continue
        key = str(path[-1])
        lost = [leaf for leaf, _ in leaves(base) if is_below(leaf, key) and not is_field(leaf)]
        if lost:
            raise file_alone.error(
                ("base", *lost[0].split(".")),
                f"it has no effect, because each row has a value of the axis {key} ({loaded.source.location(path)}), "
                "which replaces it as a whole; remove it, or give the axis a deeper key",
                "no_effect",
                axis=key,
            )


def load_ablation(path: Path) -> LoadedAblation:
    """Read an ablation file and import its plugins. Raises SpecError, also if `tuned` names no file beside it.

    The ablation's name is the file's name without suffix.
    """
    source = read_source(path)
    loaded = validate(source, path.stem, folder=path.parent)
    if loaded.content.tuned is not None and _file_beside(source, "tuned", path.parent) == path:
        message = f"{path.stem!r} is this file; name the file whose search chose the recipes, or remove the key"
        raise source.error(("tuned",), message, "invalid_name", name=path.stem)
    return loaded


# -- inherit: NAME -----------------------------------------------------------------------------------------------------


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
    heir = source.location(("inherit",))
    merged = FileMapping()
    # They describe one file.
    not_inherited = ("title", "hypothesis", "reproduces", "tuned", "claims", "figures", "inherit")
    # The farthest first: nearer files replace its keys.
    for ancestor in reversed(chain[1:]):
        inherited = copied(ancestor.data, lambda place: f"{place} (inherited by {heir})")
        kept = {key: value for key, value in inherited.items() if key not in not_inherited}
        merged = _merged(merged, kept, inherited.places)
    merged = _merged(merged, source.data, places_of(source.data))
    return replace(source, data=merged, parents=tuple(Path(parent.name) for parent in chain[1:]))


def _parent(chain: list[Source], folder: Path | None) -> Source:
    child, path = chain[-1], ("inherit",)
    name = child.data["inherit"]
    if folder is None:
        raise child.error(
            path,
            f"{name!r} cannot be inherited: this ablation is a text without a folder; remove the key",
            "no_folder",
            name=name,
        )
    file = _file_beside(child, "inherit", folder)
    if any(Path(ancestor.name) == file for ancestor in chain):
        names = [*(Path(ancestor.name).stem for ancestor in chain), name]
        message = f"files inherit from one another: {' → '.join(names)}; remove one `inherit`"
        raise child.error(path, message, "circular_inheritance", names=names)
    try:
        return read_source(file)
    except SpecError as error:
        heir = child.location(path)
        raise SpecError(f"{error} (inherited by {heir})", code=error.code, **error.data, heir=heir) from error


def _file_beside(source: Source, key: str, folder: Path) -> Path:
    """The file in `folder` that a key of `source` names. Raises SpecError."""
    name, path = source.data[key], (key,)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise source.error(
            path,
            f"{name!r} is not the name of an ablation; write the name of a file in the same folder, as in "
            f"{key}: wikitext",
            "invalid_name",
            name=name,
        )
    files = ablation_files(folder)
    if name not in files:
        message = f"no file {folder / name}.yaml" + suggest(name, files)
        raise source.error(path, message, "no_such_file", file=f"{folder / name}.yaml", allowed=list(files))
    return files[name]


def _merged(
    inherited: FileMapping, own: Mapping[str, Json], places: Mapping[str, str], path: KeyPath = ()
) -> FileMapping:
    """Merge two mappings at the same key path. `places` belong to `own`."""
    merged = FileMapping(inherited, inherited.places)
    for key, value in own.items():
        here = (*path, key)
        rival = _rival(path, key)
        # A file that gives steps replaces the tokens that it inherits, and the other way round.
        if rival is not None and rival not in own:
            merged.pop(rival, None)
        if value is None and _is_removable(here):
            if key not in merged:
                message = f"null removes what is inherited, and no {key!r} is{suggest(key, merged)}"
                raise error_at(places.get(key, ""), here, message, "unknown_key", key=key, allowed=list(merged))
            merged.pop(key)
        else:
            before: Json = merged.get(key)
            after = value
            if isinstance(before, dict) or isinstance(after, dict):
                before, after = _with_kind(before), _with_kind(after)
            both = _merges(before, after, here)
            merged.put(key, _merged(before, after, places_of(value), here) if both else value, places.get(key))
    return merged


def _rival(path: KeyPath, key: str) -> str | None:
    """The key that means the same quantity, as the same mapping names it: `train.tokens`, or `tokens` in `train`."""
    if key in RIVAL_KEYS:
        return RIVAL_KEYS[key]
    parent = f"{path[-1]}." if path else ""
    rival = RIVAL_KEYS.get(parent + key)
    return None if rival is None else rival.removeprefix(parent)


def _is_axis(path: KeyPath) -> bool:
    """Paths of axes are `grid.KEY`, and the same in a scale."""
    return len(path) >= 2 and path[-2] == "grid" and len(path) in (2, 4)


def _is_removable(path: KeyPath) -> bool:
    return _is_axis(path) or (len(path) == 2 and path[0] == "scales")


def _with_kind(value: Json) -> Json:
    """A bare kind as the mapping that it stands for, so that the two merge: `flip_flop` as `{kind: flip_flop}`."""
    return FileMapping({"kind": value}) if isinstance(value, str) else value


def _merges(inherited: Json, own: Json, path: KeyPath) -> bool:
    if not isinstance(inherited, dict) or not isinstance(own, dict) or _is_axis(path):
        return False
    # A mapping without a kind refines the one that is inherited, of whatever kind that is.
    return inherited.get("kind") == own.get("kind", inherited.get("kind"))


# -- finding files -----------------------------------------------------------------------------------------------------


def ablation_files(folder: Path) -> dict[str, Path]:
    """Name → file of the ablations in a folder, sorted by name; none if there is no folder, or if it is unreadable."""
    paths = [path for path in folder.glob("*") if path.suffix in SUFFIXES]
    # If both a.yaml and a.yml exist, a.yaml wins.
    return {path.stem: path for path in sorted(paths, key=lambda path: (path.stem, path.suffix == ".yaml"))}


def names_a_file(ablation: str | Path) -> bool:
    """The text is the path of an ablation file, and not the name of an ablation."""
    # A suffix is enough: the error about a missing file then names it as a file.
    return Path(ablation).suffix in SUFFIXES or Path(ablation).is_file()


def spelled_path(path: Path) -> Path:
    """The file beside this path whose name is the same text in another form of Unicode; the path if there is none."""
    if path.name.isascii() or path.exists() or not path.parent.is_dir():
        return path
    return path.with_name(spelled_as(path.name, (file.name for file in path.parent.iterdir())))


def find_ablation(ablation: str | Path, folder: Path, otherwise: str) -> Path:
    """The file of an ablation, given its path, or its name in a folder.

    Raises NotFoundError where there is none; it says `otherwise` where the folder has no ablation at all.
    """
    if names_a_file(ablation):
        return spelled_path(Path(ablation))
    files = ablation_files(folder)
    name = spelled_as(str(ablation), files)
    if name in files:
        return files[name]
    hint = suggest(name, files) or f"; {otherwise}"
    raise NotFoundError(
        f"no ablation {name!r} in {folder.absolute()}{hint}",
        name=name,
        folder=str(folder.absolute()),
        allowed=list(files),
    )
