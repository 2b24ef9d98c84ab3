"""The commands that the READMEs of store and sweep show, on the tiny ablation, which has the name of their example."""

import re
import shlex

import pytest

from tests.cli.conftest import TINY
from tests.test_docs import code_blocks, read


def commands(room):
    """The commands in the tables and blocks of a room's README."""
    text = read(f"cope_sweep/{room}/README.md")
    lines = [*re.findall(r"^\| `(cope-sweep [^`]+)`", text, re.MULTILINE)]
    lines += [line for block in code_blocks(text, "bash") for line in block.splitlines()]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == ["cope-sweep"]]


@pytest.mark.slow
def test_the_commands_of_the_store(trained):
    shown = commands("store")
    assert [words[0] for words in shown] == ["runs", "store", "store", "logs", "prune", "sync"]
    (run_id, *_) = [run["run_id"] for run in trained.json("runs")["runs"]]
    for words in shown:
        assert trained(*(run_id if word == "RUN" else word for word in words))[0]


def test_the_commands_of_the_sweep(shell):
    shell.write("quickstart", TINY)
    run, stop = commands("sweep")
    assert "4 finished" in shell(*run, "--local", "--no-mlflow")[1]
    (sweep,) = shell.json("status")
    assert "the sweep has ended" in shell(*(sweep["sweep_id"] if word == "SWEEP" else word for word in stop))[0]
