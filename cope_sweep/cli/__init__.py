"""The command line: words in, calls out. Heavy imports wait until a command needs them, so that help comes at once."""

from __future__ import annotations

import os
import sys

import typer

from cope_sweep.cli import bench, looking, planning, probing, running
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
bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure this machine; every number beside a peer's in the same run.",
)

app.command("list")(planning.list_ablations)
app.command()(planning.plan)
app.command()(running.run)
app.command()(running.submit)
app.command()(looking.status)
app.command()(looking.report)
app.command()(looking.perplexity)
app.command()(probing.probe)
app.command()(looking.serve)
app.command()(planning.schema)
app.add_typer(bench_app, name="bench")
bench_app.command("attention")(bench.attention)
bench_app.command("step")(bench.step)
bench_app.command("gpu")(bench.gpu)
bench_app.command("sweep")(bench.sweep)
bench_app.command("data")(bench.data)


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
