"""Code: which files are read, into which split, and the default corpus."""

import pytest

from cope_sweep.tasks import Code
from tests.helpers.errors import raises

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path):
    for index in range(80):
        path = tmp_path / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function_{index}(x):\n    return x + {index}\n" * 3)
    return tmp_path


def own(path, **fields):
    defaults = {"corpus": "mine", "folder": str(path), "tokens": 32, "vocabulary": 300}
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


def test_the_content_of_a_file_decides_its_split(folder):
    """A copy is in the split of its original, so that no test file is trained on; moving a file changes nothing."""
    task = own(folder)
    before = names(task)
    for path in list(folder.rglob("*.py")):
        (folder / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    after = names(task)
    for split, paths in before.items():
        assert sorted(after[split]) == sorted([*paths, *(f"copy_of_{name}" for name in paths)])
    train, test = (set(after[split]) for split in ("train", "test"))
    assert not train & test


def test_the_first_folders_of_a_path_can_decide_its_split(folder):
    """So all files of a project are in one split, and its other folders may be in another."""
    for index in range(40):
        (folder / f"project{index}" / "inner").mkdir(parents=True)
        for name in ("a.py", "inner/b.py"):
            (folder / f"project{index}" / name).write_text(f"{name[-4]} = {index}\n")
    of_projects, of_inner = (
        {
            path.relative_to(folder): split
            for split, files in own(folder, split_folders=depth).files().items()
            for path in files.paths
        }
        for depth in (1, 2)
    )
    assert set(of_projects.values()) == {"train", "validation", "test"}
    assert len({(path.parts[0], split) for path, split in of_projects.items()}) == 47
    assert {path for path in of_projects if "inner" not in path.parts and of_inner[path] != of_projects[path]} == set()
    assert {path for path in of_projects if of_inner[path] != of_projects[path]}


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


@pytest.mark.slow
def test_the_standard_library_is_the_default_corpus():
    """All of it is UTF-8, and long enough for the paper's contexts of 4096 tokens, at five bytes a token."""
    files = Code().files()
    sizes = {split: sum(len(path.read_text("utf-8").encode()) for path in each.paths) for split, each in files.items()}
    assert sizes["train"] > 5_000_000
    assert min(sizes[split] for split in ("validation", "test")) >= 8 * 4096 * 5
    paths = [path for each in files.values() for path in each.paths]
    assert any(b"class OrderedDict(dict):" in path.read_bytes() for path in paths if path.parent.name == "collections")


@pytest.mark.parametrize(
    ("fields", "code", "data"),
    [
        ({"corpus": "../elsewhere"}, "invalid_corpus_name", {"value": "../elsewhere"}),
        ({"corpus": "python-stdlib"}, "invalid_value", {"key": "task.corpus", "value": "python-stdlib"}),
        ({"suffixes": (".rs",)}, "empty_split", {"suffixes": [".rs"], "split": "train"}),
        ({"validation_share": 0.5}, "less_than", {"key": "validation_share"}),
        ({"folder": None}, "no_corpus", {"corpus": "mine"}),
        ({"folder": "/nowhere"}, "no_such_file", {"file": "/nowhere", "corpus": "mine"}),
    ],
)
def test_unusable_corpora_are_errors(fields, code, data, folder):
    with raises(code, **data):
        own(folder, **fields).prepare()


def test_an_error_names_a_file_that_is_not_utf8(folder):
    (folder / "latin.py").write_bytes("# café".encode("latin-1"))
    with raises("not_utf8", file=str(folder / "latin.py")):
        own(folder).prepare()


def test_sizes_of_the_paper():
    task = Code()
    assert (task.vocabulary_size, task.length("train"), task.context) == (32000, 4096, 4096)
