"""A folder in which `cope-sweep` is called: in this process, or, where the process itself matters, in one of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import typer.main
from typer.core import TyperGroup
from typer.main import get_command

from cope_sweep.cli import main
from cope_sweep.cli.application import app
from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Store
from tests.helpers.errors import raises
from tests.helpers.finished_runs import fail, finish, stop
from tests.helpers.sweeps import end, write_sweep

TINY = textwrap.dedent("""\
    title: A tiny copy
    base:
      task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
      model: {dim: 8, heads: 2, layers: 1}
      train: {steps: 6, batch: 4}
      evaluate: {every: 3, sequences: 8, final_sequences: 8}
    grid:
      model.position: {CoPE: [cope], none: []}
    seeds: [0, 1]
    metrics: [{name: in_dist/token_error, label: In-dist., unit: "%"}]
    """)


COMMAND = get_command(app)
"""The command line. Typer makes it from the functions for every call, which takes longer than most tests."""

COMMANDS = """
import sys
from cope_sweep.cli import main

for line in sys.argv.pop().split(","):
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
    print(end="\\x1e", flush=True)
"""
"""Calls commands one after another in one process, and prints a separator after each."""


class Shell:
    """Calls `cope-sweep` in a folder of its own, which has the ablation `tiny`."""

    def __init__(self, folder):
        self.folder = folder
        self.command = COMMAND
        (folder / "ablations").mkdir()
        self.write("tiny", TINY)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("COPE_SWEEP", "MLFLOW", "RAY"))}
        self.environment = kept | {"COLUMNS": "200"}

    def write(self, name, text):
        (self.folder / "ablations" / f"{name}.yaml").write_text(text)

    def start(self, *words, **options):
        """Start the command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "cope_sweep.cli", *words],
            cwd=self.folder,
            env=self.environment,
            text=True,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
        )

    @contextlib.contextmanager
    def inside(self, out, err):
        """This process has the shell's folder and environment, and writes to these files."""
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, self.environment, clear=True),
            mock.patch.object(typer.main, "get_command", return_value=self.command),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield

    def __call__(self, *words, code=0, stdin=""):
        """Run the command in this process; its standard output and standard error."""
        written, err = io.BytesIO(), io.StringIO()
        out = io.TextIOWrapper(written, encoding="utf-8", newline="", write_through=True)  # files are written as bytes
        with (
            self.inside(out, err),
            mock.patch.object(sys, "argv", ["cope-sweep", *words]),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        exit_code, text = ended.value.code or 0, written.getvalue().decode()
        assert exit_code == code, f"{words} exited with {exit_code}:\n{text}\n{err.getvalue()}"
        return text, err.getvalue()

    def refuses(self, code, *words, **data):
        """Run the command; it raises a UserError with this code and these data. `main` makes a line of it."""
        with self.inside(io.TextIOWrapper(io.BytesIO()), io.StringIO()), raises(code, **data):  # noqa: SIM117
            with TyperGroup.make_context(self.command, "cope-sweep", list(words)) as context:
                TyperGroup.invoke(self.command, context)

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code)[0])


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder where the tiny ablation was trained once, without Ray and MLflow."""
    shell = Shell(tmp_path_factory.mktemp("trained"))
    shell.first = shell.json("run", "tiny", "--local", "--no-mlflow")
    return shell


@pytest.fixture
def stored(shell):
    """A folder with a store in which CoPE is finished (seed 0) and failed (1), and `none` stopped (0) and damaged (1).

    Its runs are written without training, and a sweep contains them.
    """
    shell.store = Store(shell.folder / "store", create=True)
    shell.plan = expand(load_ablation(shell.folder / "ablations" / "tiny.yaml"))
    shell.runs = [run for row in shell.plan.rows for run in row.runs]
    facts = {"steps": 6, "wall_s": 2.0, "parameters": 1192, "device": "cpu"}
    finish(shell.store, shell.runs[0], {"in_dist/token_error": 12.5}, facts)
    fail(shell.store, shell.runs[1])
    stop(shell.store, shell.runs[2])
    finish(shell.store, shell.runs[3], {"in_dist/token_error": 50.0}, facts)
    damaged = shell.store.run(shell.runs[3].run_id)
    (damaged.path / "result.json").write_text("{")
    end(shell.store, damaged)
    shell.sweep_id = "20260730-120000-abcd"
    ended = {"status": "failed", "started_ms": 1_000, "ended_ms": 2_000, "notes": ["node-3 was left out: no GPU"]}
    write_sweep(shell.store, shell.plan, sweep_id=shell.sweep_id, **ended)
    return shell
