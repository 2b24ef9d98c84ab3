"""The command line: words in, calls out. Heavy imports wait until a command needs them, so that help comes at once."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable

import typer

from cope_sweep.cli import looking, planning, probing, running
from cope_sweep.cli.options import escaped, make_console, print_json
from cope_sweep.errors import UserError

app = typer.Typer(
    name="cope-sweep",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="""Does this position encoding really help, on which task, at which size, with how many seeds?

An *ablation* is a YAML file: a base configuration, what varies, the seeds. It unfolds into *runs*; a finished run is
never trained again.

- `cope-sweep list` — what can be run
- `cope-sweep plan quickstart` — what it would train, and how long that takes
- `cope-sweep run quickstart` — train what is missing, through Ray
- `cope-sweep report quickstart --format latex` — the table
- `cope-sweep serve` — tables, checkpoints and perplexity over REST, and a page to look at
""",
)
app.command("list")(planning.list_ablations)
app.command()(planning.plan)
app.command()(running.run)
app.command()(running.submit)
app.command()(looking.status)
app.command()(looking.report)
app.command()(looking.perplexity)
app.command()(probing.probe)
app.command()(planning.schema)

COMMANDS_GROUP = "cope_sweep.commands"
"""Entry points: commands (functions) and groups of them (Typer apps) of packages that are built on this one."""


def add_installed_commands() -> None:
    """Add the commands that installed distributions declare."""
    for entry_point in importlib.metadata.entry_points(group=COMMANDS_GROUP):
        try:
            command = entry_point.load()
        except ModuleNotFoundError:
            command = _missing(entry_point.name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry_point.name)
        else:
            app.command(entry_point.name)(command)


def _missing(name: str) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"`cope-sweep {name}` is not part of this installation; use a checkout: pip install --editable ."
        )

    command.__doc__ = "Not part of this installation."
    return command


add_installed_commands()


def main() -> None:
    """The `cope-sweep` command. What a user can put right is one line on standard error, and exit code 2."""
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        make_console(stderr=True).print(
            f"[bold red]error:[/bold red] {escaped(error)}", soft_wrap=True, highlight=False
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) went away, which is its right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
