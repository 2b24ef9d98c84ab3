"""The store: opening, its index, sweeps, settling, rebuilding and checking."""

import importlib.metadata
import json
import os
import shutil

import pytest

import cope_sweep
from cope_sweep.store import AttemptWriter, Store, SweepRun, damage, files
from cope_sweep.store.damage import find_differences, mend_index, note_lost, repair
from cope_sweep.store.index.rows import write_counters
from cope_sweep.store.index.tables import metadata
from cope_sweep.store.indexing import refresh_index
from cope_sweep.store.provenance import versions
from cope_sweep.store.reading import read_run
from tests.helpers import sweeps
from tests.helpers.errors import raises
from tests.helpers.sweeps import sweep_record
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import row

RUN = tiny_run()


def finish(store, run, loss=1.5):
    own = store.run(run.run_id).begin(run, "here")
    own.log({"step": 1, "train/loss": 2.0})
    own.finish({"test/loss": loss}, {"steps": run.train.steps, "device": "cpu"})


def members(*runs):
    """The entries of a sweep's record for these runs, in one row."""
    return [SweepRun(run_id=run.run_id, row="a", labels={}, seed=run.seed) for run in runs]


def test_a_store_that_does_not_exist_is_empty_and_is_not_made(tmp_path):
    store = Store(tmp_path / "none")
    assert (store.index.statuses(), store.index.sweeps(), store.status(RUN.run_id)) == ({}, [], "pending")
    assert not store.root.exists()


def test_nothing_is_written_to_the_index_of_a_store_that_does_not_exist(tmp_path):
    with raises("not_writable"):
        Store(tmp_path / "none").index.write([row()])


def test_a_store_that_cannot_be_written_is_read_and_says_so(store, monkeypatch, caplog):
    finish(store, RUN)
    monkeypatch.setattr(os, "access", lambda path, mode: path != store.root)
    assert Store(store.root).status(RUN.run_id) == "finished"
    assert not (store.root / "index.db").exists()
    (store.root / "index.db").mkdir()  # SQLite cannot open it, as it cannot on a read-only file system
    assert Store(store.root).status(RUN.run_id) == "finished"
    assert [record.message.partition(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        f"the store {store.root} cannot be written"
    ] * 2
    with raises("not_writable"):
        Store(store.root).index.delete([RUN.run_id])


def test_a_store_without_an_index_is_indexed_when_it_is_opened(store):
    finish(store, RUN)
    failed = store.run(tiny_run(seed=1).run_id).begin(tiny_run(seed=1), "here")
    failed.fail("ValueError: no", "Traceback")
    died = store.run(tiny_run(seed=2).run_id).begin(tiny_run(seed=2), "here")
    died.log({"step": 4, "train/loss": 1.0})
    (store.root / "sweeps" / "20260101-000000-aa.json").write_text(sweep_record(runs=members(RUN)).model_dump_json())
    progress = []
    opened = Store(store.root, on_indexing=lambda done, total: progress.append((done, total)))
    records = opened.index.records(tiny_run(seed=seed).run_id for seed in range(3))
    assert [
        (each.status, each.step, each.message) for each in map(records.get, (tiny_run(seed=s).run_id for s in range(3)))
    ] == [
        ("finished", 6, None),
        ("failed", 0, "ValueError: no"),
        ("interrupted", 4, None),
    ]
    assert records[RUN.run_id].metrics == {"test/loss": 1.5}
    assert records[RUN.run_id].sweep_id == "20260101-000000-aa"
    assert [sweep.sweep_id for sweep in opened.index.sweeps()] == ["20260101-000000-aa"]
    assert progress == [(3, 3)]


def contents(index):
    """Every row of the index that does not depend on when it was written."""
    with index.database.reading() as connection:
        return {
            table.name: sorted(
                str({key: value for key, value in row._mapping.items() if key not in ("id", "revision", "run", "key", "part")
                     and not key.endswith("_part")})
                for row in connection.execute(table.select())
            )
            for table in metadata.sorted_tables
            if table.name not in ("counters", "parts")
        }  # fmt: skip


def test_an_index_that_is_made_again_says_the_same(store):
    for seed in range(3):
        finish(store, tiny_run(seed=seed), loss=seed)
    store.write_sweep(sweep_record(runs=members(*(tiny_run(seed=seed) for seed in range(3)))))
    refresh_index(store.index, store.files)
    before = contents(store.index)
    store.index.close()
    for path in store.root.glob("index.db*"):
        path.unlink()
    again = Store(store.root)
    assert contents(again.index) == before
    refresh_index(again.index, again.files)
    assert contents(again.index) == before


def test_an_index_that_is_made_again_knows_which_sweep_trained_a_run(store):
    """The second sweep lists the runs, which the first one ends while both are executed."""
    old, done, left = (tiny_run(seed=seed) for seed in range(3))
    finish(store, old)
    store.run(done.run_id).of_sweep("20260101-000000-aa").begin(done, "here").finish({}, {})
    with raises("already_finished"):
        store.run(done.run_id).of_sweep("20260102-000000-bb").begin(done, "here")
    store.run(left.run_id).of_sweep("20260101-000000-aa").begin(left, "here")
    for number, sweep_id in enumerate(("20260101-000000-aa", "20260102-000000-bb")):
        record = sweep_record(sweep_id, runs=members(old, done, left), started_ms=number)
        (store.root / "sweeps" / f"{sweep_id}.json").write_text(record.model_dump_json())
    trained_by = {run_id: record.sweep_id for run_id, record in store.index.records(store.index.statuses()).items()}
    assert trained_by == {
        old.run_id: "20260102-000000-bb",  # its files are those of an older version
        done.run_id: "20260101-000000-aa",
        left.run_id: "20260101-000000-aa",
    }


def test_an_index_is_not_emptied_where_its_store_is_missing(store, index_url, tmp_path):
    finish(store, RUN)
    indexed = Store(store.root, index=index_url)
    assert indexed.status(RUN.run_id) == "finished"
    with indexed.index.database.writing() as connection:
        write_counters(connection, format=1)
    indexed.index.close()
    with raises("no_store", store=str(tmp_path / "typo")):
        Store(tmp_path / "typo", index=index_url).status(RUN.run_id)
    assert Store(store.root, index=index_url).status(RUN.run_id) == "finished"


def test_a_damaged_index_is_mended(store):
    finish(store, RUN)
    store.index.close()
    assert store.status(RUN.run_id) == "finished"
    store.index.close()
    (store.root / "index.db").write_bytes(b"no database" * 100)
    opened = Store(store.root)
    (difference,) = mend_index(opened)
    assert difference.problem
    assert opened.status(RUN.run_id) == "finished"
    assert (store.root / "index.db.damaged").exists()
    assert mend_index(opened) == []


@pytest.mark.parametrize("name", ["runs", "runs_by_id", "sweeps", "counters"])
def test_an_index_with_a_damaged_page_is_mended(store, name):
    finish(store, RUN)
    assert store.status(RUN.run_id) == "finished"
    with store.index.database.reading() as connection:
        page = connection.exec_driver_sql("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).scalar_one()
        size_bytes = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    store.index.close()
    with (store.root / "index.db").open("r+b") as file:
        file.seek((page - 1) * size_bytes)
        file.write(b"\xff" * size_bytes)
    with raises("damaged_index"):
        list(find_differences(store))
    assert len(mend_index(store)) == 1
    assert list(find_differences(store)) == []
    assert store.status(RUN.run_id) == "finished"


def test_repairing_removes_what_has_no_folder_and_keeps_leases(store):
    finish(store, RUN)
    assert store.status(RUN.run_id) == "finished"
    shutil.rmtree(store.run(RUN.run_id).path)
    training = tiny_run(seed=1)
    lease = store.index.acquire(row(training, "running"), "sweep", 60)
    store.run(training.run_id).begin(training, "here", lease.attempt)
    store.write_sweep(sweep_record("20260101-000000-bb", runs=members(training), status="running"), ttl_s=60)
    repair(store, find_differences(store))
    assert store.index.statuses() == {training.run_id: "running"}
    assert store.index.sweep("20260101-000000-bb").status == "running"


def test_a_run_that_is_trained_while_the_index_is_made_again_keeps_its_row(store):
    finish(store, RUN)
    other = tiny_run(seed=1)

    def list_files():
        files = store.files()
        own = sweeps.begin(store, other)
        own.finish({}, {})
        sweeps.end(store, own)
        return files

    assert store.status(RUN.run_id) == "finished"
    refresh_index(store.index, list_files)
    assert store.index.statuses() == {RUN.run_id: "finished", other.run_id: "finished"}


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_is_trained_since_it_was_found_damaged_is_not_repaired(store, ends):
    finish(store, RUN)
    (store.run(RUN.run_id).path / "result.json").write_text("{")
    assert store.status(RUN.run_id) == "interrupted"
    found = list(find_differences(store))
    assert found
    own = sweeps.begin(store, RUN)
    if ends:
        own.finish({"test/loss": 0.5}, {})
        sweeps.end(store, own)
    repair(store, found)
    status = "finished" if ends else "running"
    assert (store.status(RUN.run_id), store.run(RUN.run_id).status) == (status, status)


def test_a_run_that_is_trained_while_it_is_looked_at_again_is_not_repaired(store, monkeypatch):
    finish(store, RUN)
    (store.run(RUN.run_id).path / "result.json").write_text("{")
    found = list(find_differences(store))
    find = damage.find_damage

    def find_and_train(folder, **options):
        problems = find(folder, **options)
        own = sweeps.begin(store, RUN)
        own.finish({"test/loss": 0.5}, {})
        sweeps.end(store, own)
        return problems

    monkeypatch.setattr(damage, "find_damage", find_and_train)
    repair(store, found)
    assert (store.status(RUN.run_id), store.run(RUN.run_id).status) == ("finished", "finished")


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_is_trained_while_it_is_checked_is_no_difference(store, monkeypatch, ends):
    sweeps.stop(store, RUN, "stopped")
    find = damage.find_damage

    def train_and_find(folder, **options):
        if store.status(RUN.run_id) == "stopped":
            own = sweeps.begin(store, RUN)
            if ends:
                own.finish({"test/loss": 0.5}, {})
                sweeps.end(store, own)
        return find(folder, **options)

    monkeypatch.setattr(damage, "find_damage", train_and_find)
    assert list(find_differences(store, checksums=True)) == []
    assert store.status(RUN.run_id) == ("finished" if ends else "running")


def test_checking_names_every_difference(store):
    for seed in range(4):
        finish(store, tiny_run(seed=seed))
    assert list(find_differences(store, checksums=True)) == []
    shutil.rmtree(store.run(tiny_run(seed=0).run_id).path)
    result = store.run(tiny_run(seed=1).run_id).path / "result.json"
    result.write_text(result.read_text().replace("1.5", "2.5"))
    (store.run(tiny_run(seed=2).run_id).path / "result.json").unlink()
    finish(store, tiny_run(seed=4))
    (store.root / "sweeps" / "20260101-000000-aa.json").write_text("{")
    found = {each.item: each.problem for each in find_differences(store)}
    assert found == {
        tiny_run(seed=0).run_id: "in the index, but without a folder",
        tiny_run(seed=1).run_id: "the index has other metrics or facts than its files",
        tiny_run(seed=2).run_id: "interrupted by its files, finished in the index",
        tiny_run(seed=4).run_id: "finished by its files, and not in the index",
        str(store.root / "sweeps" / "20260101-000000-aa.json"): found[
            str(store.root / "sweeps" / "20260101-000000-aa.json")
        ],
    }
    repair(store, find_differences(store))
    assert [each.item for each in find_differences(store)] == [str(store.root / "sweeps" / "20260101-000000-aa.json")]


def test_sweeps_are_written_to_their_file_and_to_the_index(store):
    record = sweep_record(runs=members(RUN), reused=[RUN.run_id])
    store.write_sweep(record)
    assert store.sweep(record.sweep_id) == record
    assert json.loads((store.root / "sweeps" / f"{record.sweep_id}.json").read_text())["ablation"] == "tiny"
    assert store.index.sweep(record.sweep_id).reused == 1
    assert store.sweep("none") is None
    assert store.sweep("../../etc/passwd") is None


def test_a_damaged_record_names_its_file(store):
    store.write_sweep(sweep_record())
    path = store.root / "sweeps" / "20260101-000000-aa.json"
    path.write_text('{"sweep_id": 3}')
    with raises("damaged_file") as error:
        store.sweep("20260101-000000-aa")
    assert error.value.data["file"].endswith("20260101-000000-aa.json")
    assert error.value.data["keys"][0] == "sweep_id"


@pytest.mark.parametrize("lost", [False, True])
def test_a_file_that_only_seems_to_be_missing_is_not_trained_again(store, monkeypatch, lost):
    """A client of NFS remembers that another machine's file was missing, until it writes into the folder."""
    finish(store, RUN)
    store.index.write([read_run(store.run(RUN.run_id))])
    result = store.run(RUN.run_id).path / "result.json"
    content = result.read_bytes()
    if lost:
        result.unlink()
    remembered, opened, write_document = {result}, files.open_regular, AttemptWriter.write_document

    def open_regular(path):
        if path in remembered:
            raise FileNotFoundError(2, "remembered", str(path))
        return opened(path)

    def write(attempt, name, document):
        write_document(attempt, name, document)
        remembered.difference_update({each for each in remembered if each.parent == attempt.path})

    monkeypatch.setattr(files, "open_regular", open_regular)
    monkeypatch.setattr(AttemptWriter, "write_document", write)
    problems = note_lost(store, [RUN.run_id])
    assert store.index.records([RUN.run_id])[RUN.run_id].status == "interrupted"
    assert str(result) in problems[RUN.run_id]
    lease = store.index.acquire(row(RUN, "running"), "sweep", 60)
    if lost:
        store.run(RUN.run_id).begin(RUN, "here", lease.attempt)
    else:
        with raises("already_finished", run_id=RUN.run_id):
            store.run(RUN.run_id).begin(RUN, "here", lease.attempt)
        assert store.index.end(read_run(store.run(RUN.run_id)), "sweep")
        assert (store.status(RUN.run_id), result.read_bytes()) == ("finished", content)


def test_lost_runs_are_noted_together(store, monkeypatch):
    """A transaction for each took 8.7 ms in a store of 10,000."""
    runs = [tiny_run(seed=seed) for seed in range(4)]
    for run, lost in zip(runs, ("result.json", "curve.jsonl", "spec.json", None), strict=True):
        finish(store, run)
        store.index.write([read_run(store.run(run.run_id))])
        if lost:
            (store.run(run.run_id).path / lost).unlink()
    (store.run(runs[2].run_id).path / "result.json").unlink()
    transactions, writing = [], store.index.database.writing
    monkeypatch.setattr(store.index.database, "writing", lambda: transactions.append(1) or writing())
    assert note_lost(store, [run.run_id for run in runs]).keys() == {run.run_id for run in runs[:3]}
    statuses = dict.fromkeys([run.run_id for run in runs[:2]], "interrupted")
    assert store.index.statuses() == statuses | {runs[3].run_id: "finished"}
    assert len(transactions) == 2


def test_versions_are_those_of_the_libraries_that_are_installed(monkeypatch):
    original = importlib.metadata.version

    def version(name):
        if name in ("ray", "mlflow"):  # `run --local --no-mlflow` needs neither
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    assert versions()["numpy"] == original("numpy")
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions().keys() == {"cope_sweep", "python", "torch", "numpy"}
    assert versions()["cope_sweep"] == cope_sweep.__version__
