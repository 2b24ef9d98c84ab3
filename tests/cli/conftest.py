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

from cope_sweep.cli import main

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


class Shell:
    """Calls `cope-sweep` in a folder of its own, which has the ablation `tiny`."""

    def __init__(self, folder):
        self.folder = folder
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

    def __call__(self, *words, code=0, stdin=""):
        """Run the command in this process; its standard output and standard error."""
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, self.environment, clear=True),
            mock.patch.object(sys, "argv", ["cope-sweep", *words]),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        exit_code = ended.value.code or 0
        assert exit_code == code, f"{words} exited with {exit_code}:\n{out.getvalue()}\n{err.getvalue()}"
        return out.getvalue(), err.getvalue()

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
