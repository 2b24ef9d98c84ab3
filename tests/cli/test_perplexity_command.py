"""`perplexity` of token ids and of texts, with models that the command line trained."""

import json

import pytest

from tests.cli.conftest import Shell
from tests.helpers.texts import write_corpus

pytestmark = pytest.mark.slow  # the fixtures train

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
def text_shell(tmp_path_factory):
    """A folder where a model was trained on a text."""
    shell = Shell(tmp_path_factory.mktemp("text"))
    shell.environment |= {"COPE_SWEEP_CACHE": str(shell.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    shell.write("text", ABLATION)
    write_corpus(shell.folder / "data")
    shell.words = ("text", "--local", "--no-mlflow", "--set", "task.folder=data")
    shell.output, _ = shell("run", *shell.words)
    shell.run_id = shell.json("status", "text", "--set", "task.folder=data")["runs"][0]["run_id"]
    return shell


@pytest.fixture
def run_id(trained):
    return trained.json("status", "tiny")["runs"][0]["run_id"]


def test_token_ids(trained, run_id):
    """Marker 5 starts the copy, which is what the task trains."""
    measured = trained.json("perplexity", run_id, "--tokens", "0 4 1 5 0 1", "--tokens", "2,5,2")
    assert measured["perplexity"] > 1
    assert (measured["tokens"], measured["positions"]) == (2 + 1, 5 + 2)
    out, _ = trained("perplexity", run_id, "--tokens", "0 4 1 5 0 1", "--tokens", "2 5 2")
    assert out == (
        f"perplexity {measured['perplexity']:.4f} over the 3 of 7 tokens that the task trains "
        f"({measured['bits_per_token']:.4f} bits per token)\n"
    )
    (trained.folder / "ids.json").write_text(json.dumps([[0, 4, 1, 5, 0, 1], [2, 5, 2]]))
    assert trained.json("perplexity", run_id, "--file", "ids.json") == measured
    out, _ = trained("perplexity", run_id, "--file", "-", "--json", stdin="[[0, 4, 1, 5, 0, 1], [2, 5, 2]]")
    assert json.loads(out) == measured
    assert trained.json("perplexity", f"store/runs/{run_id}/checkpoint", "--file", "ids.json") == measured
    best = trained.json("status", "tiny/CoPE")["run_id"]
    of_best = trained.json("perplexity", best, "--file", "ids.json")
    assert trained.json("perplexity", "tiny/CoPE", "--file", "ids.json") == of_best


def test_a_text_of_labels(trained, run_id):
    """The vocabulary of six is 0 1 2 3, the blank and the marker."""
    text = "0 _ 3 > 0 3"
    by_ids = trained.json("perplexity", run_id, "--tokens", "0 4 3 5 0 3")
    assert trained.json("perplexity", run_id, "--text", text) == by_ids
    assert "over the 2 of 5 tokens that" in trained("perplexity", run_id, "--text", text)[0]
    trained.refuses("unknown_label", "perplexity", run_id, "--text", "0 x", label="x")
    in_windows = trained.json("perplexity", run_id, "--text", text, "--context", "2", "--stride", "1")
    assert in_windows["tokens"] == 2
    assert in_windows["nll_sum"] != by_ids["nll_sum"]
    trained.refuses("nothing_scored", "perplexity", run_id, "--text", "0 _ 3 >")


def test_a_text_of_labels_is_read_in_windows_as_in_training(trained, run_id):
    """As by the service. Of the longest sequences, the model reads two tokens to copy, four blanks, the marker, a copy."""
    text = " ".join(["0 _ 3 > 0 3"] * 3)
    by_default = trained.json("perplexity", run_id, "--text", text)
    assert by_default == trained.json("perplexity", run_id, "--text", text, "--context", "8")
    assert by_default["nll_sum"] != trained.json("perplexity", run_id, "--text", text, "--context", "17")["nll_sum"]


def test_a_text_file(text_shell):
    measured = text_shell.json("perplexity", text_shell.run_id, "--file", "data/wiki.test.tokens")
    text = (text_shell.folder / "data" / "wiki.test.tokens").read_bytes()
    assert (measured["words"], measured["size_bytes"]) == (len(text.split()) + text.count(b"\n"), len(text))
    result = text_shell.json("status", text_shell.run_id)["result"]
    for name in ("perplexity", "word_perplexity", "bits_per_byte"):
        assert measured[name] == pytest.approx(result["metrics"][f"test/{name}"], rel=1e-4)
    assert len(result["facts"]["data"]) == 64
    assert measured["byte_perplexity"] == pytest.approx(2 ** measured["bits_per_byte"])
    assert text_shell.json("perplexity", text_shell.run_id, "--text", " ")["word_perplexity"] is None, "as over REST"


def test_a_text_from_the_command_line_and_from_standard_input(text_shell):
    out, _ = text_shell("perplexity", text_shell.run_id, "--text", "the European cat", "--stride", "4")
    assert " per word, " in out
    assert out.endswith("3 words, 16 bytes\n")
    out, _ = text_shell("perplexity", text_shell.run_id, "--text", "-", "--json", stdin="the European cat")
    assert json.loads(out) == text_shell.json("perplexity", text_shell.run_id, "--text", "the European cat")


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (("--file", "latin.txt"), "not_utf8", {"file": "latin.txt"}),
        (("--file", "none.txt"), "no_such_file", {"file": "none.txt"}),
        (("--text", "\udce9"), "not_utf8", {"option": "--text", "byte": 0}),
        (("--text", "a", "--file", "b.txt"), "conflicting_options", {}),
        (("--text", "a", "--tokens", "1 2"), "conflicting_options", {}),
        (("--tokens", "1 2", "--stride", "4"), "missing_option", {"option": "--text"}),
        (("--file", "broken.json"), "invalid_json", {"file": "broken.json"}),
        (("--tokens", "1 b"), "invalid_option", {"option": "--tokens", "value": "1 b"}),
        ((), "no_sequence", {}),
    ],
)
def test_bad_input(text_shell, words, code, data):
    (text_shell.folder / "latin.txt").write_bytes(b"caf\xe9")
    (text_shell.folder / "broken.json").write_text("[[1, 2]")
    text_shell.refuses(code, "perplexity", text_shell.run_id, *words, **data)


def test_no_such_checkpoint(text_shell):
    text_shell.refuses("not_finished", "perplexity", "0123456789abcdef", "--tokens", "1 2", status="pending")
    text_shell.refuses("not_found", "perplexity", "nowhere", "--tokens", "1 2", run_id="nowhere")
    (text_shell.folder / "not_one").mkdir()
    text_shell.refuses("no_such_file", "perplexity", "not_one", "--tokens", "1 2")
