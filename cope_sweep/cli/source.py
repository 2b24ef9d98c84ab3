"""Commands that ask questions: their options are made of the fields of a question, and a `Source` answers it.

    @asks(GetPlan, "sets", "ablations", name=ABLATION, local=["measure"])
    def plan(*, question: GetPlan, source: Source, measure: Measure = False, as_json: Json = False) -> None:

In the place of `question` the command has an option or argument for each field, with its default, limits and
description, and in the place of `source` those that name a store or a service. Options that are `local` need the files
of this machine: with a service they are refused.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from cope_sweep.api.questions import RUN_PREFIX
from cope_sweep.cli.options import ABLATIONS, SERVER_VARIABLE, STORE, AblationsDir, IndexOpt, Sets, StoreOpt, load_plan
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.api.questions import Parameter, Question
    from cope_sweep.client import Client
    from cope_sweep.config import Plan
    from cope_sweep.read.queries import Queries
    from cope_sweep.store import Store

A = TypeVar("A")

ServerOpt = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar=SERVER_VARIABLE,
        help="Ask this service in the place of a store; its API key is in COPE_SWEEP_KEY.",
        show_default=False,
    ),
]
WHERE: dict[str, tuple[Any, Any]] = {
    "sets": (Sets, []),
    "ablations": (AblationsDir, ABLATIONS),
    "root": (StoreOpt, STORE),
    "index": (IndexOpt, None),
    "server": (ServerOpt, None),
}
"""Parameter → its type and default: what names a store and ablation files, or a service."""


@dataclass
class Source:
    """Answers questions: the store and the ablation files of this machine, or a service."""

    root: str = STORE
    index: str | None = None
    server: str | None = None
    ablations: Path = ABLATIONS
    sets: Sequence[str] = ()

    @cached_property
    def client(self) -> Client | None:
        """The service; None: the store. Raises UserError for what is no address."""
        if not self.server:
            return None
        from cope_sweep.client import Client

        return Client(self.server)

    @cached_property
    def queries(self) -> Queries:
        """The store and the ablation files of this machine."""
        from cope_sweep.cli.files import NamedFiles
        from cope_sweep.read.queries import Queries

        return Queries(self.store, NamedFiles(self.ablations, self.sets))

    @cached_property
    def store(self) -> Store:
        """The store of this machine."""
        from cope_sweep.cli.options import open_store

        return open_store(self.root, self.index)

    @property
    def location(self) -> str:
        """Where the answers are from, for messages."""
        return f"the store of {self.server}" if self.server else f"the store {self.store.location}"

    def ask(self, question: Question[A]) -> A:
        """The answer to a question. Raises UserError."""
        return (self.client or self.queries).ask(question)

    def run_id(self, text: str) -> str:
        """The id of the run whose id begins with these digits, at least four; else the text. Raises UserError."""
        if not RUN_PREFIX.fullmatch(text) or Path(text).exists():
            return text
        if self.client is None:
            return self.queries.run_id(text)
        from cope_sweep.api.questions import GetRun

        return self.client.ask(GetRun(text, curve=False)).run_id

    def run_or_ablation(self, text: str) -> str:
        """The same as `run_id` for what is no ablation. Raises UserError."""
        if self.client is None:
            names = [path.stem for path in self.ablations.glob("*.yaml")]
        else:
            names = [each.name for each in self.client.ablations()] if RUN_PREFIX.fullmatch(text) else []
        return text if text in names else self.run_id(text)

    def write(self, question: Question[bytes], file: IO[bytes]) -> None:
        """Write the file that answers a question. Raises UserError."""
        if self.client is not None:
            file.write(self.client.ask(question))
            return
        from cope_sweep.cli.files import write

        write(self.queries, question, file)

    def declared(self, name: str, scale: str | None) -> list[str]:
        """The figures that the file of an ablation declares. Raises UserError."""
        if self.client is not None:
            return [each.name for each in self.client.figures(name, scale) if each.declared]
        from cope_sweep.read.figures.available import declared_figures

        return [each.name for each in declared_figures(self.queries.load(name, scale).plan)]

    def plan(self, name: str, scale: str | None) -> Plan:
        """The plan of an ablation of this machine, with the values of `--set`. Raises UserError."""
        return load_plan(name, self.ablations, scale, list(self.sets))


def option(*flags: str, **attributes: Any) -> dict[str, Any]:
    """How a field is shown on the command line, where it is not as in the question: attributes of `typer.Option`."""
    return {"flags": flags, "argument": False, **attributes}


def argument(**attributes: Any) -> dict[str, Any]:
    """Shows a field as an argument: attributes of `typer.Argument`, and `default`."""
    return {"argument": True, **attributes}


def asks(
    question: Any,
    *where: str,
    local: Sequence[str] = (),
    without: Sequence[str] = (),
    remote: bool = True,
    **shown: dict[str, Any],
) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function: see the module.

    Args:
        question: The class of the question; `module:Class` of a request, which is imported on use, and whose fields the
            function gets as a dictionary `request`; None: the command has none.
        where: Further parameters of `WHERE`: sets, ablations.
        local: Parameters that need the files of this machine.
        without: Fields and parameters of `WHERE` that the command does not have.
        remote: Whether a service can be asked.
        shown: Field → `option` or `argument`.
    """
    own = {*where, "root", "index", *(["server"] if remote else [])} - {*without}
    names = [name for name in WHERE if name in own]
    return lambda function: Command(function, question, names, local, without, shown)


class Command:
    """The function of a command, as Typer calls it. Its parameters are made when they are needed."""

    def __init__(
        self,
        function: Callable[..., None],
        question: Any,
        where: Sequence[str],
        local: Sequence[str],
        without: Sequence[str],
        shown: dict[str, dict[str, Any]],
    ) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__annotations__: dict[str, Any] = {}  # Typer reads the signature
        self._function, self._question, self._shown = function, question, shown
        self._where, self._without = where, without
        self._local = [*local, *(name for name in where if name != "server")]

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature([*self._parameters(), _parameter("typer_context", typer.Context)])

    @cached_property
    def _kind(self) -> Any:
        if not isinstance(self._question, str):
            return self._question
        module, _, name = self._question.partition(":")
        return getattr(importlib.import_module(module), name)

    @cached_property
    def _fields(self) -> list[Parameter]:
        found = [] if self._kind is None else _fields_of(self._kind)
        return [each for each in found if each.name not in self._without]

    def _parameters(self) -> Iterator[inspect.Parameter]:
        for own in inspect.signature(self._function, eval_str=True).parameters.values():
            if own.name in ("question", "request"):
                yield from (_shown(each, self._shown.get(each.name, {})) for each in self._fields)
            elif own.name == "source":
                yield from (_parameter(name, *WHERE[name]) for name in self._where)
            else:
                yield _parameter(own.name, own.annotation, own.default)

    def __call__(self, typer_context: typer.Context, **values: Any) -> None:
        """Call the function with the question and the source that the options name. Raises UserError."""
        where = {name: values.pop(name) for name in self._where}
        given = [
            max(each.opts, key=len)
            for each in typer_context.command.params
            if each.name in self._local and _is_on_command_line(typer_context, each.name)
        ]
        server = where.get("server")
        if server and {"--store", "--index"} & {*given} and not _is_on_command_line(typer_context, "server"):
            server = where["server"] = None  # the command line precedes the environment
        if server and given:
            raise UserError(
                f"{given[0]} needs the files of this machine, and the service {server} is asked; leave it out, or "
                f"leave out --server and {SERVER_VARIABLE}"
            )
        if self._kind is not None:
            fields = {each.name: values.pop(each.name) for each in self._fields}
            if isinstance(self._question, str):
                values["request"] = fields
            else:
                values["question"] = self._kind(**{name: _frozen(each) for name, each in fields.items()})
        self._function(source=Source(**where), **values)


def _frozen(value: Any) -> Any:
    return (
        tuple(str(each) if isinstance(each, StrEnum) else each for each in value) if isinstance(value, list) else value
    )


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _fields_of(kind: Any) -> list[Parameter]:
    """The fields of a question, or of a request, which is a pydantic model."""
    if hasattr(kind, "parameters"):
        return [*kind.parameters()]
    from cope_sweep.api.questions import Parameter

    return [
        Parameter(
            name,
            Annotated[(each.annotation, *each.metadata)] if each.metadata else each.annotation,
            MISSING if each.is_required() else each.default,
            each.description or "",
            in_path=False,
        )
        for name, each in kind.model_fields.items()
    ]


def _shown(field: Parameter, changes: dict[str, Any]) -> inspect.Parameter:
    """The parameter of a command that is a field of a question, with the changes of `option` or `argument`."""
    attributes = {"help": field.description, "show_default": field.default not in (None, (), ""), **changes}
    flags = attributes.pop("flags", ()) or (f"--{field.name.replace('_', '-')}",)
    limits = {} if "kind" in attributes else _limits(field.kind)
    kind = attributes.pop("kind", None) or _plain(field.kind)
    default = attributes.pop("default", field.default)
    is_list = get_origin(kind) is list
    if attributes.pop("argument", field.default is MISSING):
        attributes["show_default"] = False
        info: Any = typer.Argument(**attributes, **limits)
    else:
        attributes |= limits
        info = typer.Option(*flags, **attributes)
    default = [] if is_list and not default else inspect.Parameter.empty if default is MISSING else default
    return _parameter(field.name, Annotated[kind, info], default)


def _plain(kind: Any) -> Any:
    """The type of an option: without constraints; lists for sequences."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        parts = [_plain(part) for part in get_args(kind)]
        lists = [part for part in parts if get_origin(part) is list]
        return lists[0] if lists else Union[tuple(parts)]  # noqa: UP007 - of a tuple
    if isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Sequence):
        element: Any = _plain(get_args(kind)[0])
        if get_origin(element) is Literal:  # which Typer does not have in lists
            element = _choice({each: each for each in get_args(element)})
        return list[element]
    return kind


def _choice(values: dict[str, str]) -> Any:
    return StrEnum("Choice", values)


def _limits(kind: Any) -> dict[str, Any]:
    """`min` and `max` of a constrained number."""
    found: dict[str, Any] = {}
    for part in get_args(kind):
        for each in getattr(part, "metadata", [part]):  # of pydantic's Field
            if get_origin(each) is Annotated:
                found |= _limits(each)
            for name, bound in (("min", "ge"), ("max", "le")):
                if getattr(each, bound, None) is not None:
                    found[name] = getattr(each, bound)
    return found
