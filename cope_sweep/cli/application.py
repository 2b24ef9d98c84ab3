"""The commands of `cope-sweep` and its exit codes. Their modules import little: each command imports what it needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from cope_sweep import __version__
from cope_sweep.cli import documents, models, plans, results, runs, stores, sweeps
from cope_sweep.cli.options import PlainGroup
from cope_sweep.cli.output import (
    OutputError,
    check_output,
    discard_output,
    escaped,
    forget_useless_sizes,
    keep_for_results,
    make_console,
    print_json,
)
from cope_sweep.errors import UserError
from cope_sweep.signals import ExitError, user_code

COMMANDS_GROUP = "cope_sweep.commands"
"""Entry points of installed packages: commands (functions) and groups of commands (Typer apps)."""

NO_CHOICE = re.compile(r"'(.*)' is not one of '(.*)'\.")
"""Typer's message about a value that is not one of several texts."""
BROKEN_PIPE = 141
"""The exit code where a reader of standard output closed the pipe: 128 + SIGPIPE."""


class CommandGroup(PlainGroup):
    """The top-level command. It turns the errors of all commands into exit codes."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its code. Standard output that is closed or cannot be written has a code, too."""
        forget_useless_sizes()
        try:
            check_output()
            try:
                return super().main(*args, **options)
            finally:
                sys.stdout.flush()
        except OutputError as error:
            discard_output()
            _print_error(error)
            sys.exit(error.exit_code)
        except (BrokenPipeError, SystemExit, ExitError) as error:
            # Consoles of rich, and click, raise SystemExit(1) instead of the BrokenPipeError.
            raised = error.__cause__ if isinstance(error, ExitError) else error
            if not any(isinstance(each, BrokenPipeError) for each in (raised, raised and raised.__context__)):
                raise
            discard_output()
            sys.exit(BROKEN_PIPE)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        with _exit_codes(as_json="--json" in args):
            context = super().make_context(info_name, args, *rest, **extra)
        context.obj = args
        return context

    def invoke(self, ctx: Any) -> Any:
        args = ctx.obj or []
        prints_a_document = "--json" in args or any(arg.startswith(("--format", "--yaml")) for arg in args)
        kept = keep_for_results() if prints_a_document else contextlib.nullcontext()
        with _exit_codes(as_json="--json" in args), user_code(), kept:  # a plugin's may exit
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_codes(*, as_json: bool) -> Iterator[None]:
    """Print a UserError as one line on standard error, and exit with its code. Typer prints its own errors."""
    try:
        yield
    except typer.BadParameter as error:
        error.message = _with_suggestion(error.message)
        raise
    except OutputError:
        raise
    except UserError as error:
        _print_error(error)
        if as_json:
            print_json({"error": {"code": error.code, "message": str(error), "data": error.data}})
        raise typer.Exit(error.exit_code) from None


def _with_suggestion(message: str) -> str:
    """Typer's message about a value: without pydantic's prefix, and of choices with the one that was probably meant."""
    message = message.removeprefix("Value error, ")
    match = NO_CHOICE.fullmatch(message)
    if match is None:
        return message
    from cope_sweep.config.explain import suggest

    value, choices = match.groups()
    return f"'{value}' is not one of the choices" + suggest(value, choices.split("', '"))


def _print_error(error: UserError) -> None:
    make_console(stderr=True).print(f"[bold red]error:[/bold red] {escaped(error)}", soft_wrap=True, highlight=False)


app = typer.Typer(
    name="cope-sweep",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="""Train and compare position encodings of transformers: CoPE, RoPE, ALiBi, FoX, PaTH and many others.

An *ablation* is a YAML file: a base configuration, the values that vary, and the seeds. Each combination of values and
seed is one *run*. A finished run is never trained again.

- `cope-sweep list` shows the ablations
- `cope-sweep plan quickstart` shows the runs of one, and an estimate of time and memory
- `cope-sweep run quickstart` trains the runs that are not finished
- `cope-sweep table quickstart --format latex` prints the table
- `cope-sweep serve` serves tables, checkpoints and perplexity over REST, with a web page

Exit codes: 0 success, 1 some runs failed, 2 bad input, 74 standard output cannot be written (a full disk), 130
interrupted, 141 standard output was closed.
""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cope-sweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options of the command without a subcommand."""


app.command("list")(plans.list_ablations)
app.command("plan")(plans.plan)
app.command("run")(sweeps.run)
app.command("submit")(sweeps.submit)
app.command("retry")(sweeps.retry)
app.command("stop")(sweeps.stop)
app.command("status")(runs.status)
app.command("runs")(runs.runs)
app.command("table")(documents.table)
app.command("report")(documents.report)
app.command("best")(results.best)
app.command("diff")(results.diff)
app.command("tried")(results.tried)
app.command("figure", help=documents.FIGURE_HELP)(documents.figure)
app.command("logs")(runs.logs)
app.command("sync")(stores.sync)
app.command("perplexity")(models.perplexity)
app.command("probe")(models.probe)
app.command("export")(models.export)
app.add_typer(stores.app, name="store")
app.command("delete")(stores.delete)
app.command("prune")(stores.prune)
app.command("schema")(plans.schema)


def add_installed_commands() -> None:
    """Add the commands that installed distributions declare as entry points."""
    for entry_point in importlib.metadata.entry_points(group=COMMANDS_GROUP):
        try:
            with user_code():
                command = entry_point.load()
        except ModuleNotFoundError:
            command = _unavailable(entry_point.name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry_point.name)
        else:
            app.command(entry_point.name)(command)


def _unavailable(name: str) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"`cope-sweep {name}` is not part of this installation; install a checkout: pip install --editable .",
            code="command_not_installed",
            command=name,
        )

    command.__doc__ = "Not part of this installation."
    return command


add_installed_commands()
