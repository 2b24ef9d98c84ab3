"""Code: which files, which split, in which order."""

import pytest
from pydantic import ValidationError

from cope_sweep.tasks import Code
from cope_sweep.text import TextError

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path):
    for index in range(80):
        path = tmp_path / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function_{index}(x):\n    return x + {index}\n" * 3)
    return tmp_path


def own(place, **fields):
    defaults = {"corpus": "mine", "folder": str(place), "tokens": 32, "vocabulary": 300}
    return Code(**defaults | {"validation_share": 0.15, "test_share": 0.15} | fields)


def names(task):
    return {split: [path.name for path in files.paths] for split, files in task.files().items()}


def every_name(task):
    return [name for listed in names(task).values() for name in listed]


def test_every_file_is_in_one_split(folder):
    splits = names(own(folder))
    assert sorted(every_name(own(folder))) == sorted(f"module{i}.py" for i in range(80))
    # 12 ± 3.2 of 80 files for each held-out split
    assert all(2 <= len(splits[split]) <= 22 for split in ("validation", "test"))


def test_the_split_is_the_content_s(folder):
    """A copy goes where its original is, so that nothing that is trained on is tested on; and a move changes nothing."""
    task = own(folder)
    before = names(task)
    for path in list(folder.rglob("*.py")):
        (folder / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    after = names(task)
    for split, paths in before.items():
        assert sorted(after[split]) == sorted([*paths, *(f"copy_of_{name}" for name in paths)])
    train, test = (set(after[split]) for split in ("train", "test"))
    assert not train & test


def test_files_left_out(folder):
    for name in (
        "test/module.py",
        "tests/module.py",
        ".hidden/module.py",
        "site-packages/module.py",
        "module.txt",
        "__init__.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x = 1\n" if name != "__init__.py" else "")
    assert len(every_name(own(folder))) == 80
    assert "module.txt" in every_name(own(folder, suffixes=(".py", ".txt")))
    assert len(every_name(own(folder, exclude=()))) == 84
    assert not any("module7" in name for name in every_name(own(folder, exclude=("module7*",))))


def test_a_file_is_a_document(folder):
    task = own(folder)
    corpus = task.open_corpus()
    for split, files in task.files().items():
        tokens = corpus.splits[split].tokens_L
        assert (tokens == corpus.tokenizer.end_of_text).sum() == len(files.paths)
        assert b"".join(corpus.tokenizer.pieces(tokens)) == b"".join(path.read_bytes() for path in files.paths)


def test_the_standard_library_is_there_to_read():
    """…on every machine; UTF-8 all of it, and long enough for the paper's contexts."""
    task = Code(vocabulary=2048)
    task.prepare()
    corpus = task.open_corpus()
    assert corpus.splits["train"].size_bytes > 5_000_000
    assert min(len(task.windows(split, 4096, 4096)) for split in ("validation", "test")) >= 8
    assert corpus.tokenizer.ids == 2048
    assert b"class OrderedDict(dict):" in b"".join(
        path.read_bytes() for path in task.files()["train"].paths
    ) + b"".join(path.read_bytes() for split in ("validation", "test") for path in task.files()[split].paths)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"corpus": "python-stdlib"}, ValidationError, "name your corpus, as task.corpus=my-code"),
        ({"suffixes": (".rs",)}, TextError, r"in \.rs none fell to the split 'train'"),
        ({"validation_share": 0.5}, ValidationError, "less than 0.5"),
        ({"folder": None}, TextError, r"put it in \$COPE_SWEEP_DATA/mine"),
        ({"folder": "/nowhere"}, TextError, "/nowhere: no such folder; task.folder names that of mine"),
    ],
)
def test_what_cannot_be_is_said(fields, error, message, folder):
    with pytest.raises(error, match=message):
        own(folder, **fields).prepare()


def test_a_file_that_is_not_utf8_is_named(folder):
    (folder / "latin.py").write_bytes("# café".encode("latin-1"))
    with pytest.raises(TextError, match=r"latin\.py: not UTF-8 text .* or leave it out"):
        own(folder).prepare()


def test_sizes_at_the_paper_s():
    task = Code()
    assert (task.vocabulary_size, task.length("train"), task.context) == (32000, 4096, 4096)
