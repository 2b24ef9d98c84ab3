"""What the commands share: their options, how they find an ablation, how they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cope_sweep.plan import Plan

AblationArg = Annotated[
    str, typer.Argument(help="An ablation's name, as `list` shows it, or a file.", show_default=False)
]
CheckpointArg = Annotated[
    str, typer.Argument(metavar="RUN", help="A finished run's id, or a checkpoint folder.", show_default=False)
]
AblationsDir = Annotated[
    Path, typer.Option("--ablations", envvar="COPE_SWEEP_ABLATIONS", help="Folder of ablation files.")
]
Store = Annotated[
    Path, typer.Option("--store", envvar="COPE_SWEEP_STORE", help="Folder of runs, checkpoints and MLflow's database.")
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override, as `model.dim=128` or `seeds=[0,1,2]`; repeatable.",
        show_default=False,
    ),
]
ScaleOpt = Annotated[str | None, typer.Option("--scale", help="One of the ablation's named sizes.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
ABLATIONS, STORE = Path("ablations"), Path("store")


def find_ablation(ablation: str, folder: Path) -> Path:
    """The file of an ablation given by path or by name."""
    from cope_sweep.spec.explain import suggest

    path = Path(ablation)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return path
    if (named := folder / f"{ablation}.yaml").exists():
        return named
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    raise UserError(
        f"no ablation {ablation!r} in {folder.absolute()}"
        + (suggest(ablation, known) or "; choose the folder with --ablations")
    )


def load_plan(ablation: str, folder: Path, scale: str | None, sets: list[str]) -> Plan:
    """The plan of an ablation, at a scale, with `--set`s. Raises UserError."""
    from cope_sweep.plan import expand
    from cope_sweep.spec import load_ablation, with_overrides

    return expand(with_overrides(load_ablation(find_ablation(ablation, folder)), scale=scale, assignments=sets))


def find_checkpoint(run_or_folder: str, store: Path) -> Path:
    """The checkpoint folder of a finished run, or the folder that was named. Raises UserError."""
    from cope_sweep.record import Ledger
    from cope_sweep.record.ledger import RUN_ID

    if not RUN_ID.fullmatch(run_or_folder):
        return Path(run_or_folder)
    folder = Ledger(store).run(run_or_folder)
    if folder.status != "finished":
        raise UserError(f"run {run_or_folder} is {folder.status}; only finished runs have a checkpoint")
    return folder.checkpoint


def token_ids(text: str) -> list[int]:
    """The ids of `3 14 7` or `3,14,7`. Raises UserError."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'--tokens {text!r}: token ids are whole numbers, as in --tokens "3 14 14 7"') from None


def read_text(text: str | None, file: Path | None) -> str:
    """The text that was given. Raises UserError where it cannot be read, or is not UTF-8."""
    from cope_sweep.text.reading import read_document

    if file is not None:
        return "".join(read_document([file]))
    text = str(text)
    try:
        data = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--text: not UTF-8 text ({error.reason} at byte {error.start})") from error


def make_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def grid(*columns: str) -> Table:
    """A plain table for a terminal; numbers stand to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("seed", "parameters", "time", "memory", "step", "finished")
        table.add_column(column, justify="right" if right else "left")
    return table


def escaped(text: object) -> str:
    from rich.markup import escape

    return escape(str(text))


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
