"""Stores in an object store, on a real S3-compatible server on loopback."""

import pytest

from cope_sweep.store import Store
from cope_sweep.store.damage import find_damage, find_differences
from cope_sweep.store.errors import FencedError
from cope_sweep.store.indexing import refresh_index
from cope_sweep.store.objects import ObjectFolder
from cope_sweep.store.prune import delete, waste
from cope_sweep.train import Runtime, train_run
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish
from tests.helpers.sweeps import end, sweep_record
from tests.helpers.tiny import tiny_run
from tests.helpers.training import stop_after, weights

pytestmark = pytest.mark.slow
RUN = tiny_run(**{"train.steps": 12})


def test_objects(bucket_url):
    folder = ObjectFolder(bucket_url)
    assert folder.read("a/b.txt") is None
    assert folder.names("a") == []
    folder.write("a/b.txt", b"hello")
    assert (folder.read("a/b.txt"), folder.read("a/b.txt", 2), folder.names("a")) == (b"hello", b"he", ["b.txt"])
    folder.delete("a/b.txt")
    folder.delete("a/b.txt")
    assert folder.read("a/b.txt") is None


def test_a_small_object_is_one_request(bucket_url, caplog):
    folder = ObjectFolder(bucket_url)
    with caplog.at_level("INFO", logger="werkzeug"):
        folder.write("a/b.txt", b"hello")
    assert [record.getMessage().split()[5] for record in caplog.records] == ['"PUT']


def test_a_run_moves_from_one_machine_to_another(on_machine, tmp_path):
    first = on_machine("first")
    assert train_run(RUN, first.run(RUN.run_id), Runtime(), attempt=1, should_stop=stop_after(5)) == "interrupted"
    second = on_machine("second")
    assert second.root != first.root
    assert second.run(RUN.run_id).status == "interrupted"
    assert train_run(RUN, second.run(RUN.run_id), Runtime(), attempt=2) == "finished"

    plain = Store(tmp_path / "plain", create=True)
    train_run(RUN, plain.run(RUN.run_id), Runtime())
    third = on_machine("third").run(RUN.run_id)
    assert third.result["facts"]["resumed_from_step"] == 6
    assert third.curve() == plain.run(RUN.run_id).curve()
    assert third.fetch_checkpoint().is_dir()
    for name, tensor in weights(plain.run(RUN.run_id)).items():
        assert (tensor == weights(third)[name]).all(), name
    assert "attempt 2" in third.log_text()
    assert find_damage(third, checksums=True) == {}


def test_a_run_that_another_machine_trains_again_has_its_new_checkpoint_everywhere(on_machine):
    first, second = on_machine("first"), on_machine("second")
    service = on_machine("service").run(RUN.run_id)

    def train(store, value):
        own = store.run(RUN.run_id).begin(RUN, "here")
        with own.save_checkpoint() as path:
            (path / "model.safetensors").write_text(value)
        own.finish({"test/loss": 1.0}, {})
        assert not own.checkpoint.exists()  # nobody reads the worker's own copy

    train(first, "A")
    assert (service.fetch_checkpoint() / "model.safetensors").read_text() == "A"
    second.run(RUN.run_id).put_aside({"curve.jsonl": "lost"})
    train(second, "B")
    copy = service.fetch_checkpoint() / "model.safetensors"
    assert copy.read_text() == "B"
    copy.write_text("a copy that is current is not fetched again")
    assert service.fetch_checkpoint(service.result["ended_ms"]) == service.fetch_checkpoint() == copy.parent
    assert copy.read_text() != "B"


def test_old_copies_of_checkpoints_are_named(on_machine):
    store = on_machine("first")
    finish(store, RUN, {"test/loss": 1.0})
    store.objects.write(f"runs/{RUN.run_id}/checkpoint/model.safetensors", b"weights")
    copy = store.run(RUN.run_id).fetch_checkpoint()
    assert list(waste(store, older_than_s=60.0, statuses=(), planned_runs=None)) == []
    found = list(waste(store, older_than_s=0.0, statuses=(), planned_runs=None))
    assert [each.path for each in found] == [copy]
    assert delete(store, found) == found
    assert (store.run(RUN.run_id).fetch_checkpoint() / "model.safetensors").read_bytes() == b"weights"


def test_other_ranks_keep_no_copy_of_the_resume_file(on_machine):
    train_run(RUN, on_machine("first").run(RUN.run_id), Runtime(), should_stop=lambda: "interrupted")
    second = on_machine("second").run(RUN.run_id)
    second.fetch_resume()
    assert second.resume.exists()
    assert train_run(RUN, second, Runtime(rank=1)) == "finished"
    assert not second.resume.exists()


def test_a_failure_that_another_machine_records_keeps_log_and_curve(on_machine):
    first, driver = on_machine("first").run(RUN.run_id), on_machine("driver").run(RUN.run_id)
    driver.begin(RUN, "driver", 1).log({"step": 1, "train/loss": 3.0})
    own = first.begin(RUN, "first", 2)
    own.log({"step": 2, "train/loss": 2.0})
    own.note("in its second attempt")
    own.set_state("running")
    driver.record_failure(RUN, 2, "it died", "killed by signal 9", keep_recorded=False)
    assert [row["step"] for row in driver.curve()] == [1, 2]
    assert "in its second attempt" in driver.log_text()
    assert "killed by signal 9" in driver.log_text()
    assert (driver.status, driver.last_attempt) == ("failed", 2)


def test_a_lost_file_that_an_older_machine_finds_keeps_log_and_curve(on_machine):
    first, older = on_machine("first").run(RUN.run_id), on_machine("older").run(RUN.run_id)
    older.begin(RUN, "older", 1).note("in its first attempt")
    own = first.begin(RUN, "first", 2)
    own.note("in its second attempt")
    own.log({"step": 2, "train/loss": 2.0})
    own.finish({"test/loss": 1.0}, {})
    older.interrupt({"checkpoint": "checkpoint: missing"})
    assert older.status == "interrupted"
    log_text = on_machine("another").run(RUN.run_id).log_text()
    assert "in its second attempt" in log_text


def test_a_failure_of_a_run_that_did_not_begin_downloads_no_resume_file(on_machine):
    train_run(RUN, on_machine("first").run(RUN.run_id), Runtime(), attempt=1, should_stop=lambda: "interrupted")
    driver = on_machine("driver").run(RUN.run_id)
    driver.record_failure(RUN, 2, "it died", "killed by signal 9", keep_recorded=True)
    assert (driver.status, driver.last_attempt, driver.resume.exists()) == ("failed", 2, False)
    assert driver.state["worker_id"] == ""
    driver.fetch_resume()
    assert driver.resume.exists()


def test_a_failure_that_the_same_machine_records_keeps_what_is_not_uploaded_yet(on_machine):
    folder = on_machine("first").run(RUN.run_id)
    own = folder.begin(RUN, "first", 1)
    own.log({"step": 1, "train/loss": 3.0})
    own.log({"step": 2, "train/loss": 2.0})
    own.note("before it was killed")
    folder.record_failure(RUN, 1, "it died", "killed by signal 9", keep_recorded=False)
    assert [row["step"] for row in on_machine("other").run(RUN.run_id).curve()] == [1, 2]
    assert "before it was killed" in folder.log_text()


def test_a_failure_of_an_older_attempt_changes_no_file_of_the_newer_one(on_machine):
    folder = on_machine("first").run(RUN.run_id)
    folder.begin(RUN, "first", 1)
    newer = folder.begin(RUN, "first", 2)
    newer.log({"step": 2, "train/loss": 2.0})
    newer.note("in its second attempt")
    before = [(folder.path / name).read_bytes() for name in ("curve.jsonl", "log.txt")]
    folder.record_failure(RUN, 1, "it died", "killed by signal 9", keep_recorded=False)
    assert [(folder.path / name).read_bytes() for name in ("curve.jsonl", "log.txt")] == before
    assert folder.status == "running"


def test_an_older_attempt_is_fenced(on_machine):
    old = on_machine("first").run(RUN.run_id).begin(RUN, "first", 1)
    new = on_machine("second").run(RUN.run_id).begin(RUN, "second", 2)
    new.finish({"test/loss": 1.0}, {})
    with pytest.raises(FencedError):
        old.finish({"test/loss": 9.0}, {})
    assert old.result["metrics"] == {"test/loss": 1.0}


def test_sweeps_an_index_that_is_made_again_and_check(on_machine):
    store = on_machine("first")
    train_run(RUN, store.run(RUN.run_id), Runtime())
    end(store, store.run(RUN.run_id))
    store.write_sweep(sweep_record())
    assert on_machine("second").sweep("20260101-000000-aa") == sweep_record()
    before = store.index.records([RUN.run_id])[RUN.run_id]
    store.index.delete(store.index.statuses())
    refresh_index(store.index, store.files)
    after = store.index.records([RUN.run_id])[RUN.run_id]
    assert (after.metrics, after.facts, after.ended_ms) == (before.metrics, before.facts, before.ended_ms)
    assert list(find_differences(store, checksums=True)) == []
    store.objects.write(f"runs/{RUN.run_id}/curve.jsonl", b"")
    assert ["curve.jsonl" in each.problem for each in find_differences(store, checksums=True)] == [True]


def test_a_run_is_deleted(on_machine):
    store, keep, drop = on_machine("a"), tiny_run(seed=0), tiny_run(seed=1)
    for run in (keep, drop):
        finish(store, run, {"in_dist/token_error": 1.0})
    store.delete_run(drop.run_id)
    assert store.objects.names("runs") == [keep.run_id]
    assert store.index.statuses() == {keep.run_id: "finished"}
    store.delete_run(drop.run_id)  # nothing is left to delete


def test_a_run_that_is_pruned_is_deleted_for_good(on_machine):
    store, keep, drop = on_machine("a"), tiny_run(seed=0), tiny_run(seed=1)
    for run in (keep, drop):
        finish(store, run, {"in_dist/token_error": 1.0})
    other = on_machine("b")  # without working copies
    found = list(waste(other, older_than_s=0.0, statuses=(), planned_runs={keep.run_id}))
    assert [each.run_id for each in delete(other, found)] == [drop.run_id]
    refresh_index(other.index, other.files)
    assert store.index.statuses() == {keep.run_id: "finished"}


def test_errors_name_the_store_and_the_way_out(bucket_url, tmp_path):
    with raises("index_not_named", store=bucket_url):
        Store(bucket_url).index.statuses()
    with raises("unreachable_store", store="s3://none-of-these/x"):
        Store("s3://none-of-these/x", create=True)
    (tmp_path / "file").write_bytes(b"x")
    with raises("unreachable_store", store="s3://none-of-these/x"):
        ObjectFolder("s3://none-of-these/x").upload(tmp_path / "file", "copy")
    with raises("unsupported_store", store="ftp://host/x"):
        Store("ftp://host/x")
