"""The corpus of installed packages: which files it reads, and what it refuses."""

import pytest

from cope_sweep.tasks import Code
from cope_sweep.text.packages import digest, installed_version, package_files, pinned_packages, sources
from tests.helpers.errors import raises


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that writes a package with files into a folder of packages, and returns what is to be pinned of it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, split, files, version="1.0"):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file, text in files.items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {name: {"version": version, "licence": "MIT", "split": split, "sha256": digest(sources(name))}}

    return write


def names(splits):
    return {split: [path.name for path in files.paths] for split, files in splits.items()}


def test_a_package_is_in_one_split_without_tests_generated_and_empty_files(install):
    pinned = install("one", "train", {"one/b.py": "b = 1\n", "one/a.py": "a = 1\n", "one/empty.py": ""})
    pinned |= install(
        "two", "validation", {"two/tests/t.py": "t = 1\n", "two/version.py": "v = 1\n", "two/v.py": "w = 1\n"}
    )
    pinned |= install("three", "test", {"three/x.py": "x = 1\n", "three/x.c": "int x;\n", "../bin/y.py": "y = 1\n"})
    splits = package_files(pinned)
    assert names(splits) == {"train": ["a.py", "b.py"], "validation": ["v.py"], "test": ["x.py"]}
    assert not any(files.one_document for files in splits.values())


def test_what_a_held_out_file_has_is_never_trained_on(install):
    """A vendored copy has other imports, comments and blank lines."""
    copy = "# vendored\nfrom . import b\n\ndef f(x):\n    # twice\n    return 2 * x\n"
    pinned = install("vendors", "train", {"vendors/own.py": "y = 1\n", "vendors/copied.py": copy})
    pinned |= install("original", "test", {"original/f.py": "import b\ndef f(x):\n    return 2 * x\n"})
    pinned |= install("near", "validation", {"near/f.py": "def f(x):\n    return 3 * x\n", "near/g.py": copy})
    assert names(package_files(pinned)) == {"train": ["own.py"], "validation": ["f.py"], "test": ["f.py"]}


def test_other_versions_and_changed_files_are_errors(install, tmp_path):
    pinned = install("one", "train", {"one/a.py": "a = 1\n"})
    with raises("other_packages", installed={"missing": None, "one": "1.0"}):
        package_files({"one": pinned["one"] | {"version": "2.0"}, "missing": pinned["one"]})
    (tmp_path / "one" / "a.py").write_text("a = 2\n")
    with raises("changed_packages", packages=["one"]):
        package_files(pinned)


def test_the_pinned_packages_hold_out_some_and_name_licences():
    pinned = pinned_packages()
    assert {package["split"] for package in pinned.values()} == {"train", "validation", "test"}
    assert all(package["licence"] and len(package["sha256"]) == 64 for package in pinned.values())


@pytest.mark.slow
def test_this_environment_has_the_packages_or_is_told_which_to_install():
    other = {name for name, package in pinned_packages().items() if installed_version(name) != package["version"]}
    if other:  # an environment that was resolved later
        with raises("other_packages") as error:
            package_files()
        assert error.value.data["installed"].keys() == other
        return
    splits = package_files()
    assert splits["train"].size_bytes > 200_000_000
    held_out = {path.read_bytes() for path in splits["test"].paths}
    sizes_bytes = set(map(len, held_out))  # reading the other 200 MB again would take seconds
    of_these_sizes = (path for path in splits["train"].paths if path.stat().st_size in sizes_bytes)
    assert [path for path in of_these_sizes if path.read_bytes() in held_out] == []


@pytest.mark.parametrize("field", [{"suffixes": (".c",)}, {"split_folders": 1}, {"exclude": ()}, {"test_share": 0.1}])
def test_fields_without_effect_are_errors(field):
    with raises("no_effect", key=f"task.{next(iter(field))}"):
        Code(corpus="python-packages", **field)
