"""YAML files, parsed to plain data together with the line of every key, so that errors can name it.

Scalars follow the core schema of YAML 1.2: `1e-3` is a number and `on` is text; `_` may stand between digits. Duplicate
keys are errors. Only values that JSON can express are accepted. PyYAML's parser in C gives the nodes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import yaml  # type: ignore[import-untyped]

from cope_sweep.errors import JsonValue, UserError

Json = Any
"""A value that JSON can express: a mapping with text keys, a list, text, a number, true, false or null."""

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file to a value."""

MAX_DEPTH = 30
"""Largest number of nested levels in a file. It stops aliases that contain themselves."""
MAX_CHARACTERS = 200_000
"""Largest length of a file."""
MAX_VALUES = 20_000
"""Largest number of values in a file. It stops aliases that expand exponentially."""
TOO_LARGE = f"more than {MAX_DEPTH} levels or {MAX_VALUES:,} values"
MAX_NUMBER = 10**18
"""Larger whole numbers are refused."""
TOO_MANY_DIGITS = "the number has too many digits; whole numbers have at most 18"

OPTION = "--set "
"""The beginning of a place that is a command-line option."""
ASSIGNED = "--set"
"""The key of a source's data that has the values of `--set`, so that their places are found as those of a file are."""

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile("[-+]?(0b_*[01][01_]*|0o_*[0-7][0-7_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|[0-9][0-9_]*)")
_EXPONENT = "[eE][-+]?[0-9]+"
_FLOAT = re.compile(rf"[-+]?([0-9][0-9_]*(\.[0-9_]*({_EXPONENT})?|{_EXPONENT})|\.[0-9][0-9_]*({_EXPONENT})?)")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ALIAS = re.compile(r"\*([^\s,\[\]{}]+)")
_DATE = re.compile("[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t]|$)")


class SpecError(UserError):
    """A declaration is not valid. The message names the file, line, key and value, and what would be accepted.

    `data` has the `place`, a file with its line or a command-line option, and the `key_path` as in `base.model.dim`.
    If there are several problems, they describe the first, and `problems` has code, message and data of each.
    """

    default_code = "invalid_ablation"

    @classmethod
    def of(cls, problems: Sequence[SpecError]) -> SpecError:
        """One error for all of the problems."""
        first = problems[0]
        if len(problems) == 1:
            return first
        listed: list[JsonValue] = [
            {"code": problem.code, "message": str(problem), "data": problem.data} for problem in problems
        ]
        return cls("\n".join(map(str, problems)), code=first.code, **{**first.data, "problems": listed})


class FileMapping(dict[str, Json]):
    """A mapping of a file, with the places of its keys. They stay with it where it is moved or merged.

    A place is `file:line`, or the command-line option that has set the key.
    """

    __slots__ = ("places",)

    def __init__(self, data: Mapping[str, Json] = {}, places: Mapping[Any, str] = {}) -> None:
        super().__init__(data)
        # A copy, so that nobody changes the default arguments.
        self.places = dict(places)

    def put(self, key: str, value: Json, place: str | None) -> None:
        """Set a key, and where it was written; None: not known."""
        self[key] = value
        self.places.pop(key, None)
        if place is not None:
            self.places[key] = place


class FileList(list[Json]):
    """A list of a file, with the places of its items."""

    __slots__ = ("places",)

    def __init__(self, items: Iterable[Json] = (), places: Mapping[Any, str] = {}) -> None:
        super().__init__(items)
        self.places = dict(places)


def places_of(value: Json) -> Mapping[Any, str]:
    """The places of the keys or items of a value; of JSON that was not read from a file, none."""
    return getattr(value, "places", {})


def copied(value: Json, shown: Callable[[str], str] = str) -> Json:
    """A deep copy of a value, with its places as `shown` gives them."""
    places = {part: shown(place) for part, place in places_of(value).items()}
    if isinstance(value, dict):
        return FileMapping({key: copied(inner, shown) for key, inner in value.items()}, places)
    return FileList((copied(inner, shown) for inner in value), places) if isinstance(value, list) else value


@dataclass(frozen=True)
class Source:
    """A parsed file, or JSON instead of a file."""

    name: str
    """The file's path, as error messages show it."""
    data: dict[str, Json]
    """Read-only by convention: specs that were validated from it share its values."""
    parents: tuple[Path, ...] = ()
    """The files that it inherits from, nearest first."""

    def location(self, path: KeyPath) -> str:
        """The place where the deepest known part of `path` was written: `file:line`, or a command-line option.

        For an error about several keys, the place is the `--set` options among them: without these the file is valid.
        """
        value: Json = self.data
        deepest, place = "", self.name
        for part in path:
            deepest = places_of(value).get(part, "")
            place = deepest or place
            try:
                value = value[part]
            except (LookupError, TypeError):
                return place
        options = [] if deepest.startswith(OPTION) or not path else list(dict.fromkeys(_options(value)))
        return ", ".join(options) or place

    def with_keys(self, keys: FileMapping) -> Source:
        """The source with other top-level keys, and their places."""
        places = {**places_of(self.data), **keys.places}
        return replace(self, data=FileMapping({**self.data, **keys}, places))

    def error(self, path: KeyPath, message: str, code: str | None = None, /, **data: JsonValue) -> SpecError:
        """An error about the value at `path`; an empty path means the whole file."""
        if not path:
            return SpecError(f"{self.name}: {message}", code=code, place=self.name, **data)
        return error_at(self.location(path), path, message, code, **data)


def _options(value: Json) -> Iterator[str]:
    """The `--set` options that have set a part of a value."""
    yield from (place for place in places_of(value).values() if place.startswith(OPTION))
    inner: Iterable[Json] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    for item in inner:
        yield from _options(item)


def dotted(path: KeyPath) -> str:
    """A key path as text: `model.position[0].p_max`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def read_source(path: Path) -> Source:
    """Parse a YAML file. Raises SpecError if it cannot be read, is not YAML, or does not hold a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})", code="not_utf8", place=str(path)
        ) from error
    except OSError as error:
        code = "no_such_file" if isinstance(error, FileNotFoundError) else "unreadable_file"
        raise SpecError(f"{path}: {error.strerror}", code=code, place=str(path)) from error
    return parse_source(text, str(path))


@lru_cache(maxsize=64)
def parse_source(text: str, name: str) -> Source:
    """Parse YAML text; error messages call it `name`. Raises SpecError.

    Texts are kept: most files of a folder are read once more for each file that inherits from them.
    """
    if len(text) > MAX_CHARACTERS:
        raise SpecError(
            f"{name}: {len(text):,} characters; a declaration has at most {MAX_CHARACTERS:,}",
            code="too_large",
            place=name,
        )
    root = _parsed(text, name)
    if not isinstance(root, yaml.MappingNode):
        raise _not_a_mapping(name)
    return Source(name, _Reader(name).value(root, (), name))


DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
"""A number with a decimal comma."""


# PyYAML that was built without libyaml has no parser in C. The base is not known to mypy then.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Gives a tag only to the nodes that the text gives one: `_scalar` decides what a plain scalar is."""

    nodes = 0

    def resolve(self, kind: type[Any], value: Any, implicit: Any) -> None:
        """No tag. Called for each node without one, so a text that is too large stops here. Raises YAMLError."""
        # Counted while parsing: afterwards, a large text has already used the memory.
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise yaml.YAMLError(TOO_LARGE)


def _parsed(text: str, name: str) -> yaml.Node | None:
    """The node of a text; None for an empty text. An alias is the node of its anchor. Raises SpecError."""
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        message = str(problem.problem or problem.context)
        if "nesting depth" in message:  # a limit of libyaml
            message = TOO_LARGE
        elif message == "but found another document":
            message = "more than one document"
        elif mark and text[mark.index : mark.index + 1] == "\t":
            message = "a tab; YAML indents with spaces"
        elif message == "found undefined alias" and (alias := _ALIAS.match(text, mark.index)):
            message += f" {alias[1]!r}"  # as the parser in Python does
        raise _not_yaml(place, message) from problem
    except RecursionError as problem:
        raise _not_yaml(name, TOO_LARGE) from problem
    except UnicodeEncodeError as problem:  # of a command line that is not UTF-8, or of JSON
        raise _not_yaml(name, "contains a lone surrogate, which is not Unicode text") from problem
    except yaml.YAMLError as problem:
        raise _not_yaml(name, str(problem).partition(chr(10))[0]) from problem


def _not_yaml(place: str, reason: str) -> SpecError:
    code = "too_large" if reason == TOO_LARGE else "invalid_yaml"
    return SpecError(f"{place}: not valid YAML: {reason}", code=code, place=place, reason=reason)


def _not_a_mapping(name: str) -> SpecError:
    return SpecError(
        f"{name}: expected a mapping of keys, as in ablations/quickstart.yaml", code="not_a_mapping", place=name
    )


def source_of(data: Json, name: str) -> Source:
    """A mapping from JSON as if it were a file; error messages call it `name`. Raises SpecError."""
    if not isinstance(data, dict):
        raise _not_a_mapping(name)
    values = 0
    # Not recursive: JSON may be nested deeper than Python's stack.
    open_values: list[tuple[KeyPath, Any]] = [((), data)]
    while open_values:
        path, value = open_values.pop()
        values += 1
        if len(path) > MAX_DEPTH or values > MAX_VALUES:
            raise error_at(name, path[:3], TOO_LARGE, "too_large")
        if isinstance(value, dict):
            open_values += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            open_values += [((*path, index), inner) for index, inner in enumerate(value)]
        elif isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise error_at(name, path, TOO_MANY_DIGITS, "too_many_digits")
        elif isinstance(value, float) and not math.isfinite(value):
            raise error_at(name, path, f"{value} is not a finite number", "not_finite", value=str(value))
    return Source(name, data)


def composed(text: str) -> str:
    """The text in Unicode's form NFC, in which names that look the same are equal: some systems write files in NFD."""
    return text if text.isascii() else normalize("NFC", text)


def spellings(text: str) -> list[str]:
    """The text as it is, in NFC and in NFD, each once: for conditions on names that a database compares by bytes."""
    return list(dict.fromkeys([text, normalize("NFC", text), normalize("NFD", text)]))


def spelled_as(text: str, known: Iterable[str]) -> str:
    """The known name that is the same text, in whichever form of Unicode; the text itself if there is none."""
    known = list(known)
    if text in known:
        return text
    same = composed(text)
    return next((name for name in known if composed(name) == same), text)


def parse_value(text: str, name: str) -> Json:
    """One YAML value, as it follows the equals sign of `--set key=value`. Raises SpecError."""
    # Further lines would be keys beside `value`, and have no effect.
    if len(text.splitlines()) > 1:
        raise SpecError(f"{name}: the value has a line break; write it in one line", code="line_break", place=name)
    # A copy, because parse_source keeps its answers.
    return copied(parse_source(f"value: {text}", name).data.get("value"), lambda _: name)


class _Reader:
    """Makes plain data of the YAML nodes of a file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = 0
        """The number of values that were read, each as often as aliases repeat it."""

    def value(self, node: yaml.Node, path: KeyPath, place: str) -> Json:
        """The value of a node, whose key or item is at `place`. Raises SpecError."""
        self.values += 1
        if len(path) > MAX_DEPTH or self.values > MAX_VALUES:
            message = f"the file is too deep or too large: {TOO_LARGE}; does an alias contain itself?"
            raise error_at(place, path[:3], message, "too_large")
        if node.tag is not None:
            raise error_at(
                place, path, f"the YAML tag {node.tag} is not supported; remove it", "yaml_tag", tag=node.tag
            )
        if isinstance(node, yaml.SequenceNode):
            places = {index: f"{self.name}:{_line(item)}" for index, item in enumerate(node.value)}
            items = (self.value(item, (*path, index), places[index]) for index, item in enumerate(node.value))
            return FileList(items, places)
        if isinstance(node, yaml.MappingNode):
            result = FileMapping()
            before: yaml.Node | None = None
            for key_node, value in node.value:
                at = f"{self.name}:{_line(key_node)}"
                if number := _number_with_comma(before, key_node, value):
                    wrong, right = number, number.replace(",", ".")
                    raise error_at(
                        at,
                        path,
                        f"{wrong} is not a number; write it with a point: {right}",
                        "decimal_comma",
                        value=wrong,
                    )
                before = value
                key = _key(key_node, path, at)
                if spelled_as(key, result) in result:
                    raise SpecError(
                        f"{at}: not valid YAML: the key {key!r} appears twice", code="duplicate_key", place=at, key=key
                    )
                result.put(key, self.value(value, (*path, key), at), at)
            return result
        return _scalar(node, path, place)


def _number_with_comma(before: yaml.Node | None, key: yaml.Node, value: yaml.Node) -> str | None:
    """`1,5` where `{lr: 1,5}` was written, which YAML reads as `{lr: 1, 5: }`; None for other keys."""
    if not all(isinstance(node, yaml.ScalarNode) and not node.style for node in (before, key, value)):
        return None
    text = f"{before.value},{key.value}" if before is not None and not value.value else ""
    return text if DECIMAL_COMMA.fullmatch(text) else None


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _key(node: yaml.Node, path: KeyPath, place: str) -> str:
    is_scalar = isinstance(node, yaml.ScalarNode)
    key = _scalar(node, path, place) if is_scalar else None
    if key == "<<" and not node.style:
        raise SpecError(
            f"{place}: merge keys (<<) are not supported; write the keys, or `inherit`", code="merge_key", place=place
        )
    if not isinstance(key, str) or node.tag is not None:
        shown = node.value if is_scalar else f"a {node.id}"
        raise error_at(place, path, f"key {shown} is not text; quote it", "key_not_text")
    return key


def _scalar(node: yaml.Node, path: KeyPath, place: str) -> Json:
    """The value of a scalar by the core schema. Raises SpecError for a number that JSON does not have, or a date."""
    text: str = node.value
    if node.style:  # it is quoted, or a block
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        base = {"0b": 2, "0o": 8, "0x": 16}.get(text.lstrip("+-")[:2], 10)
        # The time of int() grows with the square of the digits.
        value = int(text.replace("_", ""), base) if len(text) < 100 else MAX_NUMBER
        if abs(value) >= MAX_NUMBER:
            raise error_at(place, path, TOO_MANY_DIGITS, "too_many_digits")
        return value
    if _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
        if math.isfinite(number):
            return number
    elif not (_NOT_FINITE.fullmatch(text) or _DATE.match(text)):
        return text
    message = f"{text} is not text, a number, true, false or null"
    if _DATE.match(text):
        message = f'{text} is a date or a time in YAML; quote it: "{text}"'
    raise error_at(place, path, message, "not_json", value=text)


def error_at(place: str, path: KeyPath, message: str, code: str | None = None, /, **data: JsonValue) -> SpecError:
    """An error about the value at `path`, which was written at `place`."""
    text = dotted(path)
    return SpecError(f"{place}: {text}: {message}", code=code, place=place, key_path=text, **data)


def default_label(value: Json) -> str:
    """The label of an axis value that the file gives none: `cope+relative`, `cope(p_max=16)`, `128`."""
    if isinstance(value, list):
        return "+".join(map(default_label, value)) if value else "none"
    if isinstance(value, dict):
        kind = str(value.get("kind", ""))
        options = ", ".join(f"{key}={default_label(item)}" for key, item in value.items() if key != "kind")
        return f"{kind}({options})" if kind and options else kind or options
    return value if isinstance(value, str) else json.dumps(value)


# -- the folder of ablation files --------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parents[1]
"""The folder of `cope_sweep`."""
DEFAULT_FOLDER = Path("ablations")


def ablations_folder(folder: Path = DEFAULT_FOLDER) -> Path:
    """`folder`, or the packaged ablations where it is the default and the working directory has none."""
    return folder if folder != DEFAULT_FOLDER or folder.exists() else packaged_ablations()


def packaged_ablations() -> Path:
    """The ablations of this installation: in its wheel, or in the checkout that it was installed from."""
    installed = PACKAGE / "ablations"
    return installed if installed.is_dir() else PACKAGE.parent / "ablations"
