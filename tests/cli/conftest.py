import json
import os
import subprocess
import sys
import textwrap

import pytest

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
    """`cope-sweep` in a folder of its own, as a user runs it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "ablations").mkdir()
        self.write("tiny", TINY)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("COPE_SWEEP", "MLFLOW", "RAY"))}

    def write(self, name, text):
        (self.folder / "ablations" / f"{name}.yaml").write_text(text)

    def start(self, *words, **options):
        return subprocess.Popen(
            [sys.executable, "-m", "cope_sweep.cli", *words],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def __call__(self, *words, code=0):
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{words} exited with {process.returncode}:\n{out}\n{err}"
        return out, err

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code)[0])


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder where the tiny ablation was run once, through the local twin, MLflow included."""
    shell = Shell(tmp_path_factory.mktemp("trained"))
    shell.first = shell.json("run", "tiny", "--local")
    return shell
