"""The commands that docs/concepts shows, on the tiny ablation, which has the name of their example."""

import pytest

from tests.cli.conftest import TINY
from tests.test_docs import read, shown_commands


def commands(concept):
    return list(shown_commands(read(f"docs/concepts/{concept}.md")))


@pytest.mark.slow
def test_the_commands_of_the_store_and_of_runs(trained):
    shown = [*commands("run"), *commands("store")]
    assert [words[0] for words in shown] == ["runs", "status", "logs", "diff", "store", "prune", "prune", "sync"]
    ids = [run["run_id"] for run in trained.json("runs")["runs"]]
    for words in shown:
        runs = iter(ids)
        words = [word.replace("layers>=2", "layers>=1") for word in words]
        assert trained(*(next(runs) if word == "RUN" else word for word in words))[0]


def test_the_commands_of_the_sweep(shell):
    shell.write("quickstart", TINY)
    shown = commands("sweep")
    assert [words[0] for words in shown] == ["run", "submit", "status", "logs", "retry"]
    run, _, status, logs, retry = shown  # tests/sweep submits jobs
    assert "4 finished" in shell(*run, "--local", "--no-mlflow")[1]
    (sweep,) = shell.json(*status)
    assert shell(*(sweep["sweep_id"] if word == "SWEEP" else word for word in logs))[0]
    assert "the sweep has ended" in shell("stop", sweep["sweep_id"])[0]
    shell(*retry, "--local", "--no-mlflow")
