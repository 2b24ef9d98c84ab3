"""The commands that keep a store in order, on stores that differ from their index in every way: store, prune and sync."""

import io
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from rich.console import Console

from cope_sweep.cli import progress
from cope_sweep.store import Lease, Store, SweepRun
from cope_sweep.store.reading import read_run
from cope_sweep.tracking.sync import sync
from tests.cli.conftest import TINY
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish, plan_of
from tests.helpers.object_stores import bucket_url, object_server, on_machine  # noqa: F401 - fixtures
from tests.helpers.processes import free_port, until
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import row


def test_an_index_that_is_missing_is_made_again(stored):
    before = stored.json("runs")["runs"], stored.json("status")
    remove_index(stored)
    after = stored.json("runs")["runs"], stored.json("status")
    assert [drop(run) for run in after[0]] == [drop(run) for run in before[0]]
    assert after[1] == before[1]


def test_an_index_that_is_no_database_is_made_again_by_repair(stored):
    before = {run["run_id"]: run["status"] for run in stored.json("runs")["runs"]}
    remove_index(stored).write_bytes(b"no database" * 100)
    stored.refuses("damaged_index", "runs")
    found = stored.json("store", "check", "--repair", code=1)
    assert "file is not a database" in found[0]["problem"]
    assert {run["run_id"]: run["status"] for run in stored.json("runs")["runs"]} == before
    assert (stored.folder / "store" / "index.db.damaged").exists()


def remove_index(stored):
    """Delete the index; its path."""
    stored.store.index.close()
    for path in (stored.folder / "store").glob("index.db*"):
        path.unlink()
    return stored.folder / "store" / "index.db"


def drop(run):
    return {key: value for key, value in run.items() if key != "sweep_id"}


def test_check_of_a_good_store(stored):
    finish(stored.store, stored.runs[3], {})
    assert stored.json("store", "check", "--checksums") == []
    assert stored("store", "check")[0].endswith("nothing differs, nothing is damaged\n")


def test_a_run_that_a_killed_sweep_has_leased_and_not_begun_is_pending(stored):
    finish(stored.store, stored.runs[3], {})
    run = tiny_run(seed=9)
    assert isinstance(stored.store.index.acquire(row(run, "running"), "killed", 0), Lease)
    assert stored.store.status(run.run_id) == "interrupted"
    assert stored.json("store", "check") == []
    assert stored.store.status(run.run_id) == "pending"


def test_check_names_each_difference_and_its_way_out(stored):
    finished, failed, stopped, damaged = (stored.store.run(run.run_id) for run in stored.runs)
    stored.store.index.delete([failed.run_id])
    (stopped.path / "state.json").write_text('{"status": "failed", "attempt": 1}')
    (finished.checkpoint / "model.safetensors").write_bytes(b"other")
    problems = stored.json("store", "check", code=1)
    assert {problem["item"] for problem in problems} == {failed.run_id, stopped.run_id, damaged.run_id}
    ways_out = {problem["item"]: problem["way_out"] for problem in problems}
    assert ways_out[failed.run_id] == "cope-sweep store check --repair"
    assert "cope-sweep run" in ways_out[damaged.run_id]
    with_content = stored.json("store", "check", "--checksums", code=1)
    assert {problem["item"] for problem in with_content} - {problem["item"] for problem in problems} == {
        finished.run_id
    }
    out, _ = stored("store", "check", "--checksums", code=1)
    assert "has changed since the run was finished" in " ".join(out.split())
    stored("store", "check", "--repair", code=1)
    assert stored.json("runs", "--filter", "status=interrupted")["total"] == 1


def test_a_folder_that_is_no_store(shell):
    shell.refuses("no_store", "store", "check")


def test_prune_shows_and_deletes(stored):
    path = stored.store.run(stored.runs[0].run_id).path / "state.json.damaged"
    path.write_text("{")
    os.utime(path, (time.time() - 3 * 86400,) * 2)
    out, _ = stored("prune")
    assert "state.json.damaged" in out
    assert "--yes" in out
    assert path.exists()
    answer = stored.json("prune", "--yes")
    assert (answer["deleted"], [each["path"] for each in answer["found"]]) == (True, [str(path)])
    assert not path.exists()


def test_prune_of_runs_that_no_ablation_has(stored):
    stored.write("tiny", (stored.folder / "ablations" / "tiny.yaml").read_text().replace("seeds: [0, 1]", "seeds: [0]"))
    answer = stored.json("prune", "--orphans", "--older-than", "100", "--yes")
    gone = {stored.runs[1].run_id, stored.runs[3].run_id}
    assert {each["path"].rpartition("/")[2] for each in answer["found"]} == gone
    assert not any(stored.store.run(run_id).path.exists() for run_id in gone)
    assert stored.store.run(stored.runs[0].run_id).status == "finished"


def test_files_with_either_suffix_are_ablations(stored):
    folder = stored.folder / "ablations"
    text = (folder / "tiny.yaml").read_text()
    (folder / "more.yml").write_text(text)
    stored.write("tiny", text.replace("seeds: [0, 1]", "seeds: [0]"))
    assert stored.json("prune", "--orphans")["found"] == []
    assert len(stored.json("plan", "more")["runs"]) == len(stored.runs)


def test_prune_keeps_runs_that_sweeps_have_added_to_an_ablation(stored):
    stored.write("searched", TINY.replace("seeds: [0, 1]", "search: {kind: optuna, samples: 2}"))
    suggested, lost, more_seeds, orphan = (tiny_run(seed=seed) for seed in range(10, 14))
    for run in (suggested, lost, more_seeds, orphan):
        finish(stored.store, run, {})
    searched = write_sweep(stored.store, stored.plan, ablation="searched", runs=members([suggested]))
    stored.store.index.write([row(lost, sweep_id=searched.sweep_id)])
    write_sweep(stored.store, stored.plan, sets=["seeds=[12]"], runs=members([more_seeds]))
    write_sweep(stored.store, stored.plan, ablation="deleted", runs=members([orphan]))
    (found,) = stored.json("prune", "--orphans")["found"]
    assert found["path"].rpartition("/")[2] == orphan.run_id
    assert found["reason"] == "finished run of deleted that no ablation file contains"


def members(runs):
    return [SweepRun(run_id=run.run_id, row="a", labels={}, seed=run.seed) for run in runs]


def test_prune_refuses_what_it_cannot_do(shell, stored):
    stored.refuses("invalid_option", "prune", "--states", "running", option="--states", value="running")
    objects = ("--store", "s3://bucket/store?region=us-east-1", "--index", "sqlite://")
    stored.refuses("invalid_option", "prune", "--states", "stopped", *objects, option="--states")
    for path in (stored.folder / "ablations").iterdir():
        path.unlink()
    stored.refuses("no_ablations", "prune", "--orphans")
    (stored.folder / "ablations").rmdir()  # the installed files are others, so every run seems to be an orphan
    stored.refuses("invalid_option", "prune", "--orphans", option="--orphans")


def test_delete_asks_and_removes_folder_and_row(stored):
    finished, failed, stopped, damaged = (run.run_id for run in stored.runs)
    _, err = stored("delete", finished[:8], failed, code=1, stdin="n\n")
    assert "Delete 2 runs" in err
    assert f"{finished}  finished  tiny/CoPE, seed 0" in err
    assert set(stored.store.index.statuses()) == {finished, failed, stopped, damaged}
    assert stored.json("delete", finished[:8], damaged, "--yes") == {"deleted": [finished, damaged], "left": []}
    assert stored.store.index.statuses() == {failed: "failed", stopped: "stopped"}
    assert sorted(path.name for path in (stored.folder / "store" / "runs").iterdir()) == sorted([failed, stopped])
    assert stored.store.status(finished) == "pending"
    stored.refuses("not_found", "delete", failed, finished, "--yes")
    assert stored.store.status(failed) == "failed"


def test_a_run_in_training_is_not_deleted_nor_any_run_beside_it(stored):
    other, run = stored.runs[0], stored.runs[2]
    assert isinstance(stored.store.index.acquire(read_run(stored.store.run(run.run_id)), "a_sweep", 60), Lease)
    refused = {"run_id": run.run_id, "sweep": "a_sweep"}
    stored.refuses("in_training", "delete", other.run_id, run.run_id, "--yes", **refused)
    with raises("in_training", **refused):  # one that is leased since the command has looked
        stored.store.delete_run(run.run_id)
    assert stored.store.status(other.run_id) == "finished"
    assert stored.store.run(run.run_id).spec is not None


def test_an_interrupted_delete_has_deleted_a_run_or_has_not(stored, monkeypatch):
    first, second = stored.runs[0].run_id, stored.runs[1].run_id
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stored.store.delete_run(first)
    assert stored.store.status(first) == stored.store.run(first).status == "finished"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stored.store.delete_run(second)
    assert stored.store.status(second) == stored.store.run(second).status == "pending"
    assert "rest of a deleted run" in stored("prune", "--older-than", "0", "--yes")[0]
    assert not any(path.name.startswith(".") for path in (stored.folder / "store" / "runs").iterdir())


@pytest.fixture
def store(shell):
    """A store of a sweep that MLflow has nothing of, where the command looks for it."""
    store = Store(shell.folder / "store", create=True)
    plan = plan_of()
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    return store


def test_a_dry_run_shows_how_much_would_be_sent(shell, store):
    out, _ = shell("sync", "--dry-run", code=1)
    assert f"7 runs and sweeps are not in MLflow at sqlite:///{store.root}/mlflow.db yet" in out
    assert shell.json("sync", "--dry-run", code=1)["left"] == 7
    assert not (store.root / "mlflow.db").exists()


def test_without_a_store_it_is_bad_input(shell):
    for words in (["sync"], ["prune"], ["store", "check"]):
        shell.refuses("no_store", *words)
    shell.refuses("not_found", "delete", tiny_run().run_id)
    assert not (shell.folder / "store").exists()


@pytest.mark.slow
def test_a_machine_that_has_not_used_an_object_store_finds_it(on_machine, shell):  # noqa: F811
    first, run = on_machine("first"), tiny_run()
    finish(first, run, {})
    shell.environment["COPE_SWEEP_CACHE"] = str(shell.folder / "second")
    options = ("--store", first.location, "--index", first.index_url)
    assert shell.json("store", "check", *options) == []
    assert shell.json("prune", *options)["found"] == []
    assert shell.json("sync", "--dry-run", *options, code=1)["left"] == 1
    assert list((shell.folder / "second").rglob("*")), "MLflow's database has no folder"
    assert shell.json("delete", run.run_id, "--yes", *options)["deleted"] == [run.run_id]


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_the_reason_why_something_is_left(shell, store):
    url = f"http://127.0.0.1:{free_port()}"
    out, err = shell("sync", "--mlflow", url, code=1)
    assert "Sent 0 runs and sweeps" in out
    assert url in err
    report = shell.json("sync", "--mlflow", url, code=1)
    assert report["left"] is None
    shell.refuses("unsupported_tracking", "sync", "--mlflow", "ftp://x")


def statuses(store):
    with sqlite3.connect(store.root / "mlflow.db") as database:
        return dict(database.execute("SELECT name, status FROM runs").fetchall())


@pytest.mark.thorough
def test_ctrl_c_leaves_nothing_running_and_the_next_sync_sends_the_rest_once(shell, store):
    more = plan_of("more", seeds=list(range(2, 10)))
    record = write_sweep(store, more)
    for run in more.runs:
        finish(store, run, {"dense/loss": 0.5})
    end_sweep(store, record)
    uri = f"sqlite:///{store.root}/mlflow.db"
    total = sync(store, uri, dry_run=True).left
    process = shell.start("sync")
    until(lambda: (store.root / "mlflow.db").exists() and len(statuses(store)) > 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    left = sync(store, uri, dry_run=True).left
    assert process.returncode == 130
    assert 0 < left < total
    assert f"Sent {total - left} of {total} runs and sweeps" in out
    assert f"interrupted with {left} runs and sweeps to send; repeat the command to send the rest" in err
    assert set(statuses(store).values()) == {"FINISHED"}
    assert shell.json("sync") == {"uri": uri, "sent": left, "left": 0, "errors": []}
    assert f"MLflow at {uri} has everything." in shell("sync")[0]
    assert len(statuses(store)) == total
    with sqlite3.connect(store.root / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (total,)
        assert database.execute("SELECT count(*) FROM logged_models").fetchone() == (total - 2,)
        twice = "SELECT run_uuid, key, step FROM metrics GROUP BY 1, 2, 3 HAVING count(*) > 1"
        assert database.execute(twice).fetchall() == []


def test_the_bar_counts_on_a_terminal_and_is_a_line_now_and_then_in_a_pipe(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    for terminal, expected in ((True, "2/3"), (False, "sending to MLflow: 2/3 runs and sweeps\n")):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with progress.progress_bar(console, *progress.SENDING) as bar:
            for sent in range(3):
                bar(sent, 3)
        assert expected in console.file.getvalue()
        quiet = io.StringIO()
        with progress.progress_bar(Console(file=quiet, force_terminal=terminal, quiet=True), "checking runs") as bar:
            bar(1, 2)
        assert quiet.getvalue() == ""


def test_the_last_line_in_a_pipe_shows_the_end(monkeypatch):
    for interval_s, expected in ((0.0, ["checking runs: 1/3 runs", "checking runs: 3/3 runs"]), (99.0, [])):
        console = Console(file=io.StringIO(), force_terminal=False)
        monkeypatch.setattr(progress, "LINE_INTERVAL_S", interval_s)
        with progress.progress_bar(console, "checking runs") as bar:
            bar(1, 3)
            monkeypatch.setattr(progress, "LINE_INTERVAL_S", 99.0)
            bar(3, 3)
        assert console.file.getvalue().splitlines() == expected
