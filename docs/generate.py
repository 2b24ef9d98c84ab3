"""Writes what is made from the code: ablations/schema.json, and parts of docs/reference.

    python -m docs.generate

Each page has a part between two comments that is made here; the text around it is written by hand.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cope_services.http.app import create_app
from cope_services.http.settings import ENV_PREFIX, Settings
from typer.main import get_command

from cope_sweep.cli.application import app
from cope_sweep.config import load_ablation
from cope_sweep.kernels import which
from cope_sweep.positions import ENCODINGS, Dims
from cope_sweep.read.figures import FIGURES
from tests.helpers.shipped import shipped_files

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
SCHEMA = ROOT / "ablations" / "schema.json"
BEGIN, END = "<!-- made by python -m docs.generate -->\n", "<!-- end -->\n"

KERNEL_SIZES = Dims(dim=64, heads=2, layers=1, context=512)
MANY_COMMANDS = 4
"""An option that so many commands have, with the same meaning, is listed once."""

Schema = Mapping[str, Any]


def table(header: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Cells may have several lines and vertical bars."""
    columns = header.count("|") + 1
    lines = [f"| {header} |", f"| {' | '.join(['---'] * columns)} |"]
    lines += [f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


# -- ablation files ----------------------------------------------------------------------------------------------------


def kinds(schema: Schema) -> list[Schema]:
    """The alternatives of a schema that are told apart by `kind`."""
    return [each for each in schema.get("anyOf", []) if "kind" in each.get("properties", {})]


def kind_of(schema: Schema) -> str:
    """The `kind` of one of the alternatives."""
    kind: str = schema["properties"]["kind"]["const"]
    return kind


def type_text(schema: Schema) -> str:
    """What values a schema accepts, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "any value" if name == "JsonValue" else f"[{name}](#{name.lower()})"
    if kinds(schema):
        return "a kind, or a mapping with `kind`"
    if "oneOf" in schema:
        return "a mapping with `kind`"
    if "anyOf" in schema:
        options = list(dict.fromkeys(map(type_text, schema["anyOf"])))
        return ", ".join(options[:-1]) + f" or {options[-1]}" if len(options) > 1 else options[0]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any value")
    if kind == "array":
        inner = type_text(schema.get("items", {}))
        return "list" if inner == "any value" else f"list of {inner}"
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return f"mapping to {type_text(inner)}" if isinstance(inner, Mapping) and "$ref" in inner else "mapping"
    return {"string": "text", "boolean": "true, false"}.get(kind, kind)


def default_text(schema: Schema) -> str:
    """The default of a key, as YAML's flow style has it; a key without one is required."""
    if "default" not in schema:
        return "required"
    default = schema["default"]
    if isinstance(default, Mapping):
        default = default["kind"] if set(default) == {"kind"} else ""
    return "" if default == "" else f"`{json.dumps(default, ensure_ascii=False)}`".replace('"', "")


def fields(schema: Schema) -> str:
    """The table of the keys of a mapping."""
    rows = [
        [f"`{key}`", type_text(value), default_text(value), value.get("description", "")]
        for key, value in schema["properties"].items()
        if "const" not in value
    ]
    return table("key | value | default | meaning", rows)


def kind_sections(schemas: Sequence[Schema], level: str) -> Iterator[str]:
    """A section for each kind, with its fields."""
    for schema in schemas:
        yield f"{level} `{kind_of(schema)}`\n\n{schema['description']}\n\n"
        if len(schema["properties"]) > 1:
            yield fields(schema) + "\n"


def ablation_schema() -> Schema:
    """The JSON Schema of ablation files, as the repository has it."""
    schema: Schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return schema


def keys() -> str:
    """All keys of an ablation file but the fields of tasks and encodings."""
    schema = ablation_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    parts = ["## The file\n\n", fields(schema), "\n"]
    for key, name in (("model", "ModelSpec"), ("train", "TrainSpec"), ("evaluate", "EvaluateSpec")):
        parts += [f"## {name}\n\nThe keys of `base.{key}`. ", definitions[name]["description"], "\n\n"]
        parts += [fields(definitions[name]), "\n"]
    parts += ["Fields of `base.task` depend on [its kind](tasks.md), "]
    parts += ["fields of an item of `model.position` on [the encoding](encodings.md).\n\n"]
    for key in ("family", "optimizer", "schedule"):
        options = kinds(definitions["ModelSpec" if key == "family" else "TrainSpec"]["properties"][key])
        rows = [[f"`{kind_of(option)}`", option["description"]] for option in options]
        parts += [f"### Kinds of `{key}`\n\n", table("kind | what it is", rows), "\n"]
        for option in options:
            if len(option["properties"]) > 1:
                parts += [f"Fields of `{kind_of(option)}`:\n\n", fields(option), "\n"]
    for key in ("search", "schedule"):
        parts += [f"## {key.capitalize()}\n\n{properties[key]['description']}\n\n"]
        parts += kind_sections(kinds(properties[key]), "###")
    for name in definitions:
        if name in ("ModelSpec", "TrainSpec", "EvaluateSpec", "JsonValue"):
            continue
        kind = f"`kind: {kind_of(definitions[name])}`. " if "kind" in definitions[name]["properties"] else ""
        parts += [f"## {name}\n\n{kind}{definitions[name]['description']}\n\n", fields(definitions[name]), "\n"]
    return "".join(parts)


def kernel(kind: str, device: str) -> str:
    """How attention with an encoding is computed: by a fused kernel, by torch, or in blocks of queries."""
    path, _ = which([ENCODINGS[kind]()], KERNEL_SIZES, device=device)
    return "PyTorch, in blocks" if path == "blocked" else path


def has_all_kernels() -> bool:
    """Whether this machine can say which kernels there are: it needs a C++ compiler and Triton, and no GPU."""
    return (kernel("cope", "cpu"), kernel("cope", "cuda")) == ("native", "triton")


def source_of(kind: str) -> tuple[str, str]:
    """The year of an encoding, and a link to its paper, or to code if it has none."""
    published, _, name = ENCODINGS[kind].SOURCE.partition(" ")
    if published == "arXiv":
        return f"20{name[:2]}", f"[{name}](https://arxiv.org/abs/{name})"
    return published, f"[{name}](https://github.com/{name})"


def encodings() -> str:
    """The encodings with their papers and kernels, and their fields."""
    definitions = ablation_schema()["$defs"]
    schemas = kinds(definitions["ModelSpec"]["properties"]["position"]["items"])
    rows = []
    for schema in schemas:
        kind = kind_of(schema)
        year, source = source_of(kind)
        description = schema["description"].partition("\n")[0]
        rows.append([f"[`{kind}`](#{kind})", description, year, source, kernel(kind, "cpu"), kernel(kind, "cuda")])
    header = "encoding | what it is | year | arXiv, or code | on a CPU | on a GPU"
    text = table(header, rows) + "\n" + "".join(kind_sections(schemas, "##"))
    for name in definitions:  # their sections are on the page of keys
        text = text.replace(f"](#{name.lower()})", f"](keys.md#{name.lower()})")
    return text


def tasks() -> str:
    """The tasks, and their fields."""
    schemas = kinds(ablation_schema()["properties"]["base"]["properties"]["task"])
    rows = [[f"[`{kind_of(each)}`](#{kind_of(each)})", each["description"].partition("\n")[0]] for each in schemas]
    return table("task | what it asks", rows) + "\n" + "".join(kind_sections(schemas, "##"))


def shipped_ablations() -> str:
    """The shipped ablations."""
    rows = []
    for path in shipped_files():
        content = load_ablation(path).content
        scales = ", ".join(f"`{name}`" for name in content.scales)
        rows.append([f"[`{path.stem}`](../../ablations/{path.name})", content.title, content.reproduces, scales])
    return table("ablation | title | reproduces | scales", rows)


def figures() -> str:
    """The kinds of figures: what they show, their keys in an ablation file, and their options in a question."""
    definitions, rows = ablation_schema()["$defs"], []
    for name, kind in FIGURES.items():
        section = definitions.get(kind.__name__, {}).get("properties", {})
        keys = ", ".join(f"`{key}`" for key in section if key not in ("title", "source", "rows", "kind"))
        options = ", ".join(f"`--{option}`" for option in kind.TAKES)
        shows = (kind.__doc__ or "").partition("\n")[0]
        rows.append([f"`{name}`", shows, f"[{keys}](keys.md#{kind.__name__.lower()})" if keys else "–", options or "–"])
    return table("kind | shows | keys in a file | options", rows)


# -- commands ----------------------------------------------------------------------------------------------------------


def leaf_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The commands of a group and of its groups, each with its name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaf_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


TYPES = {"str": "TEXT", "int": "N", "int range": "N", "float": "X", "float range": "X", "path": "PATH"}
"""Typer's name of a type → what a reader expects in its place."""


def option_text(option: str) -> str:
    """An option with its value: `--groups <int range>` is `--groups N`. An argument is its name alone."""
    name, _, kind = option.partition(" <")
    if not kind or not name.startswith("-"):
        return name
    kind = kind.removesuffix(">").removeprefix("list[").removesuffix("]")
    return f"{name} {TYPES.get(kind, kind)}"


def limits_text(meaning: str) -> str:
    """What an option means, without the limit of a database's integers."""
    return re.sub(r"(\d+)<=x<=2147483648", r"x>=\1", meaning)


def with_examples(text: str) -> str:
    """The help of a command: its first sentence, its examples as a block, and the rest."""
    first, *paragraphs = text.split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.startswith("Example: ")]
    rest = [paragraph for paragraph in paragraphs if paragraph not in examples]
    lines = [line for example in examples for line in re.findall(r"`([^`]+)`", example)]
    block = ["```bash\n" + "\n".join(lines) + "\n```"] if lines else []
    return "\n\n".join([first, *block, *rest])


def commands() -> str:
    """All commands with their options. Options that many commands have are listed once."""
    found = dict(leaf_commands(get_command(app)))
    options: dict[str, list[tuple[str, str]]] = {}
    for name, command in found.items():
        context = command.context_class(command, info_name=f"cope-sweep {name}")
        records = [parameter.get_help_record(context) for parameter in command.params]
        options[name] = [(option_text(option), limits_text(meaning or "")) for option, meaning in filter(None, records)]
    counts = Counter(record for records in options.values() for record in records)
    common = [record for record, count in counts.items() if count >= MANY_COMMANDS]
    parts = ["## Options of many commands\n\n", table("option | meaning", [[f"`{a}`", b] for a, b in common]), "\n"]
    for name, command in found.items():
        parts += [f"## {name}\n\n{with_examples(command.help)}\n\n"]
        own = [[f"`{option}`", meaning] for option, meaning in options[name] if (option, meaning) not in common]
        if own:
            parts += [table("option | meaning", own), "\n"]
        if shared := [f"`{option.split()[0]}`" for option, meaning in options[name] if (option, meaning) in common]:
            parts += [f"It also has {', '.join(shared)}: see [above](#options-of-many-commands).\n\n"]
    return "".join(parts)


# -- the service -------------------------------------------------------------------------------------------------------


def openapi() -> Schema:
    """The OpenAPI document of the service."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(ablations=ROOT / "ablations", store=f"{folder}/store", keys_file=Path(folder) / "keys.txt")
        return create_app(settings).openapi()


def endpoints() -> str:
    """All endpoints by their group, and what their parameters mean."""
    groups: dict[str, list[list[str]]] = {}
    meanings: dict[tuple[str, str], list[str]] = {}
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            parameters = [each for each in operation.get("parameters", []) if each["in"] == "query"]
            names = ", ".join(f"`{each['name']}`" for each in parameters)
            row = [f"`{method.upper()} {path}`", operation["description"].replace("\n\n", " "), names]
            groups.setdefault(operation["tags"][0], []).append(row)
            for each in parameters:
                if each.get("description"):
                    meanings.setdefault((each["name"], each["description"]), []).append(path)
    tables = [
        f"### {group[0].upper()}{group[1:]}\n\n" + table("endpoint | response | parameters", rows)
        for group, rows in sorted(groups.items())
    ]
    rows = [
        [f"`{name}`", meaning, f"`…{paths[0].removeprefix('/api/v1')}`" if len(paths) == 1 else ""]
        for (name, meaning), paths in sorted(meanings.items())
    ]
    tables.append("### Parameters\n\n" + table("parameter | meaning | only of", rows))
    return "\n".join(tables)


def settings() -> str:
    """The settings of the service, as environment variables."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if field.annotation is bool else str(field.default)
        rows.append(
            [f"`{ENV_PREFIX}{name.upper()}`", f"`{default}`" if default else "", (field.description or "").rstrip(".")]
        )
    return table("variable | default | meaning", rows)


PAGES: Mapping[str, Callable[[], str]] = {
    "keys.md": keys,
    "encodings.md": encodings,
    "tasks.md": tasks,
    "ablations.md": shipped_ablations,
    "metrics-and-figures.md": figures,
    "commands.md": commands,
    "rest.md": endpoints,
    "environment.md": settings,
}
"""What makes the part of each page."""


def with_part(name: str, text: str) -> str:
    """The text of a page with its part as the code is today. Raises ValueError where the page has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/reference/{name} needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{PAGES[name]().rstrip()}\n\n{END}{after}"


if __name__ == "__main__":
    printed = subprocess.run([sys.executable, "-m", "cope_sweep.cli", "schema"], check=True, capture_output=True)
    SCHEMA.write_bytes(printed.stdout)
    for name in PAGES:
        if name == "encodings.md" and not has_all_kernels():
            sys.stderr.write("encodings.md stays as it is: its kernels need a C++ compiler and Triton\n")
            continue
        page = REFERENCE / name
        page.write_text(with_part(name, page.read_text(encoding="utf-8")), encoding="utf-8")
