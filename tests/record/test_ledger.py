import json
import os
import subprocess
import sys
import textwrap

import pytest

from cope_sweep.record import Ledger, StoreError
from cope_sweep.record.ledger import read_json, replacing
from tests.tiny import tiny_run

RUN = tiny_run()


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "store", create=True)


@pytest.fixture
def folder(ledger):
    return ledger.run(RUN.run_id)


def test_a_run_s_life(ledger, folder):
    assert folder.status == "pending"
    with folder.lock() as held:
        assert held
        folder.begin(RUN, "here")
        assert folder.status == "running"
        folder.set_state("interrupted")
    assert folder.status == "interrupted"
    with folder.lock():
        folder.begin(RUN, "there")
        folder.fail("ValueError: no", "Traceback")
    assert folder.status == "failed"
    assert folder.state["attempt"] == 2
    with folder.lock():
        folder.begin(RUN, "there")
        assert "traceback" not in folder.state
        folder.finish({"a": 1.0}, {"steps": 6})
    assert folder.status == "finished"
    assert folder.result == {"metrics": {"a": 1.0}, "facts": {"steps": 6}}
    assert [run.run_id for run in ledger.runs()] == [RUN.run_id]


def test_the_first_beginning_stands(folder):
    with folder.lock():
        folder.begin(RUN, "here")
        created = folder.spec["created_ms"]
        folder.begin(RUN, "here")
    assert folder.spec["created_ms"] == created
    assert folder.spec["spec"] == RUN.model_dump(mode="json")


def test_one_process_at_a_time_and_the_lock_dies_with_it(folder):
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from cope_sweep.record.ledger import RunFolder
        with RunFolder(Path({str(folder.path)!r})).lock() as held:
            print(held, flush=True)
            time.sleep(60)
        """)
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline().strip() == "True"
        assert folder.is_locked()
        with folder.lock() as held:
            assert not held
    finally:
        other.kill()
        other.wait()
    assert not folder.is_locked()
    with folder.lock() as held:
        assert held


def test_a_line_cut_short_is_left_out(folder):
    with folder.lock():
        folder.log({"step": 1, "loss": 2.0})
        with (folder.path / "curve.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
    assert folder.curve() == [{"step": 1, "loss": 2.0}]


def test_rewinding_drops_what_is_trained_again(folder):
    with folder.lock():
        for step in (1, 2, 3):
            folder.log({"step": step})
        folder.rewind(2)
        folder.log({"step": 3})
    assert [row["step"] for row in folder.curve()] == [1, 2, 3]


def test_a_row_that_is_not_a_number_is_refused(folder):
    with folder.lock(), pytest.raises(ValueError, match="not JSON compliant"):
        folder.log({"step": 1, "loss": float("nan")})


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_checkpoints_appear_whole_or_not_at_all(folder):
    with folder.lock():
        with folder.writing_checkpoint() as path:
            (path / "config.json").write_text("1")
        with pytest.raises(RuntimeError), folder.writing_checkpoint() as path:
            (path / "config.json").write_text("2")
            raise RuntimeError
    assert (folder.checkpoint / "config.json").read_text() == "1"
    assert not [name for name in os.listdir(folder.path) if name.startswith(".checkpoint")]


@pytest.mark.parametrize("name", ["..", "../../etc", "ABCDEF0123456789", "0123", "0123456789abcdef/", ""])
def test_only_run_ids_are_paths(ledger, name):
    with pytest.raises(StoreError, match="not a run id"):
        ledger.run(name)


def test_a_store_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written \(Not a directory\).*--store"):
        Ledger(tmp_path / "file" / "store", create=True)


def test_broken_json_names_its_file(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(StoreError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")


def test_sweeps_are_listed_in_order(ledger):
    ledger.write_sweep("20260101-000000-aa", {"sweep_id": "20260101-000000-aa"})
    ledger.write_sweep("20250101-000000-bb", {"sweep_id": "20250101-000000-bb"})
    assert [sweep["sweep_id"] for sweep in ledger.sweeps()] == ["20250101-000000-bb", "20260101-000000-aa"]
    assert json.loads((ledger.root / "sweeps" / "20250101-000000-bb.json").read_text())
