"""From a folder of text to a checkpoint that can be asked in text, through the command line."""

import json
import subprocess

import pytest

from tests.cli.conftest import Shell
from tests.texts import prose, write_corpus

ABLATION = """\
title: A small text
base:
  task: {kind: wikitext, corpus: small, tokens: 16, vocabulary: 300}
  model: {dim: 8, heads: 2, layers: 1}
  train: {steps: 4, batch: 4}
  evaluate: {every: 4, sequences: 8, final_sequences: 10000}
grid:
  model.position: {CoPE: [cope]}
metrics: [{name: test/perplexity}, {name: test/word_perplexity}, {name: test/bits_per_byte}]
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("text"))
    shell.environment |= {"COPE_SWEEP_CACHE": str(shell.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    shell.write("text", ABLATION)
    write_corpus(shell.folder / "data")
    shell.words = ("text", "--local", "--no-mlflow", "--set", "task.folder=data")
    shell.run = shell.json("run", *shell.words)
    shell.run_id = shell.json("status", "text", "--set", "task.folder=data")["runs"][0]["run_id"]
    return shell


def test_a_text_is_trained_on_and_asked_about(shell):
    measured = shell.json("perplexity", shell.run_id, "--file", "data/wiki.test.tokens")
    text = (shell.folder / "data" / "wiki.test.tokens").read_bytes()
    assert (measured["words"], measured["size_bytes"]) == (len(text.split()) + text.count(b"\n"), len(text))
    result = shell.json("status", shell.run_id)["result"]
    for name in ("perplexity", "word_perplexity", "bits_per_byte"):
        assert measured[name] == pytest.approx(result["metrics"][f"test/{name}"], rel=1e-4)
    assert len(result["facts"]["data"]) == 64
    out, _ = shell("perplexity", shell.run_id, "--text", "the European cat", "--stride", "4")
    assert " per word, " in out
    assert out.endswith("3 words, 16 bytes\n")


def test_a_text_on_standard_input(shell):
    process = shell.start("perplexity", shell.run_id, "--text", "-", "--json", stdin=subprocess.PIPE)
    out, _ = process.communicate("the European cat", timeout=120)
    assert json.loads(out) == shell.json("perplexity", shell.run_id, "--text", "the European cat")


def test_where_data_lies_is_not_what_a_run_is(shell):
    write_corpus(shell.folder / "moved")
    again = shell.json("run", *shell.words[:-1], "task.folder=moved")
    assert again["sweep"]["reused"] == 1
    shell.environment["COPE_SWEEP_DATA"] = str(shell.folder / "corpora")
    write_corpus(shell.folder / "corpora" / "small")
    assert shell.json("run", "text", "--local", "--no-mlflow")["sweep"]["reused"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--file", "latin.txt"), "latin.txt: not UTF-8 text"),
        (("--file", "none.txt"), "none.txt: No such file"),
        (("--text", ""), "the text is empty"),
        (("--text", "a", "--file", "b.txt"), "give one of --text, --file and --tokens"),
        (("--tokens", "1 2", "--stride", "4"), "--context and --stride are for a text"),
        (("--text", "a", "--stride", "40"), "a stride of 40 for windows of 16"),
    ],
)
def test_what_cannot_be_asked_is_said(shell, words, message):
    (shell.folder / "latin.txt").write_bytes(b"caf\xe9")
    _, err = shell("perplexity", shell.run_id, *words, code=2)
    assert message in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "wiki.valid.tokens").unlink(), "no file of the split 'validation'"),
        (lambda folder: (folder / "wiki.train.tokens").write_bytes(b"\xff" * 9), "not UTF-8 text"),
        (lambda folder: (folder / "wiki.test.tokens").write_text("a"), "fewer than one context of 16"),
    ],
)
def test_bad_text_stops_before_training(shell, spoil, message, tmp_path):
    folder = write_corpus(tmp_path)
    (folder / "wiki.train.tokens").write_text(prose(200, seed=7))
    spoil(folder)
    words = ("--set", "task.corpus=other", "--set", f"task.folder={folder}", "--store", str(tmp_path / "store"))
    _, err = shell("run", "text", "--local", "--no-mlflow", *words, code=2)
    assert message in " ".join(err.split())
    assert not list((tmp_path / "store" / "runs").iterdir())
