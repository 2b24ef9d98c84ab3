"""Commands where a text has changed under its name since runs were trained on it."""

import re
import shlex

import pytest

from cope_sweep.tasks import language
from tests.helpers.texts import prose

pytestmark = pytest.mark.slow  # trains

MINE = """\
title: A text of mine
base:
  task: {kind: text, path: my text.txt, tokens: 8, vocabulary: 300}
  model: {dim: 8, heads: 2, layers: 1, position: [cope]}
  train: {steps: 2, batch: 2}
  evaluate: {every: 2, sequences: 4, final_sequences: 4}
seeds: [0, 1]
metrics: [{name: validation/perplexity, decimals: 3}]
"""
RUN = ("run", "mine", "--local", "--no-mlflow")


@pytest.fixture
def mine(shell):
    shell.environment["COPE_SWEEP_CACHE"] = str(shell.folder / "cache")
    shell.write("mine", MINE)
    (shell.folder / "my text.txt").write_text(prose(1200))
    assert shell.json(*RUN)["sweep"]["trained"] == 2
    return shell


def change(shell):
    (shell.folder / "my text.txt").write_text(prose(1300, seed=9))
    language._opened.cache_clear()  # as in another process


def test_a_changed_text_is_noted_with_the_command_that_trains_on_it(mine):
    out, err = mine(*RUN)
    assert "Nothing to train" in out
    assert "note:" not in err
    change(mine)
    out, err = mine(*RUN)
    assert "Nothing to train" in out
    (note,) = [line for line in err.splitlines() if line.startswith("note:")]
    assert "my text.txt" in note
    assert "2 finished runs" in note
    (command,) = re.findall(r"(cope-sweep run .*)", note)
    words = shlex.split(command)[1:]
    assert words == ["run", "mine", "--set", "task.corpus=my-text-2"]
    trained = mine.json(*words, "--local", "--no-mlflow")["sweep"]
    assert (trained["trained"], trained["reused"]) == (2, 0)


def test_a_row_of_two_texts_is_noted_in_the_sweep_and_warned_of_in_the_table(mine):
    change(mine)
    more = mine.json(*RUN, "--set", "seeds=[0,1,2]")
    (note,) = more["sweep"]["notes"]
    assert "my text.txt" in note
    assert mine.json("status", more["sweep"]["sweep_id"])["notes"] == [note]
    warnings = mine.json("table", "mine", "--set", "seeds=[0,1,2]")["warnings"]
    assert any("data fingerprint" in warning for warning in warnings)
    assert mine.json("table", "mine")["warnings"] == []


def test_finished_runs_need_no_text(mine):
    (mine.folder / "my text.txt").unlink()
    language._opened.cache_clear()
    out, err = mine(*RUN)
    assert "Nothing to train" in out
    assert "note:" not in err
