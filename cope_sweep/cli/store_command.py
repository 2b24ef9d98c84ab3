"""The commands `store rebuild` and `store check`: the index of a store and the files that it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import STORE, IndexOpt, Json, StoreOpt, open_store
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.store import Store

DIFFERENT = 1
"""The exit code of `store check` where something differs or is damaged."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Make the index of a store again from its files, or compare both.",
)


@app.command()
def rebuild(root: StoreOpt = STORE, index: IndexOpt = None, as_json: Json = False) -> None:
    """Make the index again from the folders of the runs and the records of the sweeps.

    Runs that a sweep trains at the moment keep their row.

    Example: `cope-sweep store rebuild`
    """
    from cope_sweep.store.index import Index
    from cope_sweep.store.index.database import redacted
    from cope_sweep.store.rebuild import rebuild as rebuild_index

    store = _existing_store(root, index)
    with _progress("reading runs") as on_progress:
        report = rebuild_index(store, Index(store.index_url), on_progress)
    if as_json:
        print_json(report.__dict__)
        return
    console = make_console()
    removed = f"; {report.removed} without a folder removed" if report.removed else ""
    console.print(f"{report.runs} runs and {report.sweeps} sweeps in the index {redacted(store.index_url)}{removed}")
    if report.damaged:
        for item, problem in report.damaged.items():
            console.print(escaped(f"damaged: {item}: {problem}"), style="red", soft_wrap=True, highlight=False)
        console.print("`cope-sweep run ABLATION` trains damaged runs again.")


@app.command()
def check(
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read curves and checkpoints, too, and compare their SHA-256.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Rename damaged files to `NAME.damaged`, mark their runs, and make the index again: the same "
            "`cope-sweep run` trains again what is lost.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the index with the files, and say what is damaged and what to do.

    Exit codes: 0 nothing differs, 1 something does, or did before `--repair`.

    Example: `cope-sweep store check --checksums`
    """
    from cope_sweep.store.rebuild import check as check_store
    from cope_sweep.store.rebuild import repair as repair_store

    store = _existing_store(root, index)
    with _progress("checking runs") as on_progress:
        found = list(check_store(store, store.index, checksums=checksums, on_progress=on_progress))
        if repair and found:
            repair_store(store, store.index, found)
    if as_json:
        print_json([each.__dict__ for each in found])
    elif found:
        console = make_console()
        for each in found:  # one line each, whatever the width of the terminal
            console.print(escaped(f"{each.item}: {each.problem}"), style="red", soft_wrap=True, highlight=False)
            if not repair:
                console.print(escaped(f"    {each.way_out}"), soft_wrap=True, highlight=False)
        if repair:
            console.print("The index is made again. The same `cope-sweep run` trains again what is lost.")
    else:
        make_console().print("nothing differs, nothing is damaged")
    raise typer.Exit(DIFFERENT if found else 0)


def _existing_store(root: str, index: str | None) -> Store:
    store = open_store(root, index)
    if store.objects is None and not (store.root / "runs").is_dir():
        raise UserError(f"{store.root} is no store: it has no folder `runs`; choose another with --store")
    return store


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = make_console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
