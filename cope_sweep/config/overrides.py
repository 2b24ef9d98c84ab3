"""An ablation at another size, or with some keys replaced: `--scale NAME` and `--set KEY=VALUE`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cope_sweep.config.ablation import Ablation, Axis, LoadedAblation, Scale, validate
from cope_sweep.config.labels import default_label
from cope_sweep.config.run import RunSpec
from cope_sweep.config.search import SCHEDULERS, SEARCHES, GridSearch, RandomSearch
from cope_sweep.config.source import Json, KeyPath, SpecError, parse_value, set_key, set_path
from cope_sweep.registry import Registry

RUN_KEYS = tuple(name for name in RunSpec.model_fields if name != "seed")
TRAINED_KEYS = ("task", "model", "train")
"""Keys of a run that decide what is trained; `evaluate` only decides how it is measured."""
ABLATION_KEYS = ("seeds", "metrics", "primary", "search", "schedule", "resources")
"""Top-level keys of an ablation that `--set` replaces, in addition to the keys of a run."""
SCALED_KEYS = ("title", "exclude", "seeds", "metrics", "primary", "exploratory", "published", "search", "schedule")
"""Top-level keys of an ablation that a scale replaces."""
REGISTRIES: dict[str, Registry[Any]] = {"search": SEARCHES, "schedule": SCHEDULERS}

Lines = dict[KeyPath, int | str]


def with_overrides(
    loaded: LoadedAblation, *, scale: str | None = None, assignments: Sequence[str] = ()
) -> LoadedAblation:
    """The ablation at a named scale, with `key=value` assignments applied after it.

    A key of a run replaces the value in the base, and removes the axis of that key. `seeds`, `metrics`, `primary`,
    `search.<key>`, `schedule.<key>` and `resources.<key>` replace the ablation's own; the last also those of single
    rows. Raises SpecError.
    """
    if scale is None and not assignments:
        return loaded
    data, lines = copy.deepcopy(loaded.source.data), dict(loaded.source.lines)
    replaced = [*loaded.replaced, *(assignment.partition("=")[0] for assignment in assignments)]
    if scale is not None:
        if scale not in loaded.content.scales:
            known = ", ".join(loaded.content.scales) or "none: this ablation has one size"
            raise SpecError(f"{loaded.source.name}: unknown scale {scale!r}; it has {known}")
        _apply_scale(data, lines, scale)
        replaced += _replaced_keys(loaded.content, loaded.content.scales[scale])
    for assignment in assignments:
        _apply_assignment(data, lines, assignment)
    trained = tuple(key for key in dict.fromkeys(replaced) if key.partition(".")[0] in TRAINED_KEYS)
    return replace(validate(replace(loaded.source, data=data, lines=lines), loaded.name), replaced=trained)


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


def _apply_scale(data: dict[str, Json], lines: Lines, scale: str) -> None:
    chosen, origin = data["scales"][scale], ("scales", scale)
    grid = chosen.get("grid", {})
    # An inherited scale may set a key whose axis the same scale has here: the axis stays, with the figures over it.
    for key, value in chosen.get("set", {}).items():
        if key not in grid:
            _fix(data, lines, key, value)
            _move_lines(lines, (*origin, "set", key), ("base", *key.split(".")))
    for key, axis in grid.items():
        data.setdefault("grid", {})[key] = axis
        _move_lines(lines, (*origin, "grid", key), ("grid", key))
    for key in SCALED_KEYS:
        if chosen.get(key) is not None:
            data[key] = chosen[key]
            _move_lines(lines, (*origin, key), (key,))


def _apply_assignment(data: dict[str, Json], lines: Lines, assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    option = f"--set {assignment}"
    if not equals or not key:
        raise SpecError(f"{option}: expected key=value, as in --set model.dim=128")
    value = parse_value(text, option)
    head, *rest = path = tuple(key.split("."))
    if head in RUN_KEYS:
        _fix(data, lines, key, value)
        path = ("base", *path)
    elif head in REGISTRIES and rest == ["kind"]:
        _replace_kind(data, head, value)
        lines[head,] = option
    elif head in ABLATION_KEYS:
        if path[:2] == ("search", "space") and len(path) > 2:
            path = ("search", "space", ".".join(path[2:]))
        if head == "resources":
            _remove_own_resource(data, key)
        set_path(data, path, value)
    else:
        raise SpecError(f"{option}: no key {key!r}; it starts with one of {', '.join((*RUN_KEYS, *ABLATION_KEYS))}")
    _forget_lines(lines, path)
    lines[path] = option


def _replace_kind(data: dict[str, Json], head: str, kind: Json) -> None:
    """Set the kind of `search` or `schedule`, and keep those of its settings that the new kind has."""
    before = data.get(head)
    cls = REGISTRIES[head].get(kind) if isinstance(kind, str) else None
    fields = set(cls.model_fields) if cls is not None else set()
    kept = {key: value for key, value in before.items() if key in fields} if isinstance(before, dict) else {}
    data[head] = kept | {"kind": kind}


def _fix(data: dict[str, Json], lines: Lines, key: str, value: Json) -> None:
    """Set a run's key in the base, remove its axis or distribution, and resolve the conditions on it.

    An entry of `published`, `when` or `exclude` that asks for another value of the key is dropped.
    """
    axis = data.get("grid", {}).pop(key, None)
    labels = [default_label(value)]
    if isinstance(axis, dict):
        labels = [label for label, item in axis.items() if item == value]
    for name, part in (("published", "match"), ("when", "if"), ("exclude", None)):
        kept: list[Json] = []
        for index, entry in enumerate(data.get(name, [])):
            condition = entry if part is None else entry[part]
            wanted = condition.pop(key, value)
            alternatives = [wanted, *(wanted if isinstance(wanted, list) else [])]
            if any(item in (value, *labels) for item in alternatives):
                _move_lines(lines, (name, index), (name, len(kept)))
                kept.append(entry)
        if name in data:
            data[name] = kept
    groups: list[Json] = []
    for index, group in enumerate(data.get("zip", [])):
        if group.pop(key, None) is None or group:
            _move_lines(lines, ("zip", index), ("zip", len(groups)))
            groups.append(group)
    if "zip" in data:
        data["zip"] = groups
    _fix_figures(data, lines, key)
    _remove_distribution(data, key)
    set_key(data["base"], key, value)


def _fix_figures(data: dict[str, Json], lines: Lines, key: str) -> None:
    """Remove the key from the rows that figures draw, and the figures whose axis it is."""
    kept: list[Json] = []
    for index, figure in enumerate(data.get("figures", [])):
        if key not in (figure.get("x"), figure.get("panels")):
            figure.get("rows", {}).pop(key, None)
            _move_lines(lines, ("figures", index), ("figures", len(kept)))
            kept.append(figure)
    if "figures" in data:
        data["figures"] = kept


def _remove_own_resource(data: dict[str, Json], key: str) -> None:
    """Remove a key of `resources` that some rows have for their own: the assignment is for all rows."""
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


def _move_lines(lines: Lines, source: KeyPath, target: KeyPath) -> None:
    """Error messages about `target` and all keys below it refer to the lines of `source` from now on."""
    if source == target:
        return
    moved = {(*target, *path[len(source) :]): line for path, line in lines.items() if path[: len(source)] == source}
    _forget_lines(lines, target)
    lines.update(moved)


def _forget_lines(lines: Lines, path: KeyPath) -> None:
    for known in [known for known in lines if known[: len(path)] == path]:
        del lines[known]
