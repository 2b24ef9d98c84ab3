"""Options that several commands share, and the objects that they name: plans, checkpoints, texts, token ids."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.config import Plan
    from cope_sweep.store import Store

AblationArg = Annotated[
    str,
    typer.Argument(
        metavar="ABLATION", help="Name of an ablation (see `cope-sweep list`) or path of its file.", show_default=False
    ),
]
ABLATION = {
    "argument": True, "metavar": "ABLATION", "help": "Name of an ablation (see `cope-sweep list`) or path of its file.",
}  # fmt: skip
"""How the name of an ablation is shown, which may be a path here."""
SCALE = {"flags": ("--scale",), "metavar": "NAME"}
CheckpointArg = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of a finished run, or a checkpoint folder.", show_default=False)
]


def _or_packaged(folder: Path) -> Path:
    from cope_sweep.config.source import ablations_folder

    return ablations_folder(folder)


AblationsDir = Annotated[
    Path,
    typer.Option(
        "--ablations",
        envvar="COPE_SWEEP_ABLATIONS",
        help="Folder of the ablation files. Where there is no folder `ablations`: those that are installed.",
        callback=_or_packaged,
    ),
]
SERVER_VARIABLE = "COPE_SWEEP_SERVER"


def _not_of_a_service(context: typer.Context, value: str) -> str:
    """Raise UserError where a command that asks no service would use a store that nobody named, and one is set."""
    asks_a_service = any(each.name == "server" for each in context.command.params)
    source = context.get_parameter_source("root")
    if os.environ.get(SERVER_VARIABLE) and not asks_a_service and (source is None or source.name != "COMMANDLINE"):
        raise UserError(
            f"{SERVER_VARIABLE} names a service, and `{context.info_name}` uses a store of this machine: name it with "
            f"--store, or unset {SERVER_VARIABLE}"
        )
    return value


StoreOpt = Annotated[
    str,
    typer.Option(
        "--store",
        callback=_not_of_a_service,
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
        show_default=False,
    ),
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the file: `model.dim=128`, `seeds=[0,1,2]`. May be repeated.",
        show_default=False,
    ),
]
ScaleOpt = Annotated[
    str | None, typer.Option("--scale", metavar="NAME", help="A named size of the ablation.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
ABLATIONS, STORE = Path("ablations"), "store"


def find_ablation(ablation: str, folder: Path) -> Path:
    """The file of an ablation, given its name or its path. Raises UserError where there is none."""
    from cope_sweep.config.explain import suggest

    path = Path(ablation)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if (named := folder / f"{ablation}.yaml").exists():
        return named
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    raise UserError(
        f"no ablation {ablation!r} in {folder.absolute()}"
        + (suggest(ablation, known) or "; choose the folder with --ablations")
    )


def load_plan(ablation: str, folder: Path, scale: str | None, sets: list[str]) -> Plan:
    """The plan of an ablation at a scale, with the values of `--set`. Raises UserError."""
    from cope_sweep.config import expand, load_ablation, with_overrides

    return expand(with_overrides(load_ablation(find_ablation(ablation, folder)), scale=scale, assignments=sets))


def open_store(root: str, index: str | None = None, *, create: bool = False) -> Store:
    """The store in a folder or at a URL, with its index; with `create`, it is made. Raises StoreError."""
    from cope_sweep.store import Store

    return Store(root, index=index, create=create)


def find_checkpoint(run_or_folder: str, store: Store) -> Path:
    """The checkpoint folder of a finished run, or the folder that was named. Raises UserError."""
    from cope_sweep.store.artifacts import RUN_ID

    if not RUN_ID.fullmatch(run_or_folder):
        return Path(run_or_folder)
    from cope_sweep.store.reading import RunContents

    folder = store.run(run_or_folder)  # its files alone say whether it is finished
    if folder.status != "finished":
        raise UserError(f"run {run_or_folder} is {folder.status}; only finished runs have a checkpoint")
    if lost := RunContents(folder).lost():
        raise UserError(f"{next(iter(lost.values()))}; the `cope-sweep run` of its ablation trains it again")
    return folder.fetch_checkpoint()


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
    from cope_sweep.text.reading import read_document

    if file is not None:
        return "".join(read_document([file]))
    text = str(text)
    try:
        data = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--text: not UTF-8 text ({error.reason} at byte {error.start})") from error
