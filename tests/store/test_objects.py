"""Stores in an object store, on a real S3-compatible server on loopback."""

import shutil
from pathlib import Path

import pytest
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.owners import new_owner
from cope_sweep.store.rebuild import check, rebuild

from cope_sweep.store import LeaseHolder, Store, StoreError
from cope_sweep.store.errors import FencedError
from cope_sweep.store.event import Event
from cope_sweep.store.objects import ObjectFolder
from cope_sweep.store.reading import find_damage
from cope_sweep.tracking.sync import Sync
from cope_sweep.tracking.uri import backlog_count, tracker_key
from cope_sweep.train import Runtime, train_run
from tests.store import s3
from tests.store.sweeps import LEASE_S, begin, end, sweep_record
from tests.tiny import tiny_run
from tests.tracking.trackers import fresh_database, history, run_of, synced  # noqa: F401 - a fixture
from tests.train.stores import stop_after, weights

pytestmark = pytest.mark.slow
RUN = tiny_run(**{"train.steps": 12})


@pytest.fixture(scope="module")
def server():
    server = s3.start_server()
    yield server
    server.stop()


@pytest.fixture
def url(server, monkeypatch):
    """The URL of an empty bucket's prefix."""
    s3.set_environment(monkeypatch, server)
    return f"s3://{s3.make_bucket()}/some/prefix"


@pytest.fixture
def on_machine(url, tmp_path, monkeypatch):
    """The store as a machine sees it; each has its own working folder, and all have one index."""

    def opened(name):
        monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / name))
        return Store(url, index=f"sqlite:///{tmp_path / 'index.db'}", create=True)

    return opened


def test_objects(url):
    folder = ObjectFolder(url)
    assert folder.read("a/b.txt") is None
    assert folder.names("a") == []
    folder.write("a/b.txt", b"hello")
    assert (folder.read("a/b.txt"), folder.read("a/b.txt", 2), folder.names("a")) == (b"hello", b"he", ["b.txt"])
    folder.delete("a/b.txt")
    folder.delete("a/b.txt")
    assert folder.read("a/b.txt") is None


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


def test_an_older_attempt_is_fenced(on_machine):
    old = on_machine("first").run(RUN.run_id).begin(RUN, "first", 1)
    new = on_machine("second").run(RUN.run_id).begin(RUN, "second", 2)
    new.finish({"test/loss": 1.0}, {})
    with pytest.raises(FencedError):
        old.finish({"test/loss": 9.0}, {})
    assert old.result["metrics"] == {"test/loss": 1.0}


def test_leases_sweeps_rebuild_and_check(on_machine):
    store = on_machine("first")
    holder = LeaseHolder(store, "sweep")
    lease = holder.acquire(RUN)
    train_run(RUN, store.run(RUN.run_id), Runtime(), attempt=lease.attempt)
    assert holder.end(RUN.run_id) == "finished"
    holder.close()
    store.write_sweep(sweep_record())
    assert on_machine("second").sweep("20260101-000000-aa") == sweep_record()
    before = store.index.records([RUN.run_id])[RUN.run_id]
    store.index.delete(store.index.statuses())
    report = rebuild(store)
    assert (report.runs, report.sweeps) == (1, 1)
    after = store.index.records([RUN.run_id])[RUN.run_id]
    assert (after.metrics, after.facts, after.ended_ms) == (before.metrics, before.facts, before.ended_ms)
    assert list(check(store, checksums=True)) == []
    store.objects.write(f"runs/{RUN.run_id}/curve.jsonl", b"")
    assert ["curve.jsonl" in each.problem for each in check(store, checksums=True)] == [True]


def test_errors_name_the_store_and_the_way_out(url):
    with pytest.raises(StoreError, match=r"needs a database for its index.*--index or COPE_SWEEP_INDEX"):
        Store(url).index.statuses()
    with pytest.raises(StoreError, match=r"the store s3://none-of-these/x: .*NO_SUCH_BUCKET"):
        Store("s3://none-of-these/x", create=True)
    with pytest.raises(StoreError, match=r"a store is a folder, or the URL of an object store: s3://"):
        Store("ftp://host/x")


@pytest.fixture
def uri_of(fresh_database):  # noqa: F811
    """A function that makes the MLflow store of a machine, and returns its URI."""

    def made(store):
        shutil.copyfile(fresh_database, store.root / "mlflow.db")
        return f"sqlite:///{store.root}/mlflow.db"

    return made


def sent(store, uri):
    """Send a store as a process of its own; MLflow's run."""
    synced(store, uri)
    return run_of(uri, RUN)


def test_a_machine_that_trained_nothing_sends_runs_and_checkpoints_to_mlflow(on_machine, uri_of, monkeypatch):
    import mlflow

    first = on_machine("first")
    train_run(RUN, first.run(RUN.run_id), Runtime())
    end(first, first.run(RUN.run_id))
    second = on_machine("second")
    uri = uri_of(second)
    run = sent(second, uri)
    assert run.status == "finished"
    assert len(history(uri, run, "train/loss")) == len(
        [row for row in first.run(RUN.run_id).curve() if "train/loss" in row]
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (kept,) = run.models
    files = Path(mlflow.artifacts.download_artifacts(f"models:/{kept}"))
    for path in first.run(RUN.run_id).checkpoint.iterdir():
        assert (files / path.name).read_bytes() == path.read_bytes()
    assert mlflow.models.get_model_info(f"models:/{kept}").run_id == run.id
    # A SQLite database is one of a machine: another one has its own, which has received nothing.
    assert backlog_count(second, uri) == 0
    first = on_machine("first")
    other = uri_of(first)
    assert backlog_count(first, other) == 1
    assert sent(first, other).status == "finished"
    assert Mirrored(second.index, tracker_key(second, uri)).tracked_ids([RUN.run_id]) == {RUN.run_id: run.id}


def test_what_another_machine_logs_is_sent_while_it_trains(on_machine, uri_of):
    first = on_machine("first")
    begin(first, RUN, {"step": 1, "train/loss": 3.0}).set_state("interrupted")
    second, uri = on_machine("second"), uri_of(first)
    folder = begin(second, RUN)
    with Sync(first, uri) as session:
        assert session.sync()
        folder.log({"step": 2, "train/loss": 2.0})
        folder._publish("curve.jsonl")
        second.index.renew(new_owner("tests"), LEASE_S, [Event(RUN.run_id, "running", 2)])
        assert session.sync()
    assert [p.step for p in history(uri, run_of(uri, RUN), "train/loss")] == [1, 2]


def test_a_run_whose_checkpoint_was_deleted_is_sent_without_one(on_machine, uri_of):
    first = on_machine("first")
    train_run(RUN, first.run(RUN.run_id), Runtime())
    end(first, first.run(RUN.run_id))
    objects, folder = first.objects, f"runs/{RUN.run_id}/checkpoint"
    for name in objects.names(folder):
        objects.delete(f"{folder}/{name}")
    second = on_machine("second")
    run = sent(second, uri_of(second))
    assert (run.status, run.models) == ("finished", [])
    assert not second.run(RUN.run_id).fetch_checkpoint().exists()
