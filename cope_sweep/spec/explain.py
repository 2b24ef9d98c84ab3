"""A validation error, said so that it can be acted on: key, value, what would be accepted, and the likely intent."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from cope_sweep.registry import Registry
from cope_sweep.spec.source import KeyPath

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def explain(error: Any, model: type[BaseModel]) -> tuple[KeyPath, str]:
    """The key path (as in the file), and the message, of one of pydantic's `ValidationError.errors()`."""
    location = tuple(error["loc"])
    kind, given = error["type"], error.get("input")
    path = _without_tags(model, location)
    if kind == "extra_forbidden":
        return path, f"unknown key {path[-1]!r}" + _instead(str(path[-1]), _keys(model, location[:-1]))
    if kind == "missing":
        return path[:-1], f"the key {path[-1]!r} is missing"
    if kind == "union_tag_invalid":
        accepted = [tag.strip().strip("'") for tag in error["ctx"]["expected_tags"].split(",")]
        return path, f"unknown kind {error['ctx']['tag']!r}" + _instead(str(error["ctx"]["tag"]), accepted)
    if kind == "union_tag_not_found":
        return path, f"{_shown(given)} has no `kind`" + _instead("", _tags(model, location))
    if kind == "literal_error":
        accepted = [part.strip().strip("'") for part in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return path, f"{_shown(given)} is not one of the choices" + _instead(str(given), accepted)
    if kind == "value_error":
        return path, str(error["ctx"]["error"])
    if kind in EXPECTED:
        return path, f"{_shown(given)} is not {EXPECTED[kind]}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return path, f"{_shown(given)}: {message}"


def suggest(given: str, accepted: Iterable[str]) -> str:
    """`; did you mean 'x'? Accepted: x, y` for a name that is none of `accepted`."""
    return _instead(given, list(accepted))


def _instead(given: str, accepted: list[str]) -> str:
    if not accepted:
        return ""
    close = difflib.get_close_matches(given, accepted, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} accepted: {', '.join(accepted)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        registry = next((item for item in metadata if isinstance(item, Registry)), None)
        if registry is None:
            yield from _members(inner)
        else:
            yield from registry.classes()
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kind(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    return field.default if field else None


def _step(annotations: list[Any], part: str | int) -> tuple[list[Any], bool]:
    """One part of a location down from some annotations; and whether that part was a union's tag, not a key."""
    models = [a for a in annotations if _is_model(a)]
    tagged = [m for m in models if _kind(m) == part]
    if tagged and len(models) > 1:
        return tagged, True
    below: list[Any] = []
    for annotation in annotations:
        if _is_model(annotation) and part in annotation.model_fields:
            below += _members(annotation.model_fields[part].annotation)
        elif get_origin(annotation) in (tuple, list) and isinstance(part, int):
            below += _members(get_args(annotation)[0])
        elif get_origin(annotation) is dict and isinstance(part, str):
            below += _members(get_args(annotation)[1])
    return below, False


def _walk(model: type[BaseModel], location: KeyPath) -> tuple[list[Any], KeyPath]:
    annotations: list[Any] = [model]
    path: list[str | int] = []
    for part in location:
        below, is_tag = _step(annotations, part)
        if is_tag:
            annotations = below
            continue
        if not below and isinstance(part, str) and annotations and not any(map(_is_model, annotations)):
            continue  # the name of a union's member, as `tuple[...]` or `int`: no key of the file
        annotations = below
        path.append(part)
    return annotations, tuple(path)


def _without_tags(model: type[BaseModel], location: KeyPath) -> KeyPath:
    return _walk(model, location)[1]


def _keys(model: type[BaseModel], location: KeyPath) -> list[str]:
    annotations, _ = _walk(model, location)
    return sorted({name for a in annotations if _is_model(a) for name in a.model_fields})


def _tags(model: type[BaseModel], location: KeyPath) -> list[str]:
    annotations, _ = _walk(model, location)
    return [_kind(a) for a in annotations if _is_model(a) and _kind(a)]
