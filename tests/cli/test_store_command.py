"""`cope-sweep store rebuild` and `check`, on stores that differ from their index in every way."""

import os

import pytest

from cope_sweep.store import Store
from tests.read.tables.ablations import begin, finish


def test_rebuild_makes_the_same_index_again(stored):
    before = stored.json("runs")["runs"], stored.json("status")
    os.remove(stored.folder / "store" / "index.db")
    report = stored.json("store", "rebuild")
    assert (report["runs"], report["sweeps"], report["removed"]) == (4, 1, 0)
    assert list(report["damaged"]) == [stored.runs[3].run_id]
    after = stored.json("runs")["runs"], stored.json("status")
    assert [drop(run) for run in after[0]] == [drop(run) for run in before[0]]
    assert after[1] == before[1]


def drop(run):
    return {key: value for key, value in run.items() if key != "sweep_id"}


def test_rebuild_says_what_is_damaged(stored):
    out, _ = stored("store", "rebuild")
    assert "4 runs and 1 sweeps in the index sqlite:///" in out
    assert stored.runs[3].run_id in out
    assert "not valid JSON" in " ".join(out.split())
    assert "trains damaged runs again" in out


def test_check_of_a_good_store(stored):
    finish(stored.store, stored.runs[3], {})
    assert stored.json("store", "check", "--checksums") == []
    assert stored("store", "check")[0] == "nothing differs, nothing is damaged\n"


def test_check_names_each_difference_and_its_way_out(stored):
    finished, failed, stopped, damaged = (stored.store.run(run.run_id) for run in stored.runs)
    stored.store.index.delete([failed.run_id])
    (stopped.path / "state.json").write_text('{"status": "failed", "attempt": 1}')
    (finished.checkpoint / "model.safetensors").write_bytes(b"other")
    problems = stored.json("store", "check", code=1)
    assert {problem["item"] for problem in problems} == {failed.run_id, stopped.run_id, damaged.run_id}
    ways_out = {problem["item"]: problem["way_out"] for problem in problems}
    assert "cope-sweep store rebuild" in ways_out[failed.run_id]
    assert "cope-sweep run" in ways_out[damaged.run_id]
    with_content = stored.json("store", "check", "--checksums", code=1)
    assert {problem["item"] for problem in with_content} - {problem["item"] for problem in problems} == {
        finished.run_id
    }
    out, _ = stored("store", "check", "--checksums", code=1)
    assert "has changed since the run was finished" in " ".join(out.split())
    stored("store", "rebuild")
    assert {problem["item"] for problem in stored.json("store", "check", code=1)} == {damaged.run_id}


def test_a_run_without_an_index_row_is_found(stored):
    os.rename(stored.folder / "store" / "runs" / stored.runs[0].run_id, stored.folder / "away")
    (problem,) = [each for each in stored.json("store", "check", code=1) if each["item"] == stored.runs[0].run_id]
    assert problem["problem"] == "in the index, but without a folder"
    assert stored.json("store", "rebuild")["removed"] == 1


def test_a_store_without_an_index_is_indexed_by_the_first_command(stored):
    os.remove(stored.folder / "store" / "index.db")
    assert stored.json("status", "tiny")["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "damaged": 1}


def test_runs_in_training_are_left_alone(stored):
    store = Store(stored.folder / "store")
    row = store.index.records([stored.runs[1].run_id])[stored.runs[1].run_id]
    assert row.status == "failed"
    from cope_sweep.store.reading import read_run

    folder = begin(store, stored.runs[1])
    store.index.acquire(read_run(folder), "sweep", 60.0)
    stored("store", "rebuild")
    assert stored.json("status", "tiny")["counts"]["running"] == 1


@pytest.mark.parametrize("command", ["rebuild", "check"])
def test_a_folder_that_is_no_store(shell, command):
    _, err = shell("store", command, code=2)
    assert "is no store" in " ".join(err.split())
