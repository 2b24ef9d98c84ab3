"""`bench …`: measurements that anyone can repeat."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.cli.options import Json, grid, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure this machine; every number beside a peer's in the same run.",
)

Keep = Annotated[
    Path | None,
    typer.Option("--keep", help="Folder to write the measurement to, as JSON and Markdown.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="Threads of torch; with one, the clock is CPU time.", show_default="all cores"
    ),
]
Repetitions = Annotated[int, typer.Option("--repetitions", min=2, help="How often each is timed, in turns.")]


@app.command()
def attention(as_json: Json = False, keep: Keep = None, threads: Threads = None, repetitions: Repetitions = 9) -> None:
    """Attention with CoPE on this CPU: native and blocked kernels beside the paper's listing and torch's SDPA.

    About six minutes: the listing takes seconds a time. Whatever gives other outputs or gradients has no speed.

    Example: `cope-sweep bench attention --threads 1 --keep results`
    """
    from cope_benchmarks.attention import measure, table

    _check_writable(keep)
    _use_threads(threads)
    measured = measure(repetitions=repetitions)
    _show("attention", measured, table(measured), as_json, keep)


@app.command()
def step(as_json: Json = False, keep: Keep = None, threads: Threads = None, repetitions: Repetitions = 9) -> None:
    """Whole training steps with CoPE on this CPU, beside the same model's with SDPA and no positions.

    Example: `cope-sweep bench step --keep results`
    """
    from cope_benchmarks.step import measure, table

    _check_writable(keep)
    _use_threads(threads)
    measured = measure(repetitions)
    _show("step", measured, table(measured), as_json, keep)


@app.command()
def gpu(as_json: Json = False, keep: Keep = None) -> None:
    """Attention with CoPE on a GPU, beside torch's flash attention without positions; says so where there is no GPU."""
    from cope_benchmarks.gpu import measure, table

    _check_writable(keep)
    measured = measure()
    _show("gpu", measured, table(measured), as_json, keep)


def _check_writable(folder: Path | None) -> None:
    """Before minutes of measuring, not after. Raises UserError where nothing can be kept in `folder`."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--keep {folder}: {error.strerror}; name a folder that can be written") from error


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _show(name: str, measured: dict[str, Any], table: Table, as_json: bool, folder: Path | None) -> None:
    from cope_benchmarks.keep import keep

    if folder is not None:
        keep(folder, name, measured, table)
    print_json(measured) if as_json else make_console().print(table)


@app.command()
def sweep(as_json: Json = False) -> None:
    """From command to first step, from run to run, and 100 short runs against a plain loop."""
    from cope_benchmarks.sweep import measure

    measured = measure()
    print_json(measured) if as_json else make_console().print_json(json.dumps(measured))


@app.command()
def data(as_json: Json = False) -> None:
    """Every task's sequences per second, beside what its training step consumes, at the paper's sizes.

    Example: `cope-sweep bench data`
    """
    from cope_benchmarks.data import measure

    measured = measure()
    if as_json:
        print_json(measured)
        return
    shown = grid("task", "tokens", "made, sequences/s", "used, sequences/s", "made / used", "corpus")
    for kind, each in measured["tasks"].items():
        numbers = (f"{each['made_per_s']:,.0f}", f"{each['used_per_s']:,.2f}", f"{each['ratio']:,.0f} ×")
        style = "red" if each["ratio"] < measured["enough"] else ""
        shown.add_row(kind, str(each["tokens"]), *numbers, each["corpus"] or "", style=style)
    make_console().print(shown)
