"""A sweep records the commit of this package's own working tree, and of no other."""

import subprocess
from pathlib import Path

import pytest

from cope_sweep.store import provenance

MODULE = "cope_sweep/store/provenance.py"
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(folder: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def place(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put the module below a folder."""
    path = folder / MODULE
    path.parent.mkdir(parents=True)
    path.write_text("")
    patch.setattr(provenance, "__file__", str(path))


def test_the_commit_is_that_of_the_working_tree_that_contains_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    place(tmp_path, monkeypatch)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_commit() == commit
    (tmp_path / MODULE).write_text("changed")
    assert provenance.git_commit() == f"{commit}-dirty"


@pytest.mark.parametrize("ignored", ["", ".venv\n"])
def test_a_package_in_the_environment_of_another_project_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text(ignored)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    place(tmp_path / ".venv/lib/python3.13/site-packages", monkeypatch)
    assert provenance.git_commit() is None


def test_a_package_outside_of_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path, monkeypatch)
    assert provenance.git_commit() is None
