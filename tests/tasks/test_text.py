"""The task `text`: local files of every format, held-out shares, limits, datasets of a hub, and damaged ones."""

import gzip
import io
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cope_sweep.tasks import Text, WikiText
from cope_sweep.text import TextTokenizer, sources
from tests.helpers.errors import raises
from tests.helpers.texts import prose
from tests.tasks.hub import COMMIT, Hub, serve

pytestmark = pytest.mark.usefixtures("cache")

DOCUMENTS = [prose(4, seed) + f"document {seed}\n" for seed in range(200)]


def text(**fields):
    return Text(**{"tokens": 16, "vocabulary": 300} | fields)


def documents(corpus, split):
    """The documents of a split, decoded."""
    tokens_L = corpus.splits[split].tokens_L
    parts = np.split(tokens_L, np.flatnonzero(tokens_L == corpus.tokenizer.end_of_text))[1:]
    return [b"".join(corpus.tokenizer.pieces(part)).decode() for part in parts]


def all_documents(corpus):
    return [document for split in corpus.splits for document in documents(corpus, split)]


def json_lines(texts, column="text"):
    return "".join(json.dumps({column: each, "id": index}) + "\n" for index, each in enumerate(texts)).encode()


def parquet(texts, column="text", rows=50):
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), file, row_group_size=rows)
    return file.getvalue()


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


# -- files of this machine


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", json_lines(DOCUMENTS)),
        ("a.jsonl.gz", gzip.compress(json_lines(DOCUMENTS))),
        ("a.jsonl.zst", zstd(b"\xef\xbb\xbf" + json_lines([*DOCUMENTS, "", " \n", None]))),
        ("a.parquet", parquet([*DOCUMENTS, "", None])),
    ],
)
def test_rows_are_documents_that_belong_to_a_split_by_their_content(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    task = text(path=str(tmp_path / name))
    corpus = task.open_corpus()
    assert task.corpus == "a"
    assert sorted(all_documents(corpus)) == sorted(DOCUMENTS)
    assert all(documents(corpus, split) for split in ("validation", "test"))
    # The rest in reverse order, in several files, and every document twice: each keeps its split.
    (tmp_path / "b").mkdir()
    for part in range(2):
        (tmp_path / "b" / f"{part}.jsonl").write_bytes(json_lines(DOCUMENTS[::-1]))
    other = text(path=str(tmp_path / "b")).open_corpus()
    for split in corpus.splits:
        assert sorted(documents(other, split)) == sorted(2 * documents(corpus, split))


def test_one_text_file_gives_every_split_a_stretch(tmp_path):
    lines = prose(2000).splitlines(keepends=True)
    (tmp_path / "book.txt").write_text("".join(lines), encoding="utf-8-sig")
    (tmp_path / "short.txt").write_text("short\n")
    corpus = text(path=str(tmp_path / "*.txt"), validation_share=0.1).open_corpus()
    [validation], [test] = documents(corpus, "validation"), documents(corpus, "test")
    first, last, *short = documents(corpus, "train")
    assert (first + validation + test + last, short) == ("".join(lines), ["short\n"])  # without a byte order mark
    size = len("".join(lines))
    assert len(validation) == pytest.approx(0.1 * size, rel=0.1)
    assert len(test) == pytest.approx(0.05 * size, rel=0.1)


@pytest.mark.parametrize("words", [300, 600, 1200])
def test_a_file_of_long_lines_gives_every_split_a_stretch(words, tmp_path):
    for seed in range(20):
        content = "".join(f"{seed} {line}" + " word" * words + " é\n" for line in range(18_000 // (5 * words)))
        (tmp_path / "train.txt").write_text(content)
        found = [(split, "".join(pieces)) for split, pieces in stretches(text(path=str(tmp_path / "train.txt")))]
        assert {split for split, _ in found} == {"train", "validation", "test"}
        assert sorted("".join(stretch for _, stretch in found)) == sorted(content)
    (tmp_path / "validation.txt").write_text("of its own\n")
    found = [split for split, pieces in stretches(text(path=str(tmp_path))) if "word" in "".join(pieces)]
    assert set(found) == {"train", "test"}


def stretches(task):
    return [document for part in task.text_source().parts(()) for document in part.documents()]


def test_files_with_the_names_of_splits_and_an_encoding(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_bytes(f"{split} é\n".encode("latin-1") * 100)
    with raises("empty_split", split="test"):  # one short file of training text has nothing to hold out
        text(path=str(tmp_path), encoding="latin-1").open_corpus()
    (tmp_path / "test.txt").write_bytes("test é\n".encode("latin-1") * 100)
    corpus = text(path=str(tmp_path), encoding="latin-1").open_corpus()
    assert [documents(corpus, split)[0][:-1].splitlines()[0] for split in corpus.splits] == [
        "train é", "validation é", "test é",
    ]  # fmt: skip
    with raises("not_utf8", file=str(tmp_path / "train.txt"), byte=6):
        text(path=str(tmp_path)).open_corpus()
    (tmp_path / "notes.txt").write_text("notes")
    with raises("ambiguous_split", file=str(tmp_path / "notes.txt")):
        text(path=str(tmp_path)).open_corpus()


def test_a_limit_ends_a_split_at_the_same_place_for_every_reader(tmp_path):
    for part in range(4):
        (tmp_path / f"{part}.jsonl").write_bytes(json_lines(DOCUMENTS[part::4]))
    whole = text(path=str(tmp_path)).open_corpus()
    limited = text(path=str(tmp_path), limit_tokens="1k").open_corpus()
    train = limited.splits["train"].tokens_L
    assert 1000 <= len(train) < 1000 + max(map(len, DOCUMENTS))
    assert documents(limited, "train") == documents(whole, "train")[: len(documents(limited, "train"))]
    assert text(limit_tokens="1k", corpus="x") == text(limit_tokens=1000, corpus="x")
    small = text(path=str(tmp_path), limit_bytes=2000, tokenizer="bpe", vocabulary=257).open_corpus()
    assert 2000 <= small.splits["train"].size_bytes < 2000 + max(len(each.encode()) for each in DOCUMENTS)


@pytest.mark.parametrize(
    ("name", "content", "fields", "code", "data"),
    [
        ("a.jsonl", json_lines(DOCUMENTS, "body"), {}, "no_text_column", {"column": "text", "columns": ["body", "id"]}),
        ("a.parquet", parquet(DOCUMENTS, "body"), {}, "no_text_column", {"columns": ["id", "body"]}),
        ("a.jsonl", json_lines(DOCUMENTS), {"column": "id"}, "column_not_text", {"column": "id", "line": 1}),
        ("a.parquet", parquet(DOCUMENTS), {"column": "id"}, "column_not_text", {"column": "id", "type": "int64"}),
        ("a.jsonl", json_lines(DOCUMENTS[:3]) + b"{\n", {}, "not_json", {"line": 4}),
        ("a.jsonl", b'["text"]\n', {}, "no_text_column", {"line": 1}),
        ("a.jsonl.gz", gzip.compress(json_lines(DOCUMENTS))[:-900], {}, "damaged_file", {}),
        ("a.jsonl.zst", zstd(json_lines(DOCUMENTS))[:-900], {}, "damaged_file", {}),
        ("a.jsonl.gz", b"not compressed", {}, "damaged_file", {}),
        ("a.parquet", parquet(DOCUMENTS)[:-900], {}, "not_parquet", {}),
        ("a.parquet", parquet(DOCUMENTS)[:100] + bytes(500) + parquet(DOCUMENTS)[600:], {}, "not_parquet", {}),
        ("a.jsonl", json_lines(["", " "]), {}, "empty_split", {"split": "train"}),
        ("a-00000-of-00002.parquet", parquet(DOCUMENTS), {}, "missing_shard", {"missing": [1], "total": 2}),
    ],
)  # fmt: skip
def test_unusable_files_are_errors_and_leave_nothing(name, content, fields, code, data, tmp_path, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(content)
    with raises(code, **data):
        text(path=str(tmp_path / "texts"), **fields).open_corpus()
    assert [path for path in tmp_path.glob("cache/text/*") if path.is_dir()] == []


def test_the_digest_of_a_large_file_is_kept_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGE_FILE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    fingerprint = text(path=str(tmp_path / "a.jsonl")).fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "file_digest", None)
        assert text(path=str(tmp_path / "a.jsonl"), tokens=17).fingerprint() == fingerprint
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS[::-1]))
    assert text(path=str(tmp_path / "a.jsonl"), tokens=18).fingerprint() != fingerprint


def saved_tokenizer(folder):
    (folder / "mine").mkdir(exist_ok=True)
    TextTokenizer.train(DOCUMENTS, 300).save(folder / "mine" / "tokenizer.json")
    return str(folder / "mine" / "tokenizer.json")


@pytest.mark.parametrize(
    ("fields", "code", "data"),
    [
        ({"path": "a", "dataset": "b/c"}, "invalid_value", {"key": "task.path"}),
        ({"path": "a", "split": "dev"}, "no_effect", {"key": "task.split"}),
        ({"dataset": "b/c", "files": "*", "configuration": "d"}, "no_effect", {"key": "task.configuration"}),
        ({"dataset": "b/c", "encoding": "latin-1"}, "no_effect", {"key": "task.encoding"}),
        ({"dataset": "../../etc"}, "invalid_dataset_name", {"value": "../../etc"}),
        ({"dataset": "b/c", "revision": "a/../b"}, "invalid_value", {"key": "task.revision"}),
        ({"dataset": "no-owner"}, "invalid_dataset_name", {"value": "no-owner"}),
        ({"tokenizer": "../x"}, "invalid_tokenizer_name", {"value": "../x"}),
        ({"tokenizer": "a/b@c/../d.e$"}, "invalid_tokenizer_name", {"value": "a/b@c/../d.e$"}),
        ({"tokenizer_file": "x.json"}, "invalid_value", {"key": "task.tokenizer_file"}),
        ({"tokenizer": "y.json", "tokenizer_file": "x.json"}, "invalid_value", {"key": "task.tokenizer"}),
    ],
)
def test_impossible_specs_are_errors(fields, code, data):
    with raises(code, **data):
        text(**fields)


def test_the_place_is_checked_before_anything_is_read(tmp_path):
    (tmp_path / "book.txt").write_text("a book")
    with raises("not_a_folder", file=str(tmp_path / "book.txt")):
        WikiText(corpus="book", folder=str(tmp_path / "book.txt")).check_place()
    text(path=str(tmp_path / "book.txt")).check_place()
    with raises("no_such_file", file=str(tmp_path / "other.txt")):
        text(path=str(tmp_path / "other.txt")).check_place()
    with raises("no_tokenizer", tokenizer="gtp2"):
        text(tokenizer="gtp2").check_place()
    with raises("no_corpus", corpus="text"):
        text().open_corpus()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"path": "books/My Book.txt"}, "My-Book"),
        ({"path": "books/*.jsonl.gz"}, "books"),
        ({"path": "../*"}, "text"),
        ({"dataset": "HuggingFaceFW/fineweb-edu"}, "HuggingFaceFW--fineweb-edu"),
        ({}, "text"),
    ],
)
def test_a_corpus_has_the_name_of_its_place(fields, name):
    assert text(**fields).corpus == name


# -- tokenizers


def test_a_tokenizer_file_gives_its_name_and_its_path_is_no_identity(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(DOCUMENTS))
    task = text(path=str(tmp_path / "a.jsonl"), tokenizer=saved_tokenizer(tmp_path))
    assert (task.tokenizer, task.tokenizer_file) == ("mine", str(tmp_path / "mine" / "tokenizer.json"))
    assert task.tokenizer_name() == f"mine {TextTokenizer.load(tmp_path / 'mine' / 'tokenizer.json').digest[:12]}"


# -- datasets of the hub

CONFIGS = [
    {"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]},
    {
        "config_name": "small",
        "data_files": [
            {"split": "train", "path": ["small/train-*"]},
            {"split": "validation", "path": "small/validation.jsonl.gz"},
        ],
    },
]
DATASET = "owner/prose"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import HfFileSystem, constants

    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two attempts of the hub's client
    with serve(Hub()) as server:
        # As HF_ENDPOINT does, which the hub's client reads once per process.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        HfFileSystem.clear_instance_cache()
        server.add(
            DATASET,
            {
                "README.md": b"a card",
                "data/a.parquet": parquet(DOCUMENTS[:100]),
                "data/b.parquet": parquet(DOCUMENTS[100:]),
                "small/train-00000-of-00001.parquet": parquet(DOCUMENTS),
                "small/validation.jsonl.gz": gzip.compress(json_lines(["a validation document\n" * 9])),
            },
            CONFIGS,
        )
        yield server


def test_a_dataset_is_streamed_once_and_its_commit_recorded(hub):
    task = text(dataset=DATASET)
    assert sorted(all_documents(task.open_corpus())) == sorted(DOCUMENTS)
    assert task.data_source() == f"{DATASET} train at {COMMIT}"
    hub.requests.clear()
    again = text(dataset=DATASET, tokens=17)  # another spec of the same text
    assert again.fingerprint() == task.fingerprint()
    assert hub.requests == []
    small = text(dataset=DATASET, configuration="small").open_corpus()
    assert documents(small, "validation") == ["a validation document\n" * 9]
    assert documents(small, "test")


def test_only_what_a_limit_needs_is_downloaded(hub):
    corpus = text(dataset=DATASET, files="data/*.parquet", limit_tokens=500, validation_share=0.2, test_share=0.2)
    assert 500 <= len(corpus.open_corpus().splits["train"].tokens_L) < 1000
    assert not [path for path in hub.requests if path.endswith("b.parquet")]


@pytest.mark.parametrize(
    ("change", "fields", "code", "data"),
    [
        (lambda hub: hub.refused.update({DATASET: "GatedRepo"}), {}, "gated_dataset", {"dataset": DATASET}),
        (lambda hub: hub.refused.update({f"{DATASET}:data/a.parquet": "GatedRepo"}), {}, "gated_dataset", {"dataset": DATASET}),
        (lambda hub: hub.refused.update({DATASET: "RevisionNotFound"}), {"revision": "v9"}, "no_such_revision", {"revision": "v9"}),
        (lambda hub: None, {"dataset": "owner/none"}, "no_such_dataset", {"dataset": "owner/none"}),
        (lambda hub: None, {"configuration": "large"}, "unknown_configuration", {"allowed": ["default", "small"]}),
        (lambda hub: None, {"split": "dev"}, "unknown_split", {"allowed": ["train"]}),
        (lambda hub: None, {"files": "*.csv"}, "no_such_file", {"dataset": DATASET}),
        (lambda hub: None, {"column": "body"}, "no_text_column", {"columns": ["id", "text"]}),
        (lambda hub: hub.files[DATASET].update({"data/b.parquet": b"PAR1 no"}), {}, "not_parquet", {}),
        (
            lambda hub: hub.add(DATASET, {"train-00001-of-00003.jsonl": b"", "train-00000-of-00003.jsonl": b""}),
            {}, "missing_shard", {"missing": [2], "total": 3},
        ),
        (lambda hub: hub.interrupted.update({"data/a.parquet": 10**6}), {}, "no_download", {"dataset": DATASET}),
    ],
)  # fmt: skip
def test_what_a_dataset_lacks_is_an_error(change, fields, code, data, hub, tmp_path):
    change(hub)
    with raises(code, **data):
        text(**{"dataset": DATASET} | fields).open_corpus()
    assert [path for path in tmp_path.glob("cache/text/*") if path.is_dir()] == []


def test_a_download_continues_after_a_broken_connection(hub):
    hub.interrupted.update({"data/a.parquet": 2})
    task = text(dataset=DATASET)
    assert sorted(all_documents(task.open_corpus())) == sorted(DOCUMENTS)


def test_a_file_that_is_gone_after_it_was_listed_is_an_error_until_it_is_back(hub):
    task = text(dataset=DATASET)
    task.data_source()  # lists the files
    whole = hub.files[DATASET].pop("data/b.parquet")
    with raises("no_such_file"):
        task.open_corpus()
    hub.files[DATASET]["data/b.parquet"] = whole
    assert sorted(all_documents(task.open_corpus())) == sorted(DOCUMENTS)


def test_a_tokenizer_of_the_hub(hub, tmp_path):
    saved = Path(saved_tokenizer(tmp_path))
    hub.add("owner/model", {"tokenizer.json": saved.read_bytes()})
    task = text(dataset=DATASET, tokenizer="owner/model@v1")
    assert task.open_corpus().tokenizer.digest == TextTokenizer.load(saved).digest
    hub.refused["owner/gated"] = "GatedRepo"
    with raises("gated_tokenizer", tokenizer="owner/gated"):
        text(dataset=DATASET, tokenizer="owner/gated").open_corpus()
