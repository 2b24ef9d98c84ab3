"""`--scale NAME` and `--set KEY=VALUE`: layers over an ablation's points, and replaced top-level keys of its file.

A key of a run becomes a layer: every point has its value, whatever the axes, the search space and the conditions say.
The file itself is not edited, so that conditions, published numbers and figures find the labels that they name. Other
keys, such as `seeds` or `metrics`, and axes of a scale replace those of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cope_sweep.config.ablation import SCHEDULERS, SEARCHES, Ablation, Axis, GridSearch, RandomSearch, Scale
from cope_sweep.config.explain import closest, suggest
from cope_sweep.config.keys import RIVAL_KEYS, is_below, is_field, set_path
from cope_sweep.config.loading import AxisValue, LoadedAblation, validated_content
from cope_sweep.config.run import RunSpec
from cope_sweep.config.source import (
    ASSIGNED,
    OPTION,
    FileList,
    FileMapping,
    Json,
    KeyPath,
    SpecError,
    default_label,
    parse_value,
    places_of,
    spelled_as,
)
from cope_sweep.errors import InvalidValue
from cope_sweep.registry import Registry

RUN_KEYS = tuple(name for name in RunSpec.model_fields if name != "seed")
ABLATION_KEYS = ("seeds", "metrics", "primary", "search", "schedule", "resources")
"""Top-level keys of an ablation that `--set` replaces, in addition to the keys of a run."""
MAX_SEEDS = 10_000
"""The greatest number in `--set seeds=…`."""
ADDS = "+"
"""Begins an assignment that adds a value to an axis."""
SAME_RUNS = ("metrics", "primary", "schedule", "resources")
"""Keys that do not decide which runs there are: what is shown of them, when they stop, and where they are trained."""
REGISTRIES: dict[str, Registry[Any]] = {"search": SEARCHES, "schedule": SCHEDULERS}


def with_overrides(
    loaded: LoadedAblation, *, scale: str | None = None, assignments: Sequence[str] = ()
) -> LoadedAblation:
    """The ablation at a named scale, with `key=value` assignments applied after it.

    A key of a run then has this value in every row, and is not an axis. A field of an encoding, such as
    `model.position.cope.p_max`, has it in the rows with this encoding. `seeds`, `metrics`, `primary`, `search.<key>`,
    `schedule.<key>` and `resources.<key>` replace the ablation's own. A number of seeds (`seeds=3`) means the first
    seeds of the ablation, continued if it has fewer.

    `+key=value` adds the value to the axis instead: one more row for each combination with the other axes.

    Raises SpecError.
    """
    if scale is None and not assignments:
        return loaded
    if scale is not None:
        scale = spelled_as(scale, loaded.content.scales)
    assigned = [text.partition("=")[0] for text in assignments if not text.startswith(ADDS)]
    if both := [key for key in assigned if RIVAL_KEYS.get(key) in assigned]:
        message = f"{OPTION}{both[0]}: {RIVAL_KEYS[both[0]]} is also set; remove one of them"
        raise SpecError(message, code="two_budgets", place=f"{OPTION}{both[0]}", key=both[0])
    replaced = [*loaded.replaced, *assigned]
    changed = loaded
    if scale is not None:
        changed = _at_scale(loaded, scale)
        replaced += _replaced_keys(loaded.content, loaded.content.scales[scale])
    for assignment in assignments:
        changed = (_with_value if assignment.startswith(ADDS) else _with_assignment)(changed, assignment)
    trained_keys = ("task", "model", "train")  # `evaluate` only decides how a run is measured
    return replace(
        changed,
        replaced=tuple(key for key in dict.fromkeys(replaced) if key.partition(".")[0] in trained_keys),
        assignments=(*loaded.assignments, *assignments),
        unchanged=loaded.unchanged or loaded.source,
    )


def variant_of(assignments: Iterable[str]) -> list[str]:
    """The assignments that decide which runs an ablation has. Of several of one key, the last one counts."""
    kept: dict[str, str] = {}
    for assignment in assignments:
        key = assignment.partition("=")[0]
        if key.partition(".")[0] not in SAME_RUNS:
            kept.pop(key, None)
            kept[assignment if key.startswith(ADDS) else key] = assignment
    return list(kept.values())


def changed_axes(loaded: LoadedAblation, assignments: Sequence[str]) -> list[tuple[str, str, int]]:
    """Assignments that change each value of an axis, such as `task.tokens=32` where `task` varies.

    `loaded` is the ablation with the assignments. Returns assignment, axis, and its number of values (at least 2).
    """
    mappings: list[Mapping[str, Axis]] = [loaded.axes, *(condition.grid for condition in loaded.content.when)]
    axes = [(axis, values) for mapping in mappings for axis, values in mapping.items()]
    changed = []
    for assignment in assignments:
        key = assignment.partition("=")[0]
        if not is_field(key):
            changed += [(assignment, axis, len(values)) for axis, values in axes if is_below(key, axis)]
    return [(assignment, axis, number) for assignment, axis, number in changed if number > 1]


# -- scales ------------------------------------------------------------------------------------------------------------


def _at_scale(loaded: LoadedAblation, name: str) -> LoadedAblation:
    content, source = loaded.content, loaded.source
    if name not in content.scales:
        scales = "the scales are " + ", ".join(content.scales)
        if not content.scales:
            scales = "this ablation has no scales; leave it out"
        raise source.error(
            (), f"unknown scale {name!r}; {scales}", "unknown_scale", scale=name, allowed=list(content.scales)
        )
    scale, written = content.scales[name], source.data["scales"][name]
    if both := [key for key in scale.set if RIVAL_KEYS.get(key) in (*scale.set, *scale.grid)]:
        message = f"{RIVAL_KEYS[both[0]]} is also set at this scale; remove one of them"
        raise source.error(("scales", name, "set", both[0]), message, "two_budgets", key=both[0])
    top_level_keys = [key for key in Scale.model_fields if key not in ("description", "set", "grid")]
    names = [key for key in top_level_keys if getattr(scale, key) is not None]
    values = {key: getattr(scale, key) for key in names}
    places = places_of(written)
    keys = FileMapping({key: written[key] for key in names}, {key: places[key] for key in names if key in places})
    if scale.grid:
        values["grid"] = {**content.grid, **scale.grid}
        keys["grid"] = _joined(source.data.get("grid", {}), written["grid"])
    changed = replace(_with_keys(loaded, values, keys), scale=name)
    # An inherited scale may set a key that varies at this scale: the file that inherits it says so, and wins.
    varied = {*scale.grid, *getattr(scale.search, "space", ())}
    for key, value in scale.set.items():
        if key not in varied:
            changed = _with_layer(changed, key, value, ("scales", name, "set", key))
    return changed


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


# -- assignments -------------------------------------------------------------------------------------------------------


def _with_assignment(loaded: LoadedAblation, assignment: str) -> LoadedAblation:
    key, equals, text = assignment.partition("=")
    option = f"{OPTION}{assignment}"
    if not equals or not key:
        raise SpecError(
            f"{option}: expected key=value, as in --set model.dim=128", code="invalid_assignment", place=option
        )
    value = parse_value(text, option)
    head, *rest = path = key.split(".")
    if head in RUN_KEYS:
        loaded, origin = _written(loaded, assignment, value)
        return _with_layer(loaded, key, value, origin)
    if head not in ABLATION_KEYS:
        allowed = [*RUN_KEYS, *ABLATION_KEYS]
        near = closest(head, allowed)
        hint = f"did you mean {'.'.join([near, *rest])!r}? It" if near else "it"
        raise SpecError(
            f"{option}: no key {key!r}; {hint} starts with one of {', '.join(allowed)}",
            code="unknown_key",
            place=option,
            key=key,
            allowed=allowed,
        )
    keys = FileMapping({head: loaded.source.data[head]} if head in loaded.source.data else {})
    try:
        if head in REGISTRIES and rest == ["kind"]:
            _replace_kind(keys, head, value, option)
        else:
            if path[:2] == ["search", "space"] and len(path) > 2:
                # The keys of a space are dotted keys themselves.
                path = ["search", "space", ".".join(path[2:])]
            if key == "seeds" and isinstance(value, int):
                value = _first_seeds(loaded.content.seeds, value)
            set_path(keys, path, value, option)
    except InvalidValue as error:
        raise SpecError(f"{option}: {error}", code=error.code, place=option, **error.data) from error
    changed = _with_keys(loaded, keys, keys)
    if head != "search":
        return changed
    # A distribution that is assigned now varies its key again, whatever was assigned to that before.
    space = getattr(changed.content.search, "space", {})
    return replace(changed, layers={key: value for key, value in changed.layers.items() if key not in space})


def _first_seeds(seeds: list[int], number: int) -> list[Json]:
    """The first `number` seeds of a file, continued after its last one. Raises InvalidValue."""
    if isinstance(number, bool) or not 1 <= number <= MAX_SEEDS:
        raise InvalidValue(
            f"give a number of seeds from 1 to {MAX_SEEDS:,}; for the seed {number} itself, write seeds=[{number}]",
            key="seeds",
            value=number,
        )
    return [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + number)][:number]


def _replace_kind(data: FileMapping, head: str, kind: Json, option: str) -> None:
    """Set the kind of `search` or `schedule`, and keep the settings that the new kind also has."""
    before = data.get(head)
    cls = REGISTRIES[head].get(kind) if isinstance(kind, str) else None
    fields = set(cls.model_fields) if cls is not None else set()
    kept = {key: value for key, value in before.items() if key in fields} if isinstance(before, dict) else {}
    data.put(head, FileMapping(kept | {"kind": kind}, {**places_of(before), "kind": option}), option)


def _with_value(loaded: LoadedAblation, assignment: str) -> LoadedAblation:
    """The ablation with the value of `+key=value` on the axis. In a file without axes, it is a row beside the base."""
    option = f"{OPTION}{assignment}"
    key, equals, text = assignment.removeprefix(ADDS).partition("=")
    if not equals or not key:
        raise SpecError(
            f"{option}: expected +key=value, as in --set +model.position=[cope,fire]",
            code="invalid_assignment",
            place=option,
        )
    value, axes = parse_value(text, option), loaded.axes
    if not axes:
        loaded, origin = _written(loaded, assignment, value)
        return replace(loaded, beside=(*loaded.beside, {key: AxisValue.of(value, *origin)}))
    if key not in axes:
        raise SpecError(
            f"{option}: the grid has no axis {key!r} to add the value to{suggest(key, axes)}",
            code="unknown_axis",
            place=option,
            axis=key,
            allowed=list(axes),
        )
    axis, label = axes[key], default_label(value)
    if value in _values(axis) or (isinstance(axis, dict) and label in axis):
        raise SpecError(
            f"{option}: the axis {key} already has this value", code="no_effect", place=option, axis=key, value=text
        )
    written = loaded.source.data["grid"]
    longer: Json
    if isinstance(axis, dict):
        longer = _joined(written[key], FileMapping({label: value}, {label: option}))
    else:
        longer = FileList([*axis, value], {**places_of(written[key]), len(axis): option})
    keys = FileMapping({"grid": _joined(written, FileMapping({key: longer}, {key: option}))})
    return _with_keys(loaded, {"grid": {**loaded.content.grid, key: longer}}, keys)


# -- both --------------------------------------------------------------------------------------------------------------


def _with_layer(loaded: LoadedAblation, key: str, value: Json, origin: KeyPath) -> LoadedAblation:
    """The ablation with a value in every point. It replaces earlier ones of the key, of its rival and of keys below it.

    Fields of encodings stay: they refine any list of encodings.
    """
    replaced = {key, *([RIVAL_KEYS[key]] if key in RIVAL_KEYS else [])}
    layers = {
        other: layer
        for other, layer in loaded.layers.items()
        if other not in replaced and (not is_below(other, key) or is_field(other))
    }
    layers[key] = loaded.labelled(key, value, origin)
    # Rows that an earlier `--set +KEY=VALUE` added would not have the value that every point has now.
    beside = tuple(row for row in loaded.beside if not row.keys() & replaced)
    return _without_dimensions(replace(loaded, layers=layers, beside=beside), replaced)


def _without_dimensions(loaded: LoadedAblation, keys: set[str]) -> LoadedAblation:
    """The ablation without these keys in its search space. A random search without a space is a search of the grid."""
    search = loaded.content.search
    space = getattr(search, "space", {})
    if not space.keys() & keys:
        return loaded
    left = {key: distribution for key, distribution in space.items() if key not in keys}
    if left or not isinstance(search, RandomSearch):
        search, written = search.model_copy(update={"space": left}), loaded.source.data["search"]
        own = written["space"]
        written = _joined(written, FileMapping({"space": FileMapping({key: own[key] for key in left}, places_of(own))}))
    else:
        search = GridSearch()
        written = search.kind
    source = loaded.source.with_keys(FileMapping({"search": written}))
    return replace(loaded, content=loaded.content.model_copy(update={"search": search}), source=source)


def _with_keys(loaded: LoadedAblation, values: Mapping[str, Json], written: FileMapping) -> LoadedAblation:
    """The ablation with other top-level keys: their `values`, and how they were `written`, for the places of errors.

    Only these values are validated: the others are valid already, and stay the same objects. Raises SpecError.
    """
    source, content = loaded.source.with_keys(written), loaded.content
    # Fields that the file does not give stay unset.
    unchanged = {name: getattr(content, name) for name in content.model_fields_set}
    return replace(loaded, content=validated_content(source, {**unchanged, **values}), source=source)


def _written(loaded: LoadedAblation, assignment: str, value: Json) -> tuple[LoadedAblation, KeyPath]:
    """The ablation whose source has the value of an assignment, and the key path of that value."""
    assigned = FileMapping({assignment: value}, {assignment: f"{OPTION}{assignment}"})
    keys = FileMapping({ASSIGNED: _joined(loaded.source.data.get(ASSIGNED, {}), assigned)})
    return replace(loaded, source=loaded.source.with_keys(keys)), (ASSIGNED, assignment)


def _joined(mapping: Mapping[str, Json], other: Mapping[str, Json]) -> FileMapping:
    """A mapping of a file with the keys of another one, and the places of both."""
    return FileMapping({**mapping, **other}, {**places_of(mapping), **places_of(other)})
