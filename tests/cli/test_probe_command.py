"""The command `probe`: its table, JSON, files and errors. Commands run in this process."""

import json
from functools import partial
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from cope_sweep.inference import Predictor
from cope_sweep.inference.probe import head_statistics, loads_of_heads, probe, text_marks
from cope_sweep.model import Transformer, save_model
from cope_sweep.store import Store
from cope_sweep.text import TextTokenizer
from cope_sweep.train import Runtime, train_run
from tests.helpers.tiny import tiny_run

IDS = [0, 4, 1, 4, 5, 5]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A folder with a store of finished runs, and their ids by name."""
    folder = tmp_path_factory.mktemp("sample")
    store = Store(folder / "store", create=True)
    positions = {"cope": ["cope"], "none": [], "two": [{"kind": "cope", "p_max": 3}, "cope_mlp"]}
    runs = {name: tiny_run(**{"model.position": position}) for name, position in positions.items()}
    for run in runs.values():
        assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    ids = {name: run.run_id for name, run in runs.items()}
    return SimpleNamespace(folder=folder, store=store, **ids)


@pytest.fixture(scope="module")
def predictor(sample):
    return Predictor.load(sample.store.run(sample.cope).checkpoint, "cpu")


@pytest.fixture
def command(sample, shell):
    """A function that runs `cope-sweep probe` in a temporary folder and returns its output and its error output."""
    shell.environment["COPE_SWEEP_STORE"] = str(sample.folder / "store")
    return partial(shell, "probe")


@pytest.fixture
def refuses(command, shell):
    """A function like `command` for what raises an error: see `Shell.refuses`."""
    return lambda code, *words, **data: shell.refuses(code, "probe", *words, **data)


def test_json_has_the_statistics_of_the_library(command, sample, predictor):
    out, _ = command(
        sample.cope, "--json", "--count", "5", "--sequence", "2", "--split", "sparse", "--seen-by", "marker"
    )
    answer = json.loads(out)
    task = predictor.run.task
    tokens_NT = task.sequences("sparse", 0, 2, 5).inputs_NT
    marks = [task.marks(tokens_T) for tokens_T in tokens_NT]
    expected = head_statistics(predictor, list(tokens_NT), marks, seen_by=[each["marker"] for each in marks])
    assert (answer["run_id"], answer["sequences"]) == (sample.cope, 5)
    assert [(head["layer"], head["head"], head["encoding"]) for head in answer["heads"]] == [
        (0, 0, "cope"),
        (0, 1, "cope"),
    ]
    for answered, head in zip(answer["heads"], expected, strict=True):
        assert answered["position_max"] == pytest.approx(head.position_max, rel=1e-6)
        assert list(answered["marks"]) == ["data", "blank", "marker"]
        for name, found in head.marks.items():
            assert answered["marks"][name]["tokens_on"] == found.tokens_on
            assert answered["marks"][name]["on"] == pytest.approx(found.on, rel=1e-6)


def test_the_table_has_a_row_for_each_head_and_mark(command, sample):
    out, _ = command(sample.cope, "--tokens", "0 4 1 4 5 5", "--mark", "data", "--mark", "own=4,5")
    header, first, second, third, *_ = (line.split() for line in out.splitlines())
    assert header == ["layer", "head", "mark", "on", "else", "AUC", "d", "share", "beyond", "mean", "p", "max", "p"]
    assert first[:3] == ["0", "0", "data"]
    assert second[0] == "own"
    assert third[:3] == ["0", "1", "data"]
    assert "0.0 %" in out  # of the pairs are beyond p_max
    assert "blank" not in out


def test_the_table_names_encodings_where_there_are_several(command, sample):
    out, _ = command(sample.two, "--tokens", "0 1 2 3 0 1 2 3")
    assert out.split()[:4] == ["layer", "head", "encoding", "mark"]
    assert " cope_mlp " in out
    rows = [line for line in out.splitlines() if " cope_mlp " in line]
    assert len(rows) == 2
    assert all(" –" in row for row in rows)  # without a limit, no pair is beyond it


def test_files_contain_the_matrices(command, sample, predictor, tmp_path):
    command(
        sample.cope,
        *("--tokens", " ".join(map(str, IDS)), "--head", "1", "--mark", "data"),
        *("--output", "matrices", "--html", "probe.html", "--svg", "probe.svg"),
    )
    expected = probe(predictor, IDS, heads=[1]).arrays()
    with np.load(tmp_path / "matrices") as saved:  # no suffix is added
        assert set(saved) == {*expected, "marks/data"}
        for name, array in expected.items():
            assert saved[name].dtype == array.dtype
            np.testing.assert_allclose(saved[name], array, rtol=1e-5, atol=1e-5)  # by other kernels or threads
        assert saved["marks/data"].tolist() == [True, False, True, False, False, False]
    assert ElementTree.parse(tmp_path / "probe.svg").getroot().tag.endswith("svg")
    page = (tmp_path / "probe.html").read_text(encoding="utf-8")
    assert f"Run {sample.cope}: selective_copy, cope" in page
    assert "Layer 0 · head 1" in page


def test_only_the_first_tokens_and_one_query(command, sample):
    def heads(*arguments):
        return json.loads(command(sample.cope, "--json", *arguments)[0])["heads"]

    data = heads("--first", "3", "--seen-by", "2")[0]["marks"]["data"]
    assert data["tokens_on"] + data["tokens_off"] == 3
    assert heads("--tokens", "1 2 3", "--seen-by", "0")[0]["position_max"] < 1


def test_a_text_of_labels_is_probed_as_its_token_ids(command, sample):
    by_labels, by_ids = (json.loads(command(sample.cope, *words, "--json")[0]) for words in (
        ("--text", "_ 0 > 0"), ("--tokens", "4 0 5 0"),
    ))  # fmt: skip
    assert by_labels == by_ids


def test_a_model_without_gates_has_attention(command, sample, tmp_path):
    assert json.loads(command(sample.none, "--json")[0])["heads"] == []
    out, _ = command(sample.none, "--html", "none.html")
    assert out.startswith("no gates: no position encoding has no contextual positions")
    assert "Attention" in (tmp_path / "none.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "data"),
    [
        (["--tokens", "1 x"], "invalid_option", {"option": "--tokens", "value": "1 x"}),
        (["--tokens", "1", "--split", "dense"], "conflicting_options", {}),
        (["--tokens", "1", "--text", "a"], "conflicting_options", {}),
        (["--tokens", "1 2", "--count", "1"], "no_effect", {"option": "count"}),
        (["--text", "_ 0", "--sequence", "0"], "no_effect", {"option": "sequence"}),
        (["--load", "--mark", "data"], "no_effect", {"option": "mark"}),
        (["--load", "--seen-by", "marker", "-o", "x.npz"], "no_effect", {"option": "seen-by"}),
        (["--text", "hello"], "unknown_label", {}),
        (["--file", "none.txt"], "no_such_file", {"file": "none.txt"}),
        (["--mark", "newline"], "unknown_mark", {"mark": "newline", "allowed": ["data", "blank", "marker"]}),
        (["--mark", "own=x"], "invalid_option", {"value": "x"}),
        (["--seen-by", "nobody"], "unknown_mark", {"mark": "nobody"}),
        (["--seen-by", "6"], "invalid_option", {"option": "--seen-by", "largest": 5}),
        (["--output", "nowhere/x.npz"], "not_writable", {"file": "nowhere/x.npz"}),
        (["--html", "nowhere/x.html"], "not_writable", {"file": "nowhere/x.html"}),
        (["--svg", "nowhere/x.svg"], "not_writable", {"file": "nowhere/x.svg"}),
    ],
)
def test_invalid_input_is_an_error(refuses, sample, arguments, code, data):
    refuses(code, sample.cope, *arguments, **data)


@pytest.fixture
def text_checkpoint(tmp_path):
    """The folder of a text model's checkpoint, and its tokenizer."""
    run = tiny_run(
        **{"model.position": ["cope"]}, task={"kind": "wikitext", "corpus": "x", "tokens": 16, "vocabulary": 300}
    )
    tokenizer = TextTokenizer.train(["One. Two.\n\nThree.\n"] * 3, 300)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_model(folder, Transformer(run), run)
    tokenizer.save(folder / "tokenizer.json")
    return folder, tokenizer


def test_a_text(command, refuses, text_checkpoint, tmp_path):
    folder, tokenizer = text_checkpoint
    text = "One.\nTwo. Three.\n"
    (tmp_path / "notes.txt").write_text(text)
    answer = json.loads(command(str(folder), "--json", "--file", "notes.txt", "--html", "text.html")[0])
    expected = text_marks(tokenizer.pieces([tokenizer.end_of_text, *tokenizer.encode([text])[0]]))
    for head in answer["heads"]:
        tokens_on = {name: found["tokens_on"] for name, found in head["marks"].items()}
        assert tokens_on == {name: int(on.sum()) for name, on in expected.items()}
        assert tokens_on["sentence"] == 3
    assert answer == json.loads(command(str(folder), "--json", "--text", text)[0])
    assert answer == json.loads(command(str(folder), "--json", "--text", "-", stdin=text)[0])
    assert ">Three</span>" in (tmp_path / "text.html").read_text(encoding="utf-8").replace("> T", ">T")
    refuses("no_such_file", str(folder), "--file", "none.txt", file="none.txt")


def test_load_shows_what_position_logits_do(command, sample, predictor):
    answer = json.loads(command(sample.two, "--tokens", "0 4 1 4 5 5", "--load", "--head", "1", "--json")[0])
    expected = loads_of_heads(Predictor.load(sample.store.run(sample.two).checkpoint, "cpu"), [IDS], heads=[1])
    assert [(load["layer"], load["head"], load["encoding"]) for load in answer["loads"]] == [
        (0, 1, "cope"),
        (0, 1, "cope_mlp"),
    ]
    for load, head in zip(answer["loads"], expected, strict=True):
        assert load["load"] == pytest.approx(head.load)
        assert (load["beyond"], load["explained"]) == (head.beyond, pytest.approx(head.explained))
        assert load["spans"] == [[tokens, pytest.approx(span)] for tokens, span in head.spans]
    header, first, second, *_ = (
        line.split() for line in command(sample.cope, "--tokens", "0 4 1 4 5 5", "--load")[0].splitlines()
    )
    assert header[:7] == ["layer", "head", "position", "content", "ratio", "beyond", "explained"]
    assert [first[:2], second[:2]] == [["0", "0"], ["0", "1"]]
    assert "no position logits" in command(sample.none, "--tokens", "0 4 1 4 5 5", "--load")[0]
