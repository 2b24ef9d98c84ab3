"""Every command answers for a store in which each file of a run is damaged in each way, one run for each."""

import itertools
import os
import shutil

import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Store
from tests.cli.conftest import TINY
from tests.results.ablations import fail, finish, stop

FILES = ("spec.json", "state.json", "result.json", "curve.jsonl", "checkpoint/config.json", "checkpoint")


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def wrong_type(path):
    path.write_text('["a", {"metrics": null}]\n')


def other_keys(path):
    path.write_text('{"status": 7, "metrics": {"a": "b"}, "facts": 3, "spec": [], "step": "x"}\n')


def missing(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder(path):
    path.unlink()
    path.mkdir()


KINDS = (empty, cut, garble, wrong_type, other_keys, missing, folder)
DAMAGES = [(name, kind) for name, kind in itertools.product(FILES, KINDS) if name != "checkpoint" or kind is missing]


@pytest.fixture
def damaged(shell):
    """A store of runs with all damages, a third of them each finished, failed and stopped before, and one good run."""
    seeds = len(DAMAGES) + 1
    shell.write("tiny", TINY.replace("seeds: [0, 1]", f"seeds: {list(range(seeds))}"))
    plan = expand(load_ablation(shell.folder / "ablations" / "tiny.yaml"))
    store = Store(shell.folder / "store", create=True)
    shell.good, *shell.damaged = (run.run_id for run in plan.rows[0].runs)
    finish(store, plan.rows[0].runs[0], {"in_dist/token_error": 12.5})
    for number, (run, (name, kind)) in enumerate(zip(plan.rows[0].runs[1:], DAMAGES, strict=True)):
        write = (finish, fail, stop)[number % 3]
        write(store, run, *([{"in_dist/token_error": 99.0}] if write is finish else []))
        path = store.run(run.run_id).path / name
        if path.exists():
            kind(path)
    return shell


@pytest.mark.slow
@pytest.mark.parametrize("rebuilt", [False, True])
def test_every_command_answers(damaged, rebuilt):
    if rebuilt:
        os.remove(damaged.folder / "store" / "index.db")
    report = damaged.json("store", "rebuild") if rebuilt else None
    statuses = {run["run_id"]: run for run in damaged.json("status", "tiny")["runs"]}
    assert statuses[damaged.good]["status"] == "finished"
    if report:
        assert {run_id for run_id, run in statuses.items() if run["status"] == "damaged"} == set(report["damaged"])
        assert all(statuses[run_id]["message"] for run_id in report["damaged"])
        assert len(report["damaged"]) >= 10
    for words in (
        ["list"],
        ["plan", "tiny"],
        ["report", "tiny"],
        ["runs", "--limit", "1000"],
        ["status"],
        ["store", "rebuild"],
    ):
        damaged.json(*words)
    known = {run["run_id"]: run["status"] for run in damaged.json("status", "tiny")["runs"]}
    for run_id in damaged.damaged:
        if known[run_id] == "pending":  # unfinished and without a spec: as if it had never been begun
            assert damaged.json("status", run_id, code=2)["error"]["type"] == "NotFoundError"
        else:
            assert damaged.json("status", run_id)["status"] == known[run_id]
    found = {problem["item"] for problem in damaged.json("store", "check", "--checksums", code=1)}
    assert damaged.good not in found
    row = damaged.json("report", "tiny")["rows"][0]
    assert row["counts"]["finished"] == row["metrics"]["in_dist/token_error"]["n"]
