"""A document on standard output holds nothing that a plugin prints."""

import csv
import io
import json
import subprocess
import sys

import pytest

from tests.cli.conftest import COMMANDS, TINY, Shell

PLUGIN = """
import os
import sys
from typing import Literal

from cope_sweep.positions import ENCODINGS, RoPE

print("imported")
sys.stdout.write("and written\\n")


@ENCODINGS.register
class Loud(RoPE):
    kind: Literal["loud"] = "loud"

    def rotate(self, *arguments, **options):
        print("rotated")
        return super().rotate(*arguments, **options)


print("registered", flush=True)
"""


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("loud"))
    (shell.folder / "loud_plugin.py").write_text(PLUGIN)
    shell.environment["COPE_SWEEP_PLUGINS"] = "loud_plugin"
    shell.write("loud", TINY.replace("[cope]", "[loud]"))
    assert "loud" in (shell.folder / "ablations" / "loud.yaml").read_text()
    return shell


def output_of(shell, *words):
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=shell.folder, env=shell.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_documents_hold_nothing_that_a_plugin_prints(loud):
    """Each process imports the plugin before its first command; the first one trains with it."""
    trained = json.loads(output_of(loud, "-m", "cope_sweep.cli", "run", "loud", "--local", "--no-mlflow", "--json"))
    assert trained["sweep"]["exit_code"] == 0
    lines = ["schema", "table loud --format csv"]
    lines += [f"{words} --json" for words in ("list", "plan loud", "status loud", "table loud", "runs")]
    schema, table, *documents, rest = output_of(loud, "-c", COMMANDS, ",".join(lines)).split("\x1e")
    rows = list(csv.reader(io.StringIO(table)))
    assert len({len(row) for row in rows}) == 1
    assert (len(documents), rest) == (5, "")
    for document in (schema, *documents):
        json.loads(document)


@pytest.mark.slow
def test_a_plugin_that_cannot_be_imported_is_an_error_of_any_command(shell):
    """The help of `figure` names all kinds, so that all commands import the plugins of the environment."""
    shell.environment["COPE_SWEEP_PLUGINS"] = "no_such_plugin"
    process = shell.start("plan", "quickstart", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.splitlines()[0].startswith("error: the plugin no_such_plugin cannot be imported")
    assert len(err.splitlines()) == 1
    assert json.loads(out)["error"]["code"] == "plugin_not_loaded"
