"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from cope_sweep.errors import UserError

ABLATIONS, STORE = Path("ablations"), "store"
TO_THE_END = "schedule.kind=none"
"""The `--set` with which no schedule stops a run."""


RunStatus = StrEnum("RunStatus", ["pending", "running", "finished", "failed", "interrupted", "stopped"])


class PlainGroup(TyperGroup):
    """Commands whose help shows a flag without a type: `--local`, not `--local <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types(command.get_params(ctx))
        return command


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    return parameters


def _existing_folder(folder: Path) -> Path:
    """The folder of ablation files; where the default folder does not exist, the installed one."""
    from cope_sweep.config.source import ablations_folder

    return ablations_folder(folder)


# -- targets of commands -----------------------------------------------------------------------------------------------

ABLATION_HELP = "Name of an ablation (see `cope-sweep list`) or path of its file."
AblationArg = Annotated[str, typer.Argument(metavar="ABLATION", help=ABLATION_HELP, show_default=False)]
OptionalAblationArg = Annotated[
    str | None, typer.Argument(metavar="[ABLATION]", help=ABLATION_HELP, show_default=False)
]
AblationsDir = Annotated[
    Path,
    typer.Option(
        "--ablations",
        envvar="COPE_SWEEP_ABLATIONS",
        help="Folder of the ablation files. Default: `ablations`, or, if there is none, the installed files.",
        callback=_existing_folder,
    ),
]
StoreOpt = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="COPE_SWEEP_STORE",
        help="Folder that holds the runs, checkpoints and MLflow's database; or `s3://BUCKET/PREFIX`, `gs://…`; or a "
        "folder of results, such as `ablations/results`, which is only read.",
    ),
]
IndexOpt = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="URL",
        envvar="COPE_SWEEP_INDEX",
        help="Database of the store's index: `postgresql://USER@HOST/NAME`. Put a password into ~/.pgpass, or the "
        "whole URL into the environment variable. Default: SQLite in the store.",
    ),
]
Rows = Annotated[
    list[str],
    typer.Option(
        "--rows",
        metavar="CONDITION|ROW",
        help="Only rows that meet this condition on labels or values (`model.dim>=256`, `model.position=CoPE`), or the "
        "row of this name (`CoPE + RoPE`). May be repeated: all conditions have to hold; names add up.",
        show_default=False,
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
OutputOpt = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")]

# -- training ----------------------------------------------------------------------------------------------------------

MAX_COUNT = 1 << 31
LocalOpt = Annotated[bool, typer.Option("--local", help="Train in this process, without Ray.")]
RayAddressOpt = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS", help="A running Ray cluster: `auto` or `HOST:6379`. Default: start Ray on this machine."
    ),
]
GroupsOpt = Annotated[
    int | None, typer.Option(min=1, help="Worker groups that train side by side. Default: as many as fit.")
]
TimeBudgetOpt = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        metavar="TIME",
        help="Stop after this time (`90m`, `2h`, `1d`); runs in training write checkpoints first.",
        show_default=False,
    ),
]
MaxRunsOpt = Annotated[
    int | None, typer.Option(min=1, max=MAX_COUNT, help="Train at most this many runs.", show_default=False)
]
MaxFailuresOpt = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_COUNT, help="Start no more runs after this many have failed.", show_default=False),
]
MlflowOpt = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        envvar="MLFLOW_TRACKING_URI",
        help="MLflow's tracking server or database. Default: `sqlite:///STORE/mlflow.db`.",
    ),
]
NoMlflowOpt = Annotated[bool, typer.Option("--no-mlflow", help="Do not record in MLflow, only in the store.")]

# -- trained models ----------------------------------------------------------------------------------------------------

CheckpointArg = Annotated[
    str,
    typer.Argument(
        metavar="RUN|ABLATION/ROW",
        help="Id of a finished run, or its first digits; `ABLATION/ROW` for the row's best finished run; or a "
        "checkpoint folder.",
    ),
]
FileOpt = Annotated[Path | None, typer.Option("--file", help="A text file.")]

# -- options that do not go together -----------------------------------------------------------------------------------


def conflict(message: str, *options: str) -> UserError:
    """The error of options, such as `--json`, that exclude one another."""
    return UserError(message, code="conflicting_options", options=list(options))


def check_one_source(**sources: object) -> None:
    """Raise UserError if several of the options with these names, which all name tokens, have a value."""
    if sum(value not in (None, []) for value in sources.values()) > 1:
        *flags, last = (f"--{name}" for name in sources)
        raise conflict(f"{', '.join(flags)} and {last} all name tokens; give only one of them", *flags, last)


def check_effect(options: Mapping[str, object], why: str) -> None:
    """Raise UserError for the first option, by name, with a value: it has no effect here. `why` follows its name."""
    for name, value in options.items():
        if value not in (None, []):
            raise UserError(f"--{name} {why}", code="no_effect", option=name)


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether somebody typed the option of a parameter: its value is no default, nor from the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# -- texts of options --------------------------------------------------------------------------------------------------


def seconds_in(text: str, option: str) -> float:
    """The seconds in `90`, `90s`, `15m`, `2h` or `1d`. Raises UserError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UserError(
            f"{option} {text}: write a number with s, m, h or d, as in 90s, 15m, 2h or 1d",
            code="invalid_option",
            option=option,
            value=text,
        )
    return seconds


def token_ids(text: str) -> list[int]:
    """The token ids in `3 14 7` or `3,14,7`. Raises UserError."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(
            f'--tokens {text!r}: write token ids as whole numbers, as in --tokens "3 14 14 7"',
            code="invalid_option",
            option="--tokens",
            value=text,
        ) from None


def read_text_options(text: str | None, file: Path | None) -> str:
    """The text of `--text` (`-`: standard input) or `--file`. Raises UserError where it is not readable UTF-8."""
    from cope_sweep.text.reading import BYTE_ORDER_MARK
    from cope_sweep.text.sources import read_document

    if file is not None:
        return "".join(read_document([file]))
    text = str(text)
    try:
        data = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise UserError(
            f"--text: not UTF-8 text ({error.reason} at byte {error.start})",
            code="not_utf8",
            option="--text",
            byte=error.start,
        ) from error
