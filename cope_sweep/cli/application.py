"""The commands of `cope-sweep` and its exit codes. Commands import torch, ray, mlflow and pandas only on use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from cope_sweep.cli import documents, models, results, stores, sweeps
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.errors import UserError

COMMANDS_GROUP = "cope_sweep.commands"
"""Entry points of installed packages: commands (functions) and groups of commands (Typer apps)."""

BROKEN_PIPE = 141
"""The exit code where a reader of standard output closed the pipe: 128 + SIGPIPE."""


class LazyCommand(TyperCommand):
    """A command whose options are made when they are needed: `--help` of the application lists twenty commands."""

    function: Callable[..., None]

    @cached_property
    def made(self) -> Any:
        """The command with its options."""
        info = CommandInfo(self.name, callback=self.function)
        command = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=self.rich_markup_mode)
        self.callback = command.callback
        return command

    @property
    def params(self) -> list[Any]:
        params: list[Any] = self.made.params
        return params

    @params.setter
    def params(self, _: list[Any]) -> None:
        """There are none when the command is created."""


def add(name: str, function: Callable[..., None]) -> None:
    """Add a command to the application."""

    def callback() -> None: ...

    callback.__doc__ = function.__doc__
    app.command(name, cls=type("Own", (LazyCommand,), {"function": staticmethod(function)}))(callback)


class CommandGroup(TyperGroup):
    """The top-level command. It turns the errors of all commands into exit codes."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        with _exit_codes(as_json="--json" in args):
            context = super().make_context(info_name, args, *rest, **extra)
        context.obj = "--json" in args
        return context

    def invoke(self, ctx: Any) -> Any:
        with _exit_codes(as_json=bool(ctx.obj)):
            result = super().invoke(ctx)
            sys.stdout.flush()
        return result


@contextlib.contextmanager
def _exit_codes(*, as_json: bool) -> Iterator[None]:
    """Print a UserError as one line on standard error, and exit with its code."""
    try:
        yield
    except UserError as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        make_console(stderr=True).print(
            f"[bold red]error:[/bold red] {escaped(error)}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(error.exit_code) from None
    except (BrokenPipeError, SystemExit) as error:
        # Consoles of rich raise SystemExit(1) in place of the BrokenPipeError.
        if not any(isinstance(each, BrokenPipeError) for each in (error, error.__context__)):
            raise
        _discard_closed_streams()
        raise typer.Exit(BROKEN_PIPE) from None


def _discard_closed_streams() -> None:
    """Send to nowhere what is left for a closed pipe: Python flushes both streams once more when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(null, stream.fileno())


app = typer.Typer(
    name="cope-sweep",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="""Train, compare and query position encodings for transformers: CoPE and the encodings of its paper.

An *ablation* is a YAML file: a base configuration, the values that vary, and the seeds. Each combination of values and
seed is one *run*. A finished run is never trained again.

- `cope-sweep list` shows the ablations
- `cope-sweep plan quickstart` shows the runs of one, and an estimate of time and memory
- `cope-sweep run quickstart` trains the runs that are not finished
- `cope-sweep table quickstart --format latex` prints the table
- `cope-sweep serve` serves tables, checkpoints and perplexity over REST, with a web page

Exit codes: 0 success, 1 some runs failed, 2 bad input, 130 interrupted, 141 standard output was closed.
""",
)
add("list", results.list_ablations)
add("plan", results.plan)
add("run", sweeps.run)
add("submit", sweeps.submit)
add("retry", sweeps.retry)
add("stop", sweeps.stop)
add("status", results.status)
add("runs", results.runs)
add("table", documents.table)
add("report", documents.report)
add("best", results.best)
add("diff", results.diff)
add("figure", documents.figure)
add("logs", results.logs)
add("sync", stores.sync)
add("perplexity", models.perplexity)
add("probe", models.probe)
app.add_typer(stores.app, name="store")
add("prune", stores.prune)
add("schema", results.schema)


def add_installed_commands() -> None:
    """Add the commands that installed distributions declare as entry points."""
    for entry_point in importlib.metadata.entry_points(group=COMMANDS_GROUP):
        try:
            command = entry_point.load()
        except ModuleNotFoundError:
            command = _unavailable(entry_point.name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry_point.name)
        else:
            add(entry_point.name, command)


def _unavailable(name: str) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"`cope-sweep {name}` is not part of this installation; use a checkout: pip install --editable ."
        )

    command.__doc__ = "Not part of this installation."
    return command


add_installed_commands()
