"""`probe` says of a real checkpoint what the library says, and writes files that hold it."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from cope_sweep.inference import Predictor
from cope_sweep.model import Transformer, save_model
from cope_sweep.probe import heads_of, probe, text_marks
from cope_sweep.text import TextTokenizer
from tests.tiny import tiny_run


@pytest.fixture(scope="module")
def runs(trained):
    """The id of the CoPE run and of the one without positions, both of seed 0."""
    by_row = {run["row"]: run["run_id"] for run in trained.json("status", "tiny")["runs"] if run["seed"] == 0}
    return by_row["CoPE"], by_row["none"]


def predictor(trained, run_id):
    return Predictor.load(trained.folder / "store" / "runs" / run_id / "checkpoint", "cpu")


def test_the_table_is_the_library_s(trained, runs):
    model = predictor(trained, runs[0])
    task = model.run.task
    answer = trained.json("probe", runs[0], "--count", "5", "--index", "2", "--split", "sparse", "--seen-by", "marker")
    tokens_NT = task.sequences("sparse", 0, 2, 5).inputs_NT
    marks = [task.marks(tokens_T) for tokens_T in tokens_NT]
    expected = heads_of(model, list(tokens_NT), marks, seen_by=[each["marker"] for each in marks])
    assert (answer["run_id"], answer["sequences"]) == (runs[0], 5)
    assert [(head["layer"], head["head"], head["encoding"]) for head in answer["heads"]] == [
        (0, 0, "cope"),
        (0, 1, "cope"),
    ]
    for said, head in zip(answer["heads"], expected, strict=True):
        assert said["position_max"] == head.position_max
        assert {name: found["auc"] for name, found in said["marks"].items()} == {
            name: found.auc for name, found in head.marks.items()
        }
    out, _ = trained("probe", runs[0], "--mark", "data", "--mark", "mine=4,5")
    assert "mine" in out
    assert "blank" not in out


def test_files_hold_the_matrices(trained, runs):
    ids = [0, 4, 1, 4, 5, 5]
    words = ["probe", runs[0], "--tokens", " ".join(map(str, ids)), "--head", "1", "--mark", "data"]
    trained(*words, "--out", "matrices.npz", "--html", "probe.html", "--svg", "probe.svg")
    expected = probe(predictor(trained, runs[0]), ids, heads=[1]).arrays()
    with np.load(trained.folder / "matrices.npz") as saved:
        assert set(saved) == {*expected, "marks/data"}
        for name, array in expected.items():
            np.testing.assert_array_equal(saved[name], array)
        assert saved["marks/data"].tolist() == [True, False, True, False, False, False]
    assert ElementTree.parse(trained.folder / "probe.svg").getroot().tag.endswith("svg")
    page = (trained.folder / "probe.html").read_text(encoding="utf-8")
    assert f"Run {runs[0]}: selective_copy, cope" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_only_the_first_tokens_and_one_query(trained, runs):
    [*heads] = trained.json("probe", runs[0], "--first", "3", "--seen-by", "2")["heads"]
    assert heads[0]["marks"]["data"]["tokens_on"] + heads[0]["marks"]["data"]["tokens_off"] == 3
    assert trained.json("probe", runs[0], "--tokens", "1 2 3", "--seen-by", "0")["heads"][0]["position_max"] < 1


def test_a_model_without_gates_still_has_attention(trained, runs):
    assert trained.json("probe", runs[1])["heads"] == []
    assert "no gates: no position encoding" in trained("probe", runs[1], "--html", "none.html")[0]
    assert "Attention" in (trained.folder / "none.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1 99"], "the sequence, position 1: token id 99 is out of range"),
        (["--tokens", ""], "no tokens"),
        (["--tokens", "1 x"], "whole numbers"),
        (["--tokens", "1", "--split", "dense"], "the sequence is named twice"),
        (["--text", "hello"], "has no tokenizer"),
        (["--split", "test"], "unknown split 'test'; this task has train, in_dist, dense, sparse"),
        (["--layer", "1"], "there is no layer 1: this model has layers 0 … 0"),
        (["--head", "2"], "there is no head 2"),
        (["--mark", "newline"], "no mark 'newline'; of these tokens are marked: data, blank, marker"),
        (["--seen-by", "nobody"], "no mark 'nobody'"),
        (["--seen-by", "6"], "the sequence has places 0 … 5"),
        (["--out", "nowhere/x.npz"], "nowhere/x.npz: No such file or directory"),
        (["--svg", "nowhere/x.svg"], "nowhere/x.svg: No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_line(trained, runs, words, message):
    _, err = trained("probe", runs[0], *words, code=2)
    assert err.startswith("error: ")
    assert message in " ".join(err.split())


def test_json_of_an_error(trained):
    answer = json.loads(trained("probe", "0123456789abcdef", "--json", code=2)[0])
    assert "is pending" in answer["error"]["message"]


def test_a_text(shell):
    run = tiny_run(
        **{"model.position": ["cope"]}, task={"kind": "wikitext", "corpus": "x", "tokens": 16, "vocabulary": 300}
    )
    tokenizer = TextTokenizer.train(["One. Two.\n\nThree.\n"] * 3, 300)
    (shell.folder / "checkpoint").mkdir()
    save_model(shell.folder / "checkpoint", Transformer(run), run)
    tokenizer.save(shell.folder / "checkpoint" / "tokenizer.json")
    (shell.folder / "notes.txt").write_text("One.\nTwo. Three.\n")
    answer = shell.json("probe", "checkpoint", "--file", "notes.txt", "--html", "text.html")
    expected = text_marks(tokenizer.pieces([tokenizer.end_of_text, *tokenizer.encode(["One.\nTwo. Three.\n"])[0]]))
    for head in answer["heads"]:
        tokens_on = {name: found["tokens_on"] for name, found in head["marks"].items()}
        assert tokens_on == {name: int(on.sum()) for name, on in expected.items()}
        assert tokens_on["sentence"] == 3
    assert answer == shell.json("probe", "checkpoint", "--text", "One.\nTwo. Three.\n")
    assert ">Three</span>" in (shell.folder / "text.html").read_text(encoding="utf-8").replace("> T", ">T")
    assert "No such file" in shell("probe", "checkpoint", "--file", "none.txt", code=2)[1]
