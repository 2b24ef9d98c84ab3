"""`python -m cope_benchmarks`: the commands `cope-sweep bench …` of a checkout that is not installed."""

import sys

try:
    import typer

    from cope_benchmarks.command import app as bench
    from cope_sweep.cli.application import CommandGroup
except ModuleNotFoundError as error:
    sys.exit(f"python -m cope_benchmarks needs {error.name}; `make gpu` needs torch, Triton, NumPy and pytest only")

app = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(bench, name="bench")
app(["bench", *sys.argv[1:]], prog_name="python -m cope_benchmarks")
