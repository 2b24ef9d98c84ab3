"""The store: run folders, their status, atomic files."""

import json
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading

import pytest

from cope_sweep.store import RunFolder, Store, StoreError
from cope_sweep.store.artifacts import read_json, replacing, write_json
from tests.tiny import tiny_run

RUN = tiny_run()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


@pytest.fixture
def folder(store):
    return store.run(RUN.run_id)


def test_a_run_s_life(store, folder):
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
    assert [run.run_id for run in store.runs()] == [RUN.run_id]


def test_the_spec_of_the_first_attempt_is_kept(folder):
    with folder.lock():
        folder.begin(RUN, "here")
        created = folder.spec["created_ms"]
        folder.begin(RUN, "here")
    assert folder.spec["created_ms"] == created
    assert folder.spec["spec"] == RUN.model_dump(mode="json")


@pytest.mark.slow
def test_one_process_holds_the_lock_until_it_dies(folder):
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from cope_sweep.store.artifacts import RunFolder
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


def test_an_incomplete_line_of_the_curve_is_skipped(folder):
    with folder.lock():
        folder.log({"step": 1, "loss": 2.0})
        with (folder.path / "curve.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
    assert folder.curve() == [{"step": 1, "loss": 2.0}]


def test_rewind_drops_later_rows(folder):
    with folder.lock():
        for step in (1, 2, 3):
            folder.log({"step": step})
        folder.rewind(2)
        folder.log({"step": 3})
    assert [row["step"] for row in folder.curve()] == [1, 2, 3]


def test_a_row_with_nan_is_refused(folder):
    with folder.lock(), pytest.raises(ValueError, match="not JSON compliant"):
        folder.log({"step": 1, "loss": float("nan")})


def test_an_error_while_a_file_is_replaced_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_while_a_checkpoint_is_written_keeps_the_old_checkpoint(folder):
    with folder.lock():
        with folder.writing_checkpoint() as path:
            (path / "config.json").write_text("1")
        with pytest.raises(RuntimeError), folder.writing_checkpoint() as path:
            (path / "config.json").write_text("2")
            raise RuntimeError
    assert (folder.checkpoint / "config.json").read_text() == "1"
    assert not [name for name in os.listdir(folder.path) if name.startswith(".checkpoint")]


def test_a_crash_while_json_is_written_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, "before")
    child = os.fork()
    if child == 0:
        # The disk is "full" in the middle of the file.
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_json(path, list(range(10_000)))
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert read_json(path) == "before"
    assert os.listdir(tmp_path) == ["file.json"]


def test_a_reader_never_sees_a_partial_file(tmp_path):
    """A writer replaces a file of 100 kB; each read has to return one of the two values."""
    path = tmp_path / "file.json"
    values = [[number] * 20_000 for number in (1, 2)]
    write_json(path, values[0])
    done = threading.Event()

    def write():
        for turn in range(60):
            write_json(path, values[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert read_json(path) in values
    writer.join()


def test_files_can_be_read_by_other_users(folder):
    """Temporary files are private (0600, 0700); what they replace is not. The umask has no influence."""
    before = os.umask(0o077)
    try:
        with folder.lock():
            folder.begin(RUN, "here")
            folder.log({"step": 1})
            folder.rewind(1)
            with folder.writing_checkpoint() as path:
                (path / "config.json").write_text("1")
            folder.finish({}, {})
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((folder.path / name).stat().st_mode) for name in os.listdir(folder.path)}
    assert modes.pop("checkpoint") == 0o755
    assert modes.pop("lock") == 0o600  # not replaced: the umask applies
    assert modes == dict.fromkeys(["spec.json", "state.json", "curve.jsonl", "result.json"], 0o644)


class FinishesWhileItIsChecked(RunFolder):
    """A run whose process writes the result and ends between two checks of its status."""

    def is_locked(self):
        self.finish({"a": 1.0}, {})
        return False


def test_a_result_that_appears_during_the_status_check_counts(folder):
    with folder.lock():
        folder.begin(RUN, "here")
    assert FinishesWhileItIsChecked(folder.path).status == "finished"


@pytest.mark.parametrize("name", ["..", "../../etc", "ABCDEF0123456789", "0123", "0123456789abcdef/", ""])
def test_only_run_ids_are_accepted(store, name):
    with pytest.raises(StoreError, match="not a run id"):
        store.run(name)


def test_a_store_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written \(Not a directory\).*--store"):
        Store(tmp_path / "file" / "store", create=True)


def test_broken_json_names_its_file(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(StoreError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")


def test_sweeps_are_listed_in_order(store):
    store.write_sweep("20260101-000000-aa", {"sweep_id": "20260101-000000-aa"})
    store.write_sweep("20250101-000000-bb", {"sweep_id": "20250101-000000-bb"})
    assert [sweep["sweep_id"] for sweep in store.sweeps()] == ["20250101-000000-bb", "20260101-000000-aa"]
    assert json.loads((store.root / "sweeps" / "20250101-000000-bb.json").read_text())
