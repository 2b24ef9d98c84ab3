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
