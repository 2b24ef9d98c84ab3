"""What clients can read without asking a question: the schema, encodings, tasks, ablation files, committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_types import Resource, ResourceTemplate

from cope_services.http.components import Components
from cope_services.mcp.answers import page, table_lines
from cope_sweep.api.ablations import GetAblation
from cope_sweep.api.question import checked
from cope_sweep.api.tables import GetTable
from cope_sweep.config.ablation import ablation_schema
from cope_sweep.errors import NotFoundError

SCHEME = "cope-sweep://"
JSON, MARKDOWN, YAML = "application/json", "text/markdown", "application/yaml"
Schema = Mapping[str, Any]
_PAGE = re.compile(r"(.*?)(?:\?start=(\d{1,9}))?", re.DOTALL)


@dataclass(frozen=True)
class Kind:
    """A kind of resources: one without a name, or one for each name."""

    path: str
    """`encodings`, or `encodings/{kind}`."""
    description: str
    mime_type: str
    text: Callable[[Components, str], str]
    """Its text, by the name in the braces. Raises UserError. Markdown is read in pages, files are read whole."""
    names: Callable[[Components], Sequence[str]] | None = None
    """The names that are listed, as resources of their own; None: the client finds them elsewhere."""


def encodings() -> Sequence[Schema]:
    """The JSON Schemas of the encodings."""
    return _kinds(ablation_schema()["$defs"]["ModelSpec"]["properties"]["position"]["items"])


def tasks() -> Sequence[Schema]:
    """The JSON Schemas of the tasks."""
    return _kinds(ablation_schema()["properties"]["base"]["properties"]["task"])


def _kinds(schema: Schema) -> Sequence[Schema]:
    return [each for each in schema["anyOf"] if "kind" in each.get("properties", {})]


def _kind(schema: Schema) -> str:
    return str(schema["properties"]["kind"]["const"])


def _fields(schema: Schema) -> Iterator[tuple[str, Schema]]:
    return ((name, value) for name, value in schema["properties"].items() if name != "kind")


def _list(schemas: Sequence[Schema]) -> str:
    """A line for each kind: what it is, and its fields with their defaults."""
    rows = [
        [_kind(each), each["description"].partition("\n")[0], ", ".join(_default(*field) for field in _fields(each))]
        for each in schemas
    ]
    lines = [*table_lines(("kind", "what it is", "fields"), rows), "", "More about one: append /KIND to the URI."]
    return "\n".join(lines)


def _default(name: str, schema: Schema) -> str:
    return f"{name}={json.dumps(schema['default'])}" if "default" in schema else name


def _details(schemas: Sequence[Schema], kind: str) -> str:
    """A kind, with the meaning of each field."""
    by_kind = {_kind(each): each for each in schemas}
    if kind not in by_kind:
        raise NotFoundError(f"no kind {kind[:80]!r}; choose one of: {', '.join(by_kind)}", allowed=list(by_kind))
    schema = by_kind[kind]
    lines = [f"# {kind}", "", *schema["description"].splitlines(), ""]
    lines += [f"- {_default(name, value)}: {value.get('description', '')}" for name, value in _fields(schema)]
    return "\n".join(lines)


def _ablation(components: Components, name: str) -> str:
    return components.queries.ask(checked(GetAblation, name=name)).text


def _committed(components: Components, named: str) -> str:
    name, _, scale = named.partition(".")
    question = checked(GetTable, name=name, scale=scale or None, format="markdown")
    return components.committed.ask(question).decode()


def _committed_names(components: Components) -> list[str]:
    files = components.queries.files
    return [f"{name}.{scale}".rstrip(".") for name in files.files() for scale in files.committed(name)]


KINDS = (
    Kind("schema", "JSON Schema of ablation files.", JSON, lambda _, __: json.dumps(ablation_schema())),
    Kind("encodings", "The position encodings with their fields.", MARKDOWN, lambda _, __: _list(encodings())),
    Kind("encodings/{kind}", "An encoding, with its fields.", MARKDOWN, lambda _, name: _details(encodings(), name)),
    Kind("tasks", "The tasks with their fields.", MARKDOWN, lambda _, __: _list(tasks())),
    Kind("tasks/{kind}", "A task, with its fields.", MARKDOWN, lambda _, name: _details(tasks(), name)),
    Kind("ablations/{name}", "The file of an ablation.", YAML, _ablation),
    Kind(
        "results/{name}", "Committed results of an ablation at a scale: its table with verdicts.", MARKDOWN,
        _committed, _committed_names,
    ),
)  # fmt: skip


def listed(components: Components) -> list[Resource]:
    """The resources that have a name of their own."""
    found = []
    for kind in KINDS:
        stem, braces, _ = kind.path.partition("{")
        names = [""] if not braces else kind.names(components) if kind.names else []
        for name in names:
            resource = Resource(
                uri=f"{SCHEME}{stem}{name}",
                name=f"{stem}{name}",
                description=kind.description,
                mime_type=kind.mime_type,
            )
            found.append(resource)
    return found


def templates() -> list[ResourceTemplate]:
    """The kinds of resources that have a name in their URI."""
    return [
        ResourceTemplate(
            uri_template=f"{SCHEME}{kind.path}", name=kind.path, description=kind.description, mime_type=kind.mime_type
        )
        for kind in KINDS
        if "{" in kind.path
    ]


def read(components: Components, uri: str) -> tuple[str, str]:
    """The text of a resource, and its media type. `?start=17` is the next page. Names are only compared.

    Raises UserError.
    """
    address, start = _PAGE.fullmatch(uri).groups()  # type: ignore[union-attr]  # every text matches
    path = address.removeprefix(SCHEME)
    for kind in KINDS:
        stem, braces, _ = kind.path.partition("{")
        is_it = path.startswith(stem) and len(path) > len(stem) if braces else path == stem
        is_paged = kind.mime_type == MARKDOWN
        if uri.startswith(SCHEME) and is_it and (is_paged or start is None):
            text = kind.text(components, path.removeprefix(stem))
            return page(text.splitlines(), int(start or 0), address=address) if is_paged else text, kind.mime_type
    raise NotFoundError(
        f"no resource {uri[:200]!r}; choose one of: {', '.join(SCHEME + kind.path for kind in KINDS)}", uri=uri[:200]
    )
