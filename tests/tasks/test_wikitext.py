"""WikiText: file names, formats, the hub's cache, checks of the corpus, and the choice of the tokenizer."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cope_sweep.config import RunSpec
from cope_sweep.tasks import WikiText
from cope_sweep.text import END_OF_TEXT
from cope_sweep.text.tokenizer import byte_letters
from tests.helpers.errors import raises
from tests.helpers.texts import write_corpus

pytestmark = pytest.mark.usefixtures("cache")


def small(folder, **fields):
    return WikiText(**{"corpus": "small", "folder": str(folder), "tokens": 16, "vocabulary": 300} | fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def as_parquet(path, target):
    """Write a text as the hub stores it: one line per row, blank lines as empty strings."""
    lines = [line if line.strip() else "" for line in path.read_text().splitlines(keepends=True)]
    pq.write_table(pa.table({"text": lines}), path.parent / f"{target}-00000-of-00001.parquet")


@pytest.mark.parametrize(
    ("names", "validation"),
    [("wiki.{}.tokens", "valid"), ("wiki.{}.raw", "valid"), ("{}.txt", "validation"), ("my-{}-text.txt", "dev")],
)
def test_usual_names(names, validation, folder, tmp_path):
    for split, name in (("train", "train"), ("valid", validation), ("test", "test")):
        shutil.copy(folder / f"wiki.{split}.tokens", tmp_path / names.format(name))
    (tmp_path / "README.md").write_text("train, valid, test")
    assert small(tmp_path).fingerprint() == small(folder).fingerprint()


def test_the_cache_of_the_hub_is_read(tmp_path, folder, monkeypatch):
    """A snapshot that the hub's client downloaded earlier is found without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--Salesforce--wikitext"
    snapshot = repository / "snapshots" / ("a" * 40) / "wikitext-2-v1"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path, target in (("train", "train"), ("valid", "validation"), ("test", "test")):
        as_parquet(copy / f"wiki.{path}.tokens", target)
    for path in copy.glob("*.parquet"):
        shutil.move(path, snapshot)
    task = WikiText(corpus="wikitext-2", tokens=16, vocabulary=300)
    assert {split: len(files.paths) for split, files in task.files().items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }
    with raises("another_text", corpus="wikitext-2", split="train", expected=2_051_910):
        task.prepare()
    with raises("no_download", corpus="wikitext-103"):
        WikiText(tokens=16).prepare()


def test_a_corpus_with_the_wrong_name_is_an_error(folder):
    with raises("another_text", corpus="wikitext-103-raw", expected=101_425_671):
        small(folder, corpus="wikitext-103-raw").prepare()


@pytest.mark.parametrize(
    ("damage", "code", "name", "data"),
    [
        (lambda folder: (folder / "wiki.valid.tokens").unlink(), "empty_split", "", {"split": "validation"}),
        (
            lambda folder: (folder / "test.txt").write_text("more"),
            "ambiguous_split",
            "",
            {"split": "test", "files": ["test.txt", "wiki.test.tokens"]},
        ),
        (
            lambda folder: (folder / "wiki.train.tokens").write_text(""),
            "empty_text",
            "wiki.train.tokens",
            {"split": "train"},
        ),
        (lambda folder: (folder / "wiki.test.tokens").write_bytes(b"\xe9"), "not_utf8", "wiki.test.tokens", {}),
        (shutil.rmtree, "no_such_file", "", {"corpus": "small"}),
    ],
)
def test_unusable_folders_are_errors(damage, code, name, data, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    damage(copy)
    with raises(code, file=str(copy / name), **data):
        small(copy).prepare()


def test_an_own_corpus_needs_a_folder():
    with raises("no_corpus", corpus="mine"):
        WikiText(corpus="mine").prepare()


@pytest.mark.slow
def test_the_files_of_gpt2_s_tokenizer_are_used_if_they_are_beside_the_text(folder, tmp_path):
    """Without the files, no other tokenizer is trained instead: that run would have the id of this one."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    for fields in ({"tokenizer": "gpt2"}, {}):
        with raises("no_tokenizer"):
            small(copy, vocabulary=50257, **fields).prepare()
    vocabulary = {letter: index for index, letter in enumerate(byte_letters())}
    vocabulary |= {str(index): index for index in range(256, 50256)} | {END_OF_TEXT: 50256}
    (copy / "vocab.json").write_text(json.dumps(vocabulary))
    (copy / "merges.txt").write_text("#version: 0.2\n")
    # A process opens the corpus of a spec once, so these specs differ from the one above in the number of tokens.
    for fields in ({"tokenizer": "gpt2"}, {"tokenizer": "auto"}, {"vocabulary": 50304}):
        corpus = small(copy, **{"vocabulary": 50257, "tokens": 15} | fields).open_corpus()
        assert (corpus.tokenizer.ids, corpus.tokenizer.end_of_text) == (50257, 50256)
        assert corpus.splits["train"].tokens_L.dtype == "uint16"
    assert small(copy, vocabulary=50257, tokens=15).tokenizer_name() == f"gpt2 {corpus.tokenizer.digest[:12]}"
    assert small(copy, vocabulary=300).open_corpus().tokenizer.ids <= 300
    trained = small(copy, vocabulary=50257, tokenizer="bpe")
    assert trained.open_corpus().tokenizer.ids < 50257
    assert trained.tokenizer_name() == f"bpe {trained.open_corpus().tokenizer.digest[:12]}"
    assert RunSpec(task=trained).run_id != RunSpec(task=small(copy, vocabulary=50257)).run_id
