"""Dotted keys of a run: `train.lr`, and `model.position.cope.p_max` for a field of one encoding of the list.

Ablation files, `--set`, filters, tables, MLflow and the index name values so. An item of a list of specs is named by
its kind; where several are of one kind, each is named by its place, counted from 0: `model.position.1.p_max`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cope_sweep.config.source import FileList, FileMapping, Json, KeyPath, places_of
from cope_sweep.errors import InvalidValue

ENCODINGS_KEY = "model.position"
"""The key of the list of encodings. Keys below it name the fields of one encoding."""
RIVAL_KEYS = {"train.steps": "train.tokens", "train.tokens": "train.steps"}
"""Key → the key that means the same quantity: what is written later, or deeper in an ablation, replaces the other."""
DECIDING_KEYS = ("model", ENCODINGS_KEY)
"""The keys whose values decide which encodings a model has."""


def is_field(key: str) -> bool:
    """The key names a field of an encoding: `model.position.cope.p_max`."""
    return key.startswith(f"{ENCODINGS_KEY}.")


def is_below(key: str, other: str) -> bool:
    """The key names a part of what the other one names: `model.position` is below `model`."""
    return key.startswith(f"{other}.")


def depth(key: str) -> int:
    """The number of dots. A deeper key refines a higher one, so it is set later, whatever their order in a file."""
    return key.count(".")


def names_of(items: Sequence[Json]) -> list[str]:
    """What keys call the items of a list of specs, which are kinds or mappings with a `kind`.

    An empty name means that an item is not a spec.
    """
    kinds = [item.get("kind") if isinstance(item, Mapping) else item for item in items]
    names = [kind if isinstance(kind, str) else "" for kind in kinds]
    return [name if names.count(name) == 1 or not name else str(index) for index, name in enumerate(names)]


def field_place(items: Sequence[Json], key: str) -> tuple[int, list[str]] | None:
    """The index of the encoding that a key of a field is about, and the rest of the key; None if it is not listed."""
    name, *rest = key.removeprefix(f"{ENCODINGS_KEY}.").split(".")
    names = names_of(items)
    return (names.index(name), rest) if name in names else None


def named_by_kind(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a spec by dotted key, without fields that are named by an encoding's index instead of its kind."""
    names = names_of(str(values.get(ENCODINGS_KEY, "")).split("+"))
    return {key: value for key, value in values.items() if not is_field(key) or key.split(".")[2] in names}


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Key → the shortest end of it that is unique among the keys: `cope.p_max`, `relative.p_max`."""
    parts = {key: key.split(".") for key in keys}

    def name(key: str, length: int) -> str:
        return ".".join(parts[key][-length:])

    short = {}
    for key, key_parts in parts.items():
        lengths = range(1, len(key_parts) + 1)
        unique = (n for n in lengths if sum(name(other, n) == name(key, n) for other in parts) == 1)
        short[key] = name(key, next(unique, len(key_parts)))
    return short


def key_path(data: Json, path: KeyPath) -> tuple[str, ...]:
    """A path through lists by index as the parts of a key: `("model", "position", "cope", "p_max")`."""
    key_parts = []
    inner: Any = data
    for part in path:
        if isinstance(part, int) and isinstance(inner, list) and part < len(inner):
            key_parts.append(names_of(inner)[part] or str(part))
            inner = inner[part]
        else:
            key_parts.append(str(part))
            inner = inner.get(part) if isinstance(inner, dict) else None
    return tuple(key_parts)


def set_key(data: dict[str, Json], key: str, value: Json) -> None:
    """Set the dotted `key` of a nested mapping in place: `data["model"]["dim"]` for `model.dim`. See `set_path`.

    A rival of the key is removed.
    """
    set_path(data, key.split("."), value)
    if rival := RIVAL_KEYS.get(key):
        parent, _, name = rival.rpartition(".")
        data[parent].pop(name, None)  # `set_path` has copied it


def set_path(data: dict[str, Json], path: Sequence[str], value: Json, place: str | None = None) -> None:
    """Set the value at a key path of a nested mapping in place, and where it was written.

    The inner mappings and lists on the way are copied first, because other data may share them. Text on the way is a
    `kind`, as in `task: flip_flop`, and becomes `{kind: flip_flop}`. Raises InvalidValue where any other value is on
    the way, or a list without the named item.
    """
    *parents, last = path
    inner: Any = data
    for index, part in enumerate(parents):
        slot = _slot(inner, part, path[:index])
        below = inner[slot] if isinstance(inner, list) else inner.get(slot, {})
        if isinstance(below, str):
            below = {"kind": below}
        if isinstance(below, dict):
            below = FileMapping(below, places_of(below))
        elif isinstance(below, list) and all(names_of(below)):
            below = FileList(below, places_of(below))
        else:
            parent = ".".join(path[: index + 1])
            raise InvalidValue(
                f"{parent} is {json.dumps(below)}, which has no keys", code="no_keys", key=parent, value=below
            )
        inner[slot] = below
        inner = below
    if isinstance(inner, list):
        raise InvalidValue(f"name a field, as in {ENCODINGS_KEY}.cope.p_max", code="no_field")
    inner[last] = value
    if place is not None and isinstance(inner, FileMapping):
        inner.places[last] = place


def _slot(container: Json, part: str, before: Sequence[str]) -> Any:
    """The key of a mapping, or the index of a list's item, that a part of a key names. Raises InvalidValue."""
    if not isinstance(container, list):
        return part
    names = names_of(container)
    if part not in names:
        key = ".".join(before)
        raise InvalidValue(
            f"{key} has {', '.join(names) or 'no encoding'}, and no {part!r}",
            code="no_such_encoding",
            key=key,
            name=part,
            allowed=list(names),
        )
    return names.index(part)


def leaves(value: Any, prefix: str = "", *, by_place: bool = False) -> Iterator[tuple[str, Any]]:
    """The values of a JSON document under dotted keys.

    A list of objects gives their kinds, joined, and their own values: `model.position` is `cope+relative`, and
    `model.position.cope.p_max` is 64; `by_place`: `model.position.0.p_max`, too. Other lists, and null, are values.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key), by_place=by_place)
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        # An empty list counts as one of specs: a model without encodings has the value `none`.
        yield prefix, "+".join(str(item.get("kind", "")) for item in value) or "none"
        for place, (item, name) in enumerate(zip(value, names_of(value), strict=True)):
            fields = {key: inner for key, inner in item.items() if key != "kind"}
            yield from leaves(fields, f"{prefix}.{name or place}", by_place=by_place)
            if by_place:
                yield from leaves(item, f"{prefix}.{place}", by_place=True)
    else:
        yield prefix, value


def flatten(value: Any, prefix: str = "", *, by_place: bool = False) -> Iterator[tuple[str, bool | int | float | str]]:
    """`leaves` as the index has them: lists are joined by commas, and null is left out."""
    for name, leaf in leaves(value, prefix, by_place=by_place):
        if isinstance(leaf, (list, tuple)):
            yield name, ",".join(map(str, leaf))
        elif leaf is not None:
            yield name, leaf


def value_at(flat: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a flattened spec; of a part with options, such as `train.optimizer`, its kind."""
    return flat.get(key, flat.get(f"{key}.kind", default))
