"""The store: run folders, their status, atomic files."""

import json
import os
import resource
import stat
import time
from pathlib import Path

import pytest

from cope_sweep.store import AttemptWriter, Store
from cope_sweep.store.damage import find_damage
from cope_sweep.store.errors import FencedError
from cope_sweep.store.files import parse_json, write_bytes
from tests.helpers.errors import raises
from tests.helpers.processes import output_of
from tests.helpers.tiny import TINY, tiny_run
from tests.store.test_files import OTHERS

RUN = tiny_run()


@pytest.fixture
def folder(store):
    return store.run(RUN.run_id)


def test_a_run_s_life(folder):
    assert folder.status == "pending"
    own = folder.begin(RUN, "here")
    assert (own.number, folder.status) == (1, "running")
    own.set_state("interrupted")
    assert folder.status == "interrupted"
    own = folder.begin(RUN, "there")
    own.fail("ValueError: no", "Traceback")
    assert folder.status == "failed"
    assert folder.state["attempt"] == own.number == 2
    own = folder.begin(RUN, "there")
    assert "traceback" not in folder.state
    own.finish({"a": 1.0}, {"steps": 6})
    assert folder.status == "finished"
    result = folder.result
    assert abs(result.pop("ended_ms") - time.time() * 1000) < 60_000
    assert result == {"metrics": {"a": 1.0}, "facts": {"steps": 6}, "files": {}, "sweep_id": None}


def test_the_spec_of_the_first_attempt_is_kept(folder):
    folder.begin(RUN, "here")
    created = folder.spec["created_ms"]
    folder.begin(RUN, "here")
    assert folder.spec["created_ms"] == created
    assert folder.spec["spec"] == RUN.model_dump(mode="json")


def test_an_older_attempt_writes_nothing(folder):
    old = folder.begin(RUN, "old", 1)
    old.log({"step": 1, "loss": 2.0})
    folder.begin(RUN, "new", 2)
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    writes = [
        lambda: old.log({"step": 2}),
        lambda: old.rewind(0),
        lambda: old.set_state("interrupted"),
        lambda: old.fail("no", ""),
        lambda: old.finish({}, {}),
        lambda: old.begin(RUN, "old", 1),
    ]
    for write in writes:
        with raises("fenced", run_id=RUN.run_id, newest=2):
            write()
    for writing in (old.save_resume, old.save_checkpoint):
        with pytest.raises(FencedError), writing():
            pass
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


def write_checkpoint(own):
    with own.save_checkpoint() as path:
        (path / "config.json").write_text(str(own.number))


def write_resume(own):
    with own.save_resume() as path:
        path.write_text(str(own.number))


@pytest.mark.parametrize(
    "write",
    [
        lambda old: old.begin(RUN, "old", 2),
        lambda old: old.rewind(0),
        lambda old: old.log({"step": 2, "loss": 9.0}),
        lambda old: old.set_state("interrupted"),
        lambda old: old.finish({}, {}),
        write_checkpoint,
        write_resume,
    ],
    ids=["begin", "rewind", "log", "state", "finish", "checkpoint", "resume"],
)
def test_an_attempt_that_is_overtaken_while_it_writes_changes_nothing(folder, monkeypatch, write):
    """It is paused at its first fsync, or its first look for a newer attempt; one begins then, and writes everything."""
    old = folder.begin(RUN, "old", 1)
    old.log({"step": 1, "loss": 2.0})
    after = {}
    fsync, check_fence = os.fsync, AttemptWriter.check_fence

    def newer_writes():
        if after:
            return
        after["began"] = b""
        new = folder.begin(RUN, "new", 3)
        new.rewind(1)
        new.log({"step": 2, "loss": 1.0})
        write_resume(new)
        write_checkpoint(new)
        after.update({path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()})
        del after["began"]

    def paused_fsync(descriptor):
        newer_writes()
        fsync(descriptor)

    def paused_check(self, **options):
        if self.number < 3:
            newer_writes()
        check_fence(self, **options)

    monkeypatch.setattr(os, "fsync", paused_fsync)
    monkeypatch.setattr(AttemptWriter, "check_fence", paused_check)
    with pytest.raises((FencedError, FileNotFoundError)):  # the newer one has deleted temporary files
        write(old)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == after


def test_a_new_attempt_deletes_what_older_ones_have_left(folder):
    folder.begin(RUN, "killed", 1)
    for name in (".result.json.abc", ".curve.jsonl.x1", ".nfs0123"):
        (folder.path / name).write_bytes(b"")
    for name in (".checkpoint.x3", "checkpoint"):
        (folder.path / name).mkdir()
        (folder.path / name / "model.safetensors").write_bytes(b"")
    folder.begin(RUN, "here", 2)
    assert sorted(os.listdir(folder.path)) == [".nfs0123", "spec.json", "state.json"]


def test_an_attempt_begins_once(folder):
    folder.begin(RUN, "here", 1)
    with raises("fenced", newest=1, attempt=1):
        folder.begin(RUN, "there", 1)


def test_a_finished_run_is_not_begun(folder):
    late = folder.begin(RUN, "late", 1)  # it ends after the next one has seen that there is no result
    write_checkpoint(late)
    late.finish({}, {})
    with raises("already_finished", run_id=RUN.run_id):
        folder.begin(RUN, "here", 2)
    assert (folder.checkpoint / "config.json").exists()


def test_a_metric_of_a_step_counts_once(folder):
    """An older attempt may have written between its check and the start of a newer one."""
    own = folder.begin(RUN, "here")
    for row in ({"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 1, "a": 3.0}, {"step": 2, "a": 4.0, "b": 5.0}):
        own.log(row)
    assert folder.curve() == [{"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 2, "a": 4.0, "b": 5.0}]


@pytest.mark.parametrize("line", ['{"step": 2, "lo', pytest.param("[" * 1_000_000, id="deep")])
def test_a_line_of_the_curve_that_is_no_row_is_skipped(folder, line):
    folder.begin(RUN, "here").log({"step": 1, "loss": 2.0})
    with (folder.path / "curve.jsonl").open("a") as file:
        file.write(line)
    assert folder.curve() == [{"step": 1, "loss": 2.0}]


def test_rewind_drops_later_rows(folder):
    own = folder.begin(RUN, "here")
    for step in (1, 2, 3):
        own.log({"step": step})
    own.rewind(2)
    own.log({"step": 3})
    assert [row["step"] for row in folder.curve()] == [1, 2, 3]


def test_a_row_with_nan_is_refused(folder):
    own = folder.begin(RUN, "here")
    with pytest.raises(ValueError):  # noqa: PT011 - the json module's
        own.log({"step": 1, "loss": float("nan")})


def test_an_error_while_a_checkpoint_is_written_leaves_none(folder):
    own = folder.begin(RUN, "here")
    with pytest.raises(RuntimeError), own.save_checkpoint() as path:
        (path / "config.json").write_text("1")
        raise RuntimeError
    assert sorted(os.listdir(folder.path)) == ["spec.json", "state.json"]


def test_what_a_file_names_is_on_the_disk_before_it(folder, monkeypatch):
    """A result names curve and checkpoint, a resume file its curve; a power failure loses what was not written to disk."""
    on_disk, missing = {}, []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor):
        status = os.fstat(descriptor)
        on_disk[status.st_ino] = status.st_size
        fsync(descriptor)

    def replaced(path, target):
        if target.name in ("result.json", "resume.safetensors"):
            files = [path, folder.path / "curve.jsonl", *folder.checkpoint.glob("*")]
            sizes = {file.name: (file.stat().st_size, on_disk.get(file.stat().st_ino)) for file in files}
            missing.append([name for name, (size, known) in sizes.items() if size != known])
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    own = folder.begin(RUN, "here")
    own.log({"step": 1, "loss": 1.0})
    with own.save_resume() as path:
        path.write_text(json.dumps(own.mark_curve()))
    own.log({"step": 2, "loss": 0.5})
    with own.save_checkpoint() as path:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"weights")
    own.finish({"loss": 0.5}, {})
    assert missing == [[], []]


def test_a_full_disk_while_a_file_is_written_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_bytes(path, b'{"value": "before"}')
    child = os.fork()
    if child == 0:
        # The disk is "full" in the middle of the file.
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            write_bytes(path, json.dumps(list(range(10_000))).encode())
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert json.loads(path.read_text()) == {"value": "before"}
    assert os.listdir(tmp_path) == ["file.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_the_umask_decides_who_may_use_the_files(folder, umask, mode):
    before = os.umask(umask)
    try:
        own = folder.begin(RUN, "here")
        own.log({"step": 1})
        own.rewind(1)
        write_checkpoint(own)
        own.finish({}, {})
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((folder.path / name).stat().st_mode) for name in os.listdir(folder.path)}
    assert modes.pop("checkpoint") == 0o777 & ~umask
    assert modes == dict.fromkeys(["spec.json", "state.json", "curve.jsonl", "result.json"], mode)


GROUP_ABLATION = f"""
title: Group
base: {TINY}
metrics: [{{name: in_dist/token_error}}]
seeds: [0]
search: {{kind: optuna, samples: 2, space: {{train.lr: {{uniform: [0.001, 0.01]}}}}}}
"""


@pytest.mark.thorough
def test_a_store_of_a_group_is_the_group_s_throughout(tmp_path):
    """A folder with the setgid bit, as a team's: its second member can write everything that the first has created."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    (tmp_path / "group.yaml").write_text(GROUP_ABLATION)
    command = ("-m", "cope_sweep.cli", "run", "group.yaml", "--local", "--store", str(shared / "store"))
    before = os.umask(0o002)
    try:
        output_of(*command, cwd=tmp_path)
    finally:
        os.umask(before)
    paths = list((shared / "store").rglob("*"))
    assert {path.name for path in paths} >= {"index.db", "optuna.db", "mlflow.db", "model.safetensors", "checkpoint"}
    for path in paths:
        mode = path.stat().st_mode
        assert mode & 0o060 == 0o060, path
        assert not path.is_dir() or mode & stat.S_ISGID, path


@pytest.mark.parametrize("name", ["..", "../../etc", "ABCDEF0123456789", "0123", "0123456789abcdef/", ""])
def test_only_run_ids_are_accepted(store, name):
    with raises("invalid_run_id", run_id=name):
        store.run(name)


def test_a_store_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("not_writable", store=str(tmp_path / "file" / "store")):
        Store(tmp_path / "file" / "store", create=True)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", pytest.param(b"[" * 1_000_000, id="deep")])
def test_broken_json_names_its_file(tmp_path, content):
    with raises("invalid_json", file=str(tmp_path / "x.json")):
        parse_json(content, tmp_path / "x.json")


def test_checksums_show_what_has_changed(folder):
    own = folder.begin(RUN, "here")
    own.log({"step": 1, "loss": 2.0})
    with own.save_checkpoint() as path:
        (path / "model.safetensors").write_bytes(b"weights")
    own.finish({}, {})
    assert find_damage(folder, checksums=True) == {}
    (folder.checkpoint / "model.safetensors").write_bytes(b"WEIGHTS")
    (folder.path / "curve.jsonl").unlink()
    missing = {"curve.jsonl": f"{folder.path / 'curve.jsonl'}: missing"}
    assert find_damage(folder) == missing
    changed = f"{folder.checkpoint / 'model.safetensors'}: has changed since the run was finished (SHA-256)"
    assert find_damage(folder, checksums=True) == missing | {"checkpoint/model.safetensors": changed}


@pytest.mark.parametrize("name", ["checkpoint/a\0b", "checkpoint/\ud800", "config.json"])
def test_a_result_that_names_no_file_of_a_run_is_damaged(folder, name):
    folder.begin(RUN, "here").finish({}, {})
    path = folder.path / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {name: "0"}}))
    assert folder.lost_files() == {"result.json": f"{path}: not the result of a run"}


def test_a_damaged_file_is_kept(folder):
    folder.begin(RUN, "here").finish({"a": 1.0}, {})
    (folder.path / "result.json").write_text("{")
    folder.interrupt(find_damage(folder))
    folder.quarantine_file("result.json")
    assert (folder.status, (folder.path / "result.json.damaged").read_text()) == ("interrupted", "{")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_lines_of_a_log_go_to_no_link_and_no_pipe(folder, tmp_path, kind):
    folder.path.mkdir(parents=True)
    OTHERS[kind](folder.path / "log.txt")
    folder.begin(RUN, "here").note("begins")
    assert folder.log_text().endswith("begins\n")
    assert not (folder.path / "secret").exists() or (folder.path / "secret").read_text() == "secret"
    assert (folder.path / "log.txt.damaged").is_symlink() == (kind == "link")


def test_an_attempt_looks_for_a_newer_one_on_its_own_clock(folder):
    """In an object store, where a look is a request, two attempts of one process do not share when the last one was."""
    folder.objects = Objects(folder.path)
    folder.begin(RUN, "here", 2).note("a look")
    with pytest.raises(FencedError):
        AttemptWriter(folder, 1).log({"step": 1})


class Objects:
    """An object store in the place of its working folder: nothing has to be copied."""

    def __init__(self, root):
        self.root = root

    def read(self, name, size=-1):
        path = self.root / Path(name).name
        return path.read_bytes()[: size if size >= 0 else None] if path.exists() else None

    def upload(self, path, name):
        pass

    def download(self, name, path):
        pass

    def delete(self, name):
        pass


def test_a_message_is_redacted_before_it_is_cut(folder):
    folder.begin(RUN, "host:1").fail("x" * 475 + " postgresql://me:correct-h0rse@host/index", "Traceback …")
    assert folder.state["message"].endswith("x postgresql://***@host/in")
