"""Loads ablation files: what they inherit, and with the keys that `--scale NAME` and `--set KEY=VALUE` replace."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cope_sweep.config.ablation import SCHEDULERS, SEARCHES, Ablation, Axis, GridSearch, RandomSearch, Scale
from cope_sweep.config.explain import explain_all, suggest
from cope_sweep.config.keys import (
    ENCODINGS_KEY,
    RIVAL_KEYS,
    field_place,
    is_below,
    is_field,
    leaves,
    set_key,
    set_path,
)
from cope_sweep.config.run import RunSpec
from cope_sweep.config.source import (
    OPTION,
    FileList,
    FileMapping,
    Json,
    KeyPath,
    Source,
    SpecError,
    copied,
    default_label,
    parse_value,
    places_of,
    read_source,
)
from cope_sweep.errors import InvalidValue, NotFoundError
from cope_sweep.registry import PluginError, Registry, load_plugins

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names without separators, so that no file of another folder can be named."""
SUFFIXES = (".yaml", ".yml")
OWN_KEYS = ("title", "hypothesis", "reproduces", "claims", "figures", "inherit")
"""Keys that describe one file and are not inherited."""
RUN_KEYS = tuple(name for name in RunSpec.model_fields if name != "seed")
TRAINED_KEYS = ("task", "model", "train")
"""Keys of a run that decide what is trained; `evaluate` only decides how it is measured."""
ABLATION_KEYS = ("seeds", "metrics", "primary", "search", "schedule", "resources")
"""Top-level keys of an ablation that `--set` replaces, in addition to the keys of a run."""
SCALED_KEYS = tuple(name for name in Scale.model_fields if name not in ("description", "set", "grid"))
"""Top-level keys of an ablation that a scale replaces."""
MAX_SEEDS = 10_000
"""The greatest number in `--set seeds=…`."""
ADDS = "+"
"""Begins an assignment that adds a value to an axis."""
REGISTRIES: dict[str, Registry[Any]] = {"search": SEARCHES, "schedule": SCHEDULERS}


@dataclass(frozen=True)
class LoadedAblation:
    """An ablation with its name and the source file that error messages refer to."""

    name: str
    content: Ablation
    source: Source
    replaced: tuple[str, ...] = ()
    """Keys that a scale or `--set` has replaced and that decide what is trained: not what the paper trained."""
    scale: str | None = None
    """The scale that was chosen; None: the ablation without a scale."""
    assignments: tuple[str, ...] = ()
    """The values of `--set`."""
    typed: tuple[str, ...] = ()
    """How a command line named it: name or path, and its folder. Empty: just the name."""
    unchanged: Source | None = None
    """The file before scale and `--set`; None: `source` is."""

    @property
    def data(self) -> dict[str, Json]:
        """The content of its file with what that inherits, before scale and `--set`."""
        source = self.unchanged or self.source
        return {key: value for key, value in source.data.items() if key != "inherit"}

    @property
    def arguments(self) -> list[str]:
        """The arguments of a command that name it, with scale and `--set`."""
        return [*(self.typed or (self.name,)), *self._options]

    @property
    def cli_args(self) -> str:
        """Name, scale and `--set`, as commands take them: `counting --scale small`."""
        return shlex.join([self.name, *self._options])

    @property
    def _options(self) -> list[str]:
        scale = ["--scale", self.scale] if self.scale else []
        return [*scale, *(word for assignment in self.assignments for word in (OPTION.strip(), assignment))]


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
    if source.data.get("inherit") is not None and not source.parents:
        source = with_inherited(source, folder)
    loaded = _validated(source, name, folder, allow_plugins=allow_plugins)
    _check_base(file_alone, loaded)
    return loaded


def _validated(source: Source, name: str, folder: Path | None, *, allow_plugins: bool = True) -> LoadedAblation:
    try:
        content = Ablation.model_validate(source.data)
    except ValidationError as error:
        problems = explain_all(error, Ablation)
        raise SpecError.of(
            [source.error(problem.path, problem.message, problem.code, **problem.data) for problem in problems]
        ) from error
    if content.plugins and not allow_plugins:
        raise source.error(
            ("plugins",),
            f"plugins ({', '.join(content.plugins)}) are not allowed here, because importing them runs code; remove "
            "the key. The operator can install the plugins and declare them as entry points or in COPE_SWEEP_PLUGINS",
            "plugins_refused",
            plugins=list(content.plugins),
        )
    for index, module in enumerate(content.plugins):
        try:
            load_plugins([module], folder)
        except PluginError as error:
            raise source.error(("plugins", index), str(error), error.code, **error.data) from error
    return LoadedAblation(name, content, source)


def _check_base(file_alone: Source, loaded: LoadedAblation) -> None:
    """Raises SpecError for base values of a file below an axis, as `task.tokens` below `task`: each row replaces them.

    Inherited ones may be replaced. `own` is the file without what it inherits.
    """
    content = loaded.content
    if not isinstance(base := file_alone.data.get("base"), dict):
        return
    axes: list[KeyPath] = [("grid", key) for key in content.grid]
    axes += [("zip", index, key) for index, group in enumerate(content.zip) for key in group]
    axes += [("search", "space", key) for key in getattr(content.search, "space", {})]
    for path in axes:
        key = str(path[-1])
        in_each_row = all(key == other or is_below(key, other) for row in content.include for other in row)
        lost = [leaf for leaf, _ in leaves(base) if is_below(leaf, key) and not is_field(leaf)]
        if in_each_row and lost:
            raise file_alone.error(
                ("base", *lost[0].split(".")),
                f"it has no effect, because each row has a value of the axis {key} ({loaded.source.location(path)}), "
                "which replaces it as a whole; remove it, or give the axis a deeper key",
                "no_effect",
                axis=key,
            )


def load_ablation(path: Path) -> LoadedAblation:
    """Read an ablation file and import its plugins. Raises SpecError.

    The ablation's name is the file's name without suffix.
    """
    return validate(read_source(path), path.stem, folder=path.parent)


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
    for ancestor in reversed(chain[1:]):
        inherited = copied(ancestor.data, lambda place: f"{place} (inherited by {heir})")
        merged = _merged(
            merged, {key: value for key, value in inherited.items() if key not in OWN_KEYS}, inherited.places
        )
    merged = _merged(merged, source.data, places_of(source.data))
    return replace(source, data=merged, parents=tuple(Path(parent.name) for parent in chain[1:]))


def _parent(chain: list[Source], folder: Path | None) -> Source:
    """The file that the last file of the chain inherits from. Raises SpecError."""
    child, path = chain[-1], ("inherit",)
    name = child.data["inherit"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise child.error(
            path,
            f"{name!r} is not the name of an ablation; write the name of a file in the same folder, as in "
            "inherit: wikitext",
            "invalid_name",
            name=name,
        )
    if folder is None:
        raise child.error(
            path,
            f"{name!r} cannot be inherited: this ablation is a text without a folder; remove the key",
            "no_folder",
            name=name,
        )
    candidates = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    file = next(filter(Path.exists, candidates), None)
    if file is None:
        names_here = sorted({ancestor.stem for suffix in SUFFIXES for ancestor in folder.glob(f"*{suffix}")})
        message = f"no file {folder / name}.yaml" + suggest(name, names_here)
        raise child.error(path, message, "no_such_file", file=f"{folder / name}.yaml", allowed=names_here)
    if any(Path(ancestor.name) == file for ancestor in chain):
        names = [*(Path(ancestor.name).stem for ancestor in chain), name]
        message = f"files inherit from one another: {' → '.join(names)}; remove one `inherit`"
        raise child.error(path, message, "circular_inheritance", names=names)
    try:
        return read_source(file)
    except SpecError as error:
        heir = child.location(path)
        raise SpecError(f"{error} (inherited by {heir})", code=error.code, **error.data, heir=heir) from error


def _merged(
    inherited: FileMapping, own: Mapping[str, Json], places: Mapping[str, str], path: KeyPath = ()
) -> FileMapping:
    """Merge two mappings at the same key path. `places` belong to `own`."""
    merged = FileMapping(inherited, inherited.places)
    for key, value in own.items():
        here = (*path, key)
        rival = _rival(path, key)
        if rival is not None and rival not in own:
            merged.pop(rival, None)
        if value is None and _is_removable(here):
            merged.pop(key, None)
        else:
            both = _merges(merged.get(key), value, here)
            merged.put(key, _merged(merged[key], value, places_of(value), here) if both else value, places.get(key))
    return merged


def _rival(path: KeyPath, key: str) -> str | None:
    """The key that means the same quantity, as the same mapping names it: `train.tokens`, or `tokens` in `train`."""
    if key in RIVAL_KEYS:
        return RIVAL_KEYS[key]
    parent = f"{path[-1]}." if path else ""
    rival = RIVAL_KEYS.get(parent + key)
    return None if rival is None else rival.removeprefix(parent)


def _is_axis(path: KeyPath) -> bool:
    """Whether this is the path of an axis: `grid.KEY`, also of a scale."""
    return len(path) >= 2 and path[-2] == "grid" and len(path) in (2, 4)


def _is_removable(path: KeyPath) -> bool:
    return _is_axis(path) or (len(path) == 2 and path[0] == "scales")


def _merges(inherited: Json, own: Json, path: KeyPath) -> bool:
    if not isinstance(inherited, dict) or not isinstance(own, dict) or _is_axis(path):
        return False
    return inherited.get("kind") == own.get("kind", inherited.get("kind"))


# -- --scale and --set -------------------------------------------------------------------------------------------------


def with_overrides(
    loaded: LoadedAblation, *, scale: str | None = None, assignments: Sequence[str] = ()
) -> LoadedAblation:
    """The ablation at a named scale, with `key=value` assignments applied after it.

    A key of a run then has this value in every row, and is not an axis. A field of an encoding, such as
    `model.position.cope.p_max`, has it in the rows with this encoding. `seeds`, `metrics`, `primary`, `search.<key>`,
    `schedule.<key>` and `resources.<key>` replace the ablation's own; `resources.<key>` also in single rows. A number
    of seeds (`seeds=3`) means the first seeds of the ablation, continued if it has fewer.

    `+key=value` adds the value to the axis instead: one more row for each combination with the other axes.

    Raises SpecError.
    """
    if scale is None and not assignments:
        return loaded
    data: FileMapping = copied(loaded.source.data)
    assigned = [text.partition("=")[0] for text in assignments if not text.startswith(ADDS)]
    if both := [key for key in assigned if RIVAL_KEYS.get(key) in assigned]:
        message = f"{OPTION}{both[0]}: {RIVAL_KEYS[both[0]]} is also set; remove one of them"
        raise SpecError(message, code="two_budgets", place=f"{OPTION}{both[0]}", key=both[0])
    replaced = [*loaded.replaced, *assigned]
    if scale is not None:
        if scale not in loaded.content.scales:
            scales = "the scales are " + ", ".join(loaded.content.scales)
            if not loaded.content.scales:
                scales = "this ablation has no scales; leave it out"
            raise loaded.source.error(
                (),
                f"unknown scale {scale!r}; {scales}",
                "unknown_scale",
                scale=scale,
                allowed=list(loaded.content.scales),
            )
        _apply_scale(loaded.source, data, scale)
        replaced += _replaced_keys(loaded.content, loaded.content.scales[scale])
    for assignment in assignments:
        _add_value(data, assignment) if assignment.startswith(ADDS) else _apply_assignment(data, assignment)
    trained = tuple(key for key in dict.fromkeys(replaced) if key.partition(".")[0] in TRAINED_KEYS)
    changed = _validated(replace(loaded.source, data=data), loaded.name, None)
    original = loaded.unchanged or loaded.source
    return replace(
        changed, replaced=trained, scale=scale or loaded.scale, assignments=(*loaded.assignments, *assignments),
        typed=loaded.typed, unchanged=original,
    )  # fmt: skip


def changed_axes(content: Ablation, assignments: Sequence[str]) -> list[tuple[str, str, int]]:
    """Assignments that change each value of an axis, such as `task.tokens=32` where `task` varies.

    `content` is the ablation with the assignments. Returns assignment, axis, and its number of values (at least 2).
    """
    mappings: list[Mapping[str, Axis]] = [content.grid, *content.zip, *(condition.grid for condition in content.when)]
    axes = [(axis, values) for mapping in mappings for axis, values in mapping.items()]
    changed = []
    for assignment in assignments:
        key = assignment.partition("=")[0]
        if not is_field(key):
            changed += [(assignment, axis, len(values)) for axis, values in axes if is_below(key, axis)]
    return [(assignment, axis, number) for assignment, axis, number in changed if number > 1]


def _replaced_keys(content: Ablation, scale: Scale) -> list[str]:
    """The keys whose values at a scale are not values of the ablation: keys of axes that it only selects are not."""
    chosen = {key: [value] for key, value in scale.set.items()}
    chosen |= {key: _values(axis) for key, axis in scale.grid.items()}
    return [
        key
        for key, values in chosen.items()
        if any(value not in _values(content.grid.get(key, [])) for value in values)
    ]


def _values(axis: Axis) -> list[Json]:
    return list(axis.values()) if isinstance(axis, dict) else axis


def _apply_scale(source: Source, data: FileMapping, scale: str) -> None:
    chosen = data["scales"][scale]
    fixed, grid = chosen.get("set", {}), chosen.get("grid", {})
    if both := [key for key in fixed if RIVAL_KEYS.get(key) in (*fixed, *grid)]:
        message = f"{RIVAL_KEYS[both[0]]} is also set at this scale; remove one of them"
        raise source.error(("scales", scale, "set", both[0]), message, "two_budgets", key=both[0])
    # An inherited scale may set a key whose axis the same scale has here: the axis stays, with the figures over it.
    for key, value in fixed.items():
        if key not in grid:
            try:
                _fix(data, key, value, places_of(fixed).get(key))
            except InvalidValue as error:
                path = ("scales", scale, "set", key)
                raise source.error(path, str(error), error.code, **error.data) from error
    for key, axis in grid.items():
        data.setdefault("grid", FileMapping()).put(key, axis, places_of(grid).get(key))
        if key == ENCODINGS_KEY:
            _remove_lost_fields(data, _values(axis))
    for key in SCALED_KEYS:
        if chosen.get(key) is not None:
            data.put(key, chosen[key], places_of(chosen).get(key))


def _apply_assignment(data: FileMapping, assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    option = f"{OPTION}{assignment}"
    if not equals or not key:
        raise SpecError(
            f"{option}: expected key=value, as in --set model.dim=128", code="invalid_assignment", place=option
        )
    value = parse_value(text, option)
    head, *rest = path = key.split(".")
    if head not in (*RUN_KEYS, *ABLATION_KEYS):
        allowed = [*RUN_KEYS, *ABLATION_KEYS]
        raise SpecError(
            f"{option}: no key {key!r}; it starts with one of {', '.join(allowed)}",
            code="unknown_key",
            place=option,
            key=key,
            allowed=allowed,
        )
    try:
        if head in RUN_KEYS:
            _fix(data, key, value, option)
        elif head in REGISTRIES and rest == ["kind"]:
            _replace_kind(data, head, value, option)
        else:
            if path[:2] == ["search", "space"] and len(path) > 2:
                path = ["search", "space", ".".join(path[2:])]
            if head == "resources":
                _remove_own_values(data, key)
            if key == "seeds" and isinstance(value, int):
                value = _first_seeds(data.get("seeds"), value)
            set_path(data, path, value, option)
    except InvalidValue as error:
        raise SpecError(f"{option}: {error}", code=error.code, place=option, **error.data) from error


def _first_seeds(seeds: Json, number: int) -> list[Json]:
    """The first `number` seeds of a file, continued after its last one. Raises InvalidValue."""
    if isinstance(number, bool) or not 1 <= number <= MAX_SEEDS:
        raise InvalidValue(
            f"give a number of seeds from 1 to {MAX_SEEDS:,}; for the seed {number} itself, write seeds=[{number}]",
            key="seeds",
            value=number,
        )
    first = list(seeds) if isinstance(seeds, list) and seeds else list(Ablation.model_fields["seeds"].default)
    if not all(isinstance(seed, int) for seed in first):  # validation reports it later
        return first
    return [*first, *range(max(first) + 1, max(first) + 1 + number)][:number]


def _add_value(data: FileMapping, assignment: str) -> None:
    """Add the value of `+key=value` to the axis. Of a file without axes, it becomes a row beside the base."""
    option = f"{OPTION}{assignment}"
    key, equals, text = assignment.removeprefix(ADDS).partition("=")
    if not equals or not key:
        raise SpecError(
            f"{option}: expected +key=value, as in --set +model.position=[cope,fire]",
            code="invalid_assignment",
            place=option,
        )
    value, grid = parse_value(text, option), data.get("grid", {})
    if key not in grid and not grid and not data.get("zip"):
        row = FileMapping({key: value}, {key: option})
        data.put("include", FileList([*data.get("include", []), row], places_of(data.get("include"))), None)
        return
    if key not in grid:
        hint = suggest(key, list(grid)) or f"; its axes are: {', '.join(grid) or 'none'}"
        raise SpecError(
            f"{option}: the grid has no axis {key!r} to add the value to{hint}",
            code="unknown_axis",
            place=option,
            axis=key,
            allowed=list(grid),
        )
    axis, label = grid[key], default_label(value)
    if value in _values(axis) or (isinstance(axis, dict) and label in axis):
        raise SpecError(
            f"{option}: the axis {key} already has this value", code="no_effect", place=option, axis=key, value=text
        )
    if isinstance(axis, dict):
        grid.put(key, FileMapping({**axis, label: value}, {**places_of(axis), label: option}), option)
    else:
        grid.put(key, FileList([*axis, value], {**places_of(axis), len(axis): option}), option)


def _replace_kind(data: FileMapping, head: str, kind: Json, option: str) -> None:
    """Set the kind of `search` or `schedule`, and keep the settings that the new kind also has."""
    before = data.get(head)
    cls = REGISTRIES[head].get(kind) if isinstance(kind, str) else None
    fields = set(cls.model_fields) if cls is not None else set()
    kept = {key: value for key, value in before.items() if key in fields} if isinstance(before, dict) else {}
    data.put(head, FileMapping(kept | {"kind": kind}, {**places_of(before), "kind": option}), option)


def _fix(data: FileMapping, key: str, value: Json, place: str | None) -> None:
    """Let a run's key have one value in every row, and resolve the conditions on it.

    An entry of `published`, `when` or `exclude` that asks for another value of the key is dropped, and a figure whose
    axis it is. Raises InvalidValue, like `set_path`.
    """
    axis = data.get("grid", {}).get(key)
    labels = [default_label(value)]
    if isinstance(axis, dict):
        labels = [label for label, item in axis.items() if item == value]

    def accepts(wanted: Json) -> bool:
        alternatives = [wanted, *(wanted if isinstance(wanted, list) else [])]
        return any(item in (value, *labels) for item in alternatives)

    _remove_key(data, key, accepts)
    _remove_own_values(data, key)
    if rival := RIVAL_KEYS.get(key):
        _remove_key(data, rival, lambda _: False)
        _remove_own_values(data, rival)
    if key == ENCODINGS_KEY:
        _remove_lost_fields(data, [value])
    if is_field(key) or any(is_below(key, other) for mapping in _assigning(data) for other in mapping):
        # After all axes, which would replace a value in the base.
        condition = FileMapping({"if": {}, "set": FileMapping({key: value}, {key: place} if place else {})})
        data.put("when", FileList([*data.get("when", []), condition], places_of(data.get("when"))), None)
    else:
        set_key(data["base"], key, value, place)


def _remove_key(data: FileMapping, key: str, accepts: Callable[[Json], bool]) -> None:
    """Remove a key from the axes and the search space, and from conditions.

    Conditions on a value that `accepts` refuses are dropped with their entry, and figures over the axis.
    """

    def agrees(condition: dict[str, Json]) -> bool:
        return key not in condition or accepts(condition.pop(key))

    def draws(figure: dict[str, Json]) -> bool:
        """Whether the key is not an axis of the figure. It is removed from the rows that the figure draws."""
        figure.get("rows", {}).pop(key, None)
        return key not in (figure.get("x"), figure.get("panels"))

    data.get("grid", {}).pop(key, None)
    for condition in data.get("when", []):
        condition.get("grid", {}).pop(key, None)
    _filter(data, "published", lambda entry: agrees(entry["match"]))
    _filter(data, "when", lambda entry: agrees(entry["if"]))
    _filter(data, "exclude", agrees)
    _filter(data, "zip", lambda group: group.pop(key, None) is None or bool(group))
    _filter(data, "figures", draws)
    _remove_distribution(data, key)


def _remove_lost_fields(data: FileMapping, values: Sequence[Json]) -> None:
    """Remove the axes of fields of encodings that no row has any more, where `values` are all of `model.position`."""
    deciding = [mapping for mapping in _assigning(data) if mapping is not data.get("grid")]
    if any(ENCODINGS_KEY in mapping or "model" in mapping for mapping in deciding):
        return
    lists = [value for value in values if isinstance(value, list)]
    fields = dict.fromkeys(key for mapping in _assigning(data) for key in mapping if is_field(key))
    for key in fields:
        if all(field_place(encodings, key) is None for encodings in lists):
            _remove_key(data, key, lambda _: False)
            _remove_own_values(data, key)


def _assigning(data: FileMapping) -> list[dict[str, Json]]:
    """The mappings of a file that assign keys to rows: axes, the search space, what conditions set, single rows."""
    search = data.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    conditions = [condition.get(name) for condition in data.get("when", []) for name in ("grid", "set")]
    found = [data.get("grid"), *data.get("zip", []), space, *conditions, *data.get("include", [])]
    return [mapping for mapping in found if isinstance(mapping, dict)]


def _filter(data: FileMapping, name: str, keeps: Callable[[Json], bool]) -> None:
    """Drop the entries of a list of the file that `keeps` refuses."""
    if name in data:
        entries, places = data[name], places_of(data[name])
        kept = [index for index, entry in enumerate(entries) if keeps(entry)]
        written = {new: places[old] for new, old in enumerate(kept) if old in places}
        data[name] = FileList((entries[index] for index in kept), written)


def _remove_own_values(data: dict[str, Json], key: str) -> None:
    """Remove a key that some rows have for their own: an assignment is for all rows."""
    for condition in data.get("when", []):
        condition.get("set", {}).pop(key, None)
    for row in data.get("include", []):
        row.pop(key, None)


def _remove_distribution(data: dict[str, Json], key: str) -> None:
    """Remove a key from the search space. A random search without a space is a search of the grid."""
    search = data.get("search")
    if not isinstance(search, dict) or not isinstance(search.get("space"), dict):
        return
    removed = search["space"].pop(key, None)
    if removed is not None and not search["space"] and search.get("kind") == RandomSearch.model_fields["kind"].default:
        data["search"] = GridSearch().kind


def names_a_file(ablation: str | Path) -> bool:
    """Whether this is the path of an ablation file, and not the name of an ablation."""
    return Path(ablation).suffix in SUFFIXES or Path(ablation).is_file()


def find_ablation(ablation: str | Path, folder: Path, otherwise: str) -> Path:
    """The file of an ablation, given its path, or its name in a folder.

    Raises NotFoundError where there is none; it says `otherwise` where the folder has no ablation at all.
    """
    if names_a_file(ablation):
        return Path(ablation)
    if (named := folder / f"{ablation}.yaml").exists():
        return named
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    hint = suggest(str(ablation), names) or f"; {otherwise}"
    raise NotFoundError(
        f"no ablation {str(ablation)!r} in {folder.absolute()}{hint}",
        name=str(ablation),
        folder=str(folder.absolute()),
        allowed=names,
    )
