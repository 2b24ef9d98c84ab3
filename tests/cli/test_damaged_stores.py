"""Stores in which each file of a run is damaged in each way that differs, one run for each: `store check --repair` and
`run` lead back to the table of an undamaged store."""

import itertools
import re
import resource
import shutil

import pytest

from cope_sweep.config import expand, load_ablation
from tests.cli.conftest import TINY, Shell
from tests.helpers.damages import DAMAGES, empty, folder, garble, missing

FILES = ("spec.json", "state.json", "result.json")
WITH_CHECKSUMS = ("curve.jsonl", "checkpoint/config.json", "checkpoint/model.safetensors")
"""Their content is only compared with a checksum, which any other content fails alike."""

LOSSES = [
    *itertools.product(FILES, DAMAGES),
    *itertools.product(WITH_CHECKSUMS, (empty, garble, missing, folder)),
    ("checkpoint", missing),
    ("checkpoint", lambda path: (shutil.rmtree(path), path.write_bytes(b"a file"))),
    (".", missing),
]


def rows(shell):
    return shell.json("table", "tiny")["rows"]


@pytest.mark.slow
def test_every_loss_is_repaired_and_trained_again(shell):
    shell.write("tiny", TINY.replace("seeds: [0, 1]", f"seeds: {list(range(len(LOSSES)))}").replace(", none: []", ""))
    shell("run", "tiny", "--local", "--no-mlflow")
    before = rows(shell)
    runs = [run.run_id for run in expand(load_ablation(shell.folder / "ablations" / "tiny.yaml")).runs]
    for run_id, (name, kind) in zip(runs, LOSSES, strict=True):
        kind(shell.folder / "store" / "runs" / run_id / name)

    found = shell.json("store", "check", "--checksums", "--repair", code=1)
    harmless = {run_id for run_id, loss in zip(runs, LOSSES, strict=True) if loss == ("state.json", missing)}
    assert {problem["item"] for problem in found} == set(runs) - harmless
    spec_lost = {run_id for run_id, (name, _) in zip(runs, LOSSES, strict=True) if name == "spec.json"}
    assert {problem["item"] for problem in shell.json("store", "check", "--checksums", code=1)} == spec_lost
    statuses = {run["run_id"]: run for run in shell.json("status", "tiny")["runs"]}
    whole = {run_id for run_id, (name, _) in zip(runs, LOSSES, strict=True) if name == "state.json"}
    assert {run_id for run_id in runs if statuses[run_id]["status"] == "finished"} == whole
    for run_id, loss in zip(runs, LOSSES, strict=True):
        unmarked = {(".", missing): "pending"}  # as their files say
        assert run_id in whole or statuses[run_id]["status"] == unmarked.get(loss, "interrupted")
        assert run_id in whole or loss in [(".", missing), ("result.json", missing)] or statuses[run_id]["message"]
    shell("store", "check", "--repair", code=1 if spec_lost else 0)  # changes nothing of it
    assert {run["run_id"]: run["status"] for run in shell.json("status", "tiny")["runs"]} == {
        run_id: run["status"] for run_id, run in statuses.items()
    }

    outcome = shell.json("run", "tiny", "--local", "--no-mlflow")["sweep"]
    kept = whole | spec_lost  # the next attempt writes the spec again, and finds the result
    assert (outcome["trained"], outcome["reused"]) == (len(runs) - len(kept), len(kept))
    assert rows(shell) == before
    assert shell.json("store", "check", "--checksums") == []
    assert shell.json("run", "tiny", "--local", "--no-mlflow")["sweep"]["sweep_id"] is None


@pytest.mark.slow
def test_run_notices_what_is_missing(trained, tmp_path):
    shell = Shell(tmp_path)
    shutil.copytree(trained.folder / "store", shell.folder / "store")
    before = rows(shell)
    ids = [run["run_id"] for run in shell.json("status", "tiny")["runs"]]  # other tests may have trained more
    first, second, third, fourth = (shell.folder / "store" / "runs" / run_id for run_id in ids)
    shutil.rmtree(first)
    shutil.rmtree(second / "checkpoint")
    folder(third / "curve.jsonl")
    garble(fourth / "result.json")
    shell.refuses("damaged_file", "perplexity", second.name, "--tokens", "1 2 3", run_id=second.name)
    out, err = shell("run", "tiny", "--local", "--no-mlflow")
    assert "note: 4 finished runs have lost files, and what is lost is trained again: " in " ".join(err.split())
    assert "Nothing to train" not in out
    assert rows(shell) == before
    assert shell.json("store", "check", "--checksums") == []


@pytest.mark.slow
def test_an_unfinished_run_without_its_spec_is_trained(trained, tmp_path):
    """The index forgets it, and counts its attempts from 1 again; its folder does not."""
    shell = Shell(tmp_path)
    shutil.copytree(trained.folder / "store", shell.folder / "store")
    before = rows(shell)
    for path in (shell.folder / "store" / "runs").iterdir():
        (path / "result.json").unlink()
        (path / "spec.json").unlink()
        (path / "state.json").write_text('{"status": "interrupted", "attempt": 3}')
    (shell.folder / "store" / "index.db").unlink()
    shell("run", "tiny", "--local", "--no-mlflow", "--time-budget", "60s")
    assert rows(shell) == before


@pytest.mark.slow
@pytest.mark.parametrize("size_kb", [135, pytest.param(200, marks=pytest.mark.thorough)])
def test_a_full_disk_ends_a_sweep_in_one_line(shell, size_kb):
    """No file may become larger: the index cannot be made, or not be written any more."""
    limits = (size_kb * 1024,) * 2
    process = shell.start(
        "run", "tiny", "--local", "--no-mlflow", "--set", f"seeds={list(range(40))}",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )  # fmt: skip
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert re.fullmatch(
        r"error: the index sqlite:.*index.db cannot be used: .*run the same command again", last_line(err)
    )
    assert "Traceback" not in err


def last_line(text):
    return text.splitlines()[-1]
