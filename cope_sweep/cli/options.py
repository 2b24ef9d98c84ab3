"""Options that several commands share, and what the texts of options mean."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cope_sweep.config.source import ablations_folder
from cope_sweep.errors import UserError
from cope_sweep.text.reading import read_document

ABLATIONS, STORE = Path("ablations"), "store"
TO_THE_END = "schedule.kind=none"
"""The `--set` with which no schedule stops a run."""


class RunStatus(StrEnum):
    """The statuses of runs, as options name them."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    DAMAGED = "damaged"


AblationArg = Annotated[
    str,
    typer.Argument(
        metavar="ABLATION",
        help="Name of an ablation (see `cope-sweep list`) or path of its file.",
        show_default=False,
    ),
]
ScaleOpt = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="NAME",
        help="A named size of the ablation: one of its scales.",
        show_default=False,
    ),
]
AblationsDir = Annotated[
    Path,
    typer.Option(
        "--ablations",
        envvar="COPE_SWEEP_ABLATIONS",
        help="Folder of the ablation files. Where there is no folder `ablations`: those that are installed.",
        callback=ablations_folder,
    ),
]
StoreOpt = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="COPE_SWEEP_STORE",
        help="Folder that holds the runs, checkpoints and MLflow's database; or `s3://BUCKET/PREFIX`, `gs://…`.",
    ),
]
IndexOpt = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="URL",
        envvar="COPE_SWEEP_INDEX",
        help="Database of the store's index: `postgresql://USER:PASSWORD@HOST/NAME`. Default: SQLite in the store.",
    ),
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the file: `model.dim=128`, `seeds=[0,1,2]`. May be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
CheckpointArg = Annotated[str, typer.Argument(metavar="RUN", help="Id of a finished run, or a checkpoint folder.")]
FileOpt = Annotated[Path | None, typer.Option("--file", help="A text file.")]
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
    reports: Path | None = None
    """A folder of reports, whose runs are shown in the place of the store's."""
    as_json: bool = False
    """Whether the answer is printed as JSON."""

    def printed(self, answer: Any) -> bool:
        """Print an answer if it is asked for as JSON; whether it was. It is a model, a list of them, or plain data."""
        if self.as_json:
            print_json(answer)
        return self.as_json

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
        from cope_sweep.read.queries import Queries

        return Queries(self.store, self.files, reports=self.reports)

    @cached_property
    def files(self) -> NamedFiles:
        """The ablation files of this machine, with the values of `--set`."""
        from cope_sweep.cli.files import NamedFiles

        return NamedFiles(self.ablations, self.sets)

    @cached_property
    def store(self) -> Store:
        """The store of this machine. Raises StoreError."""
        return self.open_store()

    def open_store(self, *, create: bool = False) -> Store:
        """The store, with its index; with `create`, it is made. Raises StoreError."""
        from cope_sweep.cli.progress import indexing_bar
        from cope_sweep.store import Store

        return Store(self.root, index=self.index, create=create, on_indexing=indexing_bar())

    @property
    def location(self) -> str:
        """The place of the answers, for messages."""
        return f"the store of {self.server}" if self.server else f"the store {self.store.location}"

    def ask(self, question: Question[A]) -> A:
        """The answer to a question. Raises UserError."""
        return (self.client or self.queries).ask(question)

    def run_id(self, text: str) -> str:
        """The id of the run whose id begins with these digits, at least four; else the text. Raises UserError."""
        if not RUN_PREFIX.fullmatch(text) or Path(text).exists():
            return text
        return self.queries.run_id(text) if self.client is None else self.client.ask(GetRun(text, curve=False)).run_id

    def run_or_ablation(self, text: str) -> str:
        """The same as `run_id` for what is no ablation. Raises UserError."""
        if self.client is None:
            names = [path.stem for path in self.ablations.glob("*.yaml")]
        else:
            names = [each.name for each in self.client.ablations()] if RUN_PREFIX.fullmatch(text) else []
        return text if text in names else self.run_id(text)

    def write(self, question: Question[bytes], file: IO[bytes]) -> None:
        """Write the file that answers a question. Raises UserError."""
        if isinstance(question, ExportRuns) and self.client is None:
            self.queries.export(question, file)  # a few runs at a time, however many there are
        else:
            file.write(self.ask(question))

    def checkpoint(self, run_or_folder: str) -> Path:
        """The checkpoint folder of a finished run, or the folder that was named. Raises UserError."""
        from cope_sweep.store.artifacts import RUN_ID

        if not RUN_ID.fullmatch(run_or_folder):
            return Path(run_or_folder)
        from cope_sweep.store.damage import find_lost

        folder = self.store.run(run_or_folder)  # its files alone say whether it is finished
        if folder.status != "finished":
            raise UserError(f"run {run_or_folder} is {folder.status}; only finished runs have a checkpoint")
        if lost := find_lost(folder):
            raise UserError(f"{next(iter(lost.values()))}; the `cope-sweep run` of its ablation trains it again")
        return folder.fetch_checkpoint()


# -- options that are made from the fields of a question ---------------------------------------------------------------


def option(*flags: str, **attributes: Any) -> dict[str, Any]:
    """Show a field as an option that differs from the question: attributes of `typer.Option`."""
    return {"flags": flags, "argument": False, **attributes}


def argument(**attributes: Any) -> dict[str, Any]:
    """Show a field as an argument: attributes of `typer.Argument`, and `default`."""
    return {"argument": True, **attributes}


ABLATION = argument(metavar="ABLATION", help="Name of an ablation (see `cope-sweep list`) or path of its file.")
"""The argument for an ablation: a name, or here also a path."""


def asks(
    question: Any,
    *where: str,
    request: str | None = None,
    local: Sequence[str] = (),
    without: Sequence[str] = (),
    remote: bool = True,
    json_help: str = "Print one JSON document to standard output.",
    **shown: dict[str, Any],
) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function: see the module.

    Args:
        question: The class of the question; None: the command has none.
        where: Further parameters of `WHERE`: sets, ablations.
        request: `module:Class` of a pydantic model, which is imported on use, and whose fields the function gets as a
            dictionary `request`.
        local: Parameters that need the files of this machine.
        without: Fields and parameters of `WHERE` that the command does not have.
        remote: Whether a service can be asked.
        json_help: The help of `--json`.
        shown: Field → `option` or `argument`.
    """
    own = {*where, "root", "index", *(["server"] if remote else [])} - {*without}
    names = [name for name in WHERE if name in own]
    shown = {"scale": option(metavar="NAME")} | shown
    local = [*local, *(name for name in names if name != "server")]
    return lambda function: Command(function, question, request, names, local, without, json_help, shown)


@dataclass(eq=False)
class Command:
    """The function of a command, as Typer calls it. Its parameters are made when they are needed."""

    function: Callable[..., None]
    question: Any
    request: str | None
    where: Sequence[str]
    local: Sequence[str]
    without: Sequence[str]
    json_help: str
    shown: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        self.__name__, self.__doc__ = self.function.__name__, self.function.__doc__
        self.__annotations__ = {}  # Typer reads the signature

    @cached_property
    def _fields(self) -> dict[str, list[Parameter]]:
        """The fields of the question and of the request."""
        found = {"question": [*self.question.parameters()] if self.question else [], "request": []}
        if self.request is not None:
            module, _, name = self.request.partition(":")
            found["request"] = _model_fields(getattr(importlib.import_module(module), name))
        return {kind: [each for each in fields if each.name not in self.without] for kind, fields in found.items()}

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature(list(self._parameters()))

    def _parameters(self) -> Iterator[inspect.Parameter]:
        for own in inspect.signature(self.function, eval_str=True).parameters.values():
            if own.name in self._fields:
                yield from (_shown(each, self.shown.get(each.name, {})) for each in self._fields[own.name])
            elif own.name == "source":
                yield from (_parameter(name, *WHERE[name]) for name in self.where)
            else:
                yield _parameter(own.name, own.annotation, own.default)
        yield _parameter("as_json", Annotated[bool, typer.Option("--json", help=self.json_help)], False)
        yield _parameter("typer_context", typer.Context)

    def __call__(self, typer_context: typer.Context, as_json: bool, **values: Any) -> None:
        """Call the function with the question and the source that the options name. Raises UserError."""
        where = {name: values.pop(name) for name in self.where}
        given = [
            max(each.opts, key=len)
            for each in typer_context.command.params
            if each.name in self.local and _is_on_command_line(typer_context, each.name)
        ]
        server = where.get("server")
        if server and {"--store", "--index"} & {*given} and not _is_on_command_line(typer_context, "server"):
            server = where["server"] = None  # the command line precedes the environment
        if server and given:
            raise UserError(
                f"{given[0]} needs the files of this machine, and the service {server} is asked; leave it out, or "
                f"leave out --server and {SERVER_VARIABLE}"
            )
        fields = {kind: {each.name: values.pop(each.name) for each in own} for kind, own in self._fields.items()}
        if self.question is not None:
            values["question"] = self.question(**fields["question"])
        if self.request is not None:
            values["request"] = fields["request"]
        self.function(source=Source(**where, as_json=as_json), **values)


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _model_fields(model: Any) -> list[Parameter]:
    """The fields of a pydantic model."""
    return [
        Parameter(
            name,
            Annotated[(each.annotation, *each.metadata)] if each.metadata else each.annotation,
            MISSING if each.is_required() else each.default,
            each.description or "",
            in_path=False,
        )
        for name, each in model.model_fields.items()
    ]


def _shown(field: Parameter, changes: dict[str, Any]) -> inspect.Parameter:
    """The parameter of a command that is a field of a question, with the changes of `option` or `argument`."""
    attributes = {"help": field.description, "show_default": field.default not in (None, (), ""), **changes}
    flags = attributes.pop("flags", ()) or (f"--{field.name.replace('_', '-')}",)
    limits = {} if "kind" in attributes else _limits(field.kind)
    kind = attributes.pop("kind", None) or _plain(field.kind)
    default = attributes.pop("default", field.default)
    if attributes.pop("argument", field.default is MISSING):
        info: Any = typer.Argument(**attributes | {"show_default": False}, **limits)
    else:
        info = typer.Option(*flags, **attributes | limits)
    is_list = get_origin(kind) is list
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


# -- what options name -------------------------------------------------------------------------------------------------


def ablation_fields(ablation: str) -> dict[str, str]:
    """The fields of a request to a service for an ablation: a name that it knows, or the text of a file here.

    Raises UserError where the file cannot be read.
    """
    from cope_sweep.config.loading import names_a_file

    if not names_a_file(ablation):
        return {"ablation": ablation}
    path = Path(ablation)
    try:
        return {"name": path.stem, "spec": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def seconds_in(text: str, option: str) -> float:
    """The seconds in `90`, `90s`, `15m`, `2h` or `1d`. Raises UserError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{option} {text}: a time is a number with s, m, h or d, as in 90s, 15m, 2h or 1d")
    return seconds


def token_ids(text: str) -> list[int]:
    """The token ids in `3 14 7` or `3,14,7`. Raises UserError."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'--tokens {text!r}: token ids are whole numbers, as in --tokens "3 14 14 7"') from None


def read_text(text: str | None, file: Path | None) -> str:
    """The text of `--text` (`-`: standard input) or `--file`. Raises UserError where it is not readable UTF-8."""
    if file is not None:
        return "".join(read_document([file]))
    text = str(text)
    try:
        data = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--text: not UTF-8 text ({error.reason} at byte {error.start})") from error
