"""An ablation at another size, or with some keys replaced: `--scale NAME` and `--set KEY=VALUE`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from cope_sweep.spec.ablation import LoadedAblation, default_label, validate
from cope_sweep.spec.run import RunSpec
from cope_sweep.spec.source import Json, KeyPath, Source, SpecError, parse_value, set_key

RUN_KEYS = tuple(name for name in RunSpec.model_fields if name != "seed")
ABLATION_KEYS = ("seeds", "metrics", "resources")
"""Top-level keys of an ablation that `--set` replaces, in addition to the keys of a run."""

Lines = dict[KeyPath, int | str]


def with_overrides(
    loaded: LoadedAblation, *, scale: str | None = None, assignments: Sequence[str] = ()
) -> LoadedAblation:
    """The ablation at a named scale, with `key=value` assignments applied after it.

    A key of a run replaces the value in the base, and removes the axis of that key. `seeds`, `metrics` and
    `resources.<key>` replace the ablation's own. Raises SpecError.
    """
    if scale is None and not assignments:
        return loaded
    data, lines = copy.deepcopy(loaded.source.data), dict(loaded.source.lines)
    if scale is not None:
        if scale not in loaded.content.scales:
            known = ", ".join(loaded.content.scales) or "none: this ablation has one size"
            raise SpecError(f"{loaded.source.name}: unknown scale {scale!r}; it has {known}")
        _apply_scale(data, lines, scale)
    for assignment in assignments:
        _apply_assignment(data, lines, assignment)
    return validate(Source(loaded.source.name, data, lines), loaded.name)


def _apply_scale(data: dict[str, Json], lines: Lines, scale: str) -> None:
    chosen, origin = data["scales"][scale], ("scales", scale)
    for key, value in chosen.get("set", {}).items():
        _fix(data, lines, key, value)
        _move_lines(lines, (*origin, "set", key), ("base", *key.split(".")))
    for key, axis in chosen.get("grid", {}).items():
        data.setdefault("grid", {})[key] = axis
        _move_lines(lines, (*origin, "grid", key), ("grid", key))
    for key in ("seeds", "metrics"):
        if chosen.get(key) is not None:
            data[key] = chosen[key]
            _move_lines(lines, (*origin, key), (key,))


def _apply_assignment(data: dict[str, Json], lines: Lines, assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    option = f"--set {assignment}"
    if not equals or not key:
        raise SpecError(f"{option}: expected key=value, as in --set model.dim=128")
    value = parse_value(text, option)
    head = key.split(".")[0]
    if head in RUN_KEYS:
        _fix(data, lines, key, value)
        key = f"base.{key}"
    elif head in ABLATION_KEYS:
        set_key(data, key, value)
    else:
        raise SpecError(f"{option}: no key {key!r}; it starts with one of {', '.join((*RUN_KEYS, *ABLATION_KEYS))}")
    path = tuple(key.split("."))
    _forget_lines(lines, path)
    lines[path] = option


def _fix(data: dict[str, Json], lines: Lines, key: str, value: Json) -> None:
    """Set a run's key in the base, remove its axis, and resolve the conditions on it.

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
    set_key(data["base"], key, value)


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
