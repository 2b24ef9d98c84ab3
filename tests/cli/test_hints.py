"""Commands that messages name work as they are printed: from the same folder, with the same file, values and store."""

import shlex
import shutil

import pytest

from cope_sweep.cli.options import STORE
from cope_sweep.store import Store
from cope_sweep.store.store import DEFAULT_FOLDER


@pytest.fixture
def moved(shell):
    """The shell, with the ablation in a file of another folder, which has a blank in its name."""
    (shell.folder / "my files").mkdir()
    shutil.copy(shell.folder / "ablations" / "tiny.yaml", shell.folder / "my files" / "own.yaml")
    return shell


def hint_of(message):
    """The words of the command at the end of a message."""
    return shlex.split(message.rpartition("cope-sweep ")[2])


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (["my files/own.yaml"], ["--store", "other"]),
        (["my files/own.yaml", "--set", "seeds=[3]"], []),
        (["own", "--ablations", "my files"], []),
        (["tiny"], ["--store", "other"]),
        (["tiny"], []),
    ],
)
@pytest.mark.parametrize("command", [["figure"], ["figure", "--kind", "maps"]], ids=" ".join)
def test_the_hint_without_results_trains_them(moved, command, named, options):
    _, message = moved(*command, *named, *options, code=2)
    store = ["--store", str(moved.folder / "other")] if options else []
    assert hint_of(message) == ["run", *named, *store]


@pytest.mark.slow
def test_the_steps_after_a_sweep_work(moved):
    out, _ = moved(
        "run", "my files/own.yaml", "--local", "--no-mlflow", "--store", "other", "--max-runs", "1", code=130
    )
    steps = [
        shlex.split(line.partition("cope-sweep ")[2].partition("   ")[0])
        for line in out.partition("Next:")[2].splitlines()
    ]
    report = next(words for words in steps if words[:1] == ["report"])
    assert "# " in moved(*report)[0]


def test_the_option_of_a_store(tmp_path, monkeypatch):
    assert STORE == DEFAULT_FOLDER
    monkeypatch.chdir(tmp_path)
    assert Store("store").option == []
    assert Store("other").option == ["--store", f"{tmp_path}/other"]
    assert Store("store", index="postgresql://u:secret@h/n").option == ["--index", "postgresql://***@h/n"]
    monkeypatch.setenv("COPE_SWEEP_INDEX", "postgresql://u:secret@h/n")
    assert Store("store", index="postgresql://u:secret@h/n").option == []
