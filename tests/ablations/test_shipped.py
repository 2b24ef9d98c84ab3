import json
import shutil
import subprocess

from tests.helpers.shipped import PINNED, ROOT, shipped_files


def checkout(folder):
    (folder / PINNED).parent.mkdir(parents=True)
    shutil.copy(ROOT / PINNED, folder / PINNED)
    (folder / "ablations").mkdir()
    for name in ("quickstart", "mine"):  # the reader's file, as README.md asks for it
        shutil.copy(ROOT / "ablations" / "quickstart.yaml", folder / "ablations" / f"{name}.yaml")
    return folder


def test_a_file_that_git_does_not_track_is_not_shipped(tmp_path):
    root = checkout(tmp_path)
    for words in (["init", "-q"], ["add", "ablations/quickstart.yaml"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    assert shipped_files(root) == [root / "ablations" / "quickstart.yaml"]
    subprocess.run(["git", "add", "ablations/mine.yaml"], cwd=root, check=True)  # the project's next file
    assert [path.stem for path in shipped_files(root)] == ["mine", "quickstart"]


def test_without_git_the_pinned_files_are_shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    root = checkout(tmp_path / "archive")
    assert shipped_files(root) == [root / "ablations" / "quickstart.yaml"]


def test_the_files_of_this_repository_are_pinned():
    assert {path.stem for path in shipped_files()} == set(json.loads((ROOT / PINNED).read_text("utf-8")))
