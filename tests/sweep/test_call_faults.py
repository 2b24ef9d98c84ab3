"""Calls of the index and of an object store that fail: the sweep ends with the store of an undisturbed one.

A call is lost on its way (`lost`), or its answer is (`answer lost`), the connection dies in its middle (`in flight`), or it
takes long (`slow`). Which call fails how is random, with a seed.
"""

import contextlib
import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from cope_sweep.store import Store, StoreError, files
from cope_sweep.store.damage import find_differences
from cope_sweep.store.index import IndexUnavailable, database
from cope_sweep.store.index.database import Database
from cope_sweep.store.objects import ObjectFolder
from cope_sweep.sweep import leases, local_executor
from cope_sweep.sweep.driver import Driver
from tests.helpers.databases import index_url  # noqa: F401 - a fixture
from tests.helpers.sweep_runs import ONE_GROUP, EventLog, seeds, train_by

pytestmark = pytest.mark.slow
RUNS = seeds(3)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))]
FAULTS = ("lost", "answer lost", "in flight", "slow")
SLOW_S = 0.05
RESOURCES = ONE_GROUP.model_copy(update={"checkpoint_every_s": 0.0})
run_local = partial(train_by, local_executor.run_local)


class Faults:
    """Which calls fail, and how: one in `every`."""

    def __init__(self, seed, every=2):
        self.random, self.every, self.made = random.Random(seed), every, []
        self.lock = threading.Lock()

    def next(self):
        with self.lock:
            fault = self.random.choice(FAULTS) if self.random.randrange(self.every) == 0 else None
            if fault:
                self.made.append(fault)
            return fault


def contents(store):
    """What a sweep leaves behind, without times and the number of attempts."""
    found = {}
    for run in RUNS:
        folder = store.run(run.run_id)
        checkpoint = folder.fetch_checkpoint()
        record = store.index.records([run.run_id])[run.run_id]
        found[run.run_id] = {
            "status": (folder.status, record.status, record.step),
            "metrics": (folder.result["metrics"], dict(record.metrics)),
            "curve": folder.curve(),
            "checkpoint": (checkpoint / "model.safetensors").read_bytes(),
            "files": [name for name in ("resume.safetensors",) if folder.content(name, 0) is not None],
        }
    assert list(find_differences(store, checksums=True)) == []
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("undisturbed") / "store", create=True)
    run_local(RUNS, store, RESOURCES)
    return contents(store)


@pytest.fixture
def quick(monkeypatch):
    """Shorter times between two tries."""
    monkeypatch.setattr(database, "RETRY_INTERVAL_S", 0.005)
    monkeypatch.setattr(local_executor, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(leases, "RENEWAL_S", 0.2)


def failing(faults, call):
    """A transaction of a database, which may fail."""

    @contextlib.contextmanager
    def transaction(self):
        fault = faults.next()
        if fault == "lost":
            raise IndexUnavailable("lost")
        if fault == "slow":
            time.sleep(SLOW_S)
        with call(self) as connection:
            yield connection
            if fault == "in flight":
                if not self.is_sqlite:
                    connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
                raise IndexUnavailable("in flight")
        if fault == "answer lost":
            raise IndexUnavailable("answer lost")

    return transaction


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_of_the_index(tmp_path, index_url, undisturbed, quick, monkeypatch, seed):  # noqa: F811
    store, faults, events = Store(tmp_path / "store", index=index_url, create=True), Faults(seed), EventLog()
    unfinished = Driver._unfinished
    with monkeypatch.context() as patch:

        def begin(driver):
            """Faults begin after the first look."""
            found = unfinished(driver)
            for name in ("reading", "writing"):
                patch.setattr(Database, name, failing(faults, getattr(Database, name)))
            return found

        patch.setattr(Driver, "_unfinished", begin)
        run_local(RUNS, store, RESOURCES, on_event=events)
    assert faults.made
    assert contents(store) == undisturbed
    assert sorted(events.ends()) == sorted((run.run_id, "finished") for run in RUNS)


class FaultyObjects(ObjectFolder):
    """A folder in place of an object store, whose calls may fail. An object appears whole or not at all."""

    def __init__(self, folder, faults):
        self.url, self.folder, self.faults = "s3://bucket/prefix", Path(folder), faults

    def __reduce__(self):
        return FaultyObjects, (self.folder, self.faults)

    def read(self, name, size=-1):
        with self._failing():
            path = self.folder / name
            return path.read_bytes()[: size if size >= 0 else None] if path.is_file() else None

    def write(self, name, content):
        with self._failing():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(path, content)

    def upload(self, path, name):
        self.write(name, path.read_bytes())

    def download(self, name, path):
        content = self.read(name)
        if content is not None:
            path.write_bytes(content)
        return content is not None

    def names(self, folder):
        with self._failing():
            return sorted(path.name for path in (self.folder / folder).glob("[!.]*"))

    def delete(self, name):
        with self._failing():
            (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _failing(self):
        """Half of a write is never seen, so that to die in flight is to be lost."""
        fault = self.faults and self.faults.next()
        if fault in ("lost", "in flight"):
            raise StoreError("the object store does not answer")
        if fault == "slow":
            time.sleep(SLOW_S / 10)
        yield
        if fault == "answer lost":
            raise StoreError("the object store does not answer any more")


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_of_an_object_store(tmp_path, undisturbed, monkeypatch, seed):
    """A run whose call fails has failed, as its client has tried it several times; the same command goes on with it."""
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cope_sweep.store.store.ObjectFolder", lambda url: FaultyObjects(tmp_path / "objects", None))
    store, faults = (
        Store("s3://bucket/prefix", index=f"sqlite:///{tmp_path / 'index.db'}", create=True),
        Faults(seed, 40),
    )
    for _ in range(40):
        store.objects.faults = faults
        with contextlib.suppress(StoreError):
            run_local(RUNS, store, RESOURCES)
        store.objects.faults = None
        if set(store.index.statuses().values()) == {"finished"} and len(store.index.statuses()) == len(RUNS):
            break
    assert len(faults.made) > 1
    assert contents(store) == undisturbed
